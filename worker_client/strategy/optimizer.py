"""An optimizer whose `apply_gradients()` is called in replicas: it reduces gradients and updates variables by formulas. Knows no transport.

The formulas are those of the parameter servers' optimizers, in their order of operations, so that both give the same bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from ps_protocol.errors import DtypeMismatch, InvalidSpec, ShapeMismatch
from ps_protocol.model.expressions import with_named_powers
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import GRADIENT, LEARNING_RATE, OPTIMIZERS, STEP, OptimizerSpec
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.reduction import ReduceOp, reduce_op_of
from worker_client.strategy.strategy import ParameterServerStrategy, get_replica_context
from worker_client.strategy.values import PerReplica, check_alike
from worker_client.strategy.variables import Variable

Numbers = Mapping[str, Any]
_Number = Callable[[Any], "np.floating[Any]"]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """An optimizer as a formula. `slots`: the names of its slots in the formula. `numbers(of, rate, powers)` are its numbers.

    `powers`: hyper-parameters that it needs to the power of the updates so far, the present one included, as numbers of type `dtype`; and
    STEP, the number of these updates.
    """

    text: str
    slots: Mapping[str, str] = field(default_factory=dict)
    powers: tuple[str, ...] = ()
    dtype: "np.dtype[Any]" = field(default_factory=lambda: np.dtype(np.float32))
    numbers: Callable[[_Number, float, Mapping[str, Any]], Numbers]


def _sgd(spec: OptimizerSpec) -> _Rule:
    return _Rule(text="v - g * lr", numbers=lambda of, rate, powers: {"lr": of(rate)})


def _momentum(spec: OptimizerSpec) -> _Rule:
    change = "(g * lr + a * mu * lr)" if spec.hyperparameter("use_nesterov") else "a * lr"
    mu = spec.hyperparameter("momentum")
    return _Rule(
        text=f"a = a * mu + g; v = v - {change}",
        slots={"momentum": "a"},
        numbers=lambda of, rate, powers: {"lr": of(rate), "mu": of(_single(mu))},
    )


def _adagrad(spec: OptimizerSpec) -> _Rule:
    return _Rule(
        text="a = a + g * g; v = v - g * lr * (1 / sqrt(a))", slots={"accumulator": "a"}, numbers=lambda of, rate, powers: {"lr": of(rate)}
    )


def _adam(spec: OptimizerSpec) -> _Rule:
    beta1, beta2, epsilon = (_single(spec.hyperparameter(name)) for name in ("beta1", "beta2", "epsilon"))

    def numbers(of: _Number, rate: float, powers: Mapping[str, Any]) -> Numbers:
        one = of(1)
        corrected = of(rate) * np.sqrt(one - of(powers["beta2"])) / (one - of(powers["beta1"]))
        return {"lr": of(corrected), "c1": one - of(beta1), "c2": one - of(beta2), "eps": of(epsilon)}

    return _Rule(
        text="m = m + (g - m) * c1; s = s + (g * g - s) * c2; v = v - m * lr / (sqrt(s) + eps)",
        slots={"m": "m", "v": "s"},
        powers=("beta1", "beta2"),
        numbers=numbers,
    )


def _rmsprop(spec: OptimizerSpec) -> _Rule:
    decay, mu, epsilon = (_single(spec.hyperparameter(name)) for name in ("decay", "momentum", "epsilon"))
    is_centered = bool(spec.hyperparameter("centered"))
    mean, root = ("q = q + (g - q) * c; ", "r - q * q + eps") if is_centered else ("", "r + eps")
    return _Rule(
        text=f"r = r + (g * g - r) * c; {mean}a = a * mu + g * lr / sqrt({root}); v = v - a",
        slots={**({"mg": "q"} if is_centered else {}), "momentum": "a", "rms": "r"},
        numbers=lambda of, rate, powers: {"lr": of(rate), "c": of(1) - of(decay), "mu": of(mu), "eps": of(epsilon)},
    )


def _adadelta(spec: OptimizerSpec) -> _Rule:
    rho, epsilon = (_single(spec.hyperparameter(name)) for name in ("rho", "epsilon"))
    return _Rule(
        text="a = a * rho + g * g * c; u = sqrt(d + eps) * (1 / sqrt(a + eps)) * g; d = d * rho + u * u * c; v = v - u * lr",
        slots={"accum": "a", "accum_update": "d"},
        numbers=lambda of, rate, powers: {"lr": of(rate), "rho": of(rho), "c": of(1) - of(rho), "eps": of(epsilon)},
    )


def _text(spec: OptimizerSpec) -> _Rule:
    """The update of an optimizer whose formula is a text: its numbers are in double precision."""
    text, bases = with_named_powers(spec.text, step=STEP, named=_power), spec.parsed.bases

    def numbers(of: _Number, rate: float, powers: Mapping[str, Any]) -> Numbers:
        raised = {_power(base): powers[base] for base in bases}
        return {**spec.numbers, **raised, LEARNING_RATE: rate, STEP: powers[STEP]}

    return _Rule(text=text, slots={name: name for name in spec.slots}, powers=(*bases, STEP), dtype=np.dtype(np.float64), numbers=numbers)


def _power(base: str) -> str:
    return f"{base}_to_the_step"


_RULES: Mapping[str, Callable[[OptimizerSpec], _Rule]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
}


class Optimizer:
    """Updates variables of a strategy by gradients that its replicas compute: `apply_gradients()` is called in each of them.

    `spec` is what `lockstep.adam(0.001)` and the like return, with a learning rate that is a number: sgd, momentum, adagrad, adam, rmsprop,
    adadelta, and all whose formula is a text, such as adamw and custom optimizers. Call `build()` in the strategy's `scope()` before. All
    workers do the same in the same order. Raises InvalidSpec.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        known = (*_RULES, *(name for name, kind in OPTIMIZERS.items() if not (kind.is_single or kind.is_update_rule)), "custom")
        if not isinstance(spec, OptimizerSpec) or spec.name not in known:
            name = spec.name if isinstance(spec, OptimizerSpec) else type(spec).__name__
            raise InvalidSpec(f"Optimizer: got {name!r}, want what sgd(0.1) or another of {', '.join(known)} returns")
        if spec.learning_rate.name != "constant":
            raise InvalidSpec("Optimizer: learning_rate: want a number; set `learning_rate` before a step to change it")
        for decay in ("weight_decay", "l2"):
            if spec.kind.is_single and spec.hyperparameter(decay):
                raise InvalidSpec(f"Optimizer: {decay}: {spec.name!r} has none here; adamw has")
        self._spec, self._rule = spec, _RULES[spec.name](spec) if spec.kind.is_single else _text(spec)
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
            for name in self._rule.powers:
                value = 1.0 if name == STEP else self._spec.numbers[name]
                self._powers[name] = Variable(np.asarray(value, self._rule.dtype), name=f"{self._spec.name}/{name}_power")
        for variable in var_list:
            with strategy.extended.colocate_vars_with(variable):
                self._slots[variable] = {
                    slot: Variable(np.full(variable.shape, first[slot], variable.dtype), name=f"{variable.name}/{slot}")
                    for slot in self._rule.slots
                }

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Returns a variable's slot; None if there is none of this name."""
        return self._slots.get(var, {}).get(name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the slots, sorted."""
        return sorted(self._rule.slots)

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
        powers = {name: self._rule.dtype.type(variable.read_value()) for name, variable in self._powers.items()}
        rate = float(self._rule.dtype.type(self.learning_rate))
        for variable, gradient in reduced:
            slots = {self._rule.slots[name]: slot for name, slot in self._slots[variable].items()}
            numbers = self._rule.numbers(variable.dtype.type, rate, powers)
            strategy.extended.update(variable, self._rule.text, kwargs={**slots, **numbers, GRADIENT: gradient})
        for name, power in self._powers.items():
            if name == STEP:
                strategy.extended.update(power, "v + 1")
            else:
                strategy.extended.update(power, "v * decay", kwargs={"decay": self._rule.dtype.type(self._spec.numbers[name])})


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


def _single(number: float) -> "np.float32":
    # As servers have it: rates and hyper-parameters are float32 numbers, also for float64 variables.
    return np.float32(number)
