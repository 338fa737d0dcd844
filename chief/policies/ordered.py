"""Asynchronous training with an order: each contribution is a step by itself, one applied after the other. Knows no leases or clocks.

A worker continues when its contribution is applied ("async"), and if it is not too far ahead of the slowest live worker ("ssp").
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from chief.policies.base import Grant, Policy, Verdict
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicyName, PolicySpec, TooStale
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


@light_dataclass(slots=True)
class _Progress:
    """One live worker: contributions of its that were applied or dropped, and those that are counted and not applied.

    `incarnation` 0: that of its next contribution.
    """

    num_done: int
    num_pending: int = 0
    incarnation: int = 0


class OrderedPolicy(Policy):
    """Applies contributions in order of their counting; refuses or scales those that are too stale.

    `max_step`: the step at which training ends, so that no contribution is promised a later one. `workers`: those that live now.
    """

    def __init__(
        self,
        *,
        spec: PolicySpec,
        step: int = 0,
        counted: Sequence[ChosenPush] = (),
        workers: Iterable[int] = (),
        max_step: int | None = None,
    ) -> None:
        self.spec = spec
        self.step = step
        self._max_step = max_step
        self._limit = spec.staleness if spec.name is PolicyName.SSP else None
        self._queue: deque[ChosenPush] = deque()
        self._progress: dict[int, _Progress] = {}
        self._counts: Counter[int] = Counter()  # number done -> live workers that have done so many
        self._wishes: dict[int, None] = {}
        self._is_closed = False
        self._has_slowest_moved = False
        for worker in workers:
            self.join(worker, 0)
        for entry in counted:
            self._enqueue(entry)

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """The contribution whose turn it is."""
        return (self._queue[0].push_id,) if self._queue else ()

    @property
    def weights(self) -> tuple[float, ...]:
        """Its weight, unless that is 1."""
        return (self._queue[0].weight,) if self._queue and self._queue[0].weight != 1 else ()

    @property
    def last_worker(self) -> int:
        """The worker that it is from."""
        return self._queue[0].push_id.worker

    @property
    def num_contributions(self) -> int:
        """Contributions that wait for their turn."""
        return len(self._queue)

    @property
    def is_complete(self) -> bool:
        """Whether there is one to apply."""
        return bool(self._queue)

    @property
    def least(self) -> int:
        """The fewest contributions that a live worker has made."""
        return min(self._counts, default=0)

    def slowest(self) -> list[int]:
        """Returns the live workers that have made the fewest contributions."""
        least = self.least
        return [worker for worker, progress in self._progress.items() if progress.num_done == least]

    def lead(self, worker: int) -> int:
        """Returns how many contributions a live worker is ahead of the slowest."""
        progress = self._progress.get(worker)
        return progress.num_done - self.least if progress else 0

    def has_contributed(self, worker: int) -> bool:
        """Whether something of the worker waits for its turn, or the worker waits for others."""
        progress = self._progress.get(worker)
        return worker in self._wishes or (progress is not None and progress.num_pending > 0)

    def join(self, worker: int, incarnation: int) -> None:
        """A worker takes part from now on; it counts as having made as many contributions as the slowest.

        Where another chief has counted contributions of this incarnation, it waits for them as it did before.
        """
        if worker not in self._progress:
            least = self.least
            giver = worker, incarnation
            num_pending = sum((entry.push_id.worker, entry.push_id.incarnation) == giver for entry in self._queue)
            self._progress[worker] = _Progress(num_done=least, num_pending=num_pending, incarnation=incarnation)
            self._counts[least] += 1

    def commit(self, push_id: PushId, *, step: int, weight: float = 1.0) -> Verdict:
        """Puts a contribution at the end of the queue, unless it would be too stale by its turn."""
        applied_step = self.step + len(self._queue)
        # A worker may have read what the shards have applied just now, and the chief does not know of yet.
        staleness = max(0, applied_step - step)
        if self._takes_no_more:
            return Verdict(outcome=PushOutcome.LATE, staleness=staleness)
        excess = staleness - self.spec.max_staleness if self.spec.max_staleness is not None else 0
        if excess > 0 and self.spec.too_stale is TooStale.DROP:
            least = self.least
            self._count_done(push_id.worker)
            self._has_slowest_moved = self.least > least
            return Verdict(outcome=PushOutcome.STALE, staleness=staleness)
        factor = 1 / (1 + excess) if excess > 0 else 1.0
        self._enqueue(ChosenPush(push_id=push_id, step=step, weight=factor))
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=applied_step, staleness=staleness, factor=factor)

    def after_commit(self, worker: int) -> list[Grant]:
        """Returns those that may continue because the slowest has been dropped as too stale, and so has made a contribution more."""
        has_moved, self._has_slowest_moved = self._has_slowest_moved, False
        return self._hand_out() if has_moved else []

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Gives the open step, as soon as all that the worker gave is applied and it is not too far ahead."""
        if self._may_continue(worker):
            self._wishes.pop(worker, None)
            return self.step
        self._wishes[worker] = None
        return None

    def forget_wish(self, worker: int) -> None:
        """The worker waits no more."""
        self._wishes.pop(worker, None)

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a lost worker; others need not wait for it any longer. Its contributions are applied."""
        self._wishes.pop(worker, None)
        progress = self._progress.pop(worker, None)
        if progress is not None:
            self._leave_count(progress.num_done)
        return self._hand_out()

    def advance(self) -> list[Grant]:
        """The contribution whose turn it was is applied."""
        push_id = self._queue.popleft().push_id
        self.step += 1
        progress = self._progress.get(push_id.worker)
        if progress is None or progress.incarnation != push_id.incarnation:
            return []
        least, progress.num_pending = self.least, progress.num_pending - 1
        self._count_done(push_id.worker)
        if self._limit is not None and self.least > least:
            return self._hand_out()
        return self._hand_out([push_id.worker] if push_id.worker in self._wishes else [])

    def finish(self) -> None:
        """Takes no more contributions and hands out no more tokens; waiting contributions are applied."""
        self._is_closed = True

    def gives_way(self, policy: PolicySpec) -> bool:
        """At once to another queue; else when it is empty: each waiting contribution has been promised a step of its own."""
        if not policy.has_common_steps:
            return True
        self.finish()
        return not self._queue

    def counted(self) -> Sequence[ChosenPush]:
        """Returns the queue."""
        return tuple(self._queue)

    @property
    def _takes_no_more(self) -> bool:
        # A worker whose contribution was dropped shall wait for the next step, not compute for the same one again.
        return self._is_closed or (self._max_step is not None and self.step + len(self._queue) >= self._max_step)

    def _enqueue(self, entry: ChosenPush) -> None:
        worker, incarnation = entry.push_id.worker, entry.push_id.incarnation
        self._queue.append(entry)
        progress = self._progress.get(worker)
        if progress is None:
            return  # gone: its contribution is applied, and no caller waits for that
        if progress.incarnation != incarnation:
            progress.incarnation, progress.num_pending = incarnation, 0
        progress.num_pending += 1

    def _may_continue(self, worker: int) -> bool:
        progress = self._progress.get(worker)
        if self._takes_no_more or progress is None:
            return not self._takes_no_more
        return not progress.num_pending and (self._limit is None or progress.num_done - self.least <= self._limit)

    def _count_done(self, worker: int) -> None:
        progress = self._progress.get(worker)
        if progress is not None:
            self._leave_count(progress.num_done)
            progress.num_done += 1
            self._counts[progress.num_done] += 1

    def _leave_count(self, num_done: int) -> None:
        self._counts[num_done] -= 1
        if not self._counts[num_done]:
            del self._counts[num_done]

    def _hand_out(self, workers: Sequence[int] | None = None) -> list[Grant]:
        granted = [worker for worker in (self._wishes if workers is None else workers) if self._may_continue(worker)]
        for worker in granted:
            del self._wishes[worker]
        return [Grant(worker, self.step) for worker in granted]
