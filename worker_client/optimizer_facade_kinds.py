"""The ten optimizers under their names of tf.compat.v1.train, with its arguments and defaults. Knows no formula: servers do."""

from typing import Any

from worker_client import optimizers
from worker_client.optimizer_facade import Optimizer, Rate, checked, plain


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

    `global_step` is accepted; the servers take their own step, which is the cluster's.
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
    """Adam. Slots: "m", "v". Tables decay as a whole, as in the original; `as_optimizer(worker_client.adam(lazy=True))` spares that."""

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
