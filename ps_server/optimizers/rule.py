"""An optimizer with its schedule, powers and weight decay, step after step; and the rules of a shard. Knows blocks; no variable, no lock.

Several variables share a rule, dense ones and tables; each step begins it once, applies it to any number of blocks, and advances it once.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizer_formulas import OptimizerFormula
from ps_protocol.model.optimizers import INITIAL_HYPERPARAMETERS, PHASE, RATE, OptimizerSpec, Schedule, StepHyperparameter
from ps_protocol.model.programs import Numbers
from ps_protocol.model.variables import Array
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import ShardSettings, ShardSpec
from ps_protocol.shared_memory.words import PushMode

# The least number of blocks of scratch memory. The last one is for what is added to the gradient.
NUM_SCRATCH = 4

# Learning-rate schedules, evaluated at a step.
#
# The formulas are those of tf.compat.v1.train: exponential_decay, inverse_time_decay, polynomial_decay, cosine_decay
# (keras/optimizers/legacy_learning_rate_decay.py, learning_rate_schedule.py) and piecewise_constant, in double precision. The step is the
# one whose gradients are applied, that is global_step before it rises. What has no finite value is inf or nan, never an exception.


def learning_rate(schedule: Schedule, *, step: int) -> float:
    """Returns the learning rate of `step`."""
    with np.errstate(all="ignore"):
        return _FORMULAS[schedule.name](schedule, np.float64(step))


def _constant(schedule: Schedule, step: np.float64) -> float:
    return schedule.argument("value")


def _piecewise_constant(schedule: Schedule, step: np.float64) -> float:
    # A boundary itself still belongs to the piece before it.
    return schedule.values[bisect_left(schedule.boundaries, float(step))]


def _exponential_decay(schedule: Schedule, step: np.float64) -> float:
    return float(schedule.argument("initial") * np.float64(schedule.argument("decay_rate")) ** _periods(schedule, step))


def _inverse_time_decay(schedule: Schedule, step: np.float64) -> float:
    return float(schedule.argument("initial") / (1.0 + schedule.argument("decay_rate") * _periods(schedule, step)))


def _periods(schedule: Schedule, step: np.float64) -> np.float64:
    periods = step / schedule.argument("decay_steps")
    return np.floor(periods) if schedule.argument("staircase") else periods


def _polynomial_decay(schedule: Schedule, step: np.float64) -> float:
    initial, final = schedule.argument("initial"), schedule.argument("final")
    decay_steps = schedule.argument("decay_steps")
    if schedule.argument("cycle"):
        # The first step that is a multiple of decay_steps: the rate falls to `final` at each of them.
        decay_steps *= max(1.0, np.ceil(step / decay_steps))
    fraction = np.minimum(step, decay_steps) / decay_steps
    return float((initial - final) * (1.0 - fraction) ** schedule.argument("power") + final)


def _cosine_decay(schedule: Schedule, step: np.float64) -> float:
    decay_steps, alpha = schedule.argument("decay_steps"), schedule.argument("alpha")
    cosine = 0.5 * (1.0 + np.cos(np.pi * np.minimum(step, decay_steps) / decay_steps))
    return float(schedule.argument("initial") * ((1.0 - alpha) * cosine + alpha))


_FORMULAS: dict[str, Callable[[Schedule, np.float64], float]] = {
    "constant": _constant,
    "piecewise_constant": _piecewise_constant,
    "exponential_decay": _exponential_decay,
    "inverse_time_decay": _inverse_time_decay,
    "polynomial_decay": _polynomial_decay,
    "cosine_decay": _cosine_decay,
}


# One rule of a shard: an optimizer with its learning rate, powers and weight decay.


class _Moment:
    """The numbers of one step. Replaced as a whole, so that an apply in another thread sees the numbers of one step."""

    def __init__(
        self, formula: OptimizerFormula, *, rate: float, powers: tuple[float, ...], step: int, weight_decay: float, l2: float
    ) -> None:
        self.formula = formula
        self.has_weight_decay, self.has_l2 = bool(weight_decay), bool(l2)
        self._rate, self._powers, self._step = rate, powers, step
        self._weight_decay, self._l2 = weight_decay, l2
        self.known: dict[np.dtype[Any], tuple[Numbers, np.floating[Any], np.floating[Any]]] = {}  # what `constants` has returned

    def is_as(self, formula: OptimizerFormula, *, rate: float, powers: tuple[float, ...]) -> bool:
        """Whether all numbers of another step of the same specification are these."""
        return formula is self.formula and not formula.uses_step and rate == self._rate and powers == self._powers

    def constants(self, dtype: np.dtype[Any]) -> tuple[Numbers, "np.floating[Any]", "np.floating[Any]"]:
        """Returns the formula's numbers, lr * weight decay, and l2."""
        if dtype not in self.known:
            with np.errstate(all="ignore"):
                numbers = self.formula.numbers(self._rate, self._powers, self._step, dtype)
                self.known[dtype] = numbers, dtype.type(self._rate * self._weight_decay), dtype.type(self._l2)
        return self.known[dtype]


