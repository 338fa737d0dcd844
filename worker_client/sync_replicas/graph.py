"""A program's declarations before its session exists, and the evaluation of one `run()`. Knows names, values and phases; no hook.

Programs of tf.compat.v1.train first build a graph and then run it. Here the graph holds declarations only: the model's variables, the
optimizer of each, and the policy; gradients come from the program's own functions.

Source: tf.compat.v1: variables, global step, Session.run.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.model.spec import AVERAGE_SLOT, AverageSpec
from ps_protocol.model.variables import Array
from worker_client.model.declarations import Buffer, EmbeddingTable, Variable
from worker_client.session.session import Session

__all__ = [
    "Graph",
    "LossResult",
    "ModelVariable",
    "create_global_step",
    "default_graph",
    "get_global_step",
    "get_or_create_global_step",
    "get_variable",
    "global_variables",
    "reset_default_graph",
    "trainable_variables",
]

GLOBAL_STEP = "global_step"


class ModelVariable:
    """A handle of a variable of the model. Made by `get_variable()`; `session.run(variable)` returns the variable's value.

    `initial` is its declaration: an array, or a `Variable`, `EmbeddingTable` or `Buffer`. Compared by identity.
    """

    phase = 1

    def __init__(self, name: str, initial: Any, *, is_trainable: bool, graph: "Graph") -> None:
        self.name = name
        self.initial = initial
        self.is_trainable = is_trainable
        self._graph = graph

    def __repr__(self) -> str:
        return f"<variable {self.name!r}>"

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients may be pushed for it; a `Buffer` takes plain updates instead."""
        return not isinstance(self.initial, Buffer)

    @property
    def is_table(self) -> bool:
        """Whether the variable is a table: its gradients come as rows, and it is read by rows."""
        return isinstance(self.initial, EmbeddingTable)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of its first value."""
        initial = self.initial
        if isinstance(initial, EmbeddingTable):
            value = initial.value_or_shape
            return value.dtype if isinstance(value, np.ndarray) else np.dtype(initial.dtype)
        return np.asarray(initial.value if isinstance(initial, (Variable, Buffer)) else initial).dtype

    def value(self) -> Any:
        """Returns the value that the present loss is computed from, read-only; of a table, all rows. For loss functions without arguments.

        Raises RuntimeError outside a loss function.
        """
        current = self._graph.current
        if current is None:
            raise RuntimeError(f"{self!r} has a value only while a loss is computed; elsewhere use session.run(variable)")
        return current.read_rows(self.name) if self.is_table else current[self.name]

    def evaluate(self, run: "Run") -> Any:
        """Returns a copy of the value that this run's gradients are computed from; of a table, all rows."""
        return run.session.read_rows(self.name) if self.is_table else np.array(run.variables[self.name])


class GlobalStep:
    """The number of steps that the cluster has applied; `session.run(step)` returns it as an int, after the run's training ops.

    The chief process counts it; no worker changes it.
    """

    phase = 3
    name = GLOBAL_STEP
    dtype = np.dtype(np.int64)

    def __repr__(self) -> str:
        return f"<{GLOBAL_STEP}>"

    def evaluate(self, run: "Run") -> int:
        """Returns the newest step that this worker has heard of."""
        return run.session.global_step


