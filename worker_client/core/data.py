"""One worker's ranges of the training data: leases them from the chief, a few ahead. Knows ranges; no sample.

A worker's next contribution names the ranges that it was made from, and they count as done when it is applied. The chief leases a range
again if that contribution is dropped, or if its worker is lost or rolled back.

In strict sync, no step waits for a worker that is out of ranges. Such a worker only follows the steps, so that it is at the open step when
it gets ranges again. Under ssp and with fifo tokens, it would block the workers that still have ranges, and the data would never end. So it
makes contributions without gradients, which count in no mean, while it waits for ranges and another worker waits for it, or a step needs
its last contributions.
"""

from collections import deque
from functools import partial
from typing import Any

from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.roles.chief import ClusterStatus, ClusterStatusRequest, LeaseRangesRequest, LeaseReply, LeaseResult, ParticipantKind
from worker_client.core.place import LOST
from worker_client.core.sides import Deadline
from worker_client.core.worker import Worker

# Enough to hide the time of a request, and few enough that others soon compute those of a lost worker.
NUM_AHEAD = 4
# How often a worker that waits for ranges looks whether others wait for it.
_LOOK_AGAIN_S = 0.1


class WorkerData:
    """One worker's ranges of one data set."""

    def __init__(self, spec: DataSpec, worker: Worker[Any]) -> None:
        self._spec = spec
        # The number of the next request for this data set.
        self._request_id = 1
        self._is_granted = False  # whether the cluster has granted ranges of this data set, which means that it has no other
        self._worker = worker
        # The participant that holds the ranges. That of the place may be a new one; when the worker comes back to the model as that, it
        # drops its ranges.
        self._participant = worker.participant
        self._ahead: deque[DataRange] = deque()

    async def next(self, *, timeout_s: float | None) -> DataRange | None:
        """Returns the next range to compute gradients from; None once all are done, or training is finished. Raises DeadlineExceeded."""
        worker, ahead = self._worker, self._ahead
        await self._come_back_if_moved()
        if self._is_granted:
            # Ranges that the program got since the worker took its present place, and whose contribution was not sent.
            ahead.extendleft(reversed(worker.take_back()))
        if not ahead:
            await self._await_ranges(timeout_s)
        if not ahead:
            return None
        given = ahead.popleft()
        worker.use(given)
        if len(ahead) <= NUM_AHEAD // 2:
            worker.chief.lease_ahead(self._request(max_wait_s=0.0))
        return given

    def _request(self, *, max_wait_s: float) -> LeaseRangesRequest:
        return LeaseRangesRequest(
            participant=self._participant,
            data=self._spec,
            max_ranges=NUM_AHEAD,
            request_id=self._request_id,
            max_wait_s=max_wait_s,
            held=self._worker.place.commits.held,
        )

    async def _come_back_if_moved(self) -> None:
        """If the worker has become another participant, comes back to the model and drops the former one's ranges."""
        if self._worker.place.participant is not self._participant:
            await self._worker.check_place()
            self._participant = self._worker.participant
            self._request_id += 1
            self._ahead.clear()

    async def _await_ranges(self, timeout_s: float | None) -> None:
        worker, place = self._worker, self._worker.place
        wait = worker.chief.begin_wait(f"{worker.who} wants ranges of {self._spec.name!r}", timeout_s)
        has_waited = False
        while not worker.state.is_finished:
            participant = self._participant
            try:
                reply = await place.ask(participant, partial(self._lease, wait))
            except LOST:
                if place.participant is participant:
                    raise
                await self._come_back_if_moved()
                continue
            self._request_id += 1
            self._is_granted = True
            self._ahead.extend(reply.ranges)
            place.commits.lease(given.id for given in reply.ranges)
            if reply.result is LeaseResult.WAIT:
                has_waited = True
                wait.explain(reply.waiting_for)
            is_exhausted = reply.result is LeaseResult.EXHAUSTED and self._participant is participant
            if has_waited:
                await self._keep_up(wait)
            if is_exhausted:
                await self._catch_up(wait)
            if (has_waited or is_exhausted) and not worker.state.is_finished:
                # The answer may be from an epoch that has ended in the meantime.
                await self._come_back_if_moved()
            if self._ahead or (is_exhausted and self._participant is participant):
                return

    async def _lease(self, wait: Deadline) -> LeaseReply:
        worker, max_wait_s = self._worker, wait.slice_s()
        if worker.state.reads_latest or worker.num_unnamed:
            max_wait_s = min(max_wait_s, _LOOK_AGAIN_S)
        return await worker.chief.lease(self._request(max_wait_s=max_wait_s), wait)

    async def _catch_up(self, wait: Deadline) -> None:
        """All data is in the steps that have been applied: moves on to the last of them, so that all workers end with the same values."""
        state = self._worker.state
        status = await self._worker.chief.ask(ClusterStatusRequest(), what="status")
        if state.reads_latest:
            state.has_newest = False
        elif status.global_step > state.local_step and not state.is_finished:
            await self._worker.follow(timeout_s=wait.left_s())

    async def _keep_up(self, wait: Deadline) -> None:
        """Keeps up with the other workers while this one has no ranges: contributes without gradients, or follows the steps."""
        worker = self._worker
        if worker.num_unnamed:
            # Otherwise the worker would wait for itself, or two workers for each other.
            worker.own.warn(
                f"{worker.num_unnamed} ranges of {self._spec.name!r} were yielded here and no contribution was made from them:"
                " they count as done, without gradients"
            )
            await worker.skip(timeout_s=wait.left_s())
            return
        status = await self._worker.chief.ask(ClusterStatusRequest(), what="status")
        if not worker.state.reads_latest:
            if status.global_step > worker.state.local_step:
                await worker.follow(timeout_s=wait.left_s())
        elif self._is_waited_for(status):
            await worker.contribute(None, is_waited_for=True, timeout_s=wait.left_s())

    def _is_waited_for(self, status: ClusterStatus) -> bool:
        if status.policy.has_common_steps and status.num_contributions:
            # The open step lacks contributions. With old tokens in the queue, even its contributors may be waiting for ranges.
            return True
        workers = [other for other in status.participants if other.kind is ParticipantKind.WORKER]
        return any(other.is_waiting and other.index != self._participant.index for other in workers)
