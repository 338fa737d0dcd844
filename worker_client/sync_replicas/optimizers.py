"""The optimizers, with the API of tf.compat.v1.train. Knows graphs; servers know the formulas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec, Schedule
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from worker_client.model import optimizers
from worker_client.model.policies import async_policy
from worker_client.sync_replicas.gradients import TrainOp, check_pairs, is_gradient, loss_gradient
from worker_client.sync_replicas.graph import Graph, ModelVariable, Run, default_graph, trainable_variables

__all__ = [
    "AdadeltaOptimizer",
    "AdagradDAOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
    "as_optimizer",
]

# The base class with the API of tf.compat.v1.train: compute, apply, minimize.
#
# A plain optimizer trains asynchronously, as in the original: each worker's gradients are applied by themselves, and without `use_locking`
# updates may race. `SyncReplicasOptimizer` wraps one to train synchronously.


Rate = float | Schedule | Callable[[], float]


def checked(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Returns `make(...)`; raises ValueError in place of InvalidSpec, as the original does for the same argument."""
    try:
        return make(*arguments, **options)
    except InvalidSpec as error:
        raise ValueError(error.message) from error


def plain(number: Any) -> Any:
    """Calls a hyper-parameter that is given as a function, and returns any other unchanged."""
    return number() if callable(number) else number


@light_dataclass(frozen=True, slots=True, eq=False)
class SlotVariable:
    """An optimizer's slot of one variable; `session.run(slot)` returns its newest value."""

    variable: ModelVariable
    slot: str
    name: str
    phase: int = 3

    def evaluate(self, run: Run) -> Array:
        """Returns a copy of the slot, in the variable's shape.

        Transfers the slots of whole shards, so use it for inspection, not in every step.
        """
        return run.session.get_slot(self.variable.name, self.slot)


@light_dataclass(frozen=True, slots=True, eq=False)
class PowerVariable:
    """A power of one of Adam's decays, which changes with every update; `session.run()` returns decay ** (global step + 1)."""

    name: str
    decay: float
    phase: int = 3

    def evaluate(self, run: Run) -> Array:
        """Returns the power at the newest step that this worker has heard of."""
        return np.asarray(self.decay ** (run.session.global_step + 1), np.float32)


