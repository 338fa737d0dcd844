"""An optimizer whose `apply_gradients()` is called in replicas: it reduces gradients and updates variables by formulas. Knows no transport.

The formulas are those that parameter servers run, so that both give the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ps_protocol.errors import DtypeMismatch, InvalidSpec, ShapeMismatch
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizer_formulas import OptimizerFormula
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, STEP, OptimizerSpec
from ps_protocol.model.programs import Numbers
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.reduction import ReduceOp, reduce_op_of
from worker_client.strategy.strategy import ParameterServerStrategy, get_replica_context
from worker_client.strategy.values import PerReplica, check_alike
from worker_client.strategy.variables import Variable, VariableCopy


class Optimizer:
    """Updates variables of a strategy by gradients that its replicas compute: `apply_gradients()` is called in each of them.

    `spec` is what `lockstep.adam(0.001)` and the like return, with a learning rate that is a number. Call `build()` in the strategy's
    `scope()` before. All workers do the same in the same order. Raises InvalidSpec.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        if not isinstance(spec, OptimizerSpec) or spec.is_update_rule:
            name = spec.name if isinstance(spec, OptimizerSpec) else type(spec).__name__
            raise InvalidSpec(f"Optimizer: got {name!r}, want what sgd(0.1) or another of {', '.join(GRADIENT_OPTIMIZERS)}, custom returns")
        if spec.learning_rate.name != "constant":
            raise InvalidSpec("Optimizer: learning_rate: want a number; set `learning_rate` before a step to change it")
        for decay in ("weight_decay", "l2"):
            if spec.kind.is_single and spec.hyperparameter(decay):
                raise InvalidSpec(f"Optimizer: {decay}: {spec.name!r} has none here; adamw has")
        self._spec, self._formula = spec, OptimizerFormula(spec)
        self.learning_rate = spec.learning_rate.argument("value")
        self._slots: dict[Variable, dict[str, Variable]] = {}
        self._powers: dict[str, Variable] = {}

    def build(self, var_list: Sequence[Variable]) -> None:
        """Creates the optimizer's state for these variables: its slots beside each, and its other numbers where
        `non_slot_devices()` says. In the strategy's scope, once.

        Raises RuntimeError if it has been called, or in a replica, and InvalidSpec for objects that are not variables.
        """
        if self._slots:
            raise RuntimeError("Optimizer.build(): it has been called before; make another optimizer for other variables")
        if not isinstance(var_list, Sequence) or not var_list or not all(isinstance(variable, Variable) for variable in var_list):
            raise InvalidSpec("Optimizer.build(): want a list of the variables that are optimized, at least one")
        strategy: ParameterServerStrategy = var_list[0].strategy
        first = self._spec.slots
        with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices(var_list)):
            powers = dict(zip(self._formula.bases, self._formula.initial_powers(), strict=True))
            for name, value in {**powers, **({STEP: 1.0} if self._formula.uses_step else {})}.items():
                dtype = np.float32 if self._formula.is_single and name != STEP else np.float64
                self._powers[name] = Variable(np.asarray(value, dtype), name=f"{self._spec.name}/{name}_power")
        for variable in var_list:
            with strategy.extended.colocate_vars_with(variable):
                self._slots[variable] = {
                    slot: Variable(np.full(variable.shape, first[slot], variable.dtype), name=f"{variable.name}/{slot}") for slot in first
                }

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns a variable's slot; None if there is none of this name."""
        return self._slots.get(var, {}).get(name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, sorted."""
        return sorted(self._spec.slots)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]], *, reduce_op: ReduceOp | str = "SUM") -> None:
        """Reduces the gradients of all replicas and updates the variables, once. Call it in each replica, with the same variables.

        `reduce_op`: as in the original, gradients are added; with MEAN the values are those of `SyncReplicasOptimizer`. A variable whose
        gradient is None does not change. Raises ValueError if there are no gradients, RuntimeError across replicas and before `build()`,
        ShapeMismatch, DtypeMismatch.
        """
        context = get_replica_context()
        if context is None:
            raise RuntimeError("apply_gradients() is called in replicas, by strategy.run(); this is across them")
        op = reduce_op_of(reduce_op)
        pairs = [(gradient, variable) for gradient, variable in _pairs(grads_and_vars) if gradient is not None]
        if not pairs:
            raise ValueError("apply_gradients(): no gradients provided for any variable")
        if pairs[0][1].strategy is not context.strategy:
            raise RuntimeError("apply_gradients() is called in replicas of its variables' strategy, by strategy.run(); these are not")
        for gradient, variable in pairs:
            if variable not in self._slots:
                raise RuntimeError(f'apply_gradients(): variable "{variable.name}" was not built; call build() in scope() before run()')
            if isinstance(gradient, IndexedSlices):
                raise InvalidSpec(f'apply_gradients(): the gradient of "{variable.name}" is IndexedSlices; want an array of its shape')
            array = np.asarray(gradient)
            if array.shape != variable.shape:
                raise ShapeMismatch(f'apply_gradients(): variable "{variable.name}" has shape {variable.shape}, its gradient {array.shape}')
            if array.dtype != variable.dtype:
                raise DtypeMismatch(
                    f'apply_gradients(): variable "{variable.name}" is {variable.dtype}, its gradient {array.dtype}; cast with .astype()'
                )

        def apply_gradients(strategy: ParameterServerStrategy, merged: Any, what: Any) -> None:
            check_alike(what, "apply_gradients()")
            given: Mapping[int, _Gradients] = (
                merged.values if isinstance(merged, PerReplica) else {context.replica_id_in_sync_group: merged}
            )
            variables = _variables_of_all(given)
            gradients = [PerReplica({replica: one.arrays[place] for replica, one in given.items()}) for place in range(len(variables))]
            reduced = strategy.extended.batch_reduce_to(op, list(zip(gradients, variables, strict=True)))
            self._apply(strategy, zip(variables, reduced, strict=True))

        arrays, variables = [np.asarray(gradient) for gradient, _ in pairs], [variable for _, variable in pairs]
        context.merge_call(apply_gradients, args=(_Gradients(arrays, variables), (self, op)))

    def _apply(self, strategy: ParameterServerStrategy, reduced: Iterable[tuple[Variable, Any]]) -> None:
        formula, values = self._formula, {name: float(variable.read_value()) for name, variable in self._powers.items()}
        powers, step = [values[base] for base in formula.bases], int(values.get(STEP, 1)) - 1
        for variable, gradient in reduced:
            numbers = formula.numbers(formula.rounded(self.learning_rate), powers, step, variable.dtype)
            slots = self._slots[variable].values()
            strategy.extended.update(variable, partial(_update, formula, numbers), args=(gradient, *slots))
        following = {**dict(zip(formula.bases, formula.next_powers(tuple(powers)), strict=True)), STEP: step + 2.0}
        for name, power in self._powers.items():
            strategy.extended.update(power, VariableCopy.assign, args=(power.dtype.type(following[name]),))


def _update(formula: OptimizerFormula, numbers: Numbers, copy: VariableCopy, gradient: Any, *slots: VariableCopy) -> None:
    """Applies a step to one copy of a variable and of its slots."""
    value = np.ravel(copy.read_value())
    new = [np.array(slot.read_value()).reshape(-1) for slot in slots]
    out = np.empty_like(value)
    with np.errstate(all="ignore"):
        arrays = (value, np.ravel(np.asarray(gradient, value.dtype)), *new)
        formula.program.compute(arrays, (out,), numbers, formula.number(value.dtype))
    for one, array in zip((copy, *slots), (out, *new), strict=True):
        one.assign(array.reshape(one.shape))


@light_dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """One replica's arrays for some variables. Not a list, so that a merge leaves it whole."""

    arrays: Sequence[Any]
    variables: Sequence[Variable]

    def __str__(self) -> str:
        return ", ".join(f'"{variable.name}"' for variable in self.variables)


def _variables_of_all(given: Mapping[int, _Gradients]) -> Sequence[Variable]:
    first = min(given)
    for replica, one in given.items():
        if one.variables != given[first].variables:
            raise ValueError(
                f"apply_gradients(): replica {replica} has gradients of {one}, replica {first} of {given[first]}; "
                "all must have the same in the same order, with zeros instead of None where only some have a gradient"
            )
    return given[first].variables


def _pairs(grads_and_vars: Any) -> list[tuple[Any, Variable]]:
    pairs = list(grads_and_vars) if isinstance(grads_and_vars, Iterable) else [grads_and_vars]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Variable):
            raise InvalidSpec(f"apply_gradients(): got a {type(pair).__name__} among the pairs; want pairs (gradient, variable)")
    return pairs
