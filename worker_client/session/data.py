"""The training data of a cluster as one worker goes through it: ranges leased from the chief, a few ahead. Knows ranges; no sample.

A range that was yielded counts as done when a contribution made from it is applied: the next `push()` or `step()` names it. The
chief leases it again if that contribution is dropped, or if its worker is lost or rolled back.

In strict sync the chief does not have a step wait for a worker that is out of ranges; that one only follows, so that it is at the open
step when it gets some again. Under ssp and with fifo tokens it would hold up those who still have some, and they the end of the data. So
while it waits, and another waits for it, it gives contributions that have no gradient for any variable and count in no mean.
"""

import logging
from collections import deque
from collections.abc import Iterator

from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.roles.chief import LeaseReply, LeaseResult, Participant, ParticipantKind
from worker_client.cluster.threads import Lane
from worker_client.cluster.waiting import Wait
from worker_client.session.loop import WorkerLoop
from worker_client.session.membership import LOST, Membership
from worker_client.session.training import Training

log = logging.getLogger("lockstep.worker")

# Enough that asking is not felt, and so few that a lost worker's are soon done by others.
NUM_AHEAD = 4
_SKIPPED = "worker %d: %d ranges of %r were yielded here and no contribution was made from them: they count as done, without gradients"
# Who waits for ranges looks so often whether others wait for it.
_LOOK_AGAIN_S = 0.1


class DataBatches:
    """An iterator over a worker's ranges; made by `Session.batches()`. For one thread."""

    def __init__(self, spec: DataSpec, *, member: Membership, loop: WorkerLoop, first_request: int) -> None:
        self.spec = spec
        self.request_id = first_request
        self.timeout_s: float | None = None
        self._member = member
        self._loop = loop
        self._participant = member.participant
        self._ahead: deque[DataRange] = deque()
        self._lane = None if member.link.transport.is_in_process else Lane(f"lockstep-{member.participant.index}-data")
        self._wish: _Wish | None = None

    def __iter__(self) -> Iterator[DataRange]:
        return self

    def __next__(self) -> DataRange:
        self._member.check_open()
        self._notice_move()
        # What was yielded here since the worker has its present place, for a contribution that was not sent after all.
        self._ahead.extendleft(reversed(self._loop.take_back()))
        if not self._ahead:
            self._await_ranges()
        if not self._ahead:
            raise StopIteration
        given = self._ahead.popleft()
        self._loop.use(given)
        if self._lane is not None and self._wish is None and len(self._ahead) <= NUM_AHEAD // 2:
            self._wish = _Wish(self, self._lane, participant=self._participant, request_id=self.request_id)
        return given

    def close(self) -> None:
        """Ends the asking; what is leased goes back when the worker leaves. Idempotent."""
        if self._lane is not None:
            self._lane.close()

    def lease(self, participant: Participant, *, request_id: int, max_wait_s: float, timeout_s: float | None = None) -> LeaseReply:
        """Asks the chief for some ranges."""
        return self._member.ask(
            lambda chief: chief.lease_ranges(participant, self.spec, max_ranges=NUM_AHEAD, request_id=request_id, max_wait_s=max_wait_s),
            participant=participant,
            what=f"ranges of {self.spec.name!r}",
            timeout_s=timeout_s,
            expected_s=max_wait_s,
        )

    def _notice_move(self) -> None:
        """What was leased to a former identity is leased anew."""
        if self._member.participant is not self._participant:
            self._loop.do(Training.check_place)
            self._participant, self._wish = self._member.participant, None
            self.request_id += 1
            self._ahead.clear()

    def _await_ranges(self) -> None:
        wait = Wait(f"worker {self._participant.index} wants ranges of {self.spec.name!r}", timeout_s=self.timeout_s)
        has_waited = False
        while not self._loop.state.is_finished:
            reply = self._asked(wait)
            if reply is None:
                continue
            self.request_id += 1
            self._ahead.extend(reply.ranges)
            self._member.commits.lease(given.id for given in reply.ranges)
            if reply.result is LeaseResult.WAIT:
                has_waited = True
                wait.explain(reply.waiting_for)
            if has_waited:
                self._keep_up(wait)
            if reply.result is not LeaseResult.WAIT:
                return

    def _keep_up(self, wait: Wait) -> None:
        """Others have gone on while this worker had nothing to do."""
        state = self._loop.state
        if self._loop.num_unnamed:
            # It would wait for itself; or two of them for one another.
            log.warning(_SKIPPED, self._participant.index, self._loop.num_unnamed, self.spec.name)
            self._loop.skip(timeout_s=wait.left_s())
            return
        if not state.reads_latest:
            if self._member.status(max_ledger_entries=0).global_step > state.local_step:
                self._loop.wait(timeout_s=wait.left_s())
        elif self._is_waited_for():
            self._loop.contribute(None, is_waited_for=True, timeout_s=wait.left_s())

    def _asked(self, wait: Wait) -> LeaseReply | None:
        """The chief's answer; None if the worker's place has moved."""
        wish, self._wish = self._wish, None
        try:
            if wish is not None:
                return wish.result()
            return self.lease(self._participant, request_id=self.request_id, max_wait_s=self._slice_s(wait), timeout_s=wait.left_s())
        except LOST:
            if self._member.participant is self._participant:
                raise
            self._notice_move()
            return None

    def _slice_s(self, wait: Wait) -> float:
        slice_s = wait.slice_s()
        return min(slice_s, _LOOK_AGAIN_S) if self._loop.state.reads_latest or self._loop.num_unnamed else slice_s

    def _is_waited_for(self) -> bool:
        participants = self._member.status(max_ledger_entries=0).participants
        own = self._participant.index
        return any(other.is_waiting and other.index != own for other in participants if other.kind is ParticipantKind.WORKER)


def batches_of(spec: DataSpec, last: DataBatches | None, *, member: Membership, loop: WorkerLoop, timeout_s: float | None) -> DataBatches:
    """Returns the ranges of this data: the last iterator if it is of the same, which goes on, else a new one in its place."""
    if last is None or last.spec != spec:
        first = 1
        if last is not None:
            first = last.request_id + 1
            last.close()
        last = DataBatches(spec, member=member, loop=loop, first_request=first)
    last.timeout_s = timeout_s
    return last


class _Wish:
    """One question for ranges, asked in another thread meanwhile."""

    def __init__(self, batches: DataBatches, lane: Lane, *, participant: Participant, request_id: int) -> None:
        self._job = lane.submit(lambda: batches.lease(participant, request_id=request_id, max_wait_s=0.0))

    def result(self) -> LeaseReply:
        self._job.wait()
        if self._job.error is not None:
            raise self._job.error
        reply: LeaseReply = self._job.result
        return reply
