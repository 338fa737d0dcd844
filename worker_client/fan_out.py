"""Runs one call for each shard at the same time. Knows threads and callables; nothing of what the calls do."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class FanOut:
    """One lane for each shard: the first is the caller's own thread, so that a single shard costs no hop; each other has a thread.

    The threads are daemons, and not an executor's, because those are joined at exit: an interrupted program would wait for a dead server.
    A lane runs its calls one after the other, so what an interrupted `run` left under way never overlaps the shard's next call.
    Without `is_parallel` everything runs in the caller's thread, which is faster where no call waits for anybody.
    """

    def __init__(self, num_lanes: int, *, name: str, is_parallel: bool) -> None:
        self._lanes = [_Lane(f"{name}-{index}") for index in range(1, num_lanes)] if is_parallel else []

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs call i in lane i and returns all results in order, or raises the first error in order once all calls have ended.

        An interrupt of the calling thread passes through at once.
        """
        if not self._lanes:
            return [call() for call in calls]
        futures = [lane.submit(call) for lane, call in zip(self._lanes, calls[1:], strict=True)]
        try:
            first = calls[0]()
        except Exception:
            for future in futures:
                future.exception()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [first, *(future.result() for future in futures)]

    def close(self) -> None:
        """Lets the threads end after the calls under way; does not wait for them."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._jobs.put((call, future))
        return future

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # Held until the next job comes, these would keep the arrays of a finished step alive.
            del job, call, future
