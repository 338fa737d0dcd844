"""The chief's server: what it listens on, which name others reach it by, and its lifetime. Knows no event."""

import asyncio
import dataclasses
import logging
import secrets
import socket
from collections.abc import Iterator, Sequence
from functools import partial

from chief.config import ChiefConfig
from chief.page.event_log import EventLog
from chief.page.site import Page
from chief.serving.runner import Runner
from chief.serving.service import SERVICE, ChiefService
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.link import GrpcShardLink, ShardLink
from chief.shards.standby import ReplicatedLink
from ps_protocol.checkpoint.catalog import storage_of_role
from ps_protocol.checkpoint.trial import PlaceTrial
from ps_protocol.errors import InvalidSpec
from ps_protocol.http.server import HttpServer
from ps_protocol.metrics.exposition import Family, MetricsPage
from ps_protocol.metrics.families import cluster_families, reported_families
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.listening import announce, end_beside, page_beside
from ps_protocol.roles.chief import ClusterState
from ps_protocol.roles.identity import Address, Identity, Role, parse_address
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.server import RpcServer

# Where others reach this chief: the address to advertise, else where it listens, or, if that is everywhere, as its servers see it.


_ANY_HOST = ("0.0.0.0", "::", "")


def reachable(address: str) -> str:
    """Returns an address as others may call it; empty if it means every network interface, which no caller can use."""
    parsed = parse_address(address)
    return "" if _is_everywhere(parsed) else address


def towards(address: str, servers: tuple[str, ...]) -> str:
    """Returns an address that listens everywhere with the host that this machine has towards a server; empty if there is no way to one."""
    listening = parse_address(address)
    for server in servers:
        peer = parse_address(server)
        host = "127.0.0.1" if peer.is_unix else _host_towards(peer)
        if host:
            return str(dataclasses.replace(listening, host=host))
    return ""


def _is_everywhere(address: Address) -> bool:
    return not address.is_unix and address.host.strip("[]") in _ANY_HOST


