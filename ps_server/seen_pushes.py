"""Which push ids were seen, and what became of them: the newest incarnation of each worker, and its latest outcomes."""

from dataclasses import dataclass, field

from ps_protocol.errors import PushIdReused, Superseded
from ps_protocol.shard import PushId, PushResult

# Workers whose push ids are remembered; beyond it the one silent longest is forgotten (what it repeats is stale, or still staged).
MAX_WORKERS = 10_000
# Outcomes remembered per worker. A push id older than that which comes again is recognised as long as it is staged, and by its step after.
_OUTCOMES_KEPT = 64


@dataclass(slots=True)
class _Seen:
    """What one worker's newest incarnation has pushed."""

    incarnation: int
    outcomes: dict[int, tuple[int, PushResult]] = field(default_factory=dict)


class SeenPushes:
    """What workers have pushed, by worker. As many as MAX_WORKERS."""

    def __init__(self) -> None:
        self._of: dict[int, _Seen] = {}

    @property
    def workers(self) -> set[int]:
        """Workers of whom something is remembered."""
        return set(self._of)

    def num_outcomes(self, worker: int) -> int:
        """Returns how many outcomes of a worker are remembered."""
        return len(self._of[worker].outcomes)

    def check_incarnation(self, push_id: PushId) -> None:
        """Raises Superseded if a later incarnation of the worker has pushed."""
        seen = self._of.get(push_id.worker)
        if seen is not None and push_id.incarnation < seen.incarnation:
            raise Superseded(
                f"worker {push_id.worker}: incarnation {seen.incarnation} has pushed, this is {push_id.incarnation};"
                " another process took its place; register again",
                facts={"worker": str(push_id.worker), "incarnation": str(seen.incarnation)},
            )

    def note_incarnation(self, push_id: PushId) -> None:
        """Notes who pushes."""
        # Taken out and put in again, so that the worker that has been silent longest comes first.
        seen = self._of.pop(push_id.worker, None)
        if seen is None or seen.incarnation != push_id.incarnation:
            seen = _Seen(push_id.incarnation)
        self._of[push_id.worker] = seen
        if len(self._of) > MAX_WORKERS:
            del self._of[next(iter(self._of))]

    def outcome(self, push_id: PushId) -> tuple[int, PushResult] | None:
        """Returns step and result of a push, if it was seen; a sequence number that was passed over was not."""
        seen = self._of.get(push_id.worker)
        if seen is None or push_id.incarnation != seen.incarnation:
            return None
        return seen.outcomes.get(push_id.sequence)

    def remember(self, push_id: PushId, step: int, result: PushResult) -> None:
        """Notes what became of a push, unless another incarnation has come meanwhile."""
        seen = self._of.get(push_id.worker)
        if seen is None or seen.incarnation != push_id.incarnation:
            return
        seen.outcomes[push_id.sequence] = step, result
        if len(seen.outcomes) > _OUTCOMES_KEPT:
            del seen.outcomes[next(iter(seen.outcomes))]

    def clear(self) -> None:
        """Forgets everything."""
        self._of.clear()


def check_same_step(push_id: PushId, *, first_step: int, step: int) -> None:
    """Raises PushIdReused if a push id came again for another step."""
    if first_step != step:
        raise PushIdReused(
            f"push {push_id.worker}/{push_id.incarnation}/{push_id.sequence} was for step {first_step} and came again for step {step};"
            " give every contribution a sequence number of its own",
            facts={"worker": str(push_id.worker), "step": str(first_step)},
        )
