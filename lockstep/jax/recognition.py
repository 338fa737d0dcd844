"""Translates an optax transformation to formulas for parameter servers, by the names of its parts. Never guesses; runs nothing.

An optax transformation is a pair of closures. Optax's own parts are recognized by module and name, and their numbers are in the closures'
cells. Each part becomes one or two lines of a formula, in which `u` is the update so far. An unknown part is refused by name. `proof` then
compares the result with the transformation itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from lockstep.errors import InvalidSpec
from ps_protocol.model.optimizers import OptimizerSpec
from worker_client.model.declarations import Variable
from worker_client.model.optimizers import custom_optimizer, sgd

Cells = Mapping[str, Any]
# Returns the learning rate for a number of previous steps.
Rate = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognized:
    """The servers' counterpart of an optax transformation: an optimizer for each leaf, in order, and limits on the mean gradient.

    `rates`: for each leaf, its learning rate as a function of the step, if it changes; its optimizer then has the rate of step 0.
    """

    optimizers: tuple[OptimizerSpec, ...]
    rates: tuple[Rate | None, ...]
    clip_value: float | None = None
    clip_global_norm: float | None = None

    def declared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the leaves' values, by name and in order, as variables with their optimizers."""
        return {
            name: Variable(value, optimizer=optimizer.in_group(group)) if group else value
            for (name, value), optimizer, group in zip(values.items(), self.optimizers, self._groups, strict=True)
        }

    def numbers(self, step: int) -> dict[str, Any]:
        """Returns the changed learning rates that a contribution to this step carries; empty if no rate changes."""
        changing = {group: rate for group, rate in zip(self._groups, self.rates, strict=True) if rate is not None}
        found: dict[str, Any] = {}
        for group, rate in changing.items():
            number = {"learning_rate": float(rate(step))}
            found |= {group: number} if group else number
        return found

    @property
    def _groups(self) -> list[str]:
        """Returns the name of each leaf's group; empty for leaves with the model's optimizer, which is that of the first leaf."""
        pairs = [(optimizer.key, id(rate)) for optimizer, rate in zip(self.optimizers, self.rates, strict=True)]
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        return [f"group {numbers[pair]}" if numbers[pair] else "" for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One part of a transformation: the optax function that made it, its arguments, and its leaves."""

    name: str
    cells: Cells
    leaves: frozenset[int]


def recognize(transformation: Any, params: Any) -> Recognized:
    """Returns the servers' counterpart for these parameters. Raises InvalidSpec, which names the part, for an unknown transformation."""
    num_leaves = len(jax.tree_util.tree_leaves(params))
    stages = _stages(transformation, frozenset(range(num_leaves)), params)
    # Servers apply both limits before any optimizer, in this order.
    clip_value = clip_global_norm = None
    if [stage.name for stage in stages[:2]] == ["clip", "clip_by_global_norm"] and stages[0].leaves == stages[1].leaves:
        clip_value = float(stages[0].cells["max_delta"])
        stages = stages[1:]
    if stages and stages[0].name == "clip_by_global_norm" and len(stages[0].leaves) == num_leaves:
        clip_global_norm = float(stages[0].cells["max_norm"])
        stages = stages[1:]
    made: dict[tuple[int, ...], tuple[OptimizerSpec, Rate | None]] = {}
    of_leaves = []
    for leaf in range(num_leaves):
        own = tuple(index for index, stage in enumerate(stages) if leaf in stage.leaves)
        if own not in made:
            made[own] = _optimizer([stages[index] for index in own])
        of_leaves.append(made[own])
    return Recognized(
        optimizers=tuple(optimizer for optimizer, _ in of_leaves),
        rates=tuple(rate for _, rate in of_leaves),
        clip_value=clip_value,
        clip_global_norm=clip_global_norm,
    )


def _unknown(what: str) -> InvalidSpec:
    return InvalidSpec(
        f"optimizer: {what}, so the parameter servers cannot run it. Give what lockstep.adam() or another optimizer function returns, "
        "write it as a formula with lockstep.custom_optimizer(), or have each worker run it on its own gradients: "
        "lockstep.jax.local_updates(optimizer)"
    )


# Reading closures as a list of parts.


def _stages(transformation: Any, leaves: frozenset[int], params: Any) -> list[_Stage]:
    update, init = getattr(transformation, "update", None), getattr(transformation, "init", None)
    if not callable(update) or not callable(init):
        raise InvalidSpec(
            f"optimizer: got {transformation!r}, want an optax transformation such as optax.adam(1e-3), or what lockstep.adam() returns"
        )
    name, cells = _maker(update), _cells(update)
    if name.startswith("MultiSteps"):
        raise InvalidSpec(
            "optimizer: MultiSteps is not for the servers. Give the optimizer inside it, take the mean of the gradients of so many"
            " microbatches, and call step() once with that: this is the same"
        )
    if name == "with_extra_args_support":
        return _stages(cells["tx"], leaves, params)
    if name == "chain":
        pairs = zip(_cells(init)["init_fns"], cells["update_fns"], strict=True)
        return [stage for start, change in pairs for stage in _stages(_Pair(start, change), leaves, params)]
    if name == "masked":
        return _stages(cells["inner"], leaves & _masked(cells["mask"], params), params)
    if name in ("partition", "multi_transform"):
        labels = _labels(cells["param_labels"], params)
        found: list[_Stage] = []
        for label, inner in cells["transforms"].items():
            own = leaves & {leaf for leaf, other in enumerate(labels) if other == label}
            found += _stages(inner, own, params)
        return found
    if name == "identity":
        return []
    if name not in _PARTS and name not in _FACTORS:
        raise _unknown(f"its part {name or getattr(update, '__qualname__', repr(update))} is not known")
    return [_Stage(name=name, cells={**_cells(init), **cells}, leaves=leaves)]


@dataclass(frozen=True, slots=True)
class _Pair:
    init: Any
    update: Any


def _maker(function: Any) -> str:
    """Returns the optax function that made this closure; empty if it is not from optax."""
    if not str(getattr(function, "__module__", "")).startswith("optax."):
        return ""
    return str(getattr(function, "__qualname__", "")).partition(".<locals>")[0]


def _cells(function: Any) -> Cells:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure, strict=True)}


