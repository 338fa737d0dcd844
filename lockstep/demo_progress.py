"""How far a demo has come, as data. Pure: from the chief's status and an evaluation; knows no clock, process or terminal."""

from collections import deque
from dataclasses import dataclass

from lockstep.digits_model import Evaluation
from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind

_RATE_WINDOW_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """One worker's contributions so far."""

    index: int
    num_accepted: int = 0
    num_stale: int = 0
    num_late: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment of a demo. `loss` is that of all training examples; `waiting_for` is empty while nothing is waited for.

    `max_staleness`: how many steps older than the newest the variables were that a contribution was computed from, at most so far.
    """

    step: int
    elapsed_s: float
    loss: float
    test_accuracy: float
    steps_per_s: float
    num_stale: int
    num_late: int
    waiting_for: str
    workers: tuple[WorkerProgress, ...]
    max_staleness: int = 0


class ProgressMeter:
    """Makes Progress of what is seen at a time, and knows the steps a second over the last few."""

    def __init__(self, *, num_workers: int) -> None:
        self._num_workers = num_workers
        self._seen: deque[tuple[float, int]] = deque()

    def measure(self, *, train: Evaluation, test: Evaluation, step: int, status: ClusterStatus, elapsed_s: float) -> Progress:
        """`step` is that of the variables that were evaluated."""
        self._seen.append((elapsed_s, step))
        while len(self._seen) > 2 and self._seen[0][0] < elapsed_s - _RATE_WINDOW_S:
            self._seen.popleft()
        (first_s, first_step), (last_s, last_step) = self._seen[0], self._seen[-1]
        workers = {one.index: one for one in status.participants if one.kind is ParticipantKind.WORKER}
        return Progress(
            step=step,
            elapsed_s=elapsed_s,
            loss=train.loss,
            test_accuracy=test.accuracy,
            steps_per_s=(last_step - first_step) / (last_s - first_s) if last_s > first_s else 0.0,
            num_stale=status.num_stale,
            num_late=status.num_late,
            waiting_for=status.waiting_for if status.state is ClusterState.TRAINING else "",
            workers=tuple(
                WorkerProgress(
                    index=index,
                    num_accepted=workers[index].num_accepted,
                    num_stale=workers[index].num_stale,
                    num_late=workers[index].num_late,
                )
                if index in workers
                else WorkerProgress(index=index)
                for index in range(self._num_workers)
            ),
            max_staleness=status.max_observed_staleness,
        )