class Graph:
    """One training program's declarations. `with graph.as_default():` makes it the one that `get_variable()` and optimizers add to.

    For one thread. A session finalizes it: the model of a running cluster cannot grow.
    """

    def __init__(self) -> None:
        self.variables: dict[str, ModelVariable] = {}
        self.global_step: GlobalStep | None = None
        self.losses: list[Any] = []
        self.current: CurrentVariables | None = None
        self.policy: PolicySpec | None = None
        self.averages: AverageSpec | None = None
        self.average_name = AVERAGE_SLOT
        self._optimizers: dict[str, OptimizerSpec] = {}
        self._is_finalized = False

    @contextmanager
    def as_default(self) -> Iterator["Graph"]:
        """Makes this the thread's default graph within the `with` block."""
        stack = _graphs.stack
        stack.append(self)
        try:
            yield self
        finally:
            stack.remove(self)

    def add_variable(self, variable: ModelVariable) -> None:
        """Declares a variable. Raises ValueError if its name is taken, RuntimeError once a session runs."""
        if self._is_finalized:
            raise RuntimeError(f"Graph is finalized and cannot be modified: declare {variable.name!r} before the session is made")
        if variable.name in self.variables or variable.name == GLOBAL_STEP:
            raise ValueError(f"Variable {variable.name} already exists, disallowed; give each variable a name of its own")
        self.variables[variable.name] = variable

    def add_training(self, variables: Iterable[ModelVariable], *, optimizer: OptimizerSpec, policy: PolicySpec | None) -> None:
        """Records the optimizer of these variables, and the policy (None: keep the cluster's).

        Raises ValueError for a combination that one cluster cannot have.
        """
        merged = _merged(self.policy, policy)
        for variable in variables:
            self._check_own(variable)
            known = self._optimizers.get(variable.name)
            if known is not None and known.key != optimizer.key:
                raise ValueError(f"variable {variable.name!r} is trained by {known.name!r} already; a variable has one optimizer")
            if known is None and self._is_finalized:
                raise RuntimeError(f"Graph is finalized and cannot be modified: train {variable.name!r} before the session is made")
        self._optimizers.update({variable.name: optimizer for variable in variables})
        self.policy = merged

    def add_averages(self, averages: AverageSpec, *, name: str) -> None:
        """Records which averages servers keep, under "<variable>/<name>"; a second call adds averages.

        Raises ValueError if decays differ.
        """
        self.average_name = name
        if self.averages is None:
            self.averages = averages
            return
        if replace(self.averages, variables=()) != replace(averages, variables=()):
            raise ValueError("Moving average already computed with another decay, num_updates or zero_debias; a model has one kind")
        self.averages = replace(averages, variables=tuple(dict.fromkeys((*self.averages.variables, *averages.variables))))

    def finalize(self) -> None:
        """Forbids further variables."""
        self._is_finalized = True

    def declared(self) -> tuple[dict[str, Any], OptimizerSpec]:
        """Returns the variables' declarations by name, and the model's optimizer. Raises RuntimeError if nothing trains the model."""
        if not self._optimizers:
            raise RuntimeError("nothing trains this model: call minimize() or apply_gradients() of an optimizer before the session is made")
        first = next(iter(self._optimizers.values()))
        return {name: self._declared(variable, first) for name, variable in self.variables.items()}, first

    def _declared(self, variable: ModelVariable, of_model: OptimizerSpec) -> Any:
        """Returns the variable's declaration for a session, with its optimizer if that is not the model's."""
        optimizer, initial = self._optimizers.get(variable.name), variable.initial
        if optimizer is None or optimizer.key == of_model.key:
            return initial
        return (
            replace(initial, optimizer=optimizer)
            if isinstance(initial, (Variable, EmbeddingTable))
            else Variable(initial, optimizer=optimizer)
        )

    def _check_own(self, variable: ModelVariable) -> None:
        if self.variables.get(variable.name) is not variable:
            raise ValueError(f"variable {variable.name!r} belongs to another graph; use the variables of this one")


def _merged(known: PolicySpec | None, new: PolicySpec | None) -> PolicySpec | None:
    if known is None or new is None or known == new:
        return new or known
    if known.name is PolicyName.ASYNC and new.name is PolicyName.ASYNC:
        return new if new.use_locking else known
    raise ValueError(
        f"one cluster has one policy: training is {known.text} already, and this optimizer wants {new.text} or other numbers of replicas;"
        " use one SyncReplicasOptimizer for all variables, or none"
    )


class _DefaultGraphs(threading.local):
    """The stack of default graphs, one a thread, as in the original: workers that share a process must not share declarations."""

    def __init__(self) -> None:
        self.stack = [Graph()]


_graphs = _DefaultGraphs()


def default_graph() -> Graph:
    """Returns the thread's default graph: the one of the innermost `as_default()`, else the thread's initial graph."""
    return _graphs.stack[-1]


def reset_default_graph() -> None:
    """Gives the thread a new, empty default graph. Raises AssertionError within `as_default()`."""
    stack = _graphs.stack
    if len(stack) > 1:
        raise AssertionError("Do not use reset_default_graph() to clear nested graphs; leave the with block of as_default() first")
    stack[:] = [Graph()]


def get_variable(name: str, initial: Any, *, trainable: bool = True) -> ModelVariable:
    """Declares a variable in the default graph and returns its handle.

    `initial`: its first value, a float array (float16, bfloat16, float32, float64), or a `Variable`, `EmbeddingTable` or `Buffer`.
    Variables that are not `trainable` (and every `Buffer`) are left out where no `var_list` is given. Raises ValueError if the name is
    taken.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name: got {name!r}, want the variable's name, a str")
    graph = default_graph()
    variable = ModelVariable(name, initial, is_trainable=trainable and not isinstance(initial, Buffer), graph=graph)
    graph.add_variable(variable)
    return variable


def trainable_variables() -> list[ModelVariable]:
    """Returns the default graph's trainable variables, in order of declaration."""
    return [variable for variable in default_graph().variables.values() if variable.is_trainable]


def global_variables() -> list[ModelVariable]:
    """Returns all variables of the default graph, in order of declaration; the global step is not one of them."""
    return list(default_graph().variables.values())


