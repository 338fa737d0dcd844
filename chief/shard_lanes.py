"""Has all shards apply a step at once, each in a thread of its own: the fast way while all is well. Says whether it went well, no more.

What does not go well here is repeated by whoever insists, and explained there: applying a step twice is applying it once.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from chief.shard_caller import ShardCaller
from ps_protocol.errors import PsError
from ps_protocol.shard import ApplyRequest

log = logging.getLogger(__name__)

Report = Callable[[bool], None]
Work = Callable[[], None]


class ShardLanes:
    """One thread a shard. Thread-safe; nothing here waits."""

    def __init__(self, callers: Sequence[ShardCaller]) -> None:
        self._callers = tuple(callers)
        self._queues: list[queue.SimpleQueue[tuple[ApplyRequest, _Round] | None]] = [queue.SimpleQueue() for _ in callers]
        for index, (caller, steps) in enumerate(zip(self._callers, self._queues, strict=True)):
            # A thread that hangs at a shard must not keep the process from ending.
            threading.Thread(target=_run, args=(caller, steps), name=f"shard-lane-{index}", daemon=True).start()

    def apply(self, requests: Sequence[ApplyRequest], report: Report) -> Work | None:
        """Has each shard apply its request. `report` is called once: True when all have, or False from the first that fails.

        Returns what the calling thread shall do itself, when it holds no lock: the way to another thread would take longer.
        """
        turn = _Round(len(requests), report)
        own: Work | None = None
        for caller, steps, request in zip(self._callers, self._queues, requests, strict=True):
            if own is None and caller.is_quick:
                own = partial(_apply, caller, request, turn)
            else:
                steps.put((request, turn))
        return own

    def close(self) -> None:
        """Ends the threads, as soon as the shards let them. Idempotent."""
        for caller, steps in zip(self._callers, self._queues, strict=True):
            steps.put(None)
            caller.close()


class _Round:
    """One step at all shards."""

    def __init__(self, num_lanes: int, report: Report) -> None:
        self._lock = threading.Lock()
        self._num_left = num_lanes
        self._report = report

    def ended(self, *, is_applied: bool) -> None:
        """A lane has ended."""
        with self._lock:
            if self._num_left == 0:
                return  # another one has failed
            self._num_left = self._num_left - 1 if is_applied else 0
            is_over = self._num_left == 0
        if is_over:
            self._report(is_applied)


def _run(caller: ShardCaller, steps: "queue.SimpleQueue[tuple[ApplyRequest, _Round] | None]") -> None:
    for request, turn in iter(steps.get, None):
        _apply(caller, request, turn)


def _apply(caller: ShardCaller, request: ApplyRequest, turn: _Round) -> None:
    is_applied = False
    try:
        caller.apply_step(request)
        is_applied = True
    except PsError as error:
        log.debug("the fast way did not apply step=%d cause=%s", request.step, error.message)
    except Exception:
        log.exception("the fast way broke off step=%d", request.step)
    turn.ended(is_applied=is_applied)
