"""The training data of a cluster as one worker goes through it: ranges leased from the chief, a few ahead. Knows ranges; no sample.

A range that the worker took counts as done when a contribution made from it is applied: the worker's next contribution names it. The chief
leases the range again if that contribution is dropped, or if its worker is lost or rolled back.

In strict sync, no step waits for a worker that is out of ranges. Such a worker only follows the steps, so that it is at the open step when
it gets ranges again. Under ssp and with fifo tokens, it would hold up the workers that still have ranges, and they the end of the data. So
while it waits, and another worker waits for it, or a step needs its last contributions, it makes contributions without gradients, which
count in no mean.
"""

from collections import deque
from collections.abc import Callable

from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.roles.chief import ClusterStatus, LeaseReply, LeaseResult, ParticipantKind
from worker_client.core.place import LOST
from worker_client.core.requests import Asking, Deadline, Lease, LeaseAhead, Skipping, Status
from worker_client.core.worker import Worker

# Enough that asking is not felt, and so few that a lost worker's are soon done by others.
NUM_AHEAD = 4


class WorkerData:
    """One worker's ranges of one data set."""

    def __init__(self, spec: DataSpec, worker: Worker, *, begin_wait: Callable[[str, float | None], Deadline]) -> None:
        self._spec = spec
        # The number of the next request, of those for this data set: the cluster refuses those for another one.
        self._request_id = 1
        self._is_granted = False  # the cluster shares out this data, no other
        self._worker = worker
        self._begin_wait = begin_wait
        # Not that of its place, which may be another one by now: coming back to the model there, the worker forgets the ranges that it has.
        self._participant = worker.participant
        self._ahead: deque[DataRange] = deque()

    def next(self, *, timeout_s: float | None) -> Asking[DataRange | None]:
        """Returns the next range to compute gradients from; None once all are done, or training is finished. Raises DeadlineExceeded."""
        worker, ahead = self._worker, self._ahead
        yield from self._notice_move()
        if self._is_granted:
            # Ranges handed to the program since the worker took its present place, for a contribution that was not sent after all.
            ahead.extendleft(reversed(worker.take_back()))
        if not ahead:
            yield from self._await_ranges(timeout_s)
        if not ahead:
            return None
        given = ahead.popleft()
        worker.use(given)
        if len(ahead) <= NUM_AHEAD // 2:
            yield LeaseAhead(self._participant, self._spec, self._request_id, worker.place.commits.held)
        return given

    def _notice_move(self) -> Asking[None]:
        """Leases the ranges of a former identity anew."""
        if self._worker.place.participant is not self._participant:
            yield from self._worker.check_place()
            self._participant = self._worker.participant
            self._request_id += 1
            self._ahead.clear()

    def _await_ranges(self, timeout_s: float | None) -> Asking[None]:
        worker, place = self._worker, self._worker.place
        wait = self._begin_wait(f"{worker.who} wants ranges of {self._spec.name!r}", timeout_s)
        has_waited = False
        while not worker.state.is_finished:
            participant, is_brief = self._participant, worker.state.reads_latest or bool(worker.num_unnamed)
            try:
                wish = Lease(participant, self._spec, self._request_id, place.commits.held, wait, is_brief)
                reply: LeaseReply = yield from place.ask(wish, participant)
            except LOST:
                if place.participant is participant:
                    raise
                yield from self._notice_move()
                continue
            self._request_id += 1
            self._is_granted = True
            self._ahead.extend(reply.ranges)
            place.commits.lease(given.id for given in reply.ranges)
            if reply.result is LeaseResult.WAIT:
                has_waited = True
                wait.explain(reply.waiting_for)
            if has_waited:
                yield from self._keep_up(wait)
                if not worker.state.is_finished:
                    # The answer may be that of an epoch that has ended meanwhile.
                    yield from self._notice_move()
            if self._ahead or (reply.result is LeaseResult.EXHAUSTED and self._participant is participant):
                return

    def _keep_up(self, wait: Deadline) -> Asking[None]:
        """Others have gone on while this worker had nothing to do."""
        worker = self._worker
        if worker.num_unnamed:
            # The worker would wait for itself; or two workers for one another.
            yield Skipping(self._spec, worker.num_unnamed)
            yield from worker.skip(timeout_s=wait.left_s())
            return
        status: ClusterStatus = yield Status()
        if not worker.state.reads_latest:
            if status.global_step > worker.state.local_step:
                yield from worker.follow(timeout_s=wait.left_s())
        elif self._is_waited_for(status):
            yield from worker.contribute(None, is_waited_for=True, timeout_s=wait.left_s())

    def _is_waited_for(self, status: ClusterStatus) -> bool:
        if status.policy.has_common_steps and status.num_contributions:
            # With an old token of the queue even those who gave them wait for ranges: of the step that would be applied with one more.
            return True
        workers = [other for other in status.participants if other.kind is ParticipantKind.WORKER]
        return any(other.is_waiting and other.index != self._participant.index for other in workers)