class Measuring:
    """One variable's step by a rule with sums or norms over it: all its blocks are measured, as often as it takes, and then applied.

    For one thread.
    """

    def __init__(self, formula: OptimizerFormula, numbers: Numbers, dtype: np.dtype[Any]) -> None:
        self._program, self._numbers, self._number = formula.program, numbers, formula.number(dtype)
        self._num_passes = 0
        self._totals: list[float] = []

    @property
    def is_under_way(self) -> bool:
        """Whether the next pass over the blocks measures; otherwise it applies."""
        return self._num_passes < self._program.num_passes

    def step(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], squares: Array) -> bool:
        """Measures a block, or applies the step to it as `UpdateRule.apply` does; returns whether it was applied.

        `squares` is scratch memory for as many float64.
        """
        if not self.is_under_way:
            self._program.run((value, gradient, *slots), (out,), scratch, self._numbers)
            return True
        sums = self._program.measure(self._num_passes, (value, gradient, *slots), scratch, squares, self._numbers)
        self._totals = [total + part for total, part in zip(self._totals or [0.0] * len(sums), sums, strict=True)]
        return False

    def conclude(self) -> None:
        """Ends a pass: its sums are known from now on."""
        self._numbers = self._program.conclude(self._num_passes, self._totals, self._numbers, self._number)
        self._num_passes += 1
        self._totals = []


