"""Runs a coordinator on an event loop: tells it what happens, and does what it wants done. Owns timer, tasks and blocked callers.

All of it happens in the loop's one thread, so the coordinator needs no lock. It decides nothing itself.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from chief import events as ev
from chief.coordination import CoordinationConfig
from chief.coordinator import Coordinator
from chief.shard_links import ShardLink
from chief.shard_tasks import ShardTasks
from ps_protocol.chief import ClusterState, ClusterStatus
from ps_protocol.errors import PsError
from ps_protocol.status import defect

log = logging.getLogger(__name__)

_EPOCH = 1
# How long participants may take to leave once the process was told to end, and the shards to be told so; together less than 2 s.
_LEAVE_GRACE_S = 1.5
_HASTY_SHUTDOWN_S = 0.4
# How long shards may take to be told at the orderly end.
_SHUTDOWN_S = 5.0
# A timer this late means that the process itself stood still; what its callers sent meanwhile is heard first.
_LATE_S = 0.5
_HEARING_S = 1.0

Kind = TypeVar("Kind")


class Runner:
    """The chief without its server. To be made and used in one event loop."""

    def __init__(
        self,
        links: Sequence[ShardLink],
        *,
        config: CoordinationConfig,
        on_state: Callable[[ClusterState], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._coordinator = Coordinator(config=config, shard_addresses=[link.address for link in links], epoch=_EPOCH, now=clock())
        self._shards = ShardTasks(links, epoch=_EPOCH, report=self._report, clock=clock)
        self._num_shards = len(links)
        self._on_state = on_state
        self._state = self._coordinator.state
        self._calls = itertools.count(1)
        self._blocked: dict[int, Callable[[ev.Reply | ev.Refuse], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._background: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[ev.EndProcesses] = self._loop.create_future()
        self._is_hasty = False

    @property
    def epoch(self) -> int:
        """Epoch of the cluster."""
        return _EPOCH

    async def run(self) -> int:
        """Adopts the shards, and returns the exit code once nobody needs the cluster any more and the shards have been told to end.

        Raises PsError if the shards are not what they should be, or hold another model.
        """
        self._spawn(self._adopt_all())
        try:
            end = await self._end
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
        log.info("ending reason=%s", end.reason)
        await self._shards.shut_down_all(reason=end.reason, within_s=_HASTY_SHUTDOWN_S if self._is_hasty else _SHUTDOWN_S)
        return end.exit_code

    async def close(self) -> None:
        """Closes the connections to the shards, and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
        await self._shards.close()

    def stop(self, reason: str) -> None:
        """Finishes training, gives participants a moment to leave, and ends. A second call ends at once."""
        if self._is_hasty:
            self._end_now(reason)
            return
        self._is_hasty = True
        self._report(ev.FinishTraining(call=None, reason=reason))
        self._loop.call_later(_LEAVE_GRACE_S, self._end_now, reason)

    async def call(self, kind: type[Kind], make_event: Callable[[int], ev.Event]) -> Kind:
        """Tells the coordinator of a call and returns its answer, perhaps much later. Raises PsError."""
        future: asyncio.Future[ev.Reply | ev.Refuse] = self._loop.create_future()

        def answer(given: ev.Reply | ev.Refuse) -> None:
            if not future.done():
                future.set_result(given)

        number = self.begin(make_event, answer)
        try:
            given = await future
        except asyncio.CancelledError:
            self.cancel(number)
            raise
        if isinstance(given, ev.Refuse):
            raise given.error
        assert isinstance(given.value, kind)
        return given.value

    def begin(self, make_event: Callable[[int], ev.Event], answer: Callable[[ev.Reply | ev.Refuse], None]) -> int:
        """Tells the coordinator of a call and returns its number; `answer` is called once, perhaps before this returns, or much later."""
        number = next(self._calls)
        self._blocked[number] = answer
        try:
            self._report(make_event(number))
        except PsError as error:
            self._answer(ev.Refuse(call=number, error=error))
        except Exception:
            self._answer(ev.Refuse(call=number, error=defect("the chief")))
        return number

    def cancel(self, number: int) -> None:
        """The caller has gone away: its call is not answered any more."""
        if self._blocked.pop(number, None) is not None:
            self._report(ev.CallCancelled(call=number))

    def status(self, *, max_ledger_entries: int) -> ClusterStatus:
        """Reports the cluster."""
        return self._coordinator.status(self._clock(), max_ledger_entries=max_ledger_entries)

    def _report(self, event: ev.Event) -> None:
        for instruction in self._coordinator.handle(event, self._clock()):
            self._carry_out(instruction)
        if self._coordinator.state is not self._state:
            self._state = self._coordinator.state
            log.info("state=%s step=%d", self._state.name, self._coordinator.global_step)
            self._on_state(self._state)
        self._set_timer()

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Reply() | ev.Refuse():
                self._answer(instruction)
            case ev.PrepareStep():
                self._spawn(self._shards.prepare(instruction))
            case ev.ApplyStep():
                self._spawn(self._shards.apply(instruction))
            case ev.ConfigureShards():
                self._spawn(self._shards.configure(instruction))
            case ev.AdoptShard():
                self._spawn(self._adopt_again(instruction.shard))
            case ev.EndProcesses():
                if not self._end.done():
                    self._end.set_result(instruction)
            case ev.Note():
                log.log(logging.WARNING if instruction.is_warning else logging.INFO, "%s", instruction.text)

    def _answer(self, instruction: ev.Reply | ev.Refuse) -> None:
        answer = self._blocked.pop(instruction.call, None)
        if answer is not None:
            answer(instruction)

    async def _adopt_all(self) -> None:
        try:
            await self._shards.adopt_all()
        except PsError as error:
            if not self._end.done():
                self._end.set_exception(error)
            return
        for index in range(self._num_shards):
            self._spawn(self._shards.watch(index))

    async def _adopt_again(self, shard: int) -> None:
        try:
            await self._shards.adopt(shard)
        except PsError as error:
            self._report(ev.ShardFailed(shard=shard, why=error.message))

    def _set_timer(self) -> None:
        due = self._coordinator.next_deadline()
        # Most events move deadlines later, if at all; the timer then stays as it is.
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._fire, due)

    def _fire(self, due: float) -> None:
        now = self._clock()
        if now - due > _LATE_S:
            self._timer_due = now + _HEARING_S
            self._timer = self._loop.call_later(_HEARING_S, self._fire, self._timer_due)
            return
        self._timer = None
        self._report(ev.TimerFired())

    def _end_now(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(ev.EndProcesses(exit_code=1 if self._state is ClusterState.FAILED else 0, reason=reason))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a task of the chief broke off; it cannot go on", exc_info=error)
            if not self._end.done():
                self._end.set_result(ev.EndProcesses(exit_code=1, reason=f"internal error: {error!r}"))
