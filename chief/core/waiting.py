"""Blocked calls, timers, and the outbox of instructions: the one place where calls wait, expire, are cancelled or refused.

Knows numbers, callables and answers; decides nothing, and reads no clock. A module whose callers wait has its own `Line`, and says what
happens when a caller's time is up.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from chief.core.messages import Instruction, Note, NoteKind, Refuse, Reply, ReplyValue
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S

Ask = TypeVar("Ask")


def slice_s(max_wait_s: float) -> float:
    """Returns how long a call may block: the requested time, and 20 s at most."""
    return min(max_wait_s, MAX_WAIT_SLICE_S) if max_wait_s > 0 else 0.0


class Timer:
    """Calls a function when its time has come. It may be set and cleared any number of times."""

    __slots__ = ("_armed", "_timers", "action", "due")

    def __init__(self, timers: "Timers", action: Callable[[float], None]) -> None:
        self._timers = timers
        self._armed = math.inf
        self.action = action
        self.due: float | None = None

    def set(self, when: float) -> None:
        """Sets or moves the time."""
        self.due = when
        if when < self._armed:
            self._armed = when
            self._timers.push(when, self)

    def clear(self) -> None:
        """The time does not come."""
        self.due = None

    def reached(self, when: float, now: float) -> bool:
        """The entry of the heap at `when` is taken out: whether the time has come. If it was moved, the timer is armed anew."""
        if self._armed != when:
            return False  # a later entry of one that was since armed earlier
        self._armed = math.inf
        if self.due is None:
            return False
        if self.due > now:
            self.set(self.due)
            return False
        return True


class Timers:
    """All timers. Moving one later costs nothing: the heap keeps its entry at the earlier time, and looks again when that comes.

    So the heap holds few entries a timer, however often a lease is renewed or a call blocks and is answered.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def timer(self, action: Callable[[float], None]) -> Timer:
        """Returns a new timer that is not set."""
        return Timer(self, action)

    def next(self) -> float | None:
        """Returns the latest time to call `fire`; None: never. It may be earlier than the earliest timer, never later."""
        return self._heap[0][0] if self._heap else None

    def fire(self, now: float) -> None:
        """Runs the timers that are due, the earliest first, unless they have been cleared meanwhile."""
        due: list[Timer] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, timer = heapq.heappop(self._heap)
            if timer.reached(when, now):
                due.append(timer)
        # The heap has those that were moved later at the time that they were moved from.
        due.sort(key=lambda timer: timer.due or 0.0)
        for timer in due:
            if timer.due is not None and timer.due <= now:
                timer.due = None
                timer.action(now)

    def push(self, when: float, timer: Timer) -> None:
        """Puts an entry into the heap; for timers."""
        heapq.heappush(self._heap, (when, next(self._numbers), timer))


