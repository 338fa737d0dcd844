"""Chooses the memory for the next gradients: lent by shards, or the worker's own. Knows arenas and arrays; makes no calls.

The user may have two sets of arrays. Arrays in the worker's own memory are copied with each push, and no server sees them. Arrays in memory
that shards lend are sent without a copy, but only by calls that return after the contribution is over. All other gradients are copied into
another buffer. So a write through any view of these arrays changes nothing that is being sent.
"""

from collections.abc import Callable, Sequence

from ps_protocol.errors import TooManyPushes
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Array
from worker_client.model.gradients import Gradients, Staging
from worker_client.model.memory import ModelMemory

# Returns each shard's arena to write into (None: the shard copies); empty if no shard lends any. Raises TooManyPushes.
Giving = Callable[[], Sequence[Array | None]]

_MAX_KEPT = 64


class GradientMemory:
    """Keeps one staging for each combination of the shards' buffers. For one thread.

    `own`: memory that no server sees; all stagings share its arrays of variables that are split over shards. `give` returns memory for one
    contribution. `give_kept` returns the same memory each time, which `give` never returns, and raises TooManyPushes while a contribution
    sent from it is under way.
    """

    def __init__(self, model: ModelSpec, own: ModelMemory, *, give: Giving, give_kept: Giving) -> None:
        self._model = model
        self._own = Staging(model, own)
        self._give = give
        self._give_kept = give_kept
        self._kept: dict[tuple[int, ...], Staging] = {}
        self._lent: Staging | None = None
        self._is_under_way = False  # whether a contribution sent from `_lent` may be under way

    def ask(self, *, may_overlap: bool) -> Staging:
        """Returns the staging for the user to write the next contribution into. It is zero the first time; later it holds an earlier one.

        `may_overlap`: a contribution may still be under way when the next one is computed.
        """
        if may_overlap:
            return self._own
        staging = self._on(self._give_kept)
        if staging is not self._own:
            self._lent = staging
        return staging

    def staging_for(self, gradients: Gradients, *, may_lend: bool) -> Staging:
        """Returns the staging for a contribution.

        `may_lend`: the call returns only after the contribution is over, so gradients in the lent memory can be sent from there.
        """
        lent = self._lent
        if may_lend and lent is not None and (lent.is_own(gradients) or lent.has_some_of(gradients)) and self._on(self._give_kept) is lent:
            return lent
        return self._own if self._own.is_own(gradients) else self._on(self._give)

    def note_push(self, staging: Staging) -> bool:
        """Notes that a contribution staged there may be under way; returns whether the user has that memory."""
        is_lent = staging is self._lent
        self._is_under_way = self._is_under_way or is_lent
        return is_lent

    def unlock(self, *, is_over: bool) -> bool:
        """Makes the lent memory writable if the contribution sent from it is over, by `is_over` or by the shards. Returns whether it is."""
        if self._is_under_way and (is_over or self._is_given_back()):
            self._is_under_way = False
            if self._lent is not None:
                self._lent.memory.lock(False)
        return not self._is_under_way

    def protect(self) -> None:
        """Makes the user's arrays in lent memory read-only while a contribution sent from them is under way."""
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
            # A push would get the same error from the shards, and its caller knows how to wait.
            return self._own
        # The kept stagings hold their arenas, so that no other array gets the id of one.
        key = tuple(map(id, arenas))
        staging = self._kept.get(key)
        if staging is None:
            if not any(arena is not None for arena in arenas):
                return self._own
            if len(self._kept) >= _MAX_KEPT:
                del self._kept[next(key for key, kept in self._kept.items() if kept is not self._lent)]
            staging = self._kept[key] = Staging(self._model, self._own.memory.on(arenas))
        return staging
