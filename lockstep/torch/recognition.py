"""Translates a torch optimizer for parameter servers: each parameter group's formula, and its present numbers. Knows no tensor.

The formulas are those of torch.optim, operation by operation. Options that only concern speed (foreach, fused, capturable) have no effect.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_client import OptimizerSpec, adamw, custom_optimizer

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recognized:
    """A parameter group's optimizer on the servers, `spec`, and the names of the group's options.

    The numbers of `watched` options may change during training. The `fixed` options, with their values, determine the formula.
    """

    spec: OptimizerSpec
    watched: tuple[str, ...]
    fixed: Mapping[str, Any]
    is_negated: bool
    _numbers: Callable[[Group], dict[str, float]]

    def values(self, group: Group) -> list[Any]:
        """Returns the group's present options, for comparison with earlier ones."""
        return [_plain(group[name]) for name in (*self.watched, *self.fixed)]

    def numbers(self, group: Group) -> dict[str, float]:
        """Returns the learning rate and the hyper-parameters, with the servers' names."""
        return {"learning_rate": float(group["lr"]), **self._numbers(group)}

    def check(self, what: str, group: Group) -> None:
        """Raises ValueError, which begins with `what`, for a group without an option of this optimizer, or with another formula."""
        for name in self.watched:
            if name not in group:
                raise ValueError(f"{what} has no {name!r}, so it belongs to another optimizer than this one was made with")
        for name, value in self.fixed.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"{what} has {name} = {group[name]!r}: it was {value!r} when the optimizer was made, and the servers' formula does not"
                    f" change while training. Give the torch optimizer {name} = {group[name]!r} from the start"
                )


# Options that only concern speed, or only the beginning.
_WITHOUT_MEANING = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_accumulator_value"})


def _fixed(names: Iterable[str], watched: Sequence[str], group: Group) -> dict[str, Any]:
    return {name: group[name] for name in names if name in group and name not in watched and name not in _WITHOUT_MEANING}


def _plain(value: Any) -> Any:
    """Returns the present value: schedulers change a tensor in place."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_plain, value)) if type(value) is tuple else value


@dataclass(frozen=True, slots=True)
class _Text:
    """A formula with its slots, and its hyper-parameters' names in a group: a name may refer to one of several numbers."""

    lines: Sequence[str]
    names: Mapping[str, str]
    slots: Mapping[str, float] = field(default_factory=dict)


def recognize(optimizer: "torch.optim.Optimizer | OptimizerSpec", group: Group) -> Recognized:
    """Returns a group's optimizer for the servers. Raises TypeError for an optimizer with an unknown formula, ValueError for an option."""
    if isinstance(optimizer, OptimizerSpec):
        names = tuple(optimizer.numbers if not optimizer.is_custom else optimizer.hyperparameters)
        fixed = _fixed(names, [name for name in names if name not in optimizer.fixed_hyperparameters], group)
        names = tuple(name for name in names if name not in fixed)
        return Recognized(optimizer, ("lr", *names), fixed, False, lambda now: {name: float(now[name]) for name in names})
    if group.get("differentiable"):
        raise ValueError("differentiable=True: the servers compute the step, so no gradient goes through it; leave it out")
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        # Older versions of AdamW show it by their class alone.
        is_decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        return _adam(group, optimizer.defaults, is_decoupled=is_decoupled)
    if kind not in _TEXTS:
        known = ", ".join(sorted([one.__name__ for one in _TEXTS] + ["Adam", "AdamW"]))
        raise TypeError(
            f"torch.optim.{kind.__name__}: the parameter servers do not know its formula; known are {known}. Pass the optimizer as a value"
            " instead, such as lockstep.nadam(…), lockstep.lion(…), lockstep.lamb(…), or as a formula: lockstep.custom_optimizer(…)"
        )
    text = _TEXTS[kind](group)
    numbers = {ours: float(group[theirs]) for ours, theirs in text.names.items()}
    spec = custom_optimizer("\n".join([f"# {kind.__name__}", *text.lines]), float(group["lr"]), slots=dict(text.slots), **numbers)
    names_of = dict(text.names)
    watched = ("lr", *dict.fromkeys(names_of.values()))
    fixed = _fixed(optimizer.defaults, watched, group)

    def now(group: Group) -> dict[str, float]:
        return {ours: float(group[theirs]) for ours, theirs in names_of.items()}

    return Recognized(spec, watched, fixed, bool(group["maximize"]), now)


