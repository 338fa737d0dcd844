"""A chief for shards that are objects of this process: calls block in the threads that make them. Knows no network.

The chief's instructions are carried out by the same coroutines as over a network, over links that never suspend. The thread whose
call completes a step has it applied before its call returns, outside the lock.
"""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.options import CoordinationConfig
from chief.shards.calls import ShardCalls
from chief.shards.work import Authority, ShardWork, step_requests
from ps_protocol.errors import ContributionMissing, PsError
from ps_protocol.process.waiting import QuickCondition
from ps_protocol.roles.chief import Chief, ClusterStatus, ClusterStatusRequest
from ps_protocol.roles.fence import KEY_BYTES
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import Shard, ShardStatusRequest

Result = TypeVar("Result")


class _Link:
    """Implements ShardLink by calls of an object."""

    def __init__(self, shard: Shard, at_shards: "_AtShards", *, index: int) -> None:
        self._shard, self._at_shards, self._index = shard, at_shards, index

    @property
    def address(self) -> str:
        """Its address, for messages to people."""
        return f"in-process:{self._index}"

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the shard's identity."""
        process = self._shard.call(ShardStatusRequest()).process_incarnation
        who = Identity(cluster="", role=Role.PARAMETER_SERVER, index=self._index, process_incarnation=process)
        return HandshakeReply(identity=who, version=PROTOCOL_VERSION, epoch=0, warning="")

    async def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks, and returns the answer."""
        return self._at_shards.whole(self._index, self._shard, request)

    async def close(self) -> None:
        """Does nothing: there is no connection."""


class _AtShards:
    """Carries out one instruction at all shards, in the calling thread; `report` takes its events. Implements Pace: no time passes."""

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        authority: Authority,
        report: Callable[[ev.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.shard = 0  # the shard of the latest call
        self.interrupt: KeyboardInterrupt | None = None
        self._shards, self._authority, self._report, self._clock = shards, authority, report, clock

    def carry_out(self, work: ev.Work) -> None:
        """Carries out an instruction, and reports its events."""
        if isinstance(work, ev.ApplyStep):
            self._apply(work)
        else:
            self._carry_out_at_all(work)

    def _carry_out_at_all(self, work: ev.Work) -> None:
        links = [_Link(shard, self, index=index) for index, shard in enumerate(self._shards)]
        calls = ShardCalls(links, report=self._report, pace=self)
        at_all = ShardWork(calls, authority=self._authority, store=None, on_superseded=self._failed)
        if isinstance(work, ev.AdoptShards | ev.RestoreShards):
            self._authority.obey(work.fence)
        try:
            at_all.carry_out(work).send(None)
        except StopIteration:
            return
        except PsError as error:
            self._failed(error.message)
            return
        raise AssertionError(f"{work} waits for something, and nothing runs beside it")

    def whole(self, index: int, shard: Shard, request: Request[Answer]) -> Answer:
        """Makes one call, and once more if a Ctrl-C breaks it off, which is kept: half a step would be the end for all threads."""
        self.shard = index
        try:
            return shard.call(request)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            return shard.call(request)

    def _apply(self, step: ev.ApplyStep) -> None:
        """Applies a step as `ShardWork.apply` does, but without a coroutine: there is one with every step."""
        requests = step_requests(step, num_shards=len(self._shards))
        try:
            for index, (shard, request) in enumerate(zip(self._shards, requests, strict=True)):
                self.whole(index, shard, request)
        except ContributionMissing:
            self._carry_out_at_all(step)  # which applies nothing twice, and hears what the others lack
        except PsError as error:
            self._failed(error.message)
        else:
            self._report(ev.Done(work=step))

    def now(self) -> float:
        """Returns the chief's time."""
        return self._clock()

    def pauses(self) -> None:
        """Nothing is repeated: an object of this process that does not answer will not."""

    async def sleep(self, seconds: float) -> None:
        """Never called."""
        raise AssertionError("a pause, and nothing runs meanwhile")

    async def together(self, calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Does one after the other."""
        try:
            return [await call for call in calls]
        finally:
            for call in calls:
                call.close()

    async def at_storage(self, work: Callable[[], Result]) -> Result:
        """Does it here."""
        return work()

    def _failed(self, why: str) -> None:
        self._report(ev.ShardFailed(shard=self.shard, why=why))


class InProcessChief(Chief):
    """Implements Chief over shards in this process, all of which it adopts at once. Thread-safe. Its time is `clock`, in seconds.

    It saves no checkpoints.
    """

    def __init__(self, shards: Sequence[Shard], *, config: CoordinationConfig, clock: Callable[[], float]) -> None:
        self._shards = tuple(shards)
        self._clock = clock
        names = [f"in-process:{index}" for index in range(len(self._shards))]
        session_key = secrets.token_bytes(KEY_BYTES)
        self._coordinator = Coordinator(
            config=config,
            shard_addresses=names,
            now=clock(),
            has_successors=False,
            new_life=lambda: 1,
            session_key=session_key,
        )
        self._authority = Authority(session_key=session_key)
        self._changed = QuickCondition()
        self._calls = itertools.count(1)
        self._answers: dict[int, ev.Reply | ev.Refuse | None] = {}  # None: not answered yet
        self._to_do: deque[ev.Work] = deque()
        self._num_waiting = 0
        self._report(ev.ShardsFound(statuses=tuple(shard.call(ShardStatusRequest()) for shard in self._shards)))

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer: no call hangs."""
        if isinstance(request, ClusterStatusRequest):
            return cast("Answer", self._status(request))
        with self._changed:
            call = next(self._calls)
            self._answers[call] = None
        try:
            self._report(ev.Asked(call=call, request=request))
            answer = self._wait_for_answer(call)
        finally:
            with self._changed:
                del self._answers[call]
        if isinstance(answer, ev.Refuse):
            raise answer.error
        return cast("Answer", answer.value)

    def _status(self, request: ClusterStatusRequest) -> ClusterStatus:
        # With the shards' present reports: in process they cost nothing.
        for index, shard in enumerate(self._shards):
            found = shard.call(ShardStatusRequest())
            self._report(ev.ShardSeen(shard=index, process_incarnation=found.process_incarnation, report=found.report))
        with self._changed:
            work = self._tick_locked()
            status = self._coordinator.status(self._clock(), max_ledger_entries=request.max_ledger_entries)
        self._carry_out(work)
        return status

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _wait_for_answer(self, call: int) -> ev.Reply | ev.Refuse:
        is_waiting = False
        try:
            while True:
                with self._changed:
                    if not is_waiting:
                        self._num_waiting += 1
                        is_waiting = True
                    self._to_do.extend(self._tick_locked())
                    answer = self._answers[call]
                    # Instructions that other calls have caused are left to the threads that must wait anyway.
                    if answer is not None and (not self._to_do or self._num_waiting > 1):
                        self._num_waiting -= 1
                        is_waiting = False
                        return answer
                    work = [self._to_do.popleft()] if self._to_do else []
                    if not work:
                        due = self._coordinator.next_deadline()
                        self._changed.wait(None if due is None else max(0.001, min(due - self._clock(), threading.TIMEOUT_MAX)))
                self._carry_out(work)
        except BaseException:
            # Ctrl-C in a wait: the coordinator must not keep a place for a caller that is gone.
            self._report(ev.CallCancelled(call=call))
            raise
        finally:
            if is_waiting:
                with self._changed:
                    self._num_waiting -= 1

    def _report(self, event: ev.Event) -> None:
        with self._changed:
            work = self._tick_locked()
        self._carry_out(work)
        with self._changed:
            work = self._handle_locked(event)
        self._carry_out(work)

    def _tick_locked(self) -> list[ev.Work]:
        now, due = self._clock(), self._coordinator.next_deadline()
        return self._handle_locked(ev.TimerFired()) if due is not None and due <= now else []

    def _handle_locked(self, event: ev.Event) -> list[ev.Work]:
        """Gives an event to the coordinator and hands out its answers; returns the work to do without the lock.

        There is nothing to end when all have left: the shards are memory, and live as long as they are referenced.
        """
        work = []
        for instruction in self._coordinator.handle(event, self._clock()):
            if isinstance(instruction, (ev.Reply, ev.Refuse)):
                if instruction.call in self._answers:
                    self._answers[instruction.call] = instruction
            elif not isinstance(instruction, (ev.Note, ev.EndProcesses)):
                work.append(instruction)
        self._changed.notify_all()
        return work

    def _carry_out(self, work: Sequence[ev.Work]) -> None:
        """Carries out the instructions for the shards. The caller that waits does what follows from a step: the next contribution."""
        if not work:
            return
        own, interrupt = deque(work), None
        while own:
            item = own.popleft()
            following = self._to_do if isinstance(item, ev.ApplyStep) else own

            def report(event: ev.Event, following: deque[ev.Work] = following) -> None:
                with self._changed:
                    following.extend(self._handle_locked(event))

            at_shards = _AtShards(self._shards, authority=self._authority, report=report, clock=self._clock)
            try:
                at_shards.carry_out(item)
            except Exception as error:
                # A defect: the other threads must not wait for a step that will never finish.
                self._report(ev.ShardFailed(shard=at_shards.shard, why=f"it broke off: {error!r}"))
                raise
            interrupt = at_shards.interrupt or interrupt
        if interrupt is not None:
            raise interrupt
