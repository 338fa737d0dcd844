"""The memory that the next gradients are written into: lent by shards, or the worker's own. Knows arenas and arrays; no calls.

The user may have two sets of arrays. Arrays of the worker's own memory are copied with each push, and no server sees them. Arrays on
memory that shards lend are sent without a copy, and only where the user gets no answer before the contribution is over. All other
gradients are copied into another buffer. So a write through any view of these arrays changes nothing that is being sent.
"""

from collections.abc import Callable, Sequence

from ps_protocol.errors import TooManyPushes
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from worker_client.model.gradients import Gradients, Staging
from worker_client.model.memory import ModelMemory

# Each shard's arena to write into, None from one that copies; nothing at all if none gives any. Raises TooManyPushes.
Giving = Callable[[], Sequence[Array | None]]

_MAX_KEPT = 64


class GradientMemory:
    """Stagings, one for each combination of the shards' buffers, made once. For one thread.

    `own` is memory that no server sees; all of them share its variables that are split over shards. `give`: memory for one contribution.
    `give_kept`: memory that is the same each time and that `give` never gives; it raises TooManyPushes while what was sent from it is
    under way.
    """

    def __init__(self, model: ModelSpec, own: ModelMemory, *, give: Giving, give_kept: Giving) -> None:
        self._model = model
        self._own = Staging(model, own)
        self._give = give
        self._give_kept = give_kept
        self._kept: dict[tuple[int, ...], Staging] = {}
        self._lent: Staging | None = None
        self._is_under_way = False  # what was sent from `_lent`, for all that is known

    def ask(self, *, may_overlap: bool) -> Staging:
        """Returns where the user may write the next contribution. It is zero the first time, and has what an earlier one left later on.

        `may_overlap`: a contribution may still be under way when the next one is computed.
        """
        if may_overlap:
            return self._own
        staging = self._on(self._give_kept)
        if staging is not self._own:
            self._lent = staging
        return staging

    def staging_for(self, gradients: Gradients, *, may_lend: bool) -> Staging:
        """Returns where a contribution is staged.

        `may_lend`: the user does not write before it is over, so what lies in the memory lent to him can be sent from there.
        """
        lent = self._lent
        if may_lend and lent is not None and (lent.is_own(gradients) or lent.has_some_of(gradients)) and self._on(self._give_kept) is lent:
            return lent
        return self._own if self._own.is_own(gradients) else self._on(self._give)

    def note_push(self, staging: Staging) -> bool:
        """The contribution that was staged there may be under way; returns whether the user has that memory."""
        is_lent = staging is self._lent
        self._is_under_way = self._is_under_way or is_lent
        return is_lent

    def unlock(self, *, is_over: bool) -> bool:
        """Lets the user write into what is lent, if what was sent from there is over: it is said to be, or the shards say so."""
        if self._is_under_way and (is_over or self._is_given_back()):
            self._is_under_way = False
            if self._lent is not None:
                self._lent.memory.lock(False)
        return not self._is_under_way

    def protect(self) -> None:
        """The user gets word: his own arrays are read-only while what was sent from them is under way."""
        if self._is_under_way and self._lent is not None:
            self._lent.memory.lock()

    def _is_given_back(self) -> bool:
        try:
            self._give_kept()
        except TooManyPushes:
            return False
        return True

    def _on(self, give: Giving) -> Staging:
        try:
            arenas = give()
        except TooManyPushes:
            # The shards say the same to a push, and who pushes knows what to wait for.
            return self._own
        # The memory holds its arenas, so their ids stay theirs.
        key = tuple(map(id, arenas))
        staging = self._kept.get(key)
        if staging is None:
            if not any(arena is not None for arena in arenas):
                return self._own
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(key for key, kept in self._kept.items() if kept is not self._lent)]
            staging = self._kept[key] = Staging(self._model, self._own.memory.on(arenas))
        return staging
