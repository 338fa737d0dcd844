"""Has all shards apply a step at once, each by a way of its own: the fast way while all is well. Says whether it went well, no more.

What does not go well here is repeated by whoever insists, and explained there: applying a step twice is applying it once.
"""

import threading
from collections.abc import Sequence

from chief.shard_caller import Report, ShardCaller, Work
from ps_protocol.shard import ApplyRequest


class ShardLanes:
    """One way to each shard. Thread-safe; nothing here waits."""

    def __init__(self, callers: Sequence[ShardCaller]) -> None:
        self._callers = tuple(callers)

    def apply(self, requests: Sequence[ApplyRequest], report: Report) -> list[Work]:
        """Has each shard apply its request. `report` is called once: True when all have, or False from the first that fails.

        Returns what the calling thread shall do itself, when it holds no lock: the way to another thread would take longer.
        """
        ended = report if len(requests) == 1 else _Round(len(requests), report).ended
        begun = [caller.begin(request, ended) for caller, request in zip(self._callers, requests, strict=True)]
        return [work for work in begun if work is not None]

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        for caller in self._callers:
            caller.close()


class _Round:
    """One step at all shards."""

    def __init__(self, num_lanes: int, report: Report) -> None:
        self._lock = threading.Lock()
        self._num_left = num_lanes
        self._report = report

    def ended(self, is_applied: bool) -> None:
        """A lane has ended."""
        with self._lock:
            if self._num_left == 0:
                return  # another one has failed
            self._num_left = self._num_left - 1 if is_applied else 0
            is_over = self._num_left == 0
        if is_over:
            self._report(is_applied)
