"""How a process waits: conditions, pauses, retries, waits of users, deadlines of calls, and warnings about slow calls.

Knows time, threads and the log; nothing about the calls themselves.
"""

import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ps_protocol.errors import Cancelled, DeadlineExceeded, InvalidSpec, PsError, Unavailable
from ps_protocol.model.shown import shown

# A condition whose `with` block costs no Python call: half of `threading.Condition`'s price, where many are entered with every step.


_ReentrantLock: Any = type(threading.RLock())


class QuickCondition(_ReentrantLock, threading.Condition):  # type: ignore[misc]  # the lock's type has no name that could be inherited from
    """A `threading.Condition()` in every way; it is its own lock, whose methods come first."""

    def __init__(self) -> None:
        threading.Condition.__init__(self, self)


# A call that blocks for longer than this logs what it waits for, again and again.
FIRST_NOTICE_S = 2.0
NOTICE_INTERVAL_S = 10.0

log = logging.getLogger("lockstep.silence")
waits_log = logging.getLogger("lockstep.waits")
# Set by a launcher, which says for all of its workers what they all wait for.
LAUNCHER_SAYS = "LOCKSTEP_LAUNCHER_SAYS"


# How long to pause before trying again: doubling, jittered, bounded.


FIRST_DELAY_S = 0.05


def delays_s(rng: random.Random, *, first_s: float = FIRST_DELAY_S, max_s: float) -> Iterator[float]:
    """Yields pauses in seconds for ever: each drawn from the upper half of a bound that doubles from `first_s` to `max_s`.

    The jitter keeps many callers that lost the same server from coming back in one wave; the lower half is left out so that no one spins.
    """
    bound = first_s
    while True:
        yield bound * (0.5 + 0.5 * rng.random())
        bound = min(2 * bound, max_s)


# Repeats an idempotent call for as long as its server cannot be reached.
#
# The clients of this package make one attempt a call. To retry, wrap the call:
#
# waiting.call(lambda left_s: shard.push_gradients(header, gradients, timeout_s=left_s), what="ps 0", timeout_s=60)


# Short pauses find a restarted server about as soon as it serves; their callers have nothing else to do.
MAX_PAUSE_S = 1.0

Result = TypeVar("Result")
Piece = TypeVar("Piece")


# Whether this process was stopped for seconds since a moment, by `time.monotonic()`.
StoodStill = Callable[[float], bool]


def call(
    attempt: Callable[[float], Result],
    *,
    what: str,
    timeout_s: float,
    stop: threading.Event | None = None,
    stood_still: StoodStill | None = None,
    retried: tuple[type[PsError], ...] = (Unavailable,),
) -> Result:
    """Returns `attempt(seconds left)`, repeated with jittered pauses while it raises one of `retried`, within `timeout_s` altogether.

    Raises every other error at once. Logs a warning after 2 s, then every 10 s. Raises Unavailable with the last one's words when time is
    up, and Cancelled when `stop` is set meanwhile. `attempt` must be idempotent. Where this process `stood_still` meanwhile, as after a
    SIGSTOP, the time begins anew when it is up, for nothing was tried in it.
    """
    started = time.monotonic()
    try:
        return attempt(timeout_s)
    except retried as error:
        # Made only now: nearly every call succeeds at once.
        wait = _Retry(what=what, timeout_s=timeout_s, stop=stop, stood_still=stood_still, started=started)
        wait.pause(error)
    while True:
        try:
            return attempt(wait.left_s())
        except retried as error:
            wait.pause(error)
        except DeadlineExceeded as error:
            raise wait.explained(error) from None


