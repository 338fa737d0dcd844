"""The context of a thread: of one replica, across replicas, or updating a variable. Knows strategies only to distinguish them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ps_protocol.model.light_dataclass import light_dataclass


class Replica(Protocol):
    """One call of a replica function, as its context sees it."""

    def merge(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Has `merge_fn` called once for all replicas, and returns this replica's part of the result."""


@light_dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """One context. `replica`: None across replicas. `copy`: the copy of variables that is read and written there; None: all copies."""

    strategy: Any
    replica: Replica | None = None
    copy: int | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modes: list[Mode] = []


_THREAD = _Thread()


def current() -> Mode | None:
    """Returns the thread's context; None outside of every strategy, where the one replica of the default strategy runs."""
    return _THREAD.modes[-1] if _THREAD.modes else None


@contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """Has the thread in this context until the block ends."""
    _THREAD.modes.append(mode)
    try:
        yield
    finally:
        _THREAD.modes.pop()


def check_cross_replica(strategy: Any, what: str) -> None:
    """Raises RuntimeError unless the thread is across the replicas of `strategy`, or outside of every strategy."""
    mode = current()
    if mode is None:
        return
    check_same(mode, strategy)
    if mode.replica is not None:
        raise RuntimeError(f"{what} works across replicas, not in one: call it in merge_call(), or outside of run()")


def check_same(mode: Mode, strategy: Any) -> None:
    """Raises RuntimeError if the context is another strategy's."""
    if mode.strategy is not strategy:
        raise RuntimeError("this thread is in the scope of another strategy: leave it first; strategies cannot be mixed")