def _masked(mask: Any, params: Any) -> frozenset[int]:
    tree = mask(params) if callable(mask) else mask
    # A mask may end above the leaves; it then applies to all leaves below.
    spread = jax.tree_util.tree_map(lambda says, below: jax.tree_util.tree_map(lambda _: bool(says), below), tree, params)
    return frozenset(index for index, says in enumerate(jax.tree_util.tree_leaves(spread)) if says)


def _labels(labels: Any, params: Any) -> list[Any]:
    tree = labels(params) if callable(labels) else labels
    spread = jax.tree_util.tree_map(lambda label, below: jax.tree_util.tree_map(lambda _: label, below), tree, params)
    return [*jax.tree_util.tree_leaves(spread)]


# Making a formula of the parts.


@dataclass(slots=True)
class _Formula:
    """A formula under construction. `u` is the update so far, at first the gradient."""

    lines: list[str] = field(default_factory=lambda: ["u = g"])
    numbers: dict[str, float] = field(default_factory=dict)
    slots: dict[str, float] = field(default_factory=dict)

    def number(self, cells: Cells, name: str) -> str:
        """Adds a number of a part, and returns its name in the formula."""
        value = cells[name]
        if callable(value):
            raise _unknown(f"{name} is not a number but changes with the step")
        return self._add(self.numbers, name, float(value))

    def all_numbers(self, cells: Cells, *names: str) -> list[str]:
        """Adds numbers of a part, and returns their names in the formula."""
        return [self.number(cells, name) for name in names]

    def slot(self, name: str, first: float = 0.0) -> str:
        """Adds a slot, and returns its name in the formula."""
        return self._add(self.slots, name, first)

    def average(self, name: str, decay: str, of: str = "u", *, first: float = 0.0) -> str:
        """Adds a slot that is the moving average of a term, and returns its name in the formula."""
        slot = self.slot(name, first)
        self.do(f"{slot} = {decay} * {slot} + (1 - {decay}) * {of}")
        return slot

    def do(self, *lines: str) -> None:
        self.lines += lines

    def _add(self, store: dict[str, float], name: str, value: float) -> str:
        free = name
        while free in self.numbers or free in self.slots:
            head, _, tail = free.rpartition("_")
            free = f"{head}_{int(tail) + 1}" if tail.isdigit() and head else f"{free}_2"
        store[free] = value
        return free


