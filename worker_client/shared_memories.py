"""Those of a model's shards that share memory with the worker: their arenas, with no call to anybody. Knows shards and arenas; no steps."""

from collections.abc import Mapping, Sequence

from ps_protocol.errors import Unavailable
from ps_protocol.layout import Layout
from ps_protocol.tensors import Array
from worker_client.cluster_link import SharingShard


class SharedMemories:
    """The shards that share memory, by index, of so many in all. For one thread."""

    def __init__(self, shards: Mapping[int, SharingShard], *, epoch: int, num_shards: int) -> None:
        self.shards = dict(shards)
        self._epoch = epoch
        self._num_shards = num_shards

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
