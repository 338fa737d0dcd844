"""Time, network and processes of a simulated cluster: one queue of events, one number for the time, one seed. Knows no role.

A call that is lost, or whose answer is lost, ends as Unavailable, as a broken connection does; its request may still arrive later, or
twice.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ps_protocol.errors import Unavailable
from ps_protocol.roles.fence import KEY_BYTES
from tests.simulation.tasks import Attempt, Call, Life, Process, Running, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """What the network does until it is healed: seconds of delay, and how often (0 to 1) something befalls a message."""

    delay_s: float = 0.002
    jitter_s: float = 0.004
    drop: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0
    late_s: float = 3.0


class World:
    """The only clock, queue and source of chance. `seen` counts what has happened, by words: that a run has reached its branches."""

    def __init__(self, seed: str, network: NetworkSpec) -> None:
        self.now = 0.0
        self.network = network
        self.seen: Counter[str] = Counter()
        self.log: list[str] = []
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Life | None, Callable[[], None]]] = []
        self._number = self._num_lives = self._num_keys = 0
        self._lives: dict[str, Life] = {}
        self._cut: set[tuple[str, str]] = set()

    # -- time

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        """Has something happen."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, None, what))

    def later(self, life: Life, delay_s: float, what: Callable[[], None]) -> None:
        """Has a process do something; it does not if it is over, and not yet if it stands still."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, life, what))

    def run(self, until: float, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until then, or until it is over."""
        queue, take = self._queue, heapq.heappop
        while queue and queue[0][0] <= until and not is_over():
            self.now, _, life, what = take(queue)
            if life is None:
                what()
            else:
                self._as_life(life, what)
        if not is_over():
            self.now = max(self.now, until)

    def note(self, text: str) -> None:
        """Keeps a line that is printed with a failure."""
        self.log.append(f"{self.now:9.4f} {text}")

    def chance(self, probability: float) -> bool:
        """Whether something befalls, by chance."""
        return probability > 0 and self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        """Returns a number by chance."""
        return low + (high - low) * self._random.random()

    def new_life(self) -> int:
        """Returns a name that no life of the cluster has had."""
        self._num_lives += 1
        return self._num_lives

    def new_session_key(self) -> bytes:
        """Returns a key that no other chief has."""
        self._num_keys += 1
        return self._num_keys.to_bytes(KEY_BYTES, "little")

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
        life.end()
        for attempt in tuple(life.served):
            if not self._is_cut(name, attempt.caller.name):
                self._end(attempt, Unavailable(f"{name}: connection reset"), delay_s=self._delay())

    def end(self) -> None:
        """All is over."""
        for life in self._lives.values():
            life.end()

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
            self.later(life, 0.0, what)

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

    def spawn(self, life: Life, task: Task, then: Callable[[object], None] = lambda _: None) -> None:
        """Runs a task of a process; `then` is given what it returns, or the PsError that ends it."""
        running = Running(self, life, task, then)
        life.endings.append(running.end)
        self.later(life, 0.0, running.go_on)

    def _as_life(self, life: Life, what: Callable[[], None]) -> None:
        if not life.is_alive:
            return
        if life.is_stopped:
            life.held.append(what)
        else:
            what()

    # -- network

    def call(self, caller: Life, call: Call, done: Callable[[object], None]) -> None:
        """Makes one attempt; `done` is given a value or a PsError, once."""
        attempt, addressee = Attempt(caller, call, done), self.life(call.target)
        self.later(caller, call.timeout_s, partial(self._give_up, attempt))
        if self.chance(self.network.drop):
            self.seen["request lost"] += 1
            self._end(attempt, Unavailable(f"{call.target}: connection lost"), delay_s=self.between(0.01, 1.0))
            if not self.chance(0.5):
                return
            # The caller has given it up, and it arrives all the same.
        self.at(self._delay(), partial(self._arrive, attempt, addressee))
        if self.chance(self.network.duplicate):
            self.seen["request sent twice"] += 1
            self.at(self._delay() + self.between(0.0, 0.5), partial(self._arrive, attempt, addressee))

    def _give_up(self, attempt: Attempt) -> None:
        if not attempt.is_over:
            attempt.finish(Unavailable(f"{attempt.call.target}: no answer to {attempt.call.method}"))

    def _arrive(self, attempt: Attempt, addressee: Life | None) -> None:
        target = attempt.call.target
        if self._is_cut(attempt.caller.name, target):
            return
        life = self.life(target)
        if not attempt.caller.is_alive and addressee is not None and life is not addressee:
            return  # the connection has ended at both ends, and nobody is there to make another
        if life is None or life.process is None:
            self._end(attempt, Unavailable(f"{target}: connection refused"), delay_s=self._delay())
            return
        life.served[attempt] = None
        self._as_life(life, partial(life.process.serve, attempt.call.method, attempt.call.arguments, partial(self._respond, life, attempt)))

    def _respond(self, life: Life, attempt: Attempt, value: object) -> None:
        if not life.is_alive:
            return
        life.served.pop(attempt, None)
        if self._is_cut(life.name, attempt.caller.name):
            return
        if self.chance(self.network.drop):
            self.seen["answer lost after the work was done"] += 1
            value = Unavailable(f"{life.name}: connection lost before the answer")
        self._end(attempt, value, delay_s=self._delay())

    def _end(self, attempt: Attempt, value: object, *, delay_s: float) -> None:
        self.later(attempt.caller, delay_s, partial(attempt.finish, value))

    def _is_cut(self, source: str, target: str) -> bool:
        return bool(self._cut) and ((source, target) in self._cut or (source, "*") in self._cut or ("*", target) in self._cut)

    def _delay(self) -> float:
        spec = self.network
        if self.chance(spec.late):
            self.seen["message late"] += 1
            return spec.late_s * self._random.random()
        return spec.delay_s + spec.jitter_s * self._random.random()
