"""Tasks of a simulated process: generators, or coroutines, that yield `Sleep`, `Call` or `All` and get back the result.

Knows no clock and no network.

A PsError that ends a yielded wish is raised in the generator; an error that leaves the generator ends the task.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ps_protocol.errors import PsError

Task = Generator["Sleep | Call | All", Any, Any]
# The same made of coroutines, whose awaits come down to the same three.
Part = Task | Coroutine[Any, Any, Any]
Answer = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Sleep:
    """So many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt to have another process do something; yields its answer, or raises its PsError, or Unavailable."""

    target: str
    method: str
    arguments: tuple[Any, ...] = ()
    timeout_s: float = 4.0


@dataclass(frozen=True, slots=True)
class All:
    """Several tasks at once; yields their results in order, each a value or a PsError. `ends_with_error`: the first PsError ends all."""

    tasks: Sequence[Part]
    ends_with_error: bool = False


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
    """A task under way. `cancel` ends it without a word."""

    def __init__(self, world: Surroundings, life: Life, task: Part, then: Callable[[object], None]) -> None:
        self._world = world
        self._life = life
        self._task = task
        self._then = then
        self._parts: list[Running] = []
        self._is_begun = self.is_over = False

    def cancel(self) -> None:
        """Ends the task; what it has asked of others goes on there."""
        self.is_over = True
        for part in self._parts:
            part.cancel()
        if not self._is_begun:
            self._task.close()

    def go_on(self, value: object = None) -> None:
        """Gives the task what it waits for."""
        if self.is_over or not self._life.is_alive:
            return
        self._is_begun = True
        try:
            wish = self._task.throw(value) if isinstance(value, PsError) else self._task.send(value)
        except StopIteration as end:
            self._end(end.value)
        except PsError as error:
            self._end(error)
        else:
            self._begin(wish)

    def _end(self, value: object) -> None:
        self.is_over = True
        self._then(value)

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
            if wish.ends_with_error and isinstance(value, PsError):
                for part in self._parts:
                    part.cancel()
                self.go_on(value)
            elif not left:
                self.go_on(results)

        self._parts = [Running(self._world, self._life, task, partial(done, index)) for index, task in enumerate(wish.tasks)]
        for part in tuple(self._parts):
            part.go_on()
