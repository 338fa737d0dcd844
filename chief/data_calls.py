"""Workers that want ranges of the training data: methods of the coordinator. Knows the cluster; no clock, thread or wire."""

from chief import assurance
from chief.cluster import Cluster
from chief.deadlines import Key
from chief.events import Instruction, Refuse, Reply
from chief.member import Member
from chief.recovery_events import LeaseRanges
from chief.waiting_calls import DataCall, slice_s
from chief.wording import listed
from ps_protocol.chief import LeaseReply, LeaseResult, Participant
from ps_protocol.errors import InvalidSpec, PsError

# Workers of an earlier chief are waited for until then.
RETURN_KEY: Key = ("return", 0)


class DataCalls:
    """Answers LeaseRanges, now or when there are ranges."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def lease(self, event: LeaseRanges, now: float) -> list[Instruction]:
        """Leases ranges to a worker, or has it wait for what others hold. Raises InvalidSpec, DataMismatch and what every call may."""
        cluster = self._cluster
        member = cluster.check_worker(event.participant, "lease training data", now=now)
        if event.max_ranges < 1:
            raise InvalidSpec(f"max_ranges: got {event.max_ranges}, want >= 1")
        cluster.refuse_if_recovering(now)
        cluster.data.check(event.data)
        cluster.renew(member, now=now)
        if cluster.is_finished:
            return [_reply(event.call, LeaseResult.EXHAUSTED)]
        has_returned = cluster.data.give_back(member.index, member.incarnation, event.returned)
        waiting = DataCall(
            call=event.call,
            participant=cluster.membership.participant(member),  # the caller may know of no life
            data=event.data,
            max_ranges=event.max_ranges,
            request_id=event.request_id,
        )
        instructions = self._forget_earlier(member)
        reply = self._try(waiting)
        if has_returned:
            instructions += self.settle(now)
        if reply is not None:
            return [*self._tell(reply, now), *instructions]
        cluster.requota()
        if slice_s(event.max_wait_s):
            cluster.waiting.add_data_call(waiting, until=now + slice_s(event.max_wait_s))
            return instructions
        return [_reply(event.call, LeaseResult.WAIT, self._explain()), *instructions]

    def settle(self, now: float) -> list[Instruction]:
        """Answers those who wait and need not any longer; to be called when ranges have come back or are done."""
        instructions: list[Instruction] = []
        for waiting in self._cluster.waiting.data_calls():
            reply = self._try(waiting)
            if reply is not None:
                self._cluster.waiting.take_data_call(waiting.call)
                instructions += self._tell(reply, now)
        return instructions

    def refuse(self, gone: Participant, error: PsError) -> list[Instruction]:
        """A worker is gone: what would come back for others must not be leased to it, which nobody would take from it again."""
        calls = [one.call for one in self._cluster.waiting.data_calls() if one.participant == gone]
        for call in calls:
            self._cluster.waiting.take_data_call(call)
        return [Refuse(call=call, error=error) for call in calls]

    def returned(self, worker: int, now: float) -> list[Instruction]:
        """A worker of an earlier chief has come back, and has said what it has; once all have, the others are served."""
        awaited = self._cluster.awaited
        if worker not in awaited:
            return []
        awaited.discard(worker)
        return [] if awaited else self.stop_waiting(now)

    def stop_waiting(self, now: float) -> list[Instruction]:
        """Whoever has not come back by now may find what it has with others."""
        self._cluster.awaited.clear()
        self._cluster.deadlines.clear(RETURN_KEY)
        return self.settle(now)

    def expire(self, call: int) -> list[Instruction]:
        """A call has blocked as long as it may: its caller is told what it waits for."""
        waiting = self._cluster.waiting.take_data_call(call)
        return [_reply(call, LeaseResult.WAIT, self._explain())] if waiting is not None else []

    def _forget_earlier(self, member: Member) -> list[Instruction]:
        """A worker waits in one call at a time: an earlier one was lost on its way, or is given up."""
        cluster, who = self._cluster, (member.index, member.incarnation)
        earlier = [w for w in cluster.waiting.data_calls() if (w.participant.index, w.participant.incarnation) == who]
        for waiting in earlier:
            cluster.waiting.take_data_call(waiting.call)
        return [_reply(waiting.call, LeaseResult.WAIT, "another call of the same worker") for waiting in earlier]

    def _explain(self) -> str:
        awaited = sorted(self._cluster.awaited)
        if not awaited:
            return self._cluster.data.explain()
        names = listed([f"worker {worker}" for worker in awaited], limit=5)
        return f"another chief has leased training data to {names}: whether they still have it is known once they come back"

    def _tell(self, reply: Reply, now: float) -> list[Instruction]:
        """Another chief must know of the data before anything is made from it."""
        return [reply] if self._cluster.told.is_data_kept else assurance.tell_of_data(self._cluster, reply, now=now)

    def _try(self, waiting: DataCall) -> Reply | None:
        cluster, who = self._cluster, waiting.participant
        if cluster.awaited:
            return None
        granted = cluster.data.lease(who.index, who.incarnation, waiting.data, max_ranges=waiting.max_ranges, request_id=waiting.request_id)
        if granted:
            cluster.requota()
            return Reply(call=waiting.call, value=LeaseReply(result=LeaseResult.GRANTED, ranges=granted))
        return _reply(waiting.call, LeaseResult.EXHAUSTED) if cluster.data.is_exhausted else None


def _reply(call: int, result: LeaseResult, waiting_for: str = "") -> Reply:
    return Reply(call=call, value=LeaseReply(result=result, waiting_for=waiting_for))
