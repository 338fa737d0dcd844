"""A network link that transfers under way share evenly, with a clock that is a number. Knows sizes in seconds; no wire, no thread."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

_LEAST_S = 1e-12
_ROUNDING = 1 + 1e-14


class SharedLink:
    """Transfers of one size: each takes `alone_s` by itself, n times as long while n are under way, and they end in order."""

    def __init__(self, *, alone_s: float) -> None:
        self._alone_s = alone_s
        self._ends: deque[tuple[float, int]] = deque()  # amount of work that each has had when it is done, and whose it is
        self._done = 0.0  # work that a transfer would have had that was under way all the time
        self._at = 0.0

    def start(self, transfer: int, *, now: float) -> None:
        """Begins a transfer."""
        self._pass_time(now)
        self._ends.append((self._done + self._alone_s, transfer))

    def next_end(self) -> float | None:
        """Returns when the next transfer ends if no other begins before; None: none is under way."""
        return self._at + (self._ends[0][0] - self._done) * len(self._ends) if self._ends else None

    def pop_end(self, *, now: float) -> int:
        """Takes out the transfer that ends now, which is that of `next_end`."""
        self._pass_time(now)
        end, transfer = self._ends.popleft()
        self._done = end  # exactly, whatever was rounded on the way
        return transfer

    def _pass_time(self, now: float) -> None:
        if self._ends:
            self._done += (now - self._at) / len(self._ends)
        self._at = now


class Clock(Protocol):
    """Time as a number, and what is to happen at some time."""

    @property
    def now(self) -> float:
        """The time, in seconds."""

    def later(self, delay_s: float, what: Callable[[int], None], whose: int) -> None:
        """Has something happen; at once if there is no delay."""


class Transfers:
    """Transfers over one shared link, by a clock; `then` is what happens when one has ended, with the number that it was started with."""

    def __init__(self, clock: Clock, *, alone_s: float, then: Callable[[int], None]) -> None:
        self._clock = clock
        self._link = SharedLink(alone_s=alone_s) if alone_s else None
        self._then = then
        self._has_look_planned = False

    def start(self, transfer: int) -> None:
        """Begins a transfer; without a duration it ends at once."""
        if self._link is None:
            self._then(transfer)
            return
        self._link.start(transfer, now=self._clock.now)
        # A transfer that begins makes all others longer, so a look that is planned comes too early, never too late.
        if not self._has_look_planned:
            self._plan_look(self._link)

    def _plan_look(self, link: SharedLink) -> None:
        end = link.next_end()
        self._has_look_planned = end is not None
        if end is not None:
            self._clock.later(max(_LEAST_S, end - self._clock.now), self._look, 0)

    def _look(self, _: int) -> None:
        link, now = self._link, self._clock.now
        if link is None or (end := link.next_end()) is None:
            return
        if end > now * _ROUNDING + _LEAST_S:
            self._plan_look(link)
            return
        transfer = link.pop_end(now=now)
        self._plan_look(link)
        self._then(transfer)