class Outbox:
    """The instructions that follow from one event, in order: handed out as a whole, or, if the event is refused, not at all."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._afterwards: dict[Callable[[float], None], None] = {}

    def add(self, instruction: Instruction) -> None:
        """Has something done."""
        self._instructions.append(instruction)

    def reply(self, call: int, value: ReplyValue) -> None:
        """Answers a caller."""
        self._instructions.append(Reply(call=call, value=value))

    def refuse(self, call: int, error: PsError) -> None:
        """Answers a caller with an error."""
        self._instructions.append(Refuse(call=call, error=error))

    def note(self, text: str, *, kind: NoteKind = NoteKind.OTHER, is_warning: bool = False, is_detail: bool = False) -> None:
        """Says something in the log."""
        self._instructions.append(Note(text=text, kind=kind, is_warning=is_warning, is_detail=is_detail))

    def afterwards(self, action: Callable[[float], None]) -> None:
        """Has the chief look, once the event itself has been dealt with, whether something follows from it. Each action runs once."""
        self._afterwards[action] = None

    def __len__(self) -> int:
        return len(self._instructions)

    def move_up(self, *, since: int, to: int) -> None:
        """Moves the instructions added since there were `since` before those added since there were `to`."""
        if to < since < len(self._instructions):
            self._instructions[to:] = self._instructions[since:] + self._instructions[to:since]

    def finish(self, now: float) -> list[Instruction]:
        """Ends a handled event: runs its deferred work, and hands out all instructions."""
        while self._afterwards:
            action = next(iter(self._afterwards))
            del self._afterwards[action]
            action(now)
        instructions, self._instructions = self._instructions, []
        return instructions

    def discard(self) -> None:
        """Ends a refused event: drops its instructions."""
        self._instructions.clear()
        self._afterwards.clear()


@light_dataclass(slots=True, eq=False)
class Blocked(Generic[Ask]):
    """A call that waits. `who`: its worker, if each has one call at a time, else its own number."""

    call: int
    who: int
    ask: Ask
    line: "Line[Ask]"
    timer: Timer | None = None


class Waiting:
    """All calls that block, in lines: each is in one."""

    def __init__(self, out: Outbox, timers: Timers) -> None:
        self.out = out
        self.timers = timers
        self._blocked: dict[int, Blocked[object]] = {}

    def line(self, on_expiry: "Callable[[Blocked[Ask], float], None] | None" = None) -> "Line[Ask]":
        """Returns a new line. `on_expiry` is called with a call that has waited as long as it may, and must answer it."""
        return Line(self, self._blocked, on_expiry)

    def cancel(self, call: int) -> None:
        """A caller has gone away: it is forgotten."""
        blocked = self._blocked.get(call)
        if blocked is not None:
            blocked.line.cancel(blocked)


class Line(Generic[Ask]):
    """Callers that wait for one thing, the oldest first."""

    def __init__(
        self, waiting: Waiting, blocked: dict[int, Blocked[object]], on_expiry: Callable[[Blocked[Ask], float], None] | None
    ) -> None:
        self._waiting, self._all, self._on_expiry = waiting, blocked, on_expiry
        self._blocked: dict[int, Blocked[Ask]] = {}
        # Timers that were cleared are used again: the heap has their entries still.
        self._idle: list[Timer] = []
        # Called with each blocked call that is cancelled.
        self.on_cancel: Callable[[Blocked[Ask]], None] | None = None

    def __len__(self) -> int:
        return len(self._blocked)

    def __contains__(self, who: object) -> bool:
        return who in self._blocked

    def __iter__(self) -> Iterator[Blocked[Ask]]:
        """The calls that wait at this moment."""
        return iter([*self._blocked.values()])

    @property
    def who(self) -> frozenset[int]:
        """The keys of the calls that wait."""
        return frozenset(self._blocked)

    def get(self, who: int) -> Blocked[Ask] | None:
        """Returns the blocked call of a participant, if it has one."""
        return self._blocked.get(who)

    def block(self, call: int, ask: Ask, *, until: float | None = None, who: int | None = None) -> None:
        """Has a call wait, of a participant that does not wait in this line."""
        who = call if who is None else who
        blocked = self._blocked[who] = Blocked(call, who, ask, self)
        self._all[call] = blocked  # type: ignore[assignment]  # its line takes it out
        if until is not None:
            timer = self._idle.pop() if self._idle else self._waiting.timers.timer(self._nothing)
            timer.action = partial(self._expire, blocked)
            timer.set(until)
            blocked.timer = timer

    def take(self, who: int) -> Blocked[Ask] | None:
        """Takes a participant's call out; the caller answers it."""
        blocked = self._blocked.pop(who, None)
        if blocked is not None:
            self._all.pop(blocked.call, None)
            if (timer := blocked.timer) is not None:
                timer.clear()
                self._idle.append(timer)
        return blocked

    def answer(self, who: int, value: ReplyValue) -> bool:
        """Answers a participant; False if it does not wait here."""
        blocked = self.take(who)
        if blocked is not None:
            self._waiting.out.reply(blocked.call, value)
        return blocked is not None

    def refuse(self, who: int, error: PsError) -> bool:
        """Answers a participant with an error; False if it does not wait here."""
        blocked = self.take(who)
        if blocked is not None:
            self._waiting.out.refuse(blocked.call, error)
        return blocked is not None

    def answer_all(self, value: ReplyValue) -> None:
        """Answers all waiting calls."""
        for who in [*self._blocked]:
            self.answer(who, value)

    def refuse_all(self, error: PsError) -> None:
        """Answers all waiting calls with an error."""
        for who in [*self._blocked]:
            self.refuse(who, error)

    def cancel(self, blocked: Blocked[Ask]) -> None:
        """A participant has gone away."""
        self.take(blocked.who)
        if self.on_cancel is not None:
            self.on_cancel(blocked)

    def _expire(self, blocked: Blocked[Ask], now: float) -> None:
        if self._on_expiry is not None and self._blocked.get(blocked.who) is blocked:
            self._on_expiry(blocked, now)

    def _nothing(self, now: float) -> None:
        """The action of a timer that is not set yet."""
