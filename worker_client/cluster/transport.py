"""How calls travel between a participant and its cluster: over gRPC, or within this process. Knows clients; no model, no step."""

import logging
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ps_protocol.errors import InternalError, InvalidSpec, PsError
from ps_protocol.model.layout import Layout
from ps_protocol.process import waiting
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.waiting import Progress, SilenceWatch
from ps_protocol.roles.chief import Chief, Participant
from ps_protocol.roles.identity import HandshakeReply
from ps_protocol.roles.shard import Shard
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.memory import MemoryNotShared, SharedMemory
from ps_protocol.rpc.shard import GrpcShard
from worker_client.model.wire_format import WireFormat

log = logging.getLogger("lockstep.worker")

TRANSPORTS = ("auto", "shared_memory", "sockets", "grpc")
# Smaller payloads are as fast over gRPC.
LEAST_SOCKET_BYTES = 1 << 18
AS_IS = WireFormat()
_UNWATCHED = nullcontext()
_SEARCH_TIMEOUT_S = 2.0


class Transport(Protocol):
    """Opens chiefs and shards, and says how calls to them behave. `timeout_s`: how long a server that does not answer is waited for.

    `is_in_process`: nothing can be cut off or die alone, so no lease need be kept. `wire`: how gradients travel. `access`: credentials of
    the caller. `history`: where contributions are noted, for `lockstep audit`; None: nowhere.
    """

    is_in_process: bool
    timeout_s: float
    wire: WireFormat
    access: Access
    history: HistoryWriter | None

    @property
    def cluster(self) -> str:
        """Its name; empty where none is known."""

    def open_chief(self, address: str) -> Chief:
        """Returns the chief at an address once it has answered one attempt, which takes some seconds at most."""

    def open_shard(self, index: int, address: str) -> Shard:
        """Returns a shard once it has answered."""

    def open_replica(self, index: int | None, address: str) -> Shard:
        """Returns one of several processes that hold a shard, or whichever shard is there; makes no call."""

    def share(
        self, shard: Shard, *, where: str, participant: Participant, layout: Layout, has_standby: bool, timeout_s: float
    ) -> SharedMemory | None:
        """Has a shard share its memory with a participant, and returns that memory; None if it cannot be. `where` names it in messages."""

    def watching(
        self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None, shard: int | None = None
    ) -> AbstractContextManager[None]:
        """Has the enclosed call spoken for while it hangs; `alarm` as `SilenceWatch.expecting` has it. `shard`: whose payload it moves."""

    def moved(self, shard: int) -> None:
        """Notes that a shard is at work on a call that is watched: it is not silent."""

    @property
    def num_read_bytes(self) -> int:
        """Bytes of variables that have been read from the shards, as they came."""

    def stood_still(self, since_s: float) -> bool:
        """Whether this process did not run for seconds since a moment of `time.monotonic()`, so that no answer could reach it."""

    def close(self) -> None:
        """Watches calls no more."""


class LocalTransport:
    """Implements Transport for a cluster inside this process: calls are function calls, and all memory is shared.

    `is_in_process` False: the same calls as over a network, with threads, heartbeats and retries.
    """

    wire = AS_IS
    access = DEFAULT_ACCESS
    cluster = ""
    history: HistoryWriter | None = None

    def __init__(self, shard_at: Callable[[int], Shard], *, timeout_s: float, is_in_process: bool = True) -> None:
        self._shard_at = shard_at
        self.timeout_s = timeout_s
        self.is_in_process = is_in_process

    def open_chief(self, address: str) -> Chief:
        """There is one chief, and it does not move."""
        raise InternalError(f"a cluster inside this process has no chief at {address!r}")

    def open_shard(self, index: int | None, address: str) -> Shard:
        """Returns the shard."""
        assert index is not None, "there is no other chief that a server would have to be asked for"
        return self._shard_at(index)

    open_replica = open_shard

    def share(
        self, shard: Shard, *, where: str, participant: Participant, layout: Layout, has_standby: bool, timeout_s: float
    ) -> SharedMemory | None:
        """Returns None: there is one memory."""
        return None

    def watching(
        self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None, shard: int | None = None
    ) -> AbstractContextManager[None]:
        """No call hangs."""
        return _UNWATCHED

    def moved(self, shard: int) -> None:
        """Nobody watches."""

    @property
    def num_read_bytes(self) -> int:
        """Nothing travels."""
        return 0

    def stood_still(self, since_s: float) -> bool:
        """No answer is on its way meanwhile."""
        return False

    def close(self) -> None:
        """There is nothing to close."""


