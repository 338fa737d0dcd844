"""Which optimizers and learning-rate schedules exist, their arguments, defaults and limits. Knows no formula: the servers have those."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.errors import InvalidSpec

# Hyper-parameter -> (default, lowest allowed value, whether that value itself is allowed, highest allowed value)
_Domain = tuple[float, float, bool, float]
_FLAG: _Domain = (0.0, 0.0, True, 1.0)

OPTIMIZERS: dict[str, dict[str, _Domain]] = {
    "sgd": {},
    "momentum": {"momentum": (0.9, 0.0, True, math.inf), "use_nesterov": _FLAG},
    "adagrad": {"initial_accumulator_value": (0.1, 0.0, False, math.inf)},
    "adam": {
        "beta1": (0.9, 0.0, True, 1.0),
        "beta2": (0.999, 0.0, True, 1.0),
        "epsilon": (1e-8, 0.0, True, math.inf),
    },
}

# Schedule -> names of its scalar arguments that must be given, and of those that may be, with defaults.
SCHEDULES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "piecewise_constant": ((), {}),
    "exponential_decay": (("initial", "decay_steps", "decay_rate"), {"staircase": 0.0}),
    "inverse_time_decay": (("initial", "decay_steps", "decay_rate"), {"staircase": 0.0}),
    "polynomial_decay": (("initial", "decay_steps"), {"final": 0.0001, "power": 1.0, "cycle": 0.0}),
    "cosine_decay": (("initial", "decay_steps"), {"alpha": 0.0}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A learning rate as a function of the step."""

    name: str
    arguments: Mapping[str, float] = field(default_factory=dict)
    boundaries: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise InvalidSpec(f"schedule {self.name!r}; want {_known(self.name, SCHEDULES)}")
        required, optional = SCHEDULES[self.name]
        for key, value in self.arguments.items():
            if key not in required and key not in optional:
                raise InvalidSpec(f"schedule {self.name!r}: unknown argument {key!r}; want {_known(key, (*required, *optional))}")
            _check_number(f"schedule {self.name!r}: {key}", value)
        for key in required:
            if key not in self.arguments:
                raise InvalidSpec(f"schedule {self.name!r}: argument {key!r} is missing")
        if self.arguments.get("decay_steps", 1.0) <= 0:
            raise InvalidSpec(f"schedule {self.name!r}: decay_steps = {self.arguments['decay_steps']}, want > 0")
        self._check_pieces()

    def _check_pieces(self) -> None:
        if self.name != "piecewise_constant":
            if self.boundaries or self.values:
                raise InvalidSpec(f"schedule {self.name!r} takes no boundaries and no values")
            return
        if len(self.values) != len(self.boundaries) + 1:
            raise InvalidSpec(f"schedule 'piecewise_constant': {len(self.boundaries)} boundaries want {len(self.boundaries) + 1} values, got {len(self.values)}")
        if list(self.boundaries) != sorted(self.boundaries):
            raise InvalidSpec("schedule 'piecewise_constant': boundaries must ascend")
        for value in (*self.boundaries, *self.values):
            _check_number("schedule 'piecewise_constant': a boundary or value", value)

    def argument(self, name: str) -> float:
        """Returns an argument, or its default."""
        return self.arguments[name] if name in self.arguments else SCHEDULES[self.name][1][name]


def constant(value: float) -> Schedule:
    """Returns the schedule that is `value` at every step."""
    return Schedule(name="constant", arguments={"value": value})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer by name with its hyper-parameters; checked against the table above. Truth values are 0.0 and 1.0."""

    name: str
    learning_rate: Schedule
    hyperparameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise InvalidSpec(f"optimizer {self.name!r}; want {_known(self.name, OPTIMIZERS)}")
        domains = OPTIMIZERS[self.name]
        for key, value in self.hyperparameters.items():
            if key not in domains:
                raise InvalidSpec(f"optimizer {self.name!r}: unknown hyper-parameter {key!r}; want {_known(key, domains) or 'none'}")
            _check_number(f"optimizer {self.name!r}: {key}", value)
            _, lowest, is_allowed, highest = domains[key]
            if value < lowest or value > highest or (value == lowest and not is_allowed):
                raise InvalidSpec(f"optimizer {self.name!r}: {key} = {value}, want {'>=' if is_allowed else '>'} {lowest:g}" + (f" and <= {highest:g}" if math.isfinite(highest) else ""))
            if domains[key] is _FLAG and value not in (0.0, 1.0):
                raise InvalidSpec(f"optimizer {self.name!r}: {key} = {value}, want 0 or 1")
        for value in self._rates():
            if value < 0:
                raise InvalidSpec(f"optimizer {self.name!r}: learning_rate = {value}, want >= 0")

    def _rates(self) -> tuple[float, ...]:
        schedule = self.learning_rate
        return (*schedule.values, *(value for key, value in schedule.arguments.items() if key in ("value", "initial", "final")))

    def hyperparameter(self, name: str) -> float:
        """Returns a hyper-parameter, or its default."""
        return self.hyperparameters[name] if name in self.hyperparameters else OPTIMIZERS[self.name][name][0]


def _check_number(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidSpec(f"{what} = {value!r}, want a finite number")


def _known(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"one of {', '.join(known)}; did you mean {close[0]!r}?" if close else ", ".join(known)
