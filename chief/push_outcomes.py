"""What became of one incarnation's latest pushes, so that a repeated commit has its effect once. Bounded; knows no step state."""

from collections.abc import Sequence

from ps_protocol.chief import CommitResult, PushOutcome
from ps_protocol.errors import PushIdReused
from ps_protocol.shard import AppliedPush, PushId

_WINDOW = 16


class PushOutcomes:
    """Outcomes by sequence. Sequences grow; what fell out of the window is known to be old, but not what became of it."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self._window = max(window, _WINDOW)
        self._last_sequence = 0
        # By sequence: the step that it was computed from (None: unknown), and what became of it.
        self._recent: dict[int, tuple[int | None, CommitResult]] = {}

    def is_repeated(self, push_id: PushId, *, step: int) -> bool:
        """Whether this push was counted before. Raises PushIdReused if it was for another step."""
        if push_id.sequence > self._last_sequence:
            return False
        known = self._recent.get(push_id.sequence)
        if known is not None and known[0] not in (None, step):
            raise PushIdReused(
                f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {known[0]}, now for step {step};"
                " use a new sequence number for each contribution"
            )
        return True

    def first_result(self, push_id: PushId) -> CommitResult | None:
        """Returns what became of a repeated push at first; None if that is forgotten or it was skipped."""
        known = self._recent.get(push_id.sequence)
        return known[1] if known is not None else None

    def revise(self, push_id: PushId, result: CommitResult) -> None:
        """Has whoever repeats this push told something else than the first time; forgotten ones stay so."""
        if push_id.sequence in self._recent:
            self._recent[push_id.sequence] = (self._recent[push_id.sequence][0], result)

    def restart(self, applied: Sequence[AppliedPush]) -> None:
        """Knows only of these from now on, all accepted; sequences that were used stay used."""
        self._last_sequence = max([self._last_sequence, *(push.sequence for push in applied)])
        self._recent = {
            push.sequence: (None, CommitResult(outcome=PushOutcome.ACCEPTED, global_step=push.step, applied_step=push.step))
            for push in applied[-self._window :]
        }

    def record(self, push_id: PushId, *, step: int, result: CommitResult) -> None:
        """Remembers what became of a push that is not repeated."""
        self._last_sequence = push_id.sequence
        self._recent[push_id.sequence] = (step, result)
        if len(self._recent) > self._window:
            del self._recent[next(iter(self._recent))]
