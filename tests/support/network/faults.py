"""Shards and chiefs whose answers get lost, for tests of what the SDK repeats. Knows the Protocols; decides nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from ps_protocol.errors import PsError, Unavailable


def _named(method: str, arguments: tuple[Any, ...]) -> str:
    """The name that a call goes by: its method's, or for `call` that of the request's class."""
    return type(arguments[0]).__name__ if method == "call" else method


class Flaky:
    """Passes every call on to `target`, but for the faults it is told of; counts the calls that came.

    A request goes by the name of its class, all else by that of the method.
    """

    # Of a shard.
    transport = "local"

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
