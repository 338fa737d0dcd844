"""The servers' formula and numbers for each optimizer of Keras. Knows optimizers and formulas; no session."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import InvalidSpec
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client.model.optimizers import custom_optimizer

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """An optimizer as a formula for servers: its lines, its numbers, and its slots with their first values."""

    lines: tuple[str, ...]
    numbers: Mapping[str, float]
    slots: Mapping[str, float]


def is_known(optimizer: Any) -> bool:
    """Whether servers have a formula for this optimizer: one of Keras' own classes, not a subclass of it."""
    return type(optimizer).__module__.startswith("keras.src.") and type(optimizer).__name__ in _TEXTS


def optimizer_of(optimizer: Any, *, learning_rate: float, decays: bool) -> OptimizerSpec:
    """Returns the servers' optimizer for one of Keras. `decays`: whether its weight decay applies to this variable. Raises InvalidSpec."""
    config, name = optimizer.get_config(), type(optimizer).__name__
    if not is_known(optimizer):
        raise InvalidSpec(
            f"optimizer: {type(optimizer).__qualname__} is not known, so the parameter servers cannot run it; want one of "
            f"{', '.join(_TEXTS)} of keras.optimizers, or let each worker run it: lockstep.keras.AverageUpdates"
        )
    _refuse(config)
    text = _TEXTS[name](config)
    numbers = dict(text.numbers)
    lines = list(text.lines)
    if decays and config.get("weight_decay"):
        numbers["weight_decay"] = float(config["weight_decay"])
        lines.insert(0, "v = v - v * weight_decay * lr")
    return custom_optimizer("\n".join([f"# {name}", *lines]), learning_rate, slots=dict(text.slots), **numbers)


def limits_of(optimizer: Any) -> dict[str, float]:
    """Returns the limits on the mean gradient that an optimizer of Keras has, as `create_or_join` names them."""
    config = optimizer.get_config()
    given = {"clip_value": config.get("clipvalue"), "clip_norm": config.get("clipnorm"), "clip_global_norm": config.get("global_clipnorm")}
    return {name: float(limit) for name, limit in given.items() if limit}


def _refuse(config: Config) -> None:
    if config.get("use_ema"):
        raise InvalidSpec("optimizer: use_ema is not supported; the servers keep averages: averages=lockstep.moving_average(…)")
    if config.get("gradient_accumulation_steps"):
        raise InvalidSpec(
            "optimizer: gradient_accumulation_steps is not supported; the servers accumulate: have a step take more contributions than "
            "there are workers (lockstep up --replicas-to-aggregate N)"
        )


def _numbers(config: Config, *names: str) -> dict[str, float]:
    return {name: float(config[name]) for name in names}


def _sgd(config: Config) -> Text:
    if not config["momentum"]:
        return Text(lines=("v = v - g * lr",), numbers={}, slots={})
    change = "m * momentum - g * lr" if config["nesterov"] else "m"
    return Text(lines=("m = m * momentum - g * lr", f"v = v + {change}"), numbers=_numbers(config, "momentum"), slots={"m": 0.0})


def _moments() -> tuple[str, str]:
    return "m = m + (g - m) * (1 - beta_1)", "s = s + (g * g - s) * (1 - beta_2)"


def _adam(config: Config) -> Text:
    largest = ("largest = max(largest, s)",) if config["amsgrad"] else ()
    root = "largest" if largest else "s"
    rate = "lr * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t)"
    return Text(
        lines=(*_moments(), *largest, f"v = v - m * ({rate}) / (sqrt({root}) + epsilon)"),
        numbers=_numbers(config, "beta_1", "beta_2", "epsilon"),
        slots={"m": 0.0, "s": 0.0, **({"largest": 0.0} if largest else {})},
    )


def _nadam(config: Config) -> Text:
    return Text(
        lines=(
            "now = beta_1 * (1 - 0.5 * decay ** t)",
            "next = beta_1 * (1 - 0.5 * (decay ** t * decay))",
            "product = product * now",
            *_moments(),
            "mean = next * m / (1 - product * next) + (1 - now) * g / (1 - product)",
            "v = v - mean * lr / (sqrt(s / (1 - beta_2 ** t)) + epsilon)",
        ),
        numbers={**_numbers(config, "beta_1", "beta_2", "epsilon"), "decay": 0.96},
        slots={"m": 0.0, "s": 0.0, "product": 1.0},
    )


def _adamax(config: Config) -> Text:
    return Text(
        lines=(_moments()[0], "u = max(beta_2 * u, abs(g))", "v = v - lr * m / ((1 - beta_1 ** t) * (u + epsilon))"),
        numbers=_numbers(config, "beta_1", "beta_2", "epsilon"),
        slots={"m": 0.0, "u": 0.0},
    )


def _lamb(config: Config) -> Text:
    return Text(
        lines=(
            *_moments(),
            "u = m / (1 - beta_1 ** t) / (sqrt(s / (1 - beta_2 ** t)) + epsilon)",
            "v = v - where(norm(v) > 0, where(norm(u) > 0, norm(v) / norm(u), 1), 1) * lr * u",
        ),
        numbers=_numbers(config, "beta_1", "beta_2", "epsilon"),
        slots={"m": 0.0, "s": 0.0},
    )


def _lion(config: Config) -> Text:
    return Text(
        lines=("v = v - lr * sign(m * beta_1 + g * (1 - beta_1))", "m = m * beta_2 + g * (1 - beta_2)"),
        numbers=_numbers(config, "beta_1", "beta_2"),
        slots={"m": 0.0},
    )


def _rmsprop(config: Config) -> Text:
    lines, slots, numbers = ["s = rho * s + (1 - rho) * (g * g)"], {"s": 0.0}, _numbers(config, "rho", "epsilon")
    below = "s + epsilon"
    if config["centered"]:
        lines.append("mean = rho * mean + (1 - rho) * g")
        slots["mean"] = 0.0
        below = "s - mean * mean + epsilon"
    change = f"lr * g / sqrt({below})"
    if config["momentum"] > 0:
        lines.append(f"m = momentum * m + {change}")
        slots["m"], numbers["momentum"], change = 0.0, float(config["momentum"]), "m"
    return Text(lines=(*lines, f"v = v - {change}"), numbers=numbers, slots=slots)


def _adagrad(config: Config) -> Text:
    return Text(
        lines=("accumulator = accumulator + g * g", "v = v - lr * g / sqrt(accumulator + epsilon)"),
        numbers=_numbers(config, "epsilon"),
        slots={"accumulator": float(config["initial_accumulator_value"])},
    )


def _adadelta(config: Config) -> Text:
    return Text(
        lines=(
            "of_gradients = rho * of_gradients + (1 - rho) * (g * g)",
            "change = sqrt(of_changes + epsilon) * g / sqrt(of_gradients + epsilon)",
            "of_changes = rho * of_changes + (1 - rho) * (change * change)",
            "v = v - lr * change",
        ),
        numbers=_numbers(config, "rho", "epsilon"),
        slots={"of_gradients": 0.0, "of_changes": 0.0},
    )


# By class name in keras.optimizers.
_TEXTS: Mapping[str, Callable[[Config], Text]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adam,
    "Nadam": _nadam,
    "Adamax": _adamax,
    "Lamb": _lamb,
    "Lion": _lion,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
    "Adadelta": _adadelta,
}