def _optimizer(stages: Sequence[_Stage]) -> tuple[OptimizerSpec, Rate | None]:
    """Returns one leaf's optimizer, and its schedule if it has one."""
    if [stage.name for stage in stages if stage.name not in _FACTORS][-1:] == ["set_to_zero"]:
        return sgd(0.0), None
    of_schedule = [index for index, stage in enumerate(stages) if stage.name == "scale_by_schedule"]
    of_number = [index for index, stage in enumerate(stages) if stage.name == "scale"]
    if len(of_schedule) > 1:
        raise _unknown("it has more than one schedule")
    # Of several factors, the last one is the learning rate, by optax's convention.
    rate_at = of_schedule[0] if of_schedule else of_number[-1] if of_number else None
    formula = _Formula()
    rate = 1.0
    schedule: Rate | None = None
    for index, stage in enumerate(stages):
        if stage.name == "scale_by_schedule":
            schedule, sign = _schedule(stage.cells)
            rate = float(schedule(0))
            formula.do(f"u = {sign}lr * u")
        elif stage.name == "scale" and index == rate_at:
            step_size = float(stage.cells["step_size"])
            rate = abs(step_size)
            formula.do(f"u = {'-' if step_size < 0 else ''}lr * u")
        elif stage.name == "scale":
            formula.do(f"u = {formula.number(stage.cells, 'step_size')} * u")
        else:
            _PARTS[stage.name](formula, stage.cells)
    formula.do("v = v + u" if rate_at is not None else "v = v + lr * u")
    title = ", ".join(stage.name for stage in stages if stage.name not in _FACTORS) or "sgd"
    return custom_optimizer("\n".join([f"# optax {title}", *formula.lines]), rate, slots=formula.slots, **formula.numbers), schedule


def _schedule(cells: Cells) -> tuple[Rate, str]:
    """Returns the learning rate, which must not be negative on servers, and the sign for the formula."""
    step_size = cells["step_size_fn"]
    inner = _cells(step_size)
    if _maker(step_size) == "scale_by_learning_rate" and "learning_rate" in inner:
        return inner["learning_rate"], "-" if inner.get("m", -1) < 0 else ""
    # The program's own schedule, from `scale_by_schedule`. If its sign changes later, the step with the changed number is refused.
    first = next((factor for step in range(_MAX_STEPS_TO_SIGN) if (factor := float(step_size(step)))), 0.0)
    return (lambda step: -step_size(step), "-") if first < 0 else (step_size, "")


def _refuse_types(cells: Cells, *names: str) -> None:
    for name in names:
        if cells.get(name) is not None:
            raise _unknown(f"it keeps a moment in a type of its own ({name}={cells[name]})")


def _adam(formula: _Formula, cells: Cells) -> None:
    _refuse_types(cells, "mu_dtype")
    b1, b2, eps = formula.all_numbers(cells, "b1", "b2", "eps")
    mu, nu = formula.average("mu", b1), formula.average("nu", b2, "u * u")
    mean = f"{mu} / (1 - {b1} ** t)"
    if cells["nesterov"]:
        mean = f"({b1} * {mu} / (1 - {b1} ** t * {b1}) + (1 - {b1}) * u / (1 - {b1} ** t))"
    formula.do(f"u = {mean} / (sqrt({nu} / (1 - {b2} ** t){_plus_eps_root(formula, cells)}) + {eps})")


def _plus_eps_root(formula: _Formula, cells: Cells) -> str:
    return f" + {formula.number(cells, 'eps_root')}" if float(cells["eps_root"]) else ""


def _amsgrad(formula: _Formula, cells: Cells) -> None:
    _refuse_types(cells, "mu_dtype")
    b1, b2, eps = formula.all_numbers(cells, "b1", "b2", "eps")
    mu, nu, nu_max = formula.average("mu", b1), formula.average("nu", b2, "u * u"), formula.slot("nu_max")
    mean = f"{mu} / (1 - {b1} ** t)" if cells.get("bias_correction_mu", True) else mu
    square = f"{nu} / (1 - {b2} ** t)" if cells.get("bias_correction_nu", True) else nu
    formula.do(
        f"{nu_max} = max({nu_max}, {square})",
        f"u = {mean} / (sqrt({nu_max}{_plus_eps_root(formula, cells)}) + {eps})",
    )


def _belief(formula: _Formula, cells: Cells) -> None:
    if cells.get("nesterov"):
        raise _unknown("adabelief with nesterov is not known")
    b1, b2, eps = formula.all_numbers(cells, "b1", "b2", "eps")
    mu = formula.average("mu", b1)
    nu = formula.average("nu", b2, f"(u - {mu}) * (u - {mu}){_plus_eps_root(formula, cells)}")
    formula.do(f"u = {mu} / (1 - {b1} ** t) / (sqrt({nu} / (1 - {b2} ** t)) + {eps})")


def _adamax(formula: _Formula, cells: Cells) -> None:
    b1, b2, eps = formula.all_numbers(cells, "b1", "b2", "eps")
    mu, nu = formula.average("mu", b1), formula.slot("nu")
    formula.do(f"{nu} = max(abs(u) + {eps}, {b2} * {nu})", f"u = {mu} / (1 - {b1} ** t) / {nu}")


def _lion(formula: _Formula, cells: Cells) -> None:
    _refuse_types(cells, "mu_dtype")
    if cells.get("mode", "hard") != "hard":
        raise _unknown(f"lion with mode={cells['mode']!r} is not known")
    b1, b2 = formula.all_numbers(cells, "b1", "b2")
    mu = formula.slot("mu")
    formula.do(f"d = {b2} * {mu} + (1 - {b2}) * u", f"u = sign((1 - {b1}) * u + {b1} * {mu})", f"{mu} = d")


