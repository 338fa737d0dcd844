"""Moving averages with the API of tf.compat.v1.train. Knows names and graphs; servers keep the averages, within the step."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import AVERAGE_SLOT, AverageSpec
from ps_protocol.model.variables import Array
from worker_client.session.observer import Observer
from worker_client.session.session import Session
from worker_client.sync_replicas.graph import (
    GLOBAL_STEP,
    GlobalStep,
    ModelVariable,
    Run,
    default_graph,
    global_variables,
    trainable_variables,
)
from worker_client.sync_replicas.optimizers import checked

_AVERAGED_TYPES = ("float16", "bfloat16", "float32", "float64")


@light_dataclass(frozen=True, slots=True, eq=False)
class AverageVariable:
    """The moving average of one variable; `session.run(average)` gives its newest value."""

    variable: ModelVariable
    name: str
    phase: int = 3

    def evaluate(self, run: Run) -> Array:
        """Returns a copy of the average, in the variable's shape."""
        return np.array(run.session.read_averages([self.variable.name])[self.variable.name])


@light_dataclass(frozen=True, slots=True, eq=False)
class AveragesOp:
    """The op that `ExponentialMovingAverage.apply()` returns. Running it does nothing: servers update the averages with every step."""

    spec: AverageSpec
    phase: int = field(default=3)

    def evaluate(self, run: Run) -> None:
        """Does nothing."""


class ExponentialMovingAverage:
    """Moving averages of variables: `average -= (1 - decay) * (average - variable)` after each applied step, starting at the first value.

    `num_updates`: with a number n, the decay is min(decay, (1 + n) / (10 + n)); with the global step, n is the step after the update, so
    that averages move faster at the beginning. `zero_debias`: the averages start from 0 and are corrected for it; the original does this
    for tensors only, this class for variables. `name` names the averages. Raises ValueError for a decay outside 0 to 1.
    """

    def __init__(self, decay: float, num_updates: Any = None, zero_debias: bool = False, name: str = AVERAGE_SLOT) -> None:
        use_num_updates = isinstance(num_updates, GlobalStep)
        if num_updates is not None and not use_num_updates:
            if isinstance(num_updates, bool) or not isinstance(num_updates, (int, float, np.number)):
                raise ValueError(f"num_updates: got {num_updates!r}, want None, a number, or the global step")
            decay = min(decay, (1.0 + float(num_updates)) / (10.0 + float(num_updates)))
        self._spec: AverageSpec = checked(AverageSpec, decay=decay, use_num_updates=use_num_updates, zero_debias=bool(zero_debias))
        self._name = name
        self._averages: dict[str, AverageVariable] = {}

    @property
    def name(self) -> str:
        """The name given at construction."""
        return self._name

    def apply(self, var_list: Iterable[ModelVariable] | None = None) -> AveragesOp:
        """Declares that servers keep averages of these variables (None: all trainable ones), and returns an op that does nothing.

        Call it before the session is made; later calls add variables. Raises TypeError for a variable that is not of floats, ValueError for
        a table or a `Buffer`, and if this graph already has averages of another kind.
        """
        variables = [variable for variable in trainable_variables() if not variable.is_table] if var_list is None else list(var_list)
        for variable in variables:
            _check(variable)
        names = tuple(dict.fromkeys((*self._averages, *(variable.name for variable in variables))))
        spec = AverageSpec(
            decay=self._spec.decay, use_num_updates=self._spec.use_num_updates, zero_debias=self._spec.zero_debias, variables=names
        )
        default_graph().add_averages(spec, name=self._name)
        self._averages.update({variable.name: AverageVariable(variable, self.average_name(variable)) for variable in variables})
        return AveragesOp(spec)

    def average(self, var: ModelVariable) -> AverageVariable | None:
        """Returns the average of the variable, None if there is none; `session.run(average)` gives its value."""
        known = self._averages.get(var.name) if isinstance(var, ModelVariable) else None
        return known if known is not None and known.variable is var else None

    def average_name(self, var: ModelVariable) -> str:
        """Returns the name of the variable's average, whether or not there is one: "<variable>/<name>"."""
        return f"{var.name}/{self._name}"

    def variables_to_restore(self, moving_avg_variables: Iterable[ModelVariable] | None = None) -> dict[str, Any]:
        """Returns a map from the name to restore from to the variable, for an evaluation with averaged values.

        The name is the average's for `moving_avg_variables` (None: trainable ones, and those with an average) and the variable's own
        for all others. `restored_values()` reads the values of such a map from a cluster or from a checkpoint's arrays.
        """
        if moving_avg_variables is None:
            moving_avg_variables = [*trainable_variables(), *(average.variable for average in self._averages.values())]
        averaged = {variable.name: variable for variable in moving_avg_variables}
        names: dict[str, Any] = {self.average_name(variable): variable for variable in averaged.values()}
        names.update({variable.name: variable for variable in global_variables() if variable.name not in averaged})
        step = default_graph().global_step
        return names if step is None else names | {GLOBAL_STEP: step}


def restored_values(source: Session | Observer | Mapping[str, Array], names: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the values for the variables of `names` (see `variables_to_restore`), by the variables' own names.

    `source`: a session or observer of the training cluster, or the arrays of a checkpoint (`load_checkpoint`). The global step and tables
    are left out. If there are averages but none of a variable, the variable gets its own value. Raises KeyError for a value that a
    checkpoint lacks, and the errors of the session.
    """
    wanted = {name: variable for name, variable in names.items() if isinstance(variable, ModelVariable) and not variable.is_table}
    if isinstance(source, Mapping):
        values = source
    else:
        values = dict(source.read())
        if any(name != variable.name for name, variable in wanted.items()):
            kept = source.read_averages()
            values |= {name: kept[variable.name] for name, variable in wanted.items() if name != variable.name and variable.name in kept}
    has_averages = any(name in values for name, variable in wanted.items() if name != variable.name)
    return {variable.name: np.array(_restored(values, name, variable.name if has_averages else name)) for name, variable in wanted.items()}


def _restored(values: Mapping[str, Array], name: str, own_name: str) -> Array:
    for known in (name, own_name):
        if known in values:
            return values[known]
    raise KeyError(
        f"there is no value of {name!r} to restore; there are {', '.join(sorted(values)[:10])}; correct the name, or leave it out"
    )


def _check(variable: ModelVariable) -> None:
    if not isinstance(variable, ModelVariable):
        raise TypeError(f"var_list: got {variable!r}, want what get_variable() returns")
    if variable.is_table or not variable.takes_gradients:
        raise ValueError(f"{variable!r} has no moving average: servers keep averages of dense variables that take gradients")
    if variable.dtype.name not in _AVERAGED_TYPES:
        raise TypeError(f"The variables must be half, float, or double: {variable.name}")