def create_global_step() -> GlobalStep:
    """Returns the default graph's global step. Raises ValueError if there is one already."""
    graph = default_graph()
    if graph.global_step is not None:
        raise ValueError('"global_step" already exists.')
    graph.global_step = GlobalStep()
    return graph.global_step


def get_global_step() -> GlobalStep | None:
    """Returns the default graph's global step, None if it was not created."""
    return default_graph().global_step


def get_or_create_global_step() -> GlobalStep:
    """Returns the default graph's global step, and creates it if it does not exist."""
    return get_global_step() or create_global_step()


# -- one run: what is evaluated, in which order

# The phase of training ops.
TRAINS = 2


class Fetch(Protocol):
    """Something that `run()` can evaluate.

    `phase`: 0 comes before all others, 1 reads the values that gradients are computed from, 2 trains, 3 reads the values after training.
    """

    @property
    def phase(self) -> int:
        """The phase of the run in which it is evaluated."""

    def evaluate(self, run: "Run") -> Any:
        """Returns its value in this run."""


class CurrentVariables(Mapping[str, Array]):
    """The variables that a loss is computed from: read-only arrays by name, all of one step; tables by rows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrays = session.read()

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def read_rows(self, name: str, indices: Any = None) -> Array:
        """Returns rows of a table (None: all), in the order of `indices`. Transfers only those rows."""
        return self._session.read_rows(name, indices)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """A loss function's result with more than the pair (value, gradients by name).

    `updates`: updates of `Buffer` variables by name; `metrics`: name to a number, or to (value, weight). Both travel with the contribution
    and count only if it does.
    """

    value: Any
    gradients: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Run:
    """One run: reads the variables once, calls each loss once, and runs each training op once."""

    def __init__(self, session: Session, graph: Graph, *, feed: Any) -> None:
        self.session = session
        self.graph = graph
        self._feed = feed
        self._variables: CurrentVariables | None = None
        self._losses: dict[Any, LossResult] = {}

    @property
    def variables(self) -> CurrentVariables:
        """The variables of the worker's step; read on first use."""
        if self._variables is None:
            self._variables = CurrentVariables(self.session)
        return self._variables

    def loss(self, function: Callable[..., Any]) -> LossResult:
        """Returns the loss at these variables; calls the function once. Raises TypeError for an invalid result."""
        if function not in self._losses:  # compared by equality: each access to a method makes a new, equal object
            arguments = self._arguments(function)
            self.graph.current = self.variables
            try:
                self._losses[function] = loss_result(function(*arguments), of=function)
            finally:
                self.graph.current = None
        return self._losses[function]

    def _arguments(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns the arguments for a loss: the variables, and the feed if there is one; none for a function without parameters."""
        if _takes_nothing(function):
            if self._feed is not None:
                raise TypeError(f"loss {function!r} takes no arguments, so it cannot be fed; write loss(variables, feed)")
            return ()
        return (self.variables,) if self._feed is None else (self.variables, self._feed)

    def renew(self) -> None:
        """Drops the variables and losses after a training op: a second op of the same run computes from newer variables."""
        self._variables = None
        self._losses.clear()


def loss_result(result: Any, *, of: Any) -> LossResult:
    """Returns a loss function's result as a LossResult. Raises TypeError."""
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
    except (TypeError, ValueError):  # some builtin functions have no signature
        return False
    return not any(parameter.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) for parameter in parameters)


@light_dataclass(frozen=True, slots=True, eq=False)
class LossFetch:
    """The value of a loss function."""

    function: Callable[..., Any]
    phase: int = 1

    def evaluate(self, run: Run) -> Any:
        """Returns the loss at the run's variables."""
        return run.loss(self.function).value


def evaluate(fetches: Any, run: Run) -> Any:
    """Returns the values of a nested structure (lists, tuples, dicts) of fetches, in the same structure.

    A leaf is a fetch, a loss function, None (returned as None), or a name: of a variable, "global_step", or "loss". Raises TypeError,
    ValueError.
    """
    leaves: dict[int, tuple[Any, Fetch | None]] = {}
    for leaf in _leaves(fetches):
        leaves.setdefault(id(leaf), (leaf, _fetch_of(leaf, run.graph)))
    values: dict[int, Any] = {}
    for key, (_, fetch) in sorted(leaves.items(), key=lambda item: item[1][1].phase if item[1][1] is not None else 0):
        values[key] = None if fetch is None else fetch.evaluate(run)
    return _rebuilt(fetches, values)


def check(fetches: Any, graph: Graph) -> bool:
    """Returns whether the structure has a training op. Raises TypeError or ValueError unless all its leaves can be evaluated."""
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