def _trace(formula: _Formula, cells: Cells) -> None:
    _refuse_types(cells, "accumulator_dtype")
    decay, trace = formula.number(cells, "decay"), formula.slot("trace")
    formula.do(f"{trace} = u + {decay} * {trace}", f"u = u + {decay} * {trace}" if cells["nesterov"] else f"u = {trace}")


def _ema(formula: _Formula, cells: Cells) -> None:
    _refuse_types(cells, "accumulator_dtype")
    decay = formula.number(cells, "decay")
    ema = formula.average("ema", decay)
    formula.do(f"u = {ema} / (1 - {decay} ** t)" if cells["debias"] else f"u = {ema}")


def _rms(formula: _Formula, cells: Cells, *, centered: bool = False) -> None:
    decay, eps = formula.all_numbers(cells, "decay", "eps")
    corrected = f" / (1 - {decay} ** t)" if cells.get("bias_correction") else ""
    nu = formula.average("nu", decay, "u * u", first=float(cells["initial_scale"]))
    square = f"{nu}{corrected}"
    if centered:
        mean = f"({formula.average('mu', decay)}{corrected})"
        square = f"{square} - {mean} * {mean}"
    formula.do(f"u = u / sqrt({square} + {eps})" if cells.get("eps_in_sqrt", True) else f"u = u / (sqrt({square}) + {eps})")


def _stddev(formula: _Formula, cells: Cells) -> None:
    _rms(formula, cells, centered=True)


def _rss(formula: _Formula, cells: Cells) -> None:
    eps, total = formula.number(cells, "eps"), formula.slot("sum_of_squares", float(cells["initial_accumulator_value"]))
    formula.do(f"{total} = u * u + {total}", f"u = where({total} > 0, u / sqrt({total} + {eps}), 0 * u)")


def _adadelta(formula: _Formula, cells: Cells) -> None:
    rho, eps = formula.all_numbers(cells, "rho", "eps")
    e_g, e_x = formula.average("e_g", rho, "u * u"), formula.slot("e_x")
    formula.do(
        f"u = sqrt({e_x} + {eps}) / sqrt({e_g} + {eps}) * u",
        f"{e_x} = {rho} * {e_x} + (1 - {rho}) * u * u",
    )


def _decayed_weights(formula: _Formula, cells: Cells) -> None:
    if callable(cells["weight_decay"]) or float(cells["weight_decay"]):
        formula.do(f"u = u + {formula.number(cells, 'weight_decay')} * v")


def _trust_ratio(formula: _Formula, cells: Cells) -> None:
    if float(cells["min_norm"]):
        raise _unknown("a trust ratio with min_norm is not known")
    factor, eps = formula.all_numbers(cells, "trust_coefficient", "eps")
    formula.do(f"u = u * where(norm(v) > 0, where(norm(u) > 0, {factor} * norm(v) / (norm(u) + {eps}), 1), 1)")


def _clip(formula: _Formula, cells: Cells) -> None:
    limit = formula.number(cells, "max_delta")
    formula.do(f"u = clip(u, -{limit}, {limit})")


def _clip_by_global_norm(formula: _Formula, cells: Cells) -> None:
    raise _unknown("it has clip_by_global_norm elsewhere than first, where it does not limit the gradient")


def _sign(formula: _Formula, cells: Cells) -> None:
    formula.do("u = sign(u)")


def _set_to_zero(formula: _Formula, cells: Cells) -> None:
    formula.do("u = 0 * u")


# The most steps to search for the sign: warm-ups may begin with 0.
_MAX_STEPS_TO_SIGN = 10
# Translations by the optax function that makes the part. The learning rate is one of the factors.
_FACTORS = ("scale", "scale_by_schedule")
_PARTS: Mapping[str, Callable[[_Formula, Cells], None]] = {
    "scale_by_adam": _adam,
    "scale_by_amsgrad": _amsgrad,
    "scale_by_belief": _belief,
    "scale_by_adamax": _adamax,
    "scale_by_lion": _lion,
    "scale_by_rms": _rms,
    "scale_by_stddev": _stddev,
    "scale_by_rss": _rss,
    "scale_by_adadelta": _adadelta,
    "scale_by_trust_ratio": _trust_ratio,
    "scale_by_sign": _sign,
    "add_decayed_weights": _decayed_weights,
    "trace": _trace,
    "ema": _ema,
    "clip": _clip,
    "clip_by_global_norm": _clip_by_global_norm,
    "set_to_zero": _set_to_zero,
}
