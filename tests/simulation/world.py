"""Time, network and processes of a simulated cluster: one queue of events, one number for the time, one seed. Knows no role.

A process is a name, whatever answers its calls, and its tasks: generators that yield `Sleep`, `Call` or `All` and get back what came of it.
A call that is lost, or whose answer is lost, ends as Unavailable, as a broken connection does; its request may still arrive later, or
twice.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ps_protocol.errors import PsError, Unavailable

Task = Generator["Sleep | Call | All", Any, Any]
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
    """Several tasks at once; yields their results in order, each a value or a PsError."""

    tasks: Sequence[Task]


class Process(Protocol):
    """What a process does about a call: it answers with a value or a PsError, now or later."""

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Takes up a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """What the network does until it is healed: seconds of delay, and how often (0 to 1) something befalls a message."""

    delay_s: float = 0.002
    jitter_s: float = 0.004
    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_s: float = 3.0


@dataclass(slots=True, eq=False)
class Life:
    """One run of a process, from its start to its end. What belongs to a life that is over does not go on."""

    name: str
    process: Process | None = None
    is_alive: bool = True
    is_stopped: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)
    pending: set["_Attempt"] = field(default_factory=set)
    served: set["_Attempt"] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Attempt:
    caller: Life
    target: str
    done: Callable[[object], None]
    is_over: bool = False


class World:
    """The only clock, queue and source of chance. `seen` counts what has happened, by words: that a run has reached its branches."""

    def __init__(self, seed: str, network: NetworkSpec) -> None:
        self.now = 0.0
        self.network = network
        self.seen: Counter[str] = Counter()
        self.log: list[str] = []
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._lives: dict[str, Life] = {}
        self._cut: set[tuple[str, str]] = set()
        self.after_event: Callable[[], None] = lambda: None

    # -- time

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        """Has something happen."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, what))

    def run(self, until: float, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until then, or until it is over."""
        queue = self._queue
        while queue and queue[0][0] <= until and not is_over():
            self.now, _, what = heapq.heappop(queue)
            what()
            self.after_event()
        if not is_over():
            self.now = max(self.now, until)

    def note(self, text: str) -> None:
        """Keeps a line for whoever reads a failure."""
        self.log.append(f"{self.now:9.4f} {text}")

    def chance(self, probability: float) -> bool:
        """Whether something befalls, by chance."""
        return probability > 0 and self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        """Returns a number by chance."""
        return low + (high - low) * self._random.random()

    # -- processes

    def start(self, name: str, make: Callable[[Life], Process]) -> Life:
        """Starts a process of this name, which must not run."""
        assert name not in self._lives or not self._lives[name].is_alive, f"{name} runs already"
        life = self._lives[name] = Life(name)
        life.process = make(life)
        return life

    def life(self, name: str) -> Life | None:
        """Returns the process that runs under this name now."""
        life = self._lives.get(name)
        return life if life is not None and life.is_alive else None

    def kill(self, name: str) -> None:
        """Ends a process at once; who waits for its answers learns that the connection is gone."""
        life = self.life(name)
        if life is None:
            return
        life.is_alive = False
        life.held.clear()
        for attempt in tuple(life.served):
            if not self._is_cut(name, attempt.caller.name):
                self._end(attempt, Unavailable(f"{name}: connection reset"), delay_s=self._delay())
        life.pending.clear()

    def stop(self, name: str) -> None:
        """Makes a process stand still, as SIGSTOP does."""
        if (life := self.life(name)) is not None:
            life.is_stopped = True

    def resume(self, name: str) -> None:
        """Lets it go on: all that it has missed happens now."""
        life = self.life(name)
        if life is None or not life.is_stopped:
            return
        life.is_stopped = False
        held, life.held = life.held, []
        for what in held:
            self.at(0.0, lambda what=what: self._as_life(life, what))  # type: ignore[misc]

    def cut(self, source: str, target: str) -> None:
        """Lets nothing through in this direction any more."""
        self._cut.add((source, target))

    def mend(self) -> None:
        """Lets everything through again."""
        self._cut.clear()

    def heal(self) -> None:
        """From now on the network is a good one, and every process runs."""
        self._cut.clear()
        self.network = NetworkSpec()
        for name in tuple(self._lives):
            self.resume(name)

    def later(self, life: Life, delay_s: float, what: Callable[[], None]) -> None:
        """Has a process do something; it does not if it is over, and not yet if it stands still."""
        self.at(delay_s, lambda: self._as_life(life, what))

    def _as_life(self, life: Life, what: Callable[[], None]) -> None:
        if not life.is_alive:
            return
        if life.is_stopped:
            life.held.append(what)
        else:
            what()

    # -- tasks

    def spawn(self, life: Life, task: Task, then: Callable[[object], None] = lambda _: None) -> "Running":
        """Runs a task of a process; `then` is given what it returns, or the PsError that ends it."""
        running = Running(self, life, task, then)
        self.later(life, 0.0, lambda: running.go_on(None))
        return running

    # -- network

    def call(self, caller: Life, call: Call, done: Callable[[object], None]) -> None:
        """Makes one attempt; `done` is given a value or a PsError, once."""
        attempt = _Attempt(caller, call.target, done)
        caller.pending.add(attempt)
        self.later(caller, call.timeout_s, lambda: self._finish(attempt, Unavailable(f"{call.target}: no answer to {call.method}")))
        if self.chance(self.network.drop):
            self.seen["request lost"] += 1
            self._end(attempt, Unavailable(f"{call.target}: connection lost"), delay_s=self.between(0.01, 1.0))
            if not self.chance(0.5):
                return
            # The caller has given it up, and it arrives all the same.
        self.at(self._delay(), lambda: self._arrive(attempt, call))
        if self.chance(self.network.duplicate):
            self.seen["request sent twice"] += 1
            self.at(self._delay() + self.between(0.0, 0.5), lambda: self._arrive(attempt, call))

    def _arrive(self, attempt: _Attempt, call: Call) -> None:
        if self._is_cut(attempt.caller.name, call.target):
            return
        life = self.life(call.target)
        if life is None or life.process is None:
            self._end(attempt, Unavailable(f"{call.target}: connection refused"), delay_s=self._delay())
            return
        process = life.process
        life.served.add(attempt)

        def answer(value: object) -> None:
            if life.is_alive:
                self._respond(life, attempt, value)

        self._as_life(life, lambda: process.serve(call.method, call.arguments, answer))

    def _respond(self, life: Life, attempt: _Attempt, value: object) -> None:
        life.served.discard(attempt)
        if self._is_cut(life.name, attempt.caller.name):
            return
        if self.chance(self.network.drop):
            self.seen["answer lost after the work was done"] += 1
            value = Unavailable(f"{life.name}: connection lost before the answer")
        self._end(attempt, value, delay_s=self._delay())

    def _end(self, attempt: _Attempt, value: object, *, delay_s: float) -> None:
        self.later(attempt.caller, delay_s, lambda: self._finish(attempt, value))

    def _finish(self, attempt: _Attempt, value: object) -> None:
        if attempt.is_over:
            return
        attempt.is_over = True
        attempt.caller.pending.discard(attempt)
        attempt.done(value)

    def _is_cut(self, source: str, target: str) -> bool:
        return bool(self._cut) and ((source, target) in self._cut or (source, "*") in self._cut or ("*", target) in self._cut)

    def _delay(self) -> float:
        spec = self.network
        if self.chance(spec.late):
            self.seen["message late"] += 1
            return spec.late_s * self._random.random()
        return spec.delay_s + spec.jitter_s * self._random.random()


class Running:
    """A task under way. `cancel` ends it without a word."""

    def __init__(self, world: World, life: Life, task: Task, then: Callable[[object], None]) -> None:
        self._world = world
        self._life = life
        self._task = task
        self._then = then
        self._parts: list[Running] = []
        self.is_over = False

    def cancel(self) -> None:
        """Ends the task; what it has asked of others goes on there."""
        self.is_over = True
        for part in self._parts:
            part.cancel()

    def go_on(self, value: object) -> None:
        """Gives the task what it waits for."""
        if self.is_over or not self._life.is_alive:
            return
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
            self._world.later(self._life, wish.seconds, lambda: self.go_on(None))
        elif isinstance(wish, Call):
            self._world.call(self._life, wish, self.go_on)
        else:
            self._begin_all(wish.tasks)

    def _begin_all(self, tasks: Sequence[Task]) -> None:
        results: list[object] = [None] * len(tasks)
        left = len(tasks)

        def done(index: int, value: object) -> None:
            nonlocal left
            results[index] = value
            left -= 1
            if not left:
                self.go_on(results)

        self._parts = [Running(self._world, self._life, task, partial(done, index)) for index, task in enumerate(tasks)]
        for part in tuple(self._parts):
            part.go_on(None)
