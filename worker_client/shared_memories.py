"""Those of a model's shards that share memory with the worker: their arenas, with no call to anybody. Knows shards and arenas; no steps."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ps_protocol.chief import Participant
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from worker_client.cluster_link import MemorySharing, SharingShard

log = logging.getLogger("lockstep.worker")

# How long a shard may take to share its memory again, while its worker waits.
_SHARE_AGAIN_S = 1.0
# A shard that does not want to share is not asked with every step.
_LOOK_AGAIN_S = 5.0


class SharedMemories:
    """The shards that share memory, by index, of so many in all. For one thread."""

    def __init__(self, shards: Mapping[int, SharingShard], *, epoch: int, num_shards: int) -> None:
        self.shards = dict(shards)
        self._epoch = epoch
        self._num_shards = num_shards
        self._next_look_s = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of them still share."""
        return all(shard.is_shared for shard in self.shards.values())

    def share_again(
        self, sharing: MemorySharing, layouts: Sequence[Layout], *, participant: Participant, now: float
    ) -> Mapping[int, SharingShard]:
        """Asks those that do not share any more, as when they have stood still, and returns those that do again; asks only now and then."""
        found: dict[int, SharingShard] = {}
        if now < self._next_look_s:
            return found
        self._next_look_s = now + _LOOK_AGAIN_S
        for index, lost in self.shards.items():
            if not lost.is_shared:
                with suppress(PsError):
                    shard = sharing(
                        lost.unshared, where=f"ps {index}", participant=participant, layout=layouts[index], timeout_s=_SHARE_AGAIN_S
                    )
                    if shard is not None:
                        found[index] = shard
                        log.info("ps %d: memory is shared again", index)
        self.shards |= found
        return found

    def travels(self, index: int) -> bool:
        """Whether what a shard is to have is sent to it; not where memory is shared."""
        return index not in self.shards or not self.shards[index].is_shared

    def variables(self, layouts: Sequence[Layout], *, step: int) -> Sequence[Array | None]:
        """Returns each shard's arena of a step where the shard has it, None from one that copies; nothing if all do.

        Raises StepGone, StepNotReady.
        """
        if not self.shards:
            return ()
        arenas: list[Array | None] = [None] * self._num_shards
        for index, shard in self.shards.items():
            if layouts[index].nbytes:
                try:
                    arenas[index] = shard.variables_view(epoch=self._epoch, step=step, layout_hash=layouts[index].hash)
                except Unavailable:
                    continue  # who reads it then tries again and again
        return arenas if any(arena is not None for arena in arenas) else ()

    def gradients(self) -> Sequence[Array | None]:
        """Returns an arena of each shard to write gradients into, None from one that copies; nothing if all do. Raises TooManyPushes."""
        return self._arenas({index: shard.gradient_memory() for index, shard in self.shards.items()})

    def kept(self) -> Sequence[Array | None]:
        """Returns as `gradients` does arenas that are the same each time. Raises TooManyPushes while one of them is under way."""
        return self._arenas({index: shard.kept_memory() for index, shard in self.shards.items()})

    def _arenas(self, found: Mapping[int, Array | None]) -> Sequence[Array | None]:
        return [found.get(index) for index in range(self._num_shards)] if found else ()
