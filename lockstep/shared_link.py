"""A network link that transfers under way share evenly, with a clock that is a number. Knows sizes in seconds; no wire, no thread."""

from collections import deque


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