class Optimizer:
    """An optimizer that updates variables on the servers. Made by its subclasses, or by `as_optimizer()` from an `OptimizerSpec`.

    `learning_rate` and other numbers may be functions without arguments, which are called once, when the optimizer is made. To change
    numbers during training, use a schedule or `session.set_hyperparameters`. Raises ValueError for numbers that the original refuses.
    """

    GATE_NONE = 0
    GATE_OP = 1
    GATE_GRAPH = 2

    def __init__(self, spec: OptimizerSpec, *, use_locking: bool = False, name: str, keeps_policy: bool = False) -> None:
        if not name:
            raise ValueError("Must specify the optimizer name")
        self._keeps_policy = keeps_policy
        self.spec = spec
        self._use_locking = bool(use_locking)
        self._name = name
        self._trained: dict[str, ModelVariable] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} {self.spec.name}>"

    def get_name(self) -> str:
        """Returns the name given at construction."""
        return self._name

    def minimize(
        self,
        loss: Callable[..., Any],
        global_step: Any = None,
        var_list: Iterable[ModelVariable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> TrainOp:
        """Returns the op that updates the variables by the gradients of `loss`: `compute_gradients()`, then `apply_gradients()`.

        `loss(variables)` takes arrays by name and returns (value, gradients by name or variable) or a `LossResult`; `loss()` without
        arguments uses `variable.value()`; in a run with a `feed_dict` it is called as `loss(variables, feed_dict)`. `var_list`: None means
        all trainable variables of the graph. For `global_step` see `apply_gradients`; `gate_gradients` is checked, and like
        `aggregation_method`, `colocate_gradients_with_ops` and `grad_loss` has no further meaning where gradients come from a function.
        Raises ValueError, also if something in `var_list` is not a variable.
        """
        pairs = self.compute_gradients(
            loss,
            var_list=var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        return self.apply_gradients(pairs, global_step=global_step, name=name)

    def compute_gradients(
        self,
        loss: Callable[..., Any],
        var_list: Iterable[ModelVariable] | None = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Any, ModelVariable]]:
        """Returns pairs of a gradient's handle and its variable; arguments and errors are those of `minimize()`.

        A handle represents this worker's gradient in each run; `handle.map(function)` and `map_gradients()` return changed ones, for
        example clipped. A variable for which the loss returns no gradient, or None, does not change. Does not call the loss.
        """
        del aggregation_method, colocate_gradients_with_ops, grad_loss
        if not callable(loss):
            raise ValueError(f"`loss` passed to Optimizer.compute_gradients should be a function, got {loss!r}")
        if gate_gradients not in (self.GATE_NONE, self.GATE_OP, self.GATE_GRAPH):
            raise ValueError(
                f"gate_gradients must be one of: Optimizer.GATE_NONE, Optimizer.GATE_OP, Optimizer.GATE_GRAPH. Not {gate_gradients!r}"
            )
        variables = trainable_variables() if var_list is None else list(_flat(var_list))
        foreign = [variable for variable in variables if not isinstance(variable, ModelVariable)]
        if foreign:
            raise ValueError(f"Argument is not a variable: {foreign[0]!r}; var_list takes what get_variable() returns")
        if not variables:
            raise ValueError("No variables to optimize.")
        return [(loss_gradient(loss, variable), variable) for variable in variables]

    def apply_gradients(self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None) -> TrainOp:
        """Returns the op that pushes these gradients; the servers apply them at once, independently of other workers.

        `grads_and_vars`: pairs of a gradient (a handle, an array, IndexedSlices, or None: the variable does not change) and its variable.
        `global_step` is accepted for compatibility; the cluster counts every applied contribution, with or without it. Raises ValueError if
        there are no variables, all gradients are None, or a variable occurs twice; TypeError for another kind of gradient; RuntimeError for
        IndexedSlices of a variable with a constraint.
        """
        del global_step
        pairs = check_pairs(tuple(grads_and_vars))
        if not pairs:
            raise ValueError("No variables provided.")
        for gradient, _ in pairs:
            if gradient is not None and not is_gradient(gradient):
                raise TypeError(f"Gradient must be a Tensor, IndexedSlices, or None: {gradient!r}")
        policy = None if self._keeps_policy else checked(async_policy, use_locking=self._use_locking)
        return self.train(pairs, policy=policy, name=name or self._name)

    def get_slot(self, var: ModelVariable, name: str) -> SlotVariable | None:
        """Returns the slot `name` of the variable, None if there is none; `session.run(slot)` returns its value.

        As in the original there are slots only once `apply_gradients()` was called, and only of the variables with a gradient.
        """
        if self._trained.get(var.name) is not var or name not in self.spec.slots:
            return None
        return SlotVariable(var, name, self._slot_variable_name(var, name))

    def get_slot_names(self) -> list[str]:
        """Returns the sorted names of the slots; empty before `apply_gradients()`."""
        return list(self.spec.slots) if self._trained else []

    def variables(self) -> list[Any]:
        """Returns the optimizer's variables (slots, and Adam's two powers), sorted by name; `session.run()` returns their values."""
        slots: list[Any] = [self.get_slot(variable, slot) for variable in self._trained.values() for slot in self.get_slot_names()]
        return sorted([*slots, *self._powers()], key=lambda variable: variable.name)

    def train(self, pairs: Sequence[tuple[Any, ModelVariable]], *, policy: PolicySpec | None, name: str) -> TrainOp:
        """Adds checked pairs to the graph, trained under a policy, and returns their op. For the optimizers of this package."""
        with_gradient = [variable for gradient, variable in pairs if gradient is not None]
        if not with_gradient:
            raise ValueError(f"No gradients provided for any variable: {[variable.name for _, variable in pairs]}.")
        for gradient, variable in pairs:
            if hasattr(gradient, "indices") and getattr(variable.initial, "constraint", None) is not None:
                raise RuntimeError(f"Cannot use a constraint function on a sparse variable: {variable.name!r}")
        graph: Graph = default_graph()
        graph.add_training(with_gradient, optimizer=self.spec, policy=policy)
        op = TrainOp(name, pairs)
        if op.loss is not None and op.loss not in graph.losses:
            graph.losses.append(op.loss)
        self._trained.update({variable.name: variable for variable in with_gradient})
        return op

    def _slot_variable_name(self, var: ModelVariable, slot: str) -> str:
        """Returns the original's name for a slot: the optimizer's name, numbered from the second slot on."""
        index = list(self.spec.slots).index(slot)
        return f"{var.name}/{self._name}" + (f"_{index}" if index else "")

    def _powers(self) -> list[PowerVariable]:
        if self.spec.name != "adam" or not self._trained:
            return []
        return [PowerVariable(f"{decay}_power", self.spec.hyperparameter(decay)) for decay in ("beta1", "beta2")]


def as_optimizer(opt: "Optimizer | OptimizerSpec", *, use_locking: bool = True, keeps_policy: bool = False) -> Optimizer:
    """Returns an optimizer of this module: `opt` itself, or one made from what `lockstep.adam()` and the like return.

    A new optimizer trains asynchronously, with `use_locking`; or, if `keeps_policy` is set, under the cluster's policy. Raises TypeError
    for another kind of `opt`.
    """
    if isinstance(opt, Optimizer):
        return opt
    if isinstance(opt, OptimizerSpec) and not opt.is_update_rule:
        return Optimizer(opt, use_locking=use_locking, name=opt.name, keeps_policy=keeps_policy)
    raise TypeError(f"opt: got {opt!r}, want an optimizer such as GradientDescentOptimizer(0.1) or lockstep.sgd(0.1)")


def _flat(variables: Any) -> Iterable[Any]:
    if isinstance(variables, (list, tuple)):
        for item in variables:
            yield from _flat(item)
    else:
        yield variables


# The ten optimizers with the names, arguments and defaults of tf.compat.v1.train.


class GradientDescentOptimizer(Optimizer):
    """Plain gradient descent. `use_locking=False`: concurrent updates of asynchronous workers may be lost, as in the original."""

    def __init__(self, learning_rate: Rate, use_locking: bool = False, name: str = "GradientDescent") -> None:
        super().__init__(checked(optimizers.sgd, plain(learning_rate)), use_locking=use_locking, name=name)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum, or Nesterov's. Slot: "momentum"."""

    def __init__(
        self, learning_rate: Rate, momentum: Any, use_locking: bool = False, name: str = "Momentum", use_nesterov: bool = False
    ) -> None:
        spec = checked(optimizers.momentum, plain(learning_rate), momentum=plain(momentum), use_nesterov=bool(use_nesterov))
        super().__init__(spec, use_locking=use_locking, name=name)


class AdagradOptimizer(Optimizer):
    """Adagrad. Slot: "accumulator". Raises ValueError unless `initial_accumulator_value` > 0."""

    def __init__(
        self, learning_rate: Rate, initial_accumulator_value: float = 0.1, use_locking: bool = False, name: str = "Adagrad"
    ) -> None:
        spec = checked(optimizers.adagrad, plain(learning_rate), initial_accumulator_value=initial_accumulator_value)
        super().__init__(spec, use_locking=use_locking, name=name)


class AdagradDAOptimizer(Optimizer):
    """Adagrad with dual averaging. Slots: "gradient_accumulator", "gradient_squared_accumulator".

    `global_step` is accepted; the servers use the cluster's own step.
    """

    def __init__(
        self,
        learning_rate: Rate,
        global_step: Any,
        initial_gradient_squared_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "AdagradDA",
    ) -> None:
        del global_step
        spec = checked(
            optimizers.adagrad_da,
            plain(learning_rate),
            initial_gradient_squared_accumulator_value=initial_gradient_squared_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
        super().__init__(spec, use_locking=use_locking, name=name)


class AdamOptimizer(Optimizer):
    """Adam. Slots: "m", "v".

    Each step changes whole tables, as in the original; `as_optimizer(lockstep.adam(lazy=True))` avoids that.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        spec = checked(optimizers.adam, plain(learning_rate), beta1=plain(beta1), beta2=plain(beta2), epsilon=plain(epsilon))
        super().__init__(spec, use_locking=use_locking, name=name)


class RMSPropOptimizer(Optimizer):
    """RMSProp. Slots: "momentum", "rms", and "mg" if `centered`."""

    def __init__(
        self,
        learning_rate: Rate,
        decay: Any = 0.9,
        momentum: Any = 0.0,
        epsilon: Any = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        spec = checked(
            optimizers.rmsprop,
            plain(learning_rate),
            decay=plain(decay),
            momentum=plain(momentum),
            epsilon=plain(epsilon),
            centered=bool(centered),
        )
        super().__init__(spec, use_locking=use_locking, name=name)


class AdadeltaOptimizer(Optimizer):
    """Adadelta. Slots: "accum", "accum_update"."""

    def __init__(
        self, learning_rate: Rate = 0.001, rho: Any = 0.95, epsilon: Any = 1e-8, use_locking: bool = False, name: str = "Adadelta"
    ) -> None:
        spec = checked(optimizers.adadelta, plain(learning_rate), rho=plain(rho), epsilon=plain(epsilon))
        super().__init__(spec, use_locking=use_locking, name=name)


class FtrlOptimizer(Optimizer):
    """FTRL-proximal. Slots: "accum", "linear". `accum_name` and `linear_name` are accepted; slots are read by `get_slot()`'s names.

    Raises ValueError for `learning_rate_power` > 0 and negative numbers elsewhere.
    """

    def __init__(
        self,
        learning_rate: Rate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ) -> None:
        del accum_name, linear_name
        spec = checked(
            optimizers.ftrl,
            plain(learning_rate),
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=0.0 if beta is None else beta,
        )
        super().__init__(spec, use_locking=use_locking, name=name)


class ProximalGradientDescentOptimizer(Optimizer):
    """Gradient descent, then the proximal step of l1 and l2 penalties. No slots."""

    def __init__(
        self,
        learning_rate: Rate,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
    ) -> None:
        spec = checked(
            optimizers.proximal_sgd,
            plain(learning_rate),
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
        super().__init__(spec, use_locking=use_locking, name=name)


class ProximalAdagradOptimizer(Optimizer):
    """Adagrad, then the proximal step of l1 and l2 penalties. Slot: "accumulator"."""

    def __init__(
        self,
        learning_rate: Rate,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
    ) -> None:
        spec = checked(
            optimizers.proximal_adagrad,
            plain(learning_rate),
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
        super().__init__(spec, use_locking=use_locking, name=name)
