"""Which memory the next gradients are written into: that of shards that give some, or the worker's own. Knows arenas and arrays; no calls.

Memory of a shard is written and then pushed without a copy, but must not be written while the contribution in it is under way. Under the
strict policy sync that is over when the next step's token comes, and the same arrays can be filled again. Everywhere else one who asks for
the arrays anew for each contribution gets those of another slot, and those that he had are read-only; one who keeps his gets memory of the
worker's own, which costs one copy a push.
"""

from collections.abc import Callable, Sequence

from ps_protocol.errors import TooManyPushes
from ps_protocol.model import ModelSpec
from ps_protocol.tensors import Array
from worker_client.gradients import Gradients, Staging
from worker_client.model_memory import ModelMemory

# Each shard's arena to write into, None from one that copies; nothing at all if none gives any. Raises TooManyPushes.
Giving = Callable[[], Sequence[Array | None]]

_MAX_KEPT = 64


class GradientMemory:
    """Stagings, one for each combination of the shards' slots, made once. For one thread.

    `own` is memory that no server sees; all of them share its variables that are split over shards.
    """

    def __init__(self, model: ModelSpec, own: ModelMemory, give: Giving) -> None:
        self._model = model
        self._own = Staging(model, own)
        self._give = give
        self._kept: dict[tuple[int, ...], Staging] = {}
        self._current = self._own
        self._is_given = False  # `_current` is what shards gave last, and nothing of it has been pushed
        self._has_pushed = False
        self._is_asked_again = False
        self._has_lent_own = False

    def ask(self, *, may_overlap: bool) -> Staging:
        """Returns where the user may write the next contribution. It is zero the first time, and has what an earlier one left later on.

        `may_overlap`: a contribution may still be under way when the next one is computed.
        """
        self._is_asked_again = self._is_asked_again or self._has_pushed
        staging = self._own if may_overlap and not self._is_asked_again else self._taken()
        self._has_lent_own = self._has_lent_own or staging is self._own
        return staging

    def staging_for(self, gradients: Gradients) -> Staging:
        """Returns where a contribution is staged: what its arrays are part of already if it can be sent from there."""
        taken = self._taken()
        if self._has_lent_own and taken is not self._own and self._own.is_own(gradients):
            return self._own
        return taken

    def note_push(self) -> None:
        """The contribution that was staged last may be under way."""
        self._is_given, self._has_pushed = False, True

    def protect(self) -> None:
        """What was pushed may stay under way: the user must not write there now."""
        if not self._is_given:
            self._current.memory.lock()

    def release(self) -> None:
        """What was pushed has been applied or dropped: the user may write there again."""
        self._current.memory.lock(False)

    def _taken(self) -> Staging:
        if self._is_given:
            return self._current
        try:
            arenas = self._give()
        except TooManyPushes:
            # The shards say the same to a push, and who pushes knows what to wait for.
            return self._own
        if not any(arena is not None for arena in arenas):
            return self._own
        self._current, self._is_given = self._on(arenas), True
        self.release()
        return self._current

    def _on(self, arenas: Sequence[Array | None]) -> Staging:
        # The memory holds its arenas, so their ids stay theirs.
        key = tuple(map(id, arenas))
        staging = self._kept.get(key)
        if staging is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            staging = self._kept[key] = Staging(self._model, self._own.memory.on(arenas))
        return staging
