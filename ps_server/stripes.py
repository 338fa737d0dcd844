"""How an apply's work is offered to several threads, without a thread of its own."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

Task = TypeVar("Task")


class StripeRunner(Protocol):
    """Whoever has threads for an apply. Thread-safe."""

    @property
    def num_threads(self) -> int:
        """How many may work at once, the caller's included; at least 1."""

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        """Calls `work(0)` here, and `work(1)` to `work(num_threads - 1)` in other threads as far as they are free; returns when all have
        ended.

        `work` must do all there is to do even where only `work(0)` is called. Raises the first error of any of them.
        """


class OneThread:
    """Does everything in the thread of the caller."""

    num_threads = 1

    def run(self, work: Callable[[int], None], *, num_threads: int) -> None:
        """See StripeRunner."""
        work(0)


ONE_THREAD = OneThread()


def share(
    runner: StripeRunner,
    tasks: Iterable[Task],
    act: Callable[[Task, int], int],
    *,
    num_threads: int,
    within: Callable[[], AbstractContextManager[object]],
) -> int:
    """Calls `act(task, thread)` once for each task, in any order and in up to `num_threads` threads; returns the sum of what it returns.

    Each thread works in a context of its own, made by `within`. What `act` raises ends the others as soon as their present task is done,
    and is raised here.
    """
    # Taken one by one: a thread that the system holds up leaves the rest to the others.
    left, counts = deque(tasks), [0] * num_threads

    def work(thread: int) -> None:
        count = 0
        try:
            with within():
                while (task := _next(left)) is not None:
                    count += act(task, thread)
        except BaseException:
            left.clear()
            raise
        counts[thread] = count

    if num_threads == 1:
        work(0)
    else:
        runner.run(work, num_threads=num_threads)
    return sum(counts)


def _next(left: deque[Task]) -> Task | None:
    try:
        return left.popleft()
    except IndexError:
        return None
