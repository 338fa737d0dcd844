"""Runs a parameter server and the chief in one process: links one to the other, and ends them together. Decides nothing."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from chief.config import ChiefConfig
from chief.serving.server import ChiefServer
from chief.shards.link import GrpcShardLink, ShardLink
from ps_protocol.errors import PsError
from ps_protocol.process.ending import EndSignals
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.roles.request import Answer, CallerRole, Request
from ps_protocol.roles.shard import ApplyRequest, RestoreRequest, SaveRequest
from ps_protocol.rpc.channel import Access
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer

# The chief's link to the parameter server of this process: calls its store directly, without a network.
#
# Calls that may take long run in a thread, so that the chief keeps serving its workers. No message can be lost, so no call needs a
# deadline.


log = logging.getLogger("lockstep.chief")

# One thread for the step under way, and one for other calls meanwhile.
_NUM_THREADS = 2


class StoreLink:
    """Implements the chief's ShardLink and DirectLink over a started server. Use it in one event loop only."""

    def __init__(self, server: ParameterServer, *, identity: Identity) -> None:
        self._server = server
        self._store = server.shard
        self._identity = identity
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chief-shard")
        # For calls that wait until a checkpoint is written or read: steps continue meanwhile.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="chief-checkpoint")

    @property
    def address(self) -> str:
        """The address at which others reach the server."""
        return self._server.address

    def begin(self, request: ApplyRequest, report: Callable[[bool], None]) -> Callable[[], None] | None:
        """Has a step applied: by the calling thread, if that takes no time."""
        apply = partial(self._apply, request, report)
        if self._store.is_quick:
            return apply
        with contextlib.suppress(RuntimeError):  # the link is closed
            self._threads.submit(apply)
        return None

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity and protocol version."""
        return HandshakeReply(identity=self._identity, version=PROTOCOL_VERSION, epoch=self._store.epoch, warning="")

    async def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks, and returns the answer."""
        threads = self._waiting if isinstance(request, SaveRequest | RestoreRequest) else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, self._store.call, request)

    async def close(self) -> None:
        """Ends the threads; the server keeps running."""
        self._threads.shutdown(wait=False)
        self._waiting.shutdown(wait=False)

    def _apply(self, request: ApplyRequest, report: Callable[[bool], None]) -> None:
        is_applied = False
        try:
            self._store.apply_step(request)
            is_applied = True
        except PsError as error:
            log.debug("the fast way did not apply step=%d cause=%s", request.step, error.message)
        except Exception:
            log.exception("the fast way failed step=%d", request.step)
        report(is_applied)


async def serve(config: ParameterServerConfig, settings_at: Callable[[str], ChiefConfig]) -> int:
    """Runs both roles to their end, and returns the exit code: 0 after training, 1 if it failed. Raises PsError if a role cannot serve.

    `settings_at` returns the chief's settings for the address at which the parameter server listens.
    """
    server = ParameterServer(config)
    try:
        server.start()
    except PsError:
        server.stop(0.0, reason="could not start")
        raise
    ending = asyncio.create_task(asyncio.to_thread(server.wait))
    try:
        return await _serve_chief(config, settings_at(server.address), server=server, ending=ending)
    finally:
        server.request_stop("the chief has ended")
        await asyncio.to_thread(server.stop, reason=await ending)


async def _serve_chief(
    config: ParameterServerConfig, settings: ChiefConfig, *, server: ParameterServer, ending: "asyncio.Task[str]"
) -> int:
    chief = ChiefServer(settings, links=_links(settings, config, server))
    loop = asyncio.get_running_loop()
    end = EndSignals(chief.request_stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        await chief.start()
        # The server may be asked to end by something other than this chief.
        ending.add_done_callback(lambda task: chief.request_stop(f"its parameter server ends: {task.result()}"))
        return await chief.wait()
    finally:
        await chief.stop()


def _links(settings: ChiefConfig, config: ParameterServerConfig, server: ParameterServer) -> list[ShardLink]:
    cluster = config.cluster
    links: list[ShardLink] = []
    for index, address in enumerate(settings.ps):
        if index == config.index:
            incarnation = server.shard.process_incarnation
            identity = Identity(cluster=cluster, role=Role.PARAMETER_SERVER, index=index, process_incarnation=incarnation)
            links.append(StoreLink(server, identity=identity))
        else:
            access = Access(settings.security, role=CallerRole.CHIEF)
            links.append(GrpcShardLink(address, index=index, cluster=cluster, access=access))
    return links
