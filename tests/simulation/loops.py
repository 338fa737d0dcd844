"""The event loop of one simulated process: asyncio's own tasks, locks and waits, by the world's clock. Knows no role."""

import asyncio
import contextvars
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from ps_protocol.errors import PsError
from tests.simulation.tasks import Call, Life
from tests.simulation.world import World

_NO_CONTEXT = contextvars.Context()
AtStorage = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


class SimulatedLoop:
    """What asyncio needs of a loop, and no more. What one event of the process brings about is done at that moment, in its order.

    `at_storage` does something that blocks on storage, and takes its time. An error that no task handles ends the run.
    """

    def __init__(self, world: World, life: Life, *, at_storage: AtStorage) -> None:
        self._world, self._life, self._at_storage = world, life, at_storage
        self._ready: deque[_Handle] = deque()
        self._is_due = False
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], Coroutine[Any, Any, Any]] = weakref.WeakKeyDictionary()
        # It has what tasks, futures and locks use, and nothing else of what a loop may have.
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        life.endings.append(self._end)

    # -- what asyncio asks of it

    def time(self) -> float:
        """Returns the world's time."""
        return self._world.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> "_Handle":
        """Has something done at this moment, after what is being done."""
        handle = _Handle(callback, args, context)
        if self._life.is_alive:
            self._ready.append(handle)
            if not self._is_due:
                self._is_due = True
                self._world.later(self._life, 0.0, self._work_off)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> "_Handle":
        """Has something done after so many seconds."""
        handle = _Handle(callback, args, context)
        if self._life.is_alive:
            self._world.later(self._life, max(0.0, delay), partial(self._put, handle))
        return handle

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> "_Handle":
        """Has something done at a time."""
        return self.call_later(when - self._world.now, callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        """Returns a future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """Begins a coroutine; never, if the process is over."""
        task = asyncio.Task(coro, loop=self._as_loop)
        self._tasks[task] = coro
        if not self._life.is_alive:
            coro.close()
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Does something that blocks; it does so on storage."""
        return self.create_task(self._at_storage(partial(func, *args)))

    def get_debug(self) -> bool:
        """Returns False."""
        return False

    def call_exception_handler(self, context: Any) -> None:
        """Says nothing: tasks of a process that is killed do not come to their end."""

    # -- calls

    async def call(self, call: Call) -> Any:
        """Returns the answer to one attempt to have another process do something. Raises its PsError, or Unavailable."""
        future = self.create_future()
        self._world.call(self._life, call, partial(_settle, future))
        return await future

    # -- inside

    def _end(self) -> None:
        """What has not begun never will, and is no defect."""
        for coro in self._tasks.values():
            if inspect.getcoroutinestate(coro) == inspect.CORO_CREATED:
                coro.close()

    def _put(self, handle: "_Handle") -> None:
        self._ready.append(handle)
        self._work_off()

    def _work_off(self) -> None:
        self._is_due = True  # what is added meanwhile is done here
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._as_loop)
        try:
            while self._ready and self._life.is_alive:
                self._ready.popleft().run()
        finally:
            asyncio._set_running_loop(before)
            self._is_due = False


class _Handle:
    """Something to be done, unless it is cancelled before."""

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        self._callback, self._args, self._context = callback, args, context
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def run(self) -> None:
        if not self._is_cancelled:
            (self._context or _NO_CONTEXT.copy()).run(self._callback, *self._args)


def _settle(future: "asyncio.Future[Any]", value: object) -> None:
    if future.done():
        return  # the caller has given the call up
    if isinstance(value, PsError):
        future.set_exception(value)
    else:
        future.set_result(value)
