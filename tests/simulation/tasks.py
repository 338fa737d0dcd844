"""Tasks of a simulated process: coroutines that await `Sleep`, `Call` or `All` and get back the result.

Knows no clock and no network.

A PsError that ends an awaited wish is raised in the coroutine; an error that leaves the coroutine ends the task.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ps_protocol.errors import PsError

Task = Coroutine["Sleep | Call | All", Any, Any]
Answer = Callable[[object], None]


class Wish:
    """What a task waits for."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


@dataclass(frozen=True, slots=True)
class Sleep(Wish):
    """So many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call(Wish):
    """One attempt to have another process do something; gives its answer, or raises its PsError, or Unavailable."""

    target: str
    method: str
    arguments: tuple[Any, ...] = ()
    timeout_s: float = 4.0


@dataclass(frozen=True, slots=True)
class All(Wish):
    """Several tasks at once; gives their results in order, each a value or a PsError."""

    tasks: Sequence[Task]


class Process(Protocol):
    """What a process does about a call: it answers with a value or a PsError, now or later."""

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Takes up a call."""


@dataclass(slots=True, eq=False)
class Life:
    """One run of a process, from its start to its end. What belongs to a life that is over does not go on."""

    name: str
    process: Process | None = None
    is_alive: bool = True
    is_stopped: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)
    served: dict["Attempt", None] = field(default_factory=dict)
    # What is to be done when it is over.
    endings: list[Callable[[], None]] = field(default_factory=list)

    def end(self) -> None:
        """Nothing of it goes on."""
        self.is_alive = False
        self.held.clear()
        for ending in self.endings:
            ending()


@dataclass(slots=True, eq=False)
class Attempt:
    """A call on its way, or being answered."""

    caller: Life
    call: Call
    done: Callable[[object], None]
    is_over: bool = False

    def finish(self, value: object) -> None:
        """Gives the caller what came of it, once."""
        if not self.is_over:
            self.is_over = True
            self.done(value)


class Surroundings(Protocol):
    """What carries out a task's wishes."""

    def later(self, life: Life, delay_s: float, what: Callable[[], None]) -> None:
        """Has a process do something after so many seconds."""

    def call(self, caller: Life, call: Call, done: Callable[[object], None]) -> None:
        """Makes one attempt; `done` is given a value or a PsError, once."""


class Running:
    """A task under way."""

    def __init__(self, world: Surroundings, life: Life, task: Task, then: Callable[[object], None]) -> None:
        self._world = world
        self._life = life
        self._task = task
        self._then = then
        self._is_begun = False

    def go_on(self, value: object = None) -> None:
        """Gives the task what it waits for."""
        if not self._life.is_alive:
            self.end()
            return
        self._is_begun = True
        try:
            wish = self._task.throw(value) if isinstance(value, PsError) else self._task.send(value)
        except StopIteration as end:
            self._then(end.value)
        except PsError as error:
            self._then(error)
        else:
            self._begin(wish)

    def end(self) -> None:
        """Its process is over: if it has not begun, it never will, and that is no defect."""
        if not self._is_begun:
            self._task.close()

    def _begin(self, wish: Sleep | Call | All) -> None:
        if isinstance(wish, Sleep):
            self._world.later(self._life, wish.seconds, self.go_on)
        elif isinstance(wish, Call):
            self._world.call(self._life, wish, self.go_on)
        else:
            self._begin_all(wish)

    def _begin_all(self, wish: All) -> None:
        results: list[object] = [None] * len(wish.tasks)
        left = len(wish.tasks)

        def done(index: int, value: object) -> None:
            nonlocal left
            results[index] = value
            left -= 1
            if not left:
                self.go_on(results)

        for index, task in enumerate(wish.tasks):
            Running(self._world, self._life, task, partial(done, index)).go_on()