class GrpcTransport:
    """Implements Transport over gRPC, for one participant. `transport` is one of TRANSPORTS; see `connect()`.

    `cluster` is what every server must be of; empty until the first chief has named it. Thread-safe.
    """

    is_in_process = False

    def __init__(
        self,
        *,
        cluster: str,
        timeout_s: float,
        transport: str | None,
        wire: WireFormat,
        access: Access,
        history: HistoryWriter | None,
    ) -> None:
        chosen = transport or "auto"
        if chosen not in TRANSPORTS:
            raise InvalidSpec(f"transport: got {transport!r}, want one of {', '.join(map(repr, TRANSPORTS))}")
        self.timeout_s, self.wire, self.access, self.history = timeout_s, wire, access, history
        self.cluster = cluster
        self._shares = chosen in ("auto", "shared_memory")
        self._least_socket_bytes = {"auto": LEAST_SOCKET_BYTES, "sockets": 1}.get(chosen)
        self._must_use_sockets = chosen == "sockets"
        self._must_share = chosen == "shared_memory"
        # Of each shard, whichever of its servers has it.
        self._progress: defaultdict[int | None, Progress] = defaultdict(Progress)
        self._has_spoken = False
        self._watch = SilenceWatch()

    def enter(self, address: str) -> Chief:
        """Returns the first chief, whose cluster it is from then on; blocks until it answers, and says so after 2 s."""
        chief, what = GrpcChief(address, cluster=self.cluster, access=self.access), f"the chief at {address}"
        try:
            reply = self._handshake(chief, what)
        except BaseException:
            chief.close()
            raise
        _warn(address, reply)
        self.cluster = reply.identity.cluster
        return chief

    def open_chief(self, address: str) -> Chief:
        """Returns the chief at an address once it has answered."""
        found = GrpcChief(address, cluster=self.cluster, access=self.access)
        try:
            found.handshake(_SEARCH_TIMEOUT_S)
        except BaseException:
            found.close()
            raise
        return found

    def open_shard(self, index: int, address: str) -> Shard:
        """Returns a shard once it has answered."""
        shard, what = self.open_replica(index, address), f"ps {index} at {address}"
        try:
            _warn(address, self._handshake(shard, what))
        except BaseException:
            shard.close()
            raise
        return shard

    def _handshake(self, server: GrpcChief | GrpcShard, what: str) -> HandshakeReply:
        def attempt(left_s: float) -> HandshakeReply:
            with self._watch.expecting(what):  # each: one that fails is spoken of between two of them
                return server.handshake(left_s)

        return waiting.call(attempt, what=what, timeout_s=self.timeout_s)

    def open_replica(self, index: int | None, address: str) -> GrpcShard:
        """Returns one of several processes that hold a shard, or whichever shard is there; makes no call."""
        return GrpcShard(
            address,
            index=index,
            cluster=self.cluster,
            variables_encoding=self.wire.variable_encoding,
            access=self.access,
            least_socket_bytes=self._least_socket_bytes,
            must_use_sockets=self._must_use_sockets,
            progress=self._progress[index],
        )

    def share(
        self, shard: Shard, *, where: str, participant: Participant, layout: Layout, has_standby: bool, timeout_s: float
    ) -> SharedMemory | None:
        """Shares memory, or returns None. Raises MemoryNotShared if it is required, and what the server's call raises."""
        if not self._shares:
            return None
        is_required = self._must_share and layout.nbytes > 0
        if has_standby and is_required:
            raise MemoryNotShared(f"{where}: it has a standby, and memory is shared with single servers only", is_same_host=True)
        if not isinstance(shard, GrpcShard):
            return None
        try:
            return shard.share(
                epoch=participant.era.epoch,
                worker=participant.index,
                incarnation=participant.incarnation,
                secret=participant.secret,
                layout=layout,
                timeout_s=timeout_s,
            )
        except (MemoryNotShared, InternalError) as error:
            is_same_host = isinstance(error, InternalError) or error.facts.get("same_host") == "true"
            if is_required:
                raise MemoryNotShared(
                    f"{where}: transport='shared_memory' cannot be had: {error.message}; run the worker where its parameter servers are,"
                    " or connect with transport='auto'",
                    is_same_host=is_same_host,
                ) from None
            self._say(error, where, is_odd=is_same_host and layout.nbytes > 0)
            return None

    def watching(
        self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None, shard: int | None = None
    ) -> AbstractContextManager[None]:
        """Has the enclosed call spoken for while it hangs."""
        return self._watch.expecting(what, expected_s=expected_s, alarm=alarm, progress=None if shard is None else self._progress[shard])

    def moved(self, shard: int) -> None:
        """Notes that a shard is at work on a call that is watched."""
        self._progress[shard].num_pieces += 1

    @property
    def num_read_bytes(self) -> int:
        """Bytes of variables that have been read from the shards, as they came."""
        return sum([progress.num_read_bytes for progress in [*self._progress.values()]])

    def stood_still(self, since_s: float) -> bool:
        """Whether this process did not run for seconds since then."""
        return self._watch.stood_still(since_s)

    def close(self) -> None:
        """Watches calls no more."""
        self._watch.close()

    def _say(self, error: PsError, where: str, *, is_odd: bool) -> None:
        # Shards are asked at the same time; that two of them speak is no harm.
        if is_odd and not self._has_spoken:
            self._has_spoken = True
            log.warning(
                "memory is not shared with %s, though it is on this host: %s; variables and gradients are sent instead",
                where,
                error.message,
            )
        else:
            log.debug("memory is not shared with %s: %s", where, error.message)


def _warn(address: str, reply: HandshakeReply) -> None:
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)
