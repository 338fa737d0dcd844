"""The replicas of one process: threads that run in turn, each until it merges or ends. Knows contexts; no variable, no reduction."""

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ps_protocol.model.light_dataclass import light_dataclass
from worker_client.strategy import contexts
from worker_client.strategy.values import select


class _Abandoned(BaseException):
    """Ends a replica whose run has failed in another one. Not an Exception, so that no replica function continues after it."""


@light_dataclass(frozen=True, slots=True, eq=False)
class _Merge:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _ReplicaThread:
    """One replica's call in a thread of its own. It and the caller's thread run alternately, never at the same time."""

    def __init__(self, strategy: Any, replica: int, call: Callable[[], Any]) -> None:
        self.replica = replica
        self.merge_wanted: _Merge | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self._answer: Any = None
        self._is_abandoned = False
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._is_running = False
        mode = contexts.Mode(strategy, self, replica)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run, mode, call), name=f"replica-{replica}", daemon=True)
        self._thread.start()

    def advance(self, answer: Any = None) -> None:
        """Lets the replica run until it merges or ends; `answer` is the result of its merge_call."""
        self._answer, self.merge_wanted = answer, None
        self._is_running = True
        self._may_run.release()
        self._has_stopped.acquire()
        self._is_running = False

    def end(self) -> None:
        """Ends the replica's thread where it waits. One that still runs, since the caller was interrupted, ends at its next merge."""
        self._is_abandoned = True
        self._may_run.release()
        if not self._is_running:
            self._thread.join()

    def merge(self, merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stops here until `merge_fn` was called for all replicas."""
        if not self._is_abandoned:
            self.merge_wanted = _Merge(merge_fn, args, kwargs)
            self._has_stopped.release()
        return self._wait()

    def _wait(self) -> Any:
        if not self._is_abandoned:
            self._may_run.acquire()
        if self._is_abandoned:
            raise _Abandoned
        return self._answer

    def _run(self, mode: contexts.Mode, call: Callable[[], Any]) -> None:
        try:
            self._wait()
            with contexts.entered(mode):
                self.result = call()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._has_stopped.release()


def run_replicas(
    strategy: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    replicas: Iterable[int],
    merged: Callable[[Mapping[int, Any]], Any],
) -> dict[int, Any]:
    """Returns the results of `fn` in each replica, by id. Call it across replicas.

    The replicas run one after the other, each until its merge_call; then the function of the merge runs here, with the arguments of all
    replicas as `merged` makes them one, and each continues with its part of the result. Raises what a replica or a merge raised, once all
    replicas have ended, and RuntimeError if some replicas merge where others have ended, or merge with another function.
    """

    def call_in(replica: int) -> Callable[[], Any]:
        own_args, own_kwargs = select(replica, args), select(replica, kwargs)
        return lambda: fn(*own_args, **own_kwargs)

    calls = {replica: call_in(replica) for replica in replicas}
    threads: list[_ReplicaThread] = []
    try:
        for replica, call in calls.items():
            threads.append(_ReplicaThread(strategy, replica, call))
        answers: dict[int, Any] = dict.fromkeys(calls)
        while True:
            for thread in threads:
                thread.advance(answers[thread.replica])
                if thread.error is not None:
                    raise thread.error
            merges = {thread.replica: thread.merge_wanted for thread in threads if thread.merge_wanted is not None}
            if not merges:
                return {thread.replica: thread.result for thread in threads}
            if len(merges) < len(threads):
                ended = ", ".join(str(thread.replica) for thread in threads if thread.replica not in merges)
                raise RuntimeError(f"replica {min(merges)} calls merge_call, replica {ended} has returned; all must merge equally often")
            function = one_function({replica: merge.function for replica, merge in merges.items()}, "merge_call()")
            answer = function(
                strategy,
                *merged({replica: merge.args for replica, merge in merges.items()}),
                **merged({replica: merge.kwargs for replica, merge in merges.items()}),
            )
            answers = {replica: select(replica, answer) for replica in merges}
    finally:
        for thread in threads:
            thread.end()


def one_function(functions: Mapping[int, Callable[..., Any] | str], what: str) -> Any:
    """Returns the function or text that all replicas give: the same, or made in each by the same lines. Raises RuntimeError."""
    first = min(functions)
    for replica, function in functions.items():
        if _lines_of(function) != _lines_of(functions[first]):
            raise RuntimeError(
                f"{what}: replica {replica} is at {_where(function)}, replica {first} at {_where(functions[first])}; "
                "all replicas must make the same calls in the same order"
            )
    return functions[first]


def _lines_of(function: Any) -> Any:
    """Returns the code of a function, also of one that is called with some arguments given; of what has none itself."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    return getattr(function, "__code__", None) or getattr(type(function).__call__ if callable(function) else None, "__code__", function)


def _where(function: Any) -> str:
    code = _lines_of(function)
    name = getattr(function, "__name__", None) or (function if isinstance(function, str) else type(function).__name__)
    return f"{name!r} (line {code.co_firstlineno} of {code.co_filename})" if inspect.iscode(code) else repr(name)
