"""Runs a coordinator: passes it events, and hands out its answers. Owns its lock, timer and blocked callers; decides nothing.

Any thread may report an event, one at a time; that thread also sends the answers. The shard side carries out what concerns shards.
"""

import asyncio
import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.options import CoordinationConfig
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.link import ShardLink
from chief.shards.side import ShardSide
from ps_protocol.errors import PsError
from ps_protocol.process.exhaustion import words_of
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.chief import ClusterState, ClusterStatus, ContributionCounts, StepTotals
from ps_protocol.roles.fence import KEY_BYTES
from ps_protocol.roles.history import History
from ps_protocol.roles.request import Answer, Request
from ps_protocol.rpc.status import defect

log = logging.getLogger("lockstep.chief")

# How long ending the shards may take after training, and once the process has to end.
_SHUTDOWN_S = 5.0
_HASTY_SHUTDOWN_S = 0.4
# A timer this late means that the process itself was stopped; messages that arrived meanwhile are handled first.
_LATE_S = 0.5
_HEARING_S = 1.0


class Runner:
    """The chief without its server. To be made in the event loop; `begin`, `cancel` and `status` are for all threads and never wait."""

    def __init__(
        self,
        links: Sequence[ShardLink],
        *,
        config: CoordinationConfig,
        on_state: Callable[[ClusterState], None],
        store: CheckpointStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        history: History | None = None,
        on_note: Callable[[ev.Note, int], None] | None = None,
    ) -> None:
        self._clock = clock
        # Called with each line of the log and the step; under the lock.
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        # Guards the coordinator. Taken again by a thread whose answer ends a call.
        self._lock = threading.RLock()
        addresses = [link.address for link in links]
        session_key = new_session_key()
        self._coordinator = Coordinator(config=config, shard_addresses=addresses, now=clock(), new_life=new_life, session_key=session_key)
        self._cluster = self._coordinator.cluster
        self._shards = ShardSide(
            links,
            store=store,
            report=self._report,
            on_defect=self._broken_off,
            on_superseded=self._superseded,
            clock=clock,
            history=history,
            session_key=session_key,
        )
        self._on_state = on_state
        self._state = self._cluster.state
        self._calls = itertools.count(1)
        self._blocked: dict[int, Callable[[ev.Reply | ev.Refuse], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._listens_until = -math.inf
        self._end: asyncio.Future[ev.EndProcesses] = self._loop.create_future()
        self._is_hasty = self._is_superseded = self._has_trained = False
        # Of the page, once that is served: the status names it.
        self.page_url = ""
        self._earlier: ContributionCounts | None = None
        self._is_left: PsError | None = None  # once this process leaves the cluster to its next chief

    @property
    def epoch(self) -> int:
        """Epoch of the cluster."""
        return self._cluster.members.epoch

    @property
    def global_step(self) -> int:
        """The number of steps applied."""
        return self._cluster.step

    @property
    def has_ended_training(self) -> bool:
        """Whether training is over, and there has been a model to train, or one that a checkpoint says is trained."""
        return self._cluster.ending.is_over and (self._has_trained or self._cluster.step > 0)

    async def run(self, *, chief_address: str = "", is_takeover: bool = False) -> int:
        """Takes the shards, and returns the exit code: once no participant needs the cluster and the shards have been asked to end, or once
        the cluster is left to its next chief.

        `chief_address`: where participants reach this chief. `is_takeover`: it takes the shards whatever their present chief does. Raises
        PsError if the shards are not to be had.
        """
        self._cluster.address = chief_address
        self._shards.begin(chief_address=chief_address, is_takeover=is_takeover, on_failure=self._cannot_begin)
        try:
            end = await self._end
        finally:
            await self._shards.cancel_all()
        log.info("ending reason=%s", end.reason)
        if not end.has_successor:
            await self._shards.shut_down_all(reason=end.reason, within_s=_HASTY_SHUTDOWN_S if self._is_hasty else _SHUTDOWN_S)
        return end.exit_code

    async def close(self) -> None:
        """Closes the connections to the shards, and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
        await self._shards.close()

    def stop(self, reason: str) -> None:
        """Ends this process soon, and no training, which a later chief continues; called again, at once."""
        self._is_hasty = True
        self._shards.expect_end()
        self._report(ev.AskedToEnd(why=reason))

    async def call(self, request: Request[Answer]) -> Answer:
        """Asks the coordinator and returns its answer, perhaps much later. Raises PsError. For the event loop."""
        future: asyncio.Future[ev.Reply | ev.Refuse] = self._loop.create_future()

        def answer(given: ev.Reply | ev.Refuse) -> None:
            if not future.done():
                future.set_result(given)

        number = self.begin(request, partial(self._shards.in_loop, answer))
        try:
            given = await future
        except asyncio.CancelledError:
            self.cancel(number)
            raise
        if isinstance(given, ev.Refuse):
            raise given.error
        return cast("Answer", given.value)

    def begin(self, request: Request[Any], answer: Callable[[ev.Reply | ev.Refuse], None]) -> int:
        """Asks the coordinator and returns the call's number; `answer` is called once, perhaps before this returns, or much later.

        It is called by the thread that brings the answer about, which may be any; it must not wait.
        """
        number = next(self._calls)
        self._blocked[number] = answer
        try:
            if self._is_left is None:
                self._report(ev.Asked(call=number, request=request))
        except PsError as error:
            self._answer(ev.Refuse(call=number, error=error))
        except Exception:
            self._answer(ev.Refuse(call=number, error=defect("the chief")))
        self._refuse_if_left()  # another thread may just have left
        return number

    def cancel(self, number: int) -> None:
        """The caller has gone away: its call is not answered any more."""
        if self._blocked.pop(number, None) is not None:
            self._report(ev.CallCancelled(call=number))

    def status(self, *, max_ledger_entries: int) -> ClusterStatus:
        """Reports the cluster."""
        with self._lock:
            status = self._coordinator.status(self._clock(), max_ledger_entries=max_ledger_entries)
        return replace(status, chief_cpu_s=time.process_time(), page_url=self.page_url, earlier=self._earlier)

    def join_counts(self, earlier: ContributionCounts) -> None:
        """Has the status name what the chiefs before this one have counted."""
        self._earlier = earlier

    @property
    def totals(self) -> StepTotals:
        """All steps so far together."""
        with self._lock:
            return self._cluster.ledger.totals

    def _report(self, event: ev.Event) -> None:
        with self._lock:
            instructions = self._coordinator.handle(event, self._clock())
            if type(event) is ev.Done and type(event.work) is ev.ApplyStep:
                self._carry_out_failing(instructions)
            else:
                for instruction in instructions:
                    self._carry_out(instruction)
            if self._cluster.state is not self._state:
                self._state = self._cluster.state
                self._has_trained = self._has_trained or self._state is ClusterState.TRAINING
                log.info("the cluster has another state state=%s step=%d", self._state.name, self._cluster.step)
                self._on_state(self._state)
            self._set_timer()
        if self._shards.own_work:
            self._shards.do_own_work()

    def _carry_out_failing(self, instructions: Sequence[ev.Instruction]) -> None:
        """Carries out the instructions after a step; half of them, if a failpoint says so."""
        half = len(instructions) // 2
        for instruction in instructions[:half]:
            self._carry_out(instruction)
        failpoint("chief.tokens.half")
        for instruction in instructions[half:]:
            self._carry_out(instruction)

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Reply() | ev.Refuse():
                self._answer(instruction)
            case ev.EndProcesses():
                self._shards.in_loop(self._finish, instruction)
            case ev.Note():
                log.log(_level(instruction), "%s", instruction.text)
                if self._on_note is not None:
                    self._on_note(instruction, self._cluster.step)
            case _:
                self._shards.carry_out(instruction)

    def _answer(self, instruction: ev.Reply | ev.Refuse) -> None:
        answer = self._blocked.pop(instruction.call, None)
        if answer is not None:
            answer(instruction)

    def _set_timer(self) -> None:
        due = self._coordinator.next_deadline()
        if due is None:
            return
        # While it listens after a sleep, what is overdue must not wake it again, or it would listen for ever.
        due = max(due, self._listens_until)
        # Most events move deadlines later, if at all; the timer then stays as it is.
        if self._timer_due is None or due < self._timer_due:
            self._timer_due = due
            self._shards.in_loop(self._start_timer)

    def _start_timer(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if (due := self._timer_due) is not None:
                self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._fire, due)

    def _fire(self, due: float) -> None:
        with self._lock:
            now = self._clock()
            if now - due > _LATE_S:
                self._timer_due = self._listens_until = now + _HEARING_S
                self._start_timer()
                return
            self._timer = self._timer_due = None
            self._report(ev.TimerFired())

    def _finish(self, end: ev.EndProcesses) -> None:
        if self._end.done():
            return
        self._end.set_result(end)
        if end.has_successor:
            self._is_left = end.refusal
            self._refuse_if_left()

    def _refuse_if_left(self) -> None:
        if self._is_left is not None:
            for number in [*self._blocked]:
                self._answer(ev.Refuse(call=number, error=self._is_left))

    def _cannot_begin(self, error: PsError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _superseded(self, why: str) -> None:
        """Another chief has the shards: this one ends, and leaves them alone."""
        if not self._is_superseded:
            self._is_superseded = True
            log.error("superseded: this chief ends, and leaves the cluster to the other one cause=%s", why)
            self._shards.in_loop(self._finish, ev.EndProcesses(exit_code=1, reason=f"superseded: {why}", has_successor=True))

    def _broken_off(self, error: BaseException) -> None:
        """A defect, or want of memory: this process ends, and what the shards hold is left to the next one."""
        if lacking := words_of(error):
            log.critical("the chief ends: %s", lacking)
        else:
            log.critical("a task of the chief failed; the chief ends", exc_info=error)
        self._finish(
            ev.EndProcesses(exit_code=1, reason=lacking or f"internal error: {error!r}", has_successor=not self._cluster.ending.is_over)
        )


def new_life() -> int:
    """Returns a name for a life of a cluster that no other has."""
    return secrets.randbits(63) | 1


def new_session_key() -> bytes:
    """Returns a new random key for a chief's secrets."""
    return secrets.token_bytes(KEY_BYTES)


def _level(note: ev.Note) -> int:
    if note.is_warning:
        return logging.WARNING
    return logging.DEBUG if note.is_detail else logging.INFO
