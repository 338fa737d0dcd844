"""Handlers that never wait, and are begun by the thread that takes a server's events. Knows how grpcio is told so; no method.

grpcio otherwise begins every call in a thread of the server's pool, which makes threads as calls come, and keeps them: callers who are not
even let in could have it make thousands.
"""

from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

Serve = TypeVar("Serve", bound=Callable[..., None])


class _SameThread(futures.ThreadPoolExecutor):
    """Does at once what it is given, and never makes a thread."""

    def submit(self, do: Callable[..., Any], /, *arguments: Any, **named: Any) -> "futures.Future[Any]":
        done: futures.Future[Any] = futures.Future()
        try:
            done.set_result(do(*arguments, **named))
        except Exception as error:
            done.set_exception(error)
        return done


_SAME_THREAD = _SameThread(1)


def never_waiting(serve: Serve) -> Serve:
    """Returns the handler of a bidirectional method, marked: it is given a third argument, a function to answer by, and must not wait.

    The call lasts until that function is given None, whenever and by whatever thread. Given a message it waits until that has left, so
    that is for other threads.
    """
    # Functions have no such attributes for the type checker.
    for name, value in (("experimental_non_blocking", True), ("experimental_thread_pool", _SAME_THREAD)):
        setattr(serve, name, value)
    return serve
