"""What one `session.run()` evaluates, and in which order. Knows phases and nested structures; nothing of hooks and recovery."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ps_protocol.tensors import Array
from worker_client.graph import GLOBAL_STEP, GlobalStep, Graph, ModelVariable
from worker_client.training_session import TrainingSession

# The phase of training ops.
TRAINS = 2


class Fetch(Protocol):
    """Something that `run()` can evaluate.

    `phase`: 0 before everything, 1 reads what the gradients are computed from, 2 trains, 3 reads what there is after that.
    """

    @property
    def phase(self) -> int:
        """When in the run it is evaluated."""

    def evaluate(self, run: "Run") -> Any:
        """Returns its value in this run."""


class CurrentVariables(Mapping[str, Array]):
    """The variables that a loss is computed from: read-only arrays by name, all of one step; tables by rows."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._arrays = session.read()

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def read_rows(self, name: str, indices: Any = None) -> Array:
        """Returns rows of a table (None: all), in the order of `indices`. Moves only those rows."""
        return self._session.read_rows(name, indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """What a loss function may return instead of the pair (value, gradients by name).

    `updates`: those of `State` variables by name; `metrics`: name to a number, or to (value, weight). Both ride in the contribution and
    count only if it does.
    """

    value: Any
    gradients: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Run:
    """One run: reads variables once, calls each loss once, carries out each training op once.

    `settled`: results of training ops that an earlier attempt of the same run has begun to push, by op; they are not pushed again.
    """

    def __init__(self, session: TrainingSession, graph: Graph, *, feed: Any, settled: dict[int, Any]) -> None:
        self.session = session
        self.graph = graph
        self.settled = settled
        self._feed = feed
        self._variables: CurrentVariables | None = None
        self._losses: dict[Any, LossResult] = {}

    @property
    def variables(self) -> CurrentVariables:
        """The variables of the worker's step; read at the first use."""
        if self._variables is None:
            self._variables = CurrentVariables(self.session)
        return self._variables

    def loss(self, function: Callable[..., Any]) -> LossResult:
        """Returns the loss at these variables; calls the function once. Raises TypeError for a result that is none."""
        if function not in self._losses:  # by equality: each access of a method makes a new, equal object
            arguments = self._arguments(function)
            self.graph.current = self.variables
            try:
                self._losses[function] = loss_result(function(*arguments), of=function)
            finally:
                self.graph.current = None
        return self._losses[function]

    def _arguments(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        """The variables, and what is fed; nothing for a function that takes nothing, which asks `variable.value()`."""
        if _takes_nothing(function):
            if self._feed is not None:
                raise TypeError(f"loss {function!r} takes no arguments, so it cannot be fed; write loss(variables, feed)")
            return ()
        return (self.variables,) if self._feed is None else (self.variables, self._feed)

    def renew(self) -> None:
        """Forgets what was read: a training op has moved on. A second op of the same run computes from newer variables."""
        self._variables = None
        self._losses.clear()


def loss_result(result: Any, *, of: Any) -> LossResult:
    """Returns what a loss function has returned, in one form. Raises TypeError."""
    if isinstance(result, LossResult):
        return result
    if not isinstance(result, tuple):
        return LossResult(value=result)
    if len(result) == 2 and isinstance(result[1], Mapping):
        named = {key.name if isinstance(key, ModelVariable) else key: gradient for key, gradient in result[1].items()}
        return LossResult(value=result[0], gradients=named)
    raise TypeError(f"loss {of!r} returned {len(result)} values; want (value, gradients by variable or name), or a LossResult")


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtin functions do not say
        return False
    return not any(parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) for parameter in parameters)


@dataclass(frozen=True, slots=True, eq=False)
class LossFetch:
    """The value of a loss function."""

    function: Callable[..., Any]
    phase: int = 1

    def evaluate(self, run: Run) -> Any:
        """Returns the loss at the run's variables."""
        return run.loss(self.function).value


def evaluate(fetches: Any, run: Run) -> Any:
    """Returns the values of a nested structure (lists, tuples, dicts) of fetches, in the same structure.

    A leaf is a fetch, a loss function, None (gives None), or a name: of a variable, "global_step", or "loss". Raises TypeError, ValueError.
    """
    leaves: dict[int, tuple[Any, Fetch | None]] = {}
    for leaf in _leaves(fetches):
        leaves.setdefault(id(leaf), (leaf, _fetch_of(leaf, run.graph)))
    values: dict[int, Any] = {}
    for key, (_, fetch) in sorted(leaves.items(), key=lambda item: item[1][1].phase if item[1][1] is not None else 0):
        values[key] = None if fetch is None else fetch.evaluate(run)
    return _rebuilt(fetches, values)


def check(fetches: Any, graph: Graph) -> bool:
    """Returns whether something in the structure trains. Raises TypeError or ValueError unless everything in it can be evaluated."""
    found = [_fetch_of(leaf, graph) for leaf in _leaves(fetches)]
    return any(fetch is not None and fetch.phase == TRAINS for fetch in found)


def _fetch_of(leaf: Any, graph: Graph) -> Fetch | None:
    if leaf is None:
        return None
    if isinstance(leaf, str):
        return _named(leaf, graph)
    if hasattr(leaf, "evaluate") and hasattr(leaf, "phase"):
        return leaf  # type: ignore[no-any-return]  # the two attributes are the Protocol
    if callable(leaf):
        return LossFetch(leaf)
    raise TypeError(f"Fetch argument {leaf!r} has invalid type {type(leaf).__name__}; want a training op, variable, loss function or name")


def _named(name: str, graph: Graph) -> Fetch:
    plain = name.removesuffix(":0")
    variable: ModelVariable | None = graph.variables.get(plain)
    if variable is not None:
        return variable
    if plain == GLOBAL_STEP:
        return GlobalStep()
    if plain == "loss" and graph.losses:
        return LossFetch(graph.losses[0])
    raise ValueError(f"Fetch argument {name!r} is no variable of the graph, nor 'global_step', nor 'loss'")


def _leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, Mapping):
        for value in structure.values():
            yield from _leaves(value)
    elif isinstance(structure, (list, tuple)):
        for value in structure:
            yield from _leaves(value)
    else:
        yield structure


def _rebuilt(structure: Any, values: Mapping[int, Any]) -> Any:
    if isinstance(structure, Mapping):
        return {key: _rebuilt(value, values) for key, value in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_rebuilt(value, values) for value in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(_rebuilt(value, values) for value in structure)
    return values[id(structure)]


def number_of(value: Any) -> float:
    """Returns a scalar result as a float. Raises TypeError or ValueError for anything else."""
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"got an array of shape {array.shape}, want one number; a loss is the mean or the sum over its examples")
    return float(array.reshape(()))
