"""Shards and chiefs behind a bad network: calls that are lost, sent twice or late, and answers that get lost. Decides nothing."""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ps_protocol.errors import PsError, Unavailable
from ps_protocol.model.layout import Segments

# Shards and chiefs whose answers get lost, for tests of what the SDK repeats. Knows the Protocols; decides nothing.


def _named(method: str, arguments: tuple[Any, ...]) -> str:
    """The name that a call goes by: its method's, or for `call` that of the request's class."""
    return type(arguments[0]).__name__ if method == "call" else method


class Flaky:
    """Passes every call on to `target`, but for the faults it is told of; counts the calls that came.

    A request goes by the name of its class, all else by that of the method.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._lost: Counter[str] = Counter()
        self._refused: dict[str, list[PsError]] = {}
        self._answers: dict[str, list[Callable[[Any], Any]]] = {}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def lose_answers(self, method: str, *, count: int) -> None:
        """Has the work of the next calls done, and tells the caller that nobody was reached."""
        self._lost[method] += count

    def refuse(self, method: str, *errors: PsError) -> None:
        """Ends the next calls with these errors, without any work."""
        self._refused.setdefault(method, []).extend(errors)

    def answer(self, method: str, *changes: Callable[[Any], Any]) -> None:
        """Changes what the next calls answer."""
        self._answers.setdefault(method, []).extend(changes)

    def arguments_of(self, method: str) -> list[Any]:
        """Returns the first argument of each call of a method."""
        return [arguments[0] for name, arguments, _ in self.calls if name == method]

    def __getattr__(self, wanted: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            method = _named(wanted, arguments)
            self.calls.append((method, arguments, named))
            if refused := self._refused.get(method):
                raise refused.pop(0)
            result = getattr(self._target, wanted)(*arguments, **named)
            if self._lost[method]:
                self._lost[method] -= 1
                raise Unavailable(f"the answer of {method} was lost")
            changes = self._answers.get(method)
            return changes.pop(0)(result) if changes else result

        return call


# A network at its worst, in front of any shard or chief: calls that are lost, answered by nobody, sent twice, or held back and sent later.
#
# Knows the Protocols; decides by its seed alone. What it holds back has been given up by its caller, who is told that nobody was reached.


# What a call may meet, each as often as the others.
WORST = ("request lost", "answer lost", "sent twice", "held back")
# What callers that do not repeat can bear.
REPEATS = ("sent twice", "held back and sent twice")
_PASSED_ON = ("close", "know_layout", "gradient_memory", "variables_view", "expect", "handshake")
_MAX_HELD = 5


class Nemesis:
    """Passes every call on to `target`; with `probability` something befalls it. `seen` counts what. Thread-safe."""

    def __init__(self, target: Any, *, seed: int, probability: float = 0.4, evils: tuple[str, ...] = WORST) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._probability = probability
        self._evils = evils
        self._lock = threading.Lock()
        self._held: list[Callable[[], Any]] = []
        self.seen: Counter[str] = Counter()

    def __getattr__(self, method: str) -> Any:
        wanted = getattr(self._target, method)
        return wanted if method in _PASSED_ON or not callable(wanted) else lambda *given, **named: self._call(method, given, named)

    def release_all(self) -> None:
        """Sends what is still held back."""
        for held in self._take(len(self._held)):
            _without_effect_on_us(held)

    def _call(self, method: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        work = getattr(self._target, method)
        method = _named(method, given)
        with self._lock:
            evil = self._random.choice(self._evils) if self._random.random() < self._probability else ""
            num_released = self._random.choice((0, 0, 0, 1, 2))
            self.seen[f"{method} {evil}" if evil else "passed on"] += 1
        for held in self._take(num_released):
            _without_effect_on_us(held)
        if evil == "request lost":
            raise Unavailable(f"nemesis: the request {method} was lost")
        if evil.startswith("held back"):
            self._hold(work, given, named)
        if evil == "held back":
            raise Unavailable(f"nemesis: {method} is still on its way")
        if evil == "sent twice":
            _without_effect_on_us(lambda: work(*map(_own, given), **named))
        result = work(*given, **named)
        if evil == "answer lost":
            raise Unavailable(f"nemesis: the answer of {method} was lost, the work is done")
        return result

    def _hold(self, work: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> None:
        # The caller continues and writes there again.
        own = tuple(map(_own, given))
        with self._lock:
            self._held.append(lambda: work(*own, **named))
            if len(self._held) > _MAX_HELD:
                self._held.pop(self._random.randrange(_MAX_HELD))

    def _take(self, count: int) -> list[Callable[[], Any]]:
        with self._lock:
            # In any order: what was held back first need not arrive first.
            self._random.shuffle(self._held)
            taken, self._held = self._held[:count], self._held[count:]
        return taken


def _own(argument: Any) -> Any:
    if not isinstance(argument, Segments):
        return argument
    return Segments([np.array(piece) for piece in argument.pieces])


def _without_effect_on_us(work: Callable[[], Any]) -> None:
    with contextlib.suppress(PsError):
        work()