class UpdateRule:
    """Applies an optimizer by `spec`. `begin`, `advance` and `change` are for one thread at a time; `apply` may run in several."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._take(spec)
        self._powers = self._formula.initial_powers()
        self._slots = spec.slots
        # Hyper-parameters of a step, in place of the specification's.
        self._own_rate: float | None = None
        self._own_numbers: Mapping[str, float] = {}
        self._begun: int | None = None
        self._moment = self._at(0)

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer with its present numbers."""
        return self._spec

    @property
    def slots(self) -> Mapping[str, float]:
        """Names of the slots, sorted, and the value that each starts with."""
        return self._slots

    @property
    def is_lazy(self) -> bool:
        """Whether the rows of a table that no gradient touches stay as they are, with their slots."""
        return self._spec.is_lazy

    @property
    def num_scratch(self) -> int:
        """How many blocks of scratch memory `apply` needs; at least NUM_SCRATCH."""
        return max(NUM_SCRATCH, self._formula.program.num_scratch)

    @property
    def needs_whole_variables(self) -> bool:
        """Whether a variable's blocks are measured before they are applied; see `measuring`."""
        return bool(self._formula.program.num_passes)

    @property
    def sums(self) -> bool:
        """Whether the optimizer needs the sum of the contributions, not their mean."""
        return self._spec.kind.sums

    def begin(self, step: int) -> None:
        """Makes the numbers of the step whose gradients are applied next. Repeated for the same step, it has no effect."""
        if self._begun != step:
            rate = self._rate_of(step)
            if not self._moment.is_as(self._formula, rate=rate, powers=self._powers):
                self._moment = self._at(step)
            self._begun = step

    def use(self, numbers: Mapping[str, float]) -> None:
        """Has the steps that are begun from now on use these numbers in place of the specification's, and no others. Raises InvalidSpec."""
        others = {name: value for name, value in numbers.items() if name != RATE}
        if others != self._own_numbers:
            self._take(self._spec, others)
            self._own_numbers = others
        self._own_rate = self._formula.rounded(numbers[RATE]) if RATE in numbers else None
        self._begun = None

    def apply(self, value: Array, *, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array]) -> None:
        """Writes the next values of a block to `out`, and those of the slots in place.

        All arrays are one-dimensional, contiguous, of one length, and of `sum_dtype`, which is computed in. `slots` has the order of
        their names; `scratch` has at least NUM_SCRATCH blocks; no two arrays share memory; `value` and `gradient` stay as they are.
        Infinities and nan go where the formula takes them; a caller that wants no warnings of them says so by np.errstate.
        """
        moment = self._moment
        numbers, decay, l2 = moment.known.get(value.dtype) or moment.constants(value.dtype)
        if moment.has_l2:
            penalty = scratch[NUM_SCRATCH - 1]
            np.multiply(value, l2, out=penalty)
            gradient = np.add(gradient, penalty, out=penalty)
        moment.formula.program.run((value, gradient, *slots), (out,), scratch, numbers)
        if moment.has_weight_decay:
            np.multiply(value, decay, out=scratch[0])
            np.subtract(out, scratch[0], out=out)

    def measuring(self, dtype: np.dtype[Any]) -> "Measuring":
        """Returns the object that applies the step to one variable whose formula needs all of its elements first."""
        moment = self._moment
        return Measuring(moment.formula, moment.constants(dtype)[0], dtype)

    def advance(self) -> None:
        """Ends a step: the powers of the optimizer's decays move on."""
        self._powers = self._formula.next_powers(self._powers)
        self._begun = None

    @property
    def powers(self) -> tuple[float, ...]:
        """Powers of the optimizer's decays that the next step needs; float32 numbers, where the optimizer is TensorFlow's."""
        return self._powers

    def resume(self, powers: Sequence[float]) -> None:
        """Goes on from a result of `powers`. Raises InvalidSpec for another number of them than the optimizer has."""
        if len(powers) != len(self._powers):
            raise InvalidSpec(f"optimizer {self._spec.name!r}: {len(powers)} powers of its decays, want {len(self._powers)}")
        self._powers = tuple(self._formula.rounded(power) for power in powers)
        self._begun = None

    def restart(self) -> None:
        """Begins with the powers of a new optimizer; the caller gives the slots their first values."""
        self._powers = self._formula.initial_powers()
        self._begun = None

    def change(self, spec: OptimizerSpec) -> None:
        """Goes on with other numbers, from the next `begin`; powers and slots stay.

        Raises InvalidSpec for another optimizer, or another value of an argument that only counts when the model is created.
        """
        if spec.name != self._spec.name:
            raise InvalidSpec(f"optimizer {self._spec.name!r} cannot become {spec.name!r}: it has other slots; create a new model")
        if (spec.formula, spec.slot_values) != (self._spec.formula, self._spec.slot_values):
            raise InvalidSpec(f"optimizer {spec.name!r}: its formula and slots cannot change; create a new model")
        for name in sorted(INITIAL_HYPERPARAMETERS & spec.kind.hyperparameters.keys()):
            if spec.hyperparameter(name) != self._spec.hyperparameter(name):
                raise InvalidSpec(f"optimizer {spec.name!r}: {name} only counts when the model is created; it cannot change any more")
        self._take(spec)
        self._own_rate, self._own_numbers = None, {}
        self._begun = None

    def _take(self, spec: OptimizerSpec, others: Mapping[str, float] | None = None) -> None:
        with_others = replace(spec, hyperparameters={**spec.hyperparameters, **others}) if others else spec
        self._spec, self._formula = spec, OptimizerFormula(with_others)
        self._weight_decay, self._l2 = (_beside_the_formula(with_others, name) for name in ("weight_decay", "l2"))
        self._rate = self._rate_at(0) if spec.learning_rate.name == "constant" else None

    def _rate_at(self, step: int) -> float:
        return self._formula.rounded(learning_rate(self._spec.learning_rate, step=step))

    def _rate_of(self, step: int) -> float:
        rate = self._rate if self._own_rate is None else self._own_rate
        return self._rate_at(step) if rate is None else rate

    def _at(self, step: int) -> _Moment:
        rate = self._rate_of(step)
        return _Moment(self._formula, rate=rate, powers=self._powers, step=step, weight_decay=self._weight_decay, l2=self._l2)