def _host_towards(peer: Address) -> str:
    """Asks the system which of its addresses it would use; sends nothing."""
    try:
        found = socket.getaddrinfo(peer.host.strip("[]"), peer.port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


log = logging.getLogger("lockstep.chief")

_READY_STATES = (ClusterState.WAITING_FOR_MODEL, ClusterState.TRAINING)
# How long answers under way may still take when the process ends.
_GRACE_S = 0.5


class ChiefServer:
    """A chief. To be made and used in one event loop; `start`, `wait` and `stop` are called once each.

    `links`: its parameter servers, by index, where they are reached otherwise than by the addresses of the configuration.
    """

    def __init__(self, config: ChiefConfig, *, links: Sequence[ShardLink] | None = None) -> None:
        self._config = config
        # The address of the chief; empty before `start`.
        self.address = ""
        cluster = config.coordination.cluster
        access = Access(config.security, role=CallerRole.CHIEF)
        if links is None:
            links = shard_links(config, access)
        storage = storage_of_role(config.checkpoint_dir) if config.checkpoint_dir else None
        store = CheckpointStore(storage, cluster=cluster) if storage is not None else None
        self._trial = PlaceTrial(storage) if storage is not None else None
        history = HistoryWriter(config.history, role="chief", max_bytes=config.history_max_bytes) if config.history else None
        event_log = EventLog()
        self._runner = Runner(
            links, config=config.coordination, on_state=self._announce_state, store=store, history=history, on_note=event_log.add
        )
        identity = Identity(cluster=cluster, role=Role.CHIEF, index=0, process_incarnation=secrets.randbits(63) | 1)
        self._server = RpcServer(config.security, identity=identity, address=config.address)
        metrics = MetricsPage(self._families, role="chief")
        self._metrics = metrics.route(rpc=f"/{SERVICE}/GetClusterStatus")
        self._http = self._metrics_server() if config.metrics else None
        self._service = ChiefService(self._runner, may_work=partial(self._server.may_act_as, CallerRole.WORKER))
        self._page: Page | None = (
            Page(
                self._runner,
                name=cluster,
                join_counts=self._runner.join_counts,
                event_log=event_log,
                address=config.page,
                security=config.security,
                allow_insecure_network=config.allow_insecure_network,
                more=[self._metrics],
            )
            if config.page
            else None
        )

    @property
    def page_url(self) -> str:
        """The URL of the chief's page; empty: there is none."""
        return self._page.url if self._page is not None else ""

    async def start(self) -> None:
        """Begins to serve, and announces the address. Raises InvalidSpec if it cannot listen there."""
        cluster = self._config.coordination.cluster
        self.address = self._server.listen(self._service.methods, epoch=lambda: self._runner.epoch, trial=self._trial)
        self._server.report_health("", is_serving=True)
        self._server.report_health(SERVICE, is_serving=False)
        self._server.start()
        if self._http is not None:
            self._http.start()
            log.info("metrics url=%s", f"{self._http.url}metrics")
        self._start_page()
        if self._config.announce is not None:
            announce(self._config.announce, address=self.address)
        log.info("chief ready address=%s cluster=%s ps=%d", self.address, cluster, len(self._config.ps))

    def _families(self) -> Iterator[Family]:
        status = self._runner.status(max_ledger_entries=0) if self._page is None else self._page.status
        yield from cluster_families(status, self._runner.totals)
        if self._page is not None:  # which reads them anyway
            yield from reported_families(self._page.reported)

    def _start_page(self) -> None:
        """Serves the page. If its port cannot be opened, training continues without it."""
        if self._page is None:
            return
        try:
            self._page.start()
        except InvalidSpec as error:
            log.warning("there is no page cause=%s", error.message)
            return
        self._runner.page_url = self._page.url
        log.info("page url=%s", self._page.url)
        if self._config.announce is not None:
            # First: a reader that finds the chief's address finds this too.
            announce(page_beside(self._config.announce), address=self._page.url)

    async def wait(self) -> int:
        """Returns the exit code when this process may end: training is over and the cluster is unused, or a later chief continues it.

        Raises PsError if the shards cannot be taken.
        """
        own = self._own_address() or await asyncio.to_thread(towards, self.address, self._config.ps)
        if not own:
            log.warning("listening at all addresses, and it is not known which of them others can reach: give --advertise HOST:PORT")
        code = await self._runner.run(chief_address=own, is_takeover=self._config.is_takeover)
        self._announce_end()
        return code

    def request_stop(self, reason: str) -> None:
        """Makes `wait` return within 2 s, or once a last checkpoint is whole; ends no training. To be called in the event loop."""
        self._runner.stop(reason)

    async def stop(self) -> None:
        """Lets calls under way finish for a moment, then ends the server."""
        self._server.report_health("", SERVICE, is_serving=False)
        # They would last as long as their callers like.
        self._service.end_conversations()
        if self._http is not None:
            await asyncio.to_thread(self._http.stop)
        if self._page is not None:
            await asyncio.to_thread(self._page.stop)
        await asyncio.to_thread(self._server.stop, _GRACE_S)
        await self._runner.close()
        await asyncio.to_thread(self._server.close)
        log.info("chief ended")

    def _metrics_server(self) -> HttpServer:
        config = self._config
        return HttpServer(
            [self._metrics],
            address=config.metrics,
            cluster=config.coordination.cluster,
            security=config.security,
            allow_insecure_network=config.allow_insecure_network,
        )

    def _own_address(self) -> str:
        advertised = self._config.advertise
        if not advertised:
            return reachable(self.address)
        told = parse_address(advertised, is_bind=True)
        return str(told if told.is_unix or told.port else dataclasses.replace(told, port=parse_address(self.address).port))

    def _announce_end(self) -> None:
        """Writes where training has ended, for who started this process and may not have asked it meanwhile."""
        if self._config.announce is None or not self._runner.has_ended_training:
            return
        try:
            announce(end_beside(self._config.announce), address=f"{self._runner.epoch} {self._runner.global_step}")
        except InvalidSpec as error:  # its directory may be gone by now
            log.warning("where training has ended is not announced cause=%s", error.message)

    def _announce_state(self, state: ClusterState) -> None:
        self._server.report_health(SERVICE, is_serving=state in _READY_STATES)


def shard_links(config: ChiefConfig, access: Access) -> list[ShardLink]:
    """Returns the ways to the parameter servers, and to their standbys."""
    cluster = config.coordination.cluster
    links: list[ShardLink] = []
    for index, address in enumerate(config.ps):
        link = GrpcShardLink(address, index=index, cluster=cluster, access=access)
        standby = config.standbys[index] if index < len(config.standbys) else ""
        if standby:
            other = GrpcShardLink(standby, index=index, cluster=cluster, access=access)
            links.append(ReplicatedLink([link, other], index=index))
        else:
            links.append(link)
    return links
