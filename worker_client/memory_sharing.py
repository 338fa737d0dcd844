"""Whether a session shares memory with its shards, and what it says if it cannot. Knows clients and the log; no models and no steps."""

import logging

from ps_protocol.chief import Participant
from ps_protocol.errors import InternalError, InvalidSpec, PsError
from ps_protocol.layout import Layout
from ps_protocol.memory_link import MemoryNotShared
from ps_protocol.shard import Shard
from ps_protocol.shard_client import GrpcShard
from ps_protocol.shared_memory_shard import share_memory
from worker_client.cluster_link import MemorySharing, SharingShard
from worker_client.replicated_shard import ReplicatedShard

log = logging.getLogger("lockstep.worker")

TRANSPORTS = ("auto", "shared_memory", "grpc")


def sharing_of(transport: str | None) -> MemorySharing | None:
    """Returns how to share memory for a transport, None for "grpc". None or empty stands for "auto". Raises InvalidSpec."""
    chosen = transport or "auto"
    if chosen not in TRANSPORTS:
        raise InvalidSpec(f"transport: got {transport!r}, want one of {', '.join(map(repr, TRANSPORTS))}")
    return None if chosen == "grpc" else _Sharing(is_required=chosen == "shared_memory")


class _Sharing:
    """Shares memory with each shard that it can; for one session. A shard that it cannot is an error if sharing is required."""

    def __init__(self, *, is_required: bool) -> None:
        self._is_required = is_required
        self._has_spoken = False

    def __call__(self, shard: Shard, *, where: str, participant: Participant, layout: Layout, timeout_s: float) -> SharingShard | None:
        """Returns a shard that shares memory, or None. Raises MemoryNotShared if it is required, and what the server's call raises."""
        if isinstance(shard, ReplicatedShard) and self._is_required and layout.nbytes:
            raise MemoryNotShared(f"{where}: it has a standby, and memory is shared with single servers only", is_same_host=True)
        if not isinstance(shard, GrpcShard):
            return None
        try:
            return share_memory(
                shard,
                epoch=participant.epoch,
                worker=participant.index,
                incarnation=participant.incarnation,
                layout=layout,
                timeout_s=timeout_s,
            )
        except (MemoryNotShared, InternalError) as error:
            is_same_host = isinstance(error, InternalError) or error.facts.get("same_host") == "true"
            if self._is_required and layout.nbytes:
                raise MemoryNotShared(
                    f"{where}: transport='shared_memory' cannot be had: {error.message}; run the worker where its parameter servers are,"
                    " or connect with transport='auto'",
                    is_same_host=is_same_host,
                ) from None
            self._say(error, where, is_odd=is_same_host and layout.nbytes > 0)
            return None

    def _say(self, error: PsError, where: str, *, is_odd: bool) -> None:
        # Shards are asked at the same time; that two of them speak is no harm.
        if is_odd and not self._has_spoken:
            self._has_spoken = True
            log.warning(
                "memory is not shared with %s, though it is on this host: %s; variables and gradients go over gRPC", where, error.message
            )
        else:
            log.debug("memory is not shared with %s: %s", where, error.message)
