"""Which contributions were applied lately, worker by worker, for a chief that takes the shard over."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ps_protocol.shard import AppliedPush, PushId, WorkerPushes

# A worker repeats its last commit; a few more cover those that it sent before it heard of anything.
PUSHES_KEPT = 16
# Beyond it the worker that has been applied longest ago is forgotten.
MAX_WORKERS = 10_000


@dataclass(slots=True)
class _Applied:
    """Sequences and steps of one worker's newest incarnation, the latest applied last."""

    incarnation: int
    pushes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PUSHES_KEPT))


class AppliedPushes:
    """The newest of each worker. The caller serialises the calls."""

    def __init__(self) -> None:
        self._of: dict[int, _Applied] = {}

    def count(self, push_id: PushId, *, step: int) -> None:
        """Notes that a contribution was applied as a part of `step`. One of an incarnation that has been followed is not kept."""
        known = self._of.get(push_id.worker)
        if known is None or known.incarnation != push_id.incarnation:
            if known is not None and push_id.incarnation < known.incarnation:
                return
            # Taken out and put in again, so that the worker that was replaced longest ago comes first.
            self._of.pop(push_id.worker, None)
            known = self._of[push_id.worker] = _Applied(push_id.incarnation)
            if len(self._of) > MAX_WORKERS:
                del self._of[next(iter(self._of))]
        known.pushes.append((push_id.sequence, step))

    def lately(self) -> tuple[WorkerPushes, ...]:
        """Returns them by worker, each in order of sequences."""
        return tuple(
            WorkerPushes(
                worker=worker,
                incarnation=known.incarnation,
                applied=tuple(AppliedPush(sequence=sequence, step=step) for sequence, step in sorted(known.pushes)),
            )
            for worker, known in sorted(self._of.items())
        )

    def resume(self, pushes: Iterable[WorkerPushes]) -> None:
        """Goes on from what `lately` has returned, in place of what is here."""
        self._of = {}
        for of_worker in pushes:
            for push in of_worker.applied:
                push_id = PushId(worker=of_worker.worker, incarnation=of_worker.incarnation, sequence=push.sequence)
                self.count(push_id, step=push.step)