def _adam(group: Group, names: Iterable[str], *, is_decoupled: bool) -> Recognized:
    decay, other = ("weight_decay", "l2") if is_decoupled else ("l2", "weight_decay")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decays = {decay: float(group["weight_decay"]), other: 0.0}
    spec = adamw(
        *(float(group["lr"]), beta1, beta2, float(group["eps"])),
        weight_decay=decays["weight_decay"],
        l2=decays["l2"],
        amsgrad=bool(group["amsgrad"]),
    )

    def now(group: Group) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {"beta1": float(beta1), "beta2": float(beta2), "epsilon": float(group["eps"]), decay: float(group["weight_decay"])}

    watched = ("lr", "betas", "eps", "weight_decay")
    return Recognized(spec, watched, _fixed(names, watched, group), bool(group["maximize"]), now)


def _gradient(group: Group, names: dict[str, str]) -> tuple[list[str], str]:
    """Returns the line that adds weight decay to the gradient, and the gradient's name after it."""
    if not group["weight_decay"]:
        return [], "g"
    names["weight_decay"] = "weight_decay"
    return ["d = g + weight_decay * v"], "d"


def _sgd(group: Group) -> _Text:
    names: dict[str, str] = {}
    lines, d = _gradient(group, names)
    if not group["momentum"]:
        return _Text([*lines, f"v = v - lr * {d}"], names)
    names["momentum"] = "momentum"
    slots = {"momentum_buffer": 0.0}
    new = d
    if group["dampening"]:
        # The first gradient of a parameter is not dampened, whenever it comes.
        names["dampening"] = "dampening"
        slots["seen"] = 0.0
        new = f"where(seen > 0, 1 - dampening, 1) * {d}"
    lines.append(f"momentum_buffer = momentum * momentum_buffer + {new}")
    lines += ["seen = max(seen, 1)"] if "seen" in slots else []
    lines.append(f"v = v - lr * ({d} + momentum * momentum_buffer)" if group["nesterov"] else "v = v - lr * momentum_buffer")
    return _Text(lines, names, slots)


def _adagrad(group: Group) -> _Text:
    names = {"eps": "eps"}
    lines, d = _gradient(group, names)
    rate = "lr"
    if group["lr_decay"]:
        names["lr_decay"], rate = "lr_decay", "lr / (1 + (t - 1) * lr_decay)"
    lines += [f"sum_of_squares = sum_of_squares + {d} * {d}", f"v = v - {rate} * {d} / (sqrt(sum_of_squares) + eps)"]
    return _Text(lines, names, {"sum_of_squares": float(group["initial_accumulator_value"])})


def _rmsprop(group: Group) -> _Text:
    names = {"alpha": "alpha", "eps": "eps"}
    lines, d = _gradient(group, names)
    slots = {"square_avg": 0.0}
    lines.append(f"square_avg = alpha * square_avg + (1 - alpha) * ({d} * {d})")
    root = "sqrt(square_avg)"
    if group["centered"]:
        slots["grad_avg"] = 0.0
        lines.append(f"grad_avg = grad_avg + ({d} - grad_avg) * (1 - alpha)")
        root = "sqrt(square_avg - grad_avg * grad_avg)"
    if group["momentum"]:
        names["momentum"] = "momentum"
        slots["momentum_buffer"] = 0.0
        lines += [f"momentum_buffer = momentum * momentum_buffer + {d} / ({root} + eps)", "v = v - lr * momentum_buffer"]
    else:
        lines.append(f"v = v - lr * {d} / ({root} + eps)")
    return _Text(lines, names, slots)


def _adadelta(group: Group) -> _Text:
    names = {"rho": "rho", "eps": "eps"}
    lines, d = _gradient(group, names)
    lines += [
        f"square_avg = rho * square_avg + (1 - rho) * ({d} * {d})",
        f"delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * {d}",
        "acc_delta = rho * acc_delta + (1 - rho) * (delta * delta)",
        "v = v - lr * delta",
    ]
    return _Text(lines, names, {"square_avg": 0.0, "acc_delta": 0.0})


_TEXTS: Mapping[type, Callable[[Group], _Text]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
}
