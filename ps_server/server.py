"""One parameter server as a gRPC server in this process: listening, health, an orderly end, a chief that falls silent. Knows no tensor."""

import contextlib
import logging
import math
import queue
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ps_protocol.checkpoint.catalog import storage_of_role
from ps_protocol.checkpoint.trial import PlaceTrial
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.listening import announce
from ps_protocol.roles.identity import Identity, Role, parse_address
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import ReadMetricsRequest, ShardStatusRequest
from ps_protocol.rpc.server import RpcServer
from ps_protocol.rpc.server_stream import Call
from ps_protocol.shared_memory.segment import SegmentMaker
from ps_protocol.sockets.listener import DataListener
from ps_server.accumulators.registry import AccumulatorRegistry
from ps_server.boards import BoardRegistry
from ps_server.config import ParameterServerConfig, default_apply_threads, machine_memory_bytes
from ps_server.serving.calls import (
    ACCUMULATOR_SERVICE,
    BOARD_SERVICE,
    SERVICE,
    AccumulatorService,
    BoardService,
    ParameterService,
    Serving,
)
from ps_server.serving.local import new_process_incarnation
from ps_server.serving.streams import IdleStreams, StreamService
from ps_server.shard.shard import ServedShard
from ps_server.threads import ApplyThreads

if TYPE_CHECKING:
    from ps_protocol.http.server import HttpServer
    from ps_protocol.metrics.exposition import Family

log = logging.getLogger("lockstep.server")

# When to warn of a chief that is silent, or was never heard.
FIRST_WARNING_S = 10.0
WARNING_INTERVAL_S = 60.0
# A chief looks at its shards about every second; more often there is nothing to be learnt.
LOOK_INTERVAL_S = 1.0
# A look this late means that the process itself was stopped; the chief's calls of that time are handled first.
_LATE_S = 5.0


class ChiefSilence:
    """When to warn that no chief is heard, from `now` on. One thread calls `look` every LOOK_INTERVAL_S."""

    def __init__(self, *, now: float) -> None:
        self._started_at = self._stood_until = self._looked_at = now
        self._warned_at = -math.inf

    def look(self, now: float, *, heard_ago_s: float | None, address: str) -> str:
        """Returns the text of a warning that is due; empty if there is none. `heard_ago_s` None: no chief has adopted the server."""
        if now - self._looked_at > _LATE_S:
            self._stood_until = now
        self._looked_at = now
        since = self._started_at if heard_ago_s is None else max(now - heard_ago_s, self._stood_until)
        due = since + FIRST_WARNING_S if since > self._warned_at else self._warned_at + WARNING_INTERVAL_S
        if now < due:
            return ""
        self._warned_at = now
        silence = f"{now - since:.0f} s"
        if heard_ago_s is not None:
            consequence = "if it is gone, start it again, here or elsewhere: training then continues at its step"
            return f"the chief has been silent for {silence}; {consequence}"
        return f"no chief has adopted this parameter server for {silence}; is the chief started with --ps naming {address}?"


# How long a save under way may still take when the process ends: the time that supervisors allow, less the rest of the end.
SAVE_GRACE_S = 5.0
# How long a server that is asked to end waits for the chief to save.
LAST_SAVE_S = 7.0
# How long calls under way may still take when the process ends.
GRACE_S = 1.0