def _beside_the_formula(spec: OptimizerSpec, name: str) -> float:
    """Returns a decay that means the same to all optimizers of TensorFlow; 0 for the others, whose formulas have their own."""
    return spec.hyperparameter(name) if spec.kind.is_single else 0.0


# How a shard works at present: its update rules with their numbers, and its mode.


class RuleSettings:
    """The rules of a layout, in the order of `layout.rules`, and the settings in force."""

    def __init__(self, spec: ShardSpec) -> None:
        self._needs_norms = spec.clip.needs_norms
        self._originals: tuple[OptimizerSpec, ...] = tuple(optimizer or spec.optimizer for optimizer in spec.layout.rules)
        self.rules: Sequence[UpdateRule] = [UpdateRule(optimizer) for optimizer in self._originals]
        # By their names in contributions; None: contributions cannot change them.
        self._groups = ["" if own is None else own.group or None for own in spec.layout.rules]
        self._given: tuple[StepHyperparameter, ...] = ()
        self.current = ShardSettings(fence=NOBODY, version=0)
        # The present phase of training, and its first step: rules count steps from there.
        self.phase = self.phase_step = 0
        self._given_phase = 0

    def is_news(self, settings: ShardSettings) -> bool:
        """Whether they are newer than those in force: of a later epoch or chief, or of the same one with a higher version."""
        return _age(settings) > _age(self.current)

    def change(self, settings: ShardSettings) -> None:
        """Puts settings in force, all or nothing; raises InvalidSpec."""
        if settings.applies_on_arrival and self._needs_norms:
            raise InvalidSpec("applies_on_arrival: a limit on the norm needs the mean over all shards; use locking, or take the limit away")
        changes = {original.key: current for original, current in settings.optimizers}
        specs = [changes.get(original.key, original) for original in self._originals]
        before = [rule.spec for rule in self.rules]
        try:
            for rule, spec in zip(self.rules, specs, strict=True):
                rule.change(spec)
        except InvalidSpec:
            for rule, spec in zip(self.rules, before, strict=True):
                rule.change(spec)
            raise
        self.current, self._given, self._given_phase = settings, (), 0

    def begin(self, step: int, given: tuple[StepHyperparameter, ...] = ()) -> None:
        """Makes the rules' numbers for a step; `given`: hyper-parameters for it in place of the settings. Raises InvalidSpec."""
        if given != self._given:
            self._use(given)
        for rule in self.rules:
            rule.begin(step - self.phase_step)

    def begin_phase(self, step: int) -> bool:
        """Begins the phase of training that the step's numbers name, after `begin`; False: the step is of no later phase."""
        if self._given_phase <= self.phase:
            return False
        self.resume_phase(self._given_phase, step)
        for rule in self.rules:
            rule.restart()
            rule.begin(0)
        return True

    def resume_phase(self, phase: int, first_step: int) -> None:
        """Continues in a phase of training that began with this step."""
        self.phase, self.phase_step = phase, first_step

    def _use(self, given: tuple[StepHyperparameter, ...]) -> None:
        by_group: dict[str | None, dict[str, float]] = {}
        phase = 0
        for one in given:
            if one.name == PHASE:
                phase = int(one.value)
            else:
                by_group.setdefault(one.group, {})[one.name] = one.value
        for rule, group in zip(self.rules, self._groups, strict=True):
            rule.use(by_group.get(group, {}))
        self._given, self._given_phase = given, phase

    def advance(self) -> None:
        """Ends a step for all rules, also for those without a gradient."""
        for rule in self.rules:
            rule.advance()


def _age(settings: ShardSettings) -> tuple[int, int, int]:
    return settings.fence.epoch, settings.fence.chief_incarnation, settings.version


def push_mode(settings: ShardSettings) -> PushMode:
    """Returns what workers that share memory may do without a call."""
    if settings.applies_on_arrival:
        return PushMode.BY_CALL
    return PushMode.ANY_STEP if settings.accepts_stale else PushMode.OPEN_STEP_ONLY
