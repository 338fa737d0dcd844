"""The dense variables as a reader has them: on the shards' arenas where those show them, else copied. Knows steps and shards; no tokens."""

from collections.abc import Mapping, Sequence

from ps_protocol.model import ModelSpec
from ps_protocol.tensors import Array
from worker_client.model_memory import ModelMemory
from worker_client.shard_group import ShardGroup

# Each shard has two arenas, and all shards are at one step, so mostly two are needed.
_MAX_KEPT = 8


class VariableMemory:
    """What was read last. Memories on shards' arenas are made once for each combination of them. For one thread."""

    def __init__(self, model: ModelSpec, own: ModelMemory, shards: ShardGroup) -> None:
        self._model = model
        self._own = own
        self._shards = shards
        self._kept: dict[tuple[int, ...], ModelMemory] = {}
        self._memory = own
        self._own_steps: list[int | None] = [None] * len(own.layouts)
        self.step: int | None = None  # of what is held, if it is one step and was asked for by its number

    @property
    def views(self) -> Mapping[str, Array]:
        """The variables by name, read-only."""
        return self._memory.views

    @property
    def is_lent(self) -> bool:
        """Whether some of what is held lies in memory of servers, who will write there again."""
        return self._memory is not self._own

    def fetch(self, step: int, *, may_view: bool) -> None:
        """Holds the variables of `step`; with `may_view` where shards have them. Raises StepGone, StepNotReady; then nothing is held."""
        self.step = None
        arenas = self._shards.memories.variables(self._own.layouts, step=step) if may_view else ()
        memory = self._on(arenas) if arenas else self._own
        self._own_steps = [None] * len(self._own_steps)
        self._shards.read(memory, step=step)
        if arenas and memory.copies:
            # A slow reader may have copied what was being overwritten: then this raises StepGone.
            self._shards.memories.variables(self._own.layouts, step=step)
        self._memory, self.step = memory, step
        if not arenas:
            self._own_steps = [step] * len(self._own_steps)

    def fetch_latest(self, *, is_aligned: bool) -> int | None:
        """Holds a copy of the newest variables, and returns the least of their steps; None if no shard has any.

        Of one step if `is_aligned` and that can be had. Moves nothing where they have not changed.
        """
        self.step = None
        # Shards without common steps count what arrives and change in place: the same number need not be the same values.
        held, self._own_steps = self._own_steps if is_aligned else (), [None] * len(self._own_steps)
        found = self._shards.read_latest(self._own, is_aligned=is_aligned, held=held)
        self._memory = self._own
        self._own_steps = [found.get(index) for index in range(len(self._own_steps))]
        return min(found.values(), default=None)

    def copied(self, step: int) -> dict[str, Array]:
        """Returns arrays of the caller's own with the variables of `step`. Raises StepGone, StepNotReady."""
        if self.step == step and not self.is_lent:
            return self.copied_held()
        memory = ModelMemory(self._model, layouts=self._own.layouts, is_writable=True)
        self._shards.read(memory, step=step)
        return memory.views

    def copied_held(self) -> dict[str, Array]:
        """Returns copies of what is held, which must lie in memory of the reader's own."""
        return {name: view.copy() for name, view in self.views.items()}

    def _on(self, arenas: Sequence[Array | None]) -> ModelMemory:
        # The memory holds its arenas, so their ids stay theirs.
        key = tuple(map(id, arenas))
        memory = self._kept.get(key)
        if memory is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            memory = self._kept[key] = self._own.on(arenas)
        return memory