class ParameterServer:
    """A parameter server. `start` and `stop` are called once each."""

    def __init__(self, config: ParameterServerConfig) -> None:
        self._config = config
        self._name = f"ps {config.index}"
        self._address = ""
        limit_bytes = config.max_memory_bytes if config.max_memory_bytes is not None else machine_memory_bytes()
        # Reasons to end. The one queue into which a signal handler may put, whatever its thread was doing.
        self._ending: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._apply_threads = ApplyThreads(config.apply_threads if config.apply_threads is not None else default_apply_threads())
        process_incarnation = new_process_incarnation()
        role, max_bytes = f"ps-{config.index}", config.history_max_bytes
        storage = storage_of_role(config.checkpoint_dir) if config.checkpoint_dir else None
        self._trial = PlaceTrial(storage) if storage is not None else None
        self._shard = ServedShard(
            index=config.index,
            process_incarnation=process_incarnation,
            memory_limit_bytes=limit_bytes,
            table_dir=config.table_dir,
            on_shutdown=self._ending.put,
            apply_threads=self._apply_threads,
            segments=SegmentMaker(cluster=config.cluster, index=config.index, process_incarnation=process_incarnation),
            storage=storage,
            history=HistoryWriter(config.history, role=role, max_bytes=max_bytes) if config.history else None,
        )
        self._accumulators = AccumulatorRegistry(owner=self._name, budget=self._shard.budget)
        self._boards = BoardRegistry(owner=self._name, budget=self._shard.budget, process_incarnation=process_incarnation)
        self._idle_streams = IdleStreams()
        self._data_sockets = DataListener(name=self._name)
        self._stream_service = StreamService(self._shard, idle_streams=self._idle_streams, data_sockets=self._data_sockets)
        self._chief_silence = ChiefSilence(now=time.monotonic())
        self._http = self._metrics_server() if config.metrics else None
        identity = Identity(cluster=config.cluster, role=Role.PARAMETER_SERVER, index=config.index, process_incarnation=process_incarnation)
        self._server = RpcServer(config.security, identity=identity, address=config.address)

    @property
    def address(self) -> str:
        """The address of the server; empty before `start`."""
        return self._address

    @property
    def shard(self) -> ServedShard:
        """The shard that it serves, for a chief in the same process."""
        return self._shard

    def start(self) -> None:
        """Begins to serve, and announces the address. Raises InvalidSpec if it cannot listen there."""
        serving = Serving(idle_streams=self._idle_streams, threads=self._server.threads)
        service = ParameterService(self._shard, serving, data_sockets=self._data_sockets, is_chief=self._is_chief)
        methods = {
            **service.methods,
            **self._stream_service.methods,
            **AccumulatorService(self._accumulators, serving).methods,
            **BoardService(self._boards, serving).methods,
        }
        self._address = self._server.listen(methods, epoch=lambda: self._shard.epoch, trial=self._trial)
        self._listen_for_data_sockets()
        self._idle_streams.start()
        self._server.start()
        if self._http is not None:
            self._http.start()
            log.info("metrics url=%s", f"{self._http.url}metrics")
        self._server.report_health("", SERVICE, ACCUMULATOR_SERVICE, BOARD_SERVICE, is_serving=True)
        if self._config.announce is not None:
            announce(self._config.announce, address=self._address)
        log.info("%s ready address=%s cluster=%s", self._name, self._address, self._config.cluster)

    def wait(self) -> str:
        """Returns, with the reason, when the server has been asked to end: by `request_stop`, or by the chief's RPC. Then call `stop`.

        Warns meanwhile of a silent chief.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ending.get(timeout=LOOK_INTERVAL_S)
            heard_ago_s = self._shard.call(ShardStatusRequest()).chief_heard_ago_s
            warning = self._chief_silence.look(time.monotonic(), heard_ago_s=heard_ago_s, address=self._address)
            if warning:
                log.warning("%s", warning)

    def request_stop(self, reason: str) -> None:
        """Wakes `wait`; called again, ends the server at once. May be called from any thread, and by a signal handler."""
        self._ending.put(reason)

    def stop(self, grace_s: float = GRACE_S, *, reason: str = "asked to") -> None:
        """Refuses new calls, lets those under way finish for `grace_s` seconds, then ends them and the server.

        Before that, the chief may save a checkpoint; asked again to end, or without a grace, the server does not wait for it.
        """
        self._server.report_health(SERVICE, is_serving=False)
        if grace_s:
            self._shard.await_last_save(LAST_SAVE_S, is_hurried=lambda: not self._ending.empty())
        self._shard.begin_shutdown(reason)
        self._accumulators.begin_shutdown(reason)
        self._boards.begin_shutdown(reason)
        if grace_s:
            self._shard.wait_for_save(SAVE_GRACE_S)
        # They would take up the whole grace.
        self._idle_streams.end_long_lived()
        if self._http is not None:
            self._http.stop()
        self._data_sockets.stop()
        self._server.stop(grace_s)
        self._stream_service.close()
        self._idle_streams.stop()
        self._server.close()
        self._apply_threads.stop()
        log.info("%s ended reason=%s", self._name, reason)

    def _listen_for_data_sockets(self) -> None:
        listening, port = parse_address(self._config.address, is_bind=True), self._config.data_port
        is_encrypted = self._config.security.tls_cert is not None
        if port and (listening.is_unix or is_encrypted):
            why = "its data sockets are Unix sockets, too" if listening.is_unix else "there are no data sockets where TLS encrypts"
            log.warning("--data-port %d is not used, and nothing listens there: %s", port, why)
        elif port and port == parse_address(self._address, is_bind=True).port:
            raise InvalidSpec(f"--data-port: {port} is the port of the server itself, {self._address}; choose another one, or 0 for any")
        if listening.is_unix or not is_encrypted:
            self._data_sockets.start(listening, port=port)

    def _metrics_server(self) -> "HttpServer":
        # Only where it is wanted: it imports OpenSSL.
        from ps_protocol.http.server import HttpServer
        from ps_protocol.metrics.exposition import MetricsPage

        config, page = self._config, MetricsPage(self._families, role=self._name)
        return HttpServer(
            [page.route(rpc=f"/{SERVICE}/ReadMetrics")],
            address=config.metrics,
            cluster=config.cluster,
            security=config.security,
            allow_insecure_network=config.allow_insecure_network,
        )

    def _families(self) -> "Iterator[Family]":
        from ps_protocol.metrics.families import shard_families

        shard = self._shard
        num_applied, apply_s = shard.applied()
        try:
            cells = shard.call(ReadMetricsRequest(epoch=shard.epoch))
        except PsError:  # before there are variables, and while the shard is being brought back
            cells = ()
        return shard_families(shard.call(ShardStatusRequest()), num_applied=num_applied, apply_s=apply_s, cells=cells)

    def _is_chief(self, call: Call) -> bool:
        return self._server.may_act_as(CallerRole.CHIEF, call)
