"""Runs calls that may hang for a bounded time, and one call for each shard at once. Knows threads and callables; not what the calls do."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

# Runs calls that may hang, for a bounded time.


def run_bounded(calls: Sequence[Callable[[], object]], *, name: str, timeout_s: float) -> bool:
    """Runs all calls at the same time, each in a daemon thread, and waits for them at most `timeout_s`; returns whether all have ended.

    A call that has not ended continues by itself, and delays neither the caller nor the interpreter's end. Calls handle their own errors.
    """
    threads = [threading.Thread(target=call, name=name, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


# Runs one call for each shard at the same time.


Result = TypeVar("Result")


class FanOut:
    """One lane for each shard: the first is the caller's own thread, so that a single shard costs no hop; each other has a thread.

    The threads are daemons, and not an executor's, because those are joined at exit: an interrupted program would wait for a dead server.
    A lane runs its calls one after the other, so what an interrupted `run` left under way never overlaps the shard's next call.
    Without `is_parallel` everything runs in the caller's thread, which is faster where no call waits.
    """

    def __init__(self, num_lanes: int, *, name: str, is_parallel: bool) -> None:
        self._lanes = [Lane(f"{name}-{index}") for index in range(1, num_lanes)] if is_parallel else []

    def run(self, calls: Sequence[Callable[[], Result] | None]) -> list[Result | None]:
        """Runs call i in lane i and returns all results in order, or raises the first error in order once all calls have ended.

        None: that lane has nothing to do. An interrupt of the calling thread passes through at once.
        """
        if not self._lanes:
            return [call() if call is not None else None for call in calls]
        jobs = [None if call is None else lane.submit(call) for lane, call in zip(self._lanes, calls[1:], strict=True)]
        first: Any = None
        error: BaseException | None = None
        try:
            if calls[0] is not None:
                first = calls[0]()
        except Exception as raised:
            error = raised
        results = [first]
        for job in jobs:
            if job is not None:
                job.wait()
                error, job.error = error or job.error, None
            results.append(None if job is None else job.result)
        if error is None:
            return results
        try:
            raise error
        finally:
            # It holds this frame. If the frame held it too, the data to read would stay until the garbage collector finds the cycle.
            del error

    def close(self) -> None:
        """Lets the threads end after the calls under way; does not wait for them."""
        for lane in self._lanes:
            lane.close()


class Job:
    """One call in a lane. Lighter than a Future, of which nothing else would be used."""

    __slots__ = ("_call", "_ended", "error", "result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self) -> None:
        """Makes the call, and keeps its error."""
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.release()

    def wait(self) -> None:
        """Blocks until it has ended, with `result` or `error`."""
        with self._ended:
            pass


class Lane:
    """A daemon thread that makes calls one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Job:
        """Has the call made after those before it."""
        job = Job(call)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Lets the thread end after the calls that were submitted; does not wait."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            # Held until the next job comes, this would keep the arrays of a finished step alive.
            del job
