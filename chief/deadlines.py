"""Which key is due when, for keys whose deadline is moved far more often than it passes. Knows numbers; reads no clock.

Moving a deadline later costs one dictionary store: the heap keeps an entry at the earlier time and looks again when that comes.
So the heap holds few entries a key, however often a lease is renewed or a call blocks and is answered.
"""

import heapq

Key = tuple[str, int]


class Deadlines:
    """Deadlines by key. `next()` may be earlier than the earliest deadline, never later."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._armed: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def set(self, key: Key, when: float) -> None:
        """Sets or moves the deadline of `key`."""
        self._due[key] = when
        if when < self._armed.get(key, float("inf")):
            self._arm(key, when)

    def clear(self, key: Key) -> None:
        """Forgets the deadline of `key`, if it has one."""
        self._due.pop(key, None)

    def next(self) -> float | None:
        """Returns when to call `pop_due` at the latest; None: never."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Key]:
        """Takes out the keys whose deadline has come, the earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._armed.get(key) != when:
                continue  # a later entry of a key that was since armed earlier
            del self._armed[key]
            actual = self._due.get(key)
            if actual is None:
                continue
            if actual <= now:
                del self._due[key]
                due.append(key)
            else:
                self._arm(key, actual)
        return due

    def _arm(self, key: Key, when: float) -> None:
        self._armed[key] = when
        heapq.heappush(self._heap, (when, key))