class _Retry:
    """The wait of one caller: for what, since when, and why."""

    def __init__(
        self, *, what: str, timeout_s: float, stop: threading.Event | None, stood_still: StoodStill | None, started: float
    ) -> None:
        self._what, self._timeout_s, self._stop, self._stood_still = what, timeout_s, stop, stood_still
        self._started = started
        self._delays: Iterator[float] = delays_s(random.Random(), max_s=MAX_PAUSE_S)
        self._next_notice_s = FIRST_NOTICE_S
        self._failure = ""  # its words: the error itself would hold its caller's frames, and those hold this

    def left_s(self) -> float:
        return self._timeout_s - (time.monotonic() - self._started)

    def pause(self, failure: PsError) -> None:
        """Sleeps before the next attempt, or raises if there will be none."""
        self._failure = failure.message
        delay_s, left_s = next(self._delays), self.left_s()
        if delay_s >= left_s and self._stood_still is not None and self._stood_still(self._started):
            log.warning("this process was stopped for a while; trying again what=%s cause=%s", self._what, failure.message)
            self._started, self._next_notice_s = time.monotonic(), FIRST_NOTICE_S
            left_s = self._timeout_s
        elapsed_s = self._timeout_s - left_s
        if delay_s >= left_s:
            raise Unavailable(f"{failure.message} (tried for {elapsed_s:.1f} s)", facts=failure.facts) from None
        # The pause counts: no wait may exceed 2 s without a log line.
        if elapsed_s + delay_s >= self._next_notice_s:
            log.warning("still trying what=%s elapsed_s=%.1f left_s=%.1f cause=%s", self._what, elapsed_s, left_s, failure.message)
            self._next_notice_s = elapsed_s + NOTICE_INTERVAL_S
        if (self._stop or threading.Event()).wait(delay_s):
            raise Cancelled(f"{self._what}: closed while it was waited for; the last failure: {failure.message}")

    def explained(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """Returns the error with the failures that used up its time."""
        if not self._failure:
            return error
        return DeadlineExceeded(f"{error.message} (before that: {self._failure})", facts=error.facts)


# A user's wait for something that takes many calls, each of which blocks for a slice of it.


# The chief answers a blocked call after a slice of the wait, so that a silent chief is noticed. The first slices are short.
_FIRST_SLICE_S = 1.0
_LATER_SLICE_S = 3.0


# 30 years. gRPC ends a call at once whose deadline lies beyond what 64 bits of nanoseconds hold, as that of an infinite time does.
_LONGEST_S = 1e9


def checked_timeout(timeout_s: float) -> float:
    """Returns the time limit of a call, 30 years at most. Raises InvalidSpec unless it is a number of seconds > 0."""
    try:
        if timeout_s > 0:
            return float(min(timeout_s, _LONGEST_S))
    except (TypeError, ValueError):
        pass
    raise InvalidSpec(f"timeout_s: got {shown(timeout_s)}, want seconds > 0")


class Wait:
    """One wait, cut in slices: after 2 s, then every 10 s, it says what it waits for; at its deadline it gives up with the same words."""

    def __init__(self, what: str, timeout_s: float | None) -> None:
        try:
            is_time = timeout_s is None or bool(timeout_s >= 0)
        except (TypeError, ValueError):
            is_time = False
        if not is_time:
            raise InvalidSpec(f"timeout_s: got {shown(timeout_s)}, want seconds >= 0, or None for no limit")
        self._what = what
        self._start_s = time.monotonic()
        self._timeout_s = None if timeout_s is None else min(timeout_s, _LONGEST_S)
        self._deadline_s = None if self._timeout_s is None else self._start_s + self._timeout_s
        self._next_words_s = self._start_s + FIRST_NOTICE_S

    def slice_s(self) -> float:
        """Returns how long the next call may block, in seconds: until there is something to say, or the deadline, and not for long."""
        now = time.monotonic()
        end = self._next_words_s if self._deadline_s is None else min(self._next_words_s, self._deadline_s)
        return max(0.0, min(end - now, _FIRST_SLICE_S if now < self._start_s + FIRST_NOTICE_S else _LATER_SLICE_S))

    def left_s(self) -> float | None:
        """Returns the time to the deadline in seconds; None if there is none."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Blocks for so long, at most to the deadline."""
        left_s = self.left_s()
        time.sleep(seconds if left_s is None else min(seconds, left_s))  # the caller wants time to pass, and waits for nothing

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Takes note that the wait continues; logs why if it is time to. Raises DeadlineExceeded at the deadline.

        `is_of_all`: all workers wait for this, by the chief's own words; where a launcher says it for all of them, it is logged as INFO.
        """
        now = time.monotonic()
        reason = waiting_for or "no reason was given"
        if self._deadline_s is not None and now >= self._deadline_s:
            raise DeadlineExceeded(f"{self._what}: not within {self._timeout_s:g} s: {reason}")
        if now >= self._next_words_s:
            level = logging.INFO if is_of_all and os.environ.get(LAUNCHER_SAYS) else logging.WARNING
            waits_log.log(level, "%s: waiting for %.0f s: %s", self._what, now - self._start_s, reason)
            self._next_words_s = now + NOTICE_INTERVAL_S


# Says that a call has had no answer for too long, while it still blocks.
#
# `call` warns between two attempts; a server that is stopped, or behind a cut network, lets a single attempt hang until keepalive or
# the deadline ends it. Any wait over 2 s is logged with its reason, so a separate thread checks the calls under way.
# Where a search for a server that has moved may help, it sounds an alarm as well.


_LOOK_INTERVAL_S = 0.5
# If a thread that looks twice a second finds that so much time has passed, the process was stopped.
_STANDSTILL_S = 5.0
# The answer to a blocking call is late sooner than that of an immediate one: the reason of its wait has been logged before.
_GRACE_S = 1.0
_ALARM_INTERVAL_S = 2.0


class Progress:
    """Counts the pieces of payloads that have moved, for a `SilenceWatch` to see. Any thread may count; none needs to be exact.

    `num_read_bytes`: of variables that were read, as they came.
    """

    __slots__ = ("num_pieces", "num_read_bytes")

    def __init__(self) -> None:
        self.num_pieces = self.num_read_bytes = 0

    def counted(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yields the pieces, each of which counts once the next one is asked for."""
        for piece in pieces:
            yield piece
            self.num_pieces += 1


class _Call:
    """One call, watched within its `with` block. One object a call, because that is all that every call pays."""

    __slots__ = ("_calls", "_expected_s", "alarm", "late_s", "next_alarm_s", "next_notice_s", "num_pieces", "progress", "started_s", "what")

    def __init__(
        self, calls: "dict[int, _Call]", what: str, expected_s: float, alarm: Callable[[], None] | None, progress: Progress | None
    ) -> None:
        self._calls, self.what, self._expected_s, self.alarm, self.progress = calls, what, expected_s, alarm, progress
        self.started_s = self.late_s = self.next_notice_s = self.next_alarm_s = 0.0
        self.num_pieces = 0

    def __enter__(self) -> None:
        self.started_s = time.monotonic()
        self.late_s = self.next_notice_s = self.started_s + max(FIRST_NOTICE_S, self._expected_s and self._expected_s + _GRACE_S)
        self.next_alarm_s = self.started_s + self._expected_s + _GRACE_S
        if self.progress is not None:
            self.num_pieces, self.next_notice_s = self.progress.num_pieces, self.started_s + FIRST_NOTICE_S
        self._calls[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._calls[id(self)]


class SilenceWatch:
    """Watches calls of any number of threads. A call costs it two dictionary writes; its daemon thread looks twice a second."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._closed = threading.Event()
        self._looked_s, self._went_on_s = time.monotonic(), -math.inf
        threading.Thread(target=self._run, name="lockstep-silence", daemon=True).start()

    def expecting(
        self, what: str, *, expected_s: float = 0.0, alarm: Callable[[], None] | None = None, progress: Progress | None = None
    ) -> AbstractContextManager[None]:
        """Watches the enclosed call: logs a warning once it has taken 2 s, and 1 s more than `expected_s`; then every 10 s.

        `progress` counts what moves meanwhile: the warning comes as soon as nothing has moved for 2 s.

        `alarm` is called, in another thread, once it has taken 1 s more than `expected_s`, then every 2 s. It must not block. Where `what`
        is empty, nothing is logged: others speak for it.
        """
        return _Call(self._calls, what, expected_s, alarm, progress)

    def stood_still(self, since_s: float) -> bool:
        """Whether the process did not run for 5 s or more since `since_s`: it was stopped, or its machine slept."""
        # The thread may not have looked since then.
        return self._went_on_s > since_s or (time.monotonic() - self._looked_s > _STANDSTILL_S and not self._closed.is_set())

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            if now - self._looked_s > _STANDSTILL_S:
                self._went_on_s = now
            self._looked_s = now
            # A list of a dict's values is made in one go, so calls may begin and end meanwhile.
            for call in list(self._calls.values()):
                _look(call, now)


def _look(call: _Call, now: float) -> None:
    if call.alarm is not None and now >= call.next_alarm_s:
        call.next_alarm_s = now + _ALARM_INTERVAL_S
        call.alarm()
    if call.progress is not None and call.num_pieces != call.progress.num_pieces:
        call.num_pieces = call.progress.num_pieces
        call.next_notice_s = max(call.next_notice_s, min(now + FIRST_NOTICE_S, call.late_s))
    # Half an interval early rather than late.
    if call.what and now + _LOOK_INTERVAL_S >= call.next_notice_s:
        call.next_notice_s = now + NOTICE_INTERVAL_S
        log.warning("no answer yet from %s, for %.1f s: it may be gone, stopped or cut off; still waiting", call.what, now - call.started_s)


# Ends calls that have no deadline of their own, when their time is up.


class Expiring(Protocol):
    """A call under way, that can be ended from any thread."""

    def expire(self) -> None:
        """Ends it, since its time is up. Must not block."""


class CallDeadlines:
    """Watches calls of any number of threads, from one thread of its own that begins with the first. A call costs a few microseconds."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, Expiring]] = {}
        self._changed = QuickCondition()
        self._numbers = itertools.count()
        self._next_look = math.inf
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, call: Expiring, *, timeout_s: float) -> int:
        """Watches a call from now on; returns its number for `end`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            number = next(self._numbers)
            self._calls[number] = deadline, call
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-deadlines", daemon=True)
                self._thread.start()
            elif deadline < self._next_look:
                self._changed.notify_all()
        return number

    def end(self, number: int) -> None:
        """Stops watching a call."""
        with self._changed:
            self._calls.pop(number, None)

    def close(self) -> None:
        """Ends the thread. Idempotent; does not wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                overdue = [number for number, (deadline, _) in self._calls.items() if deadline <= now]
                expired = [self._calls.pop(number)[1] for number in overdue]
                if not expired:
                    self._next_look = min((deadline for deadline, _ in self._calls.values()), default=math.inf)
                    self._changed.wait(None if self._next_look == math.inf else self._next_look - now)
            for call in expired:
                call.expire()
