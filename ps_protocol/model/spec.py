"""A model as all workers must present it, and where its rows lie: variables, optimizers, averages, clipping, placement.

Knows no address and no value.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ps_protocol.errors import InvalidSpec, LimitExceeded, ModelMismatch
from ps_protocol.model.differences import differences
from ps_protocol.model.layout import Layout, VariableSlice, check_disjoint
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MergeName, MergeSpec
from ps_protocol.model.optimizers import PHASE, RATE, OptimizerSpec, StepHyperparameter
from ps_protocol.model.shown import shown
from ps_protocol.model.variables import MAX_VARIABLES, Partition, VariableSpec

# Moving averages of variables, as the servers keep them: which, and by what decay.
#
# Source: tf.compat.v1.train.ExponentialMovingAverage.


# The averages are read like an optimizer's slot, under this name.
AVERAGE_SLOT = "ExponentialMovingAverage"


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSpec:
    """average -= (1 - decay) * (average - variable), after each step, for `variables` (empty: all dense ones that take gradients).

    `use_num_updates`: the decay is min(decay, (1 + n) / (10 + n)), where n is the step after the update. `zero_debias`: the average starts
    from 0 and is divided by 1 - the product of the decays, instead of starting from the variable's first value.
    """

    decay: float
    use_num_updates: bool = False
    zero_debias: bool = False
    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 <= self.decay <= 1:
            raise InvalidSpec(f"averages: decay = {shown(self.decay)}, want 0 to 1")
        if len(set(self.variables)) < len(self.variables):
            raise InvalidSpec("averages: a variable occurs twice; name each once")

    def decay_at(self, num_updates: int) -> float:
        """Returns the decay of the update after which the step is `num_updates`."""
        return min(self.decay, (1 + num_updates) / (10 + num_updates)) if self.use_num_updates else self.decay


# Limits on the mean gradient of a step, and merging by norms, over all shards: what is asked for, and the factors that follow from norms.
#
# Sources: tf.clip_by_value, tf.clip_by_norm, tf.clip_by_global_norm, and those of `MergeName`. Norms are of the mean that the optimizer
# would get, so shards first report sums of squares, slice by slice, and then apply with the factors that follow from all of them.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec:
    """Limits; 0 is none. First every element to -value … value, then every variable to `norm`, then all together to `global_norm`."""

    value: float = 0.0
    norm: float = 0.0
    global_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("value", "norm", "global_norm"):
            limit = getattr(self, name)
            try:
                is_limit = 0 <= limit <= sys.float_info.max
            except (TypeError, ValueError):
                is_limit = False
            if not is_limit:
                raise InvalidSpec(f"clip: {name} = {shown(limit)}, want a finite number > 0, or 0 for no limit")

    @property
    def needs_norms(self) -> bool:
        """Whether shards must report sums of squares before a step is applied."""
        return bool(self.norm or self.global_norm)


NO_CLIP = ClipSpec()


def shares(
    merge: MergeSpec, *, layouts: Sequence[Layout], sums: Sequence[Sequence[float]], weights: Sequence[float]
) -> tuple[tuple[tuple[float, ...], ...], dict[str, float]]:
    """Returns what a merge by norms makes of the norms of each contribution: factors, and the norms to scale the mean of variables to.

    `sums` are, for each shard and each contribution in turn, the sums of squares of first `layout.slices`, then `layout.tables`, -1 where
    it has no gradient; the factors are in the same arrangement. `weights`: of all contributions. Formulas: `MergeName`.
    """
    squares: dict[str, dict[int, float]] = {}
    for layout, shard_sums in zip(layouts, sums, strict=True):
        pieces = (*layout.slices, *layout.tables)
        for position, square in enumerate(shard_sums):
            piece, contribution = pieces[position % len(pieces)], position // len(pieces)
            if not square < 0 and not _is_update(piece):
                of = squares.setdefault(piece.variable.name, {})
                of[contribution] = of.get(contribution, 0.0) + square
    factors: dict[str, dict[int, float]] = {}
    wanted: dict[str, float] = {}
    if merge.name is MergeName.BOUNDED_MEAN:
        given = sorted({one for of in squares.values() for one in of})
        totals = {one: math.sqrt(_total(of[one] for of in squares.values() if one in of)) for one in given}
        bounded = {one: _within(norm, merge, [other for it, other in totals.items() if it != one]) for one, norm in totals.items()}
        factors = dict.fromkeys(squares, bounded)
    else:
        for name, of in squares.items():
            norms = {one: math.sqrt(square) for one, square in of.items()}
            wanted[name] = _total(weights[one] * norm for one, norm in norms.items()) / _total(weights[one] for one in norms)
            # Of this norm, so that no unit vector is too small or large for its type.
            factors[name] = {one: _ratio(wanted[name], norm) for one, norm in norms.items()}
    names = [[piece.variable.name for piece in (*layout.slices, *layout.tables)] for layout in layouts]
    by_shard = (tuple(factors.get(name, {}).get(one, 1.0) for one in range(len(weights)) for name in of) for of in names)
    return tuple(by_shard), wanted


def _within(norm: float, merge: MergeSpec, others: Sequence[float]) -> float:
    limit = merge.number * statistics.median(finite) if (finite := [one for one in others if math.isfinite(one)]) else math.inf
    return limit / norm if norm > limit else 1.0


def _ratio(wanted: float, norm: float) -> float:
    if not math.isfinite(norm):
        return math.nan
    return wanted / norm if norm else 0.0


def scales(
    clip: ClipSpec, *, layouts: Sequence[Layout], sums: Sequence[Sequence[float]], norms: Mapping[str, float] = MappingProxyType({})
) -> tuple[tuple[float, ...], ...]:
    """Returns, for each shard, the factor of each of its slices: first `layout.slices`, then `layout.tables`.

    `sums` are the sums of squares in the same arrangement, after clipping by value. `norms`: what the mean of a variable is scaled to
    before it is clipped, by name, as `shares` gives them; the others stay as they are. Slices of one variable have one factor. A norm that
    is not finite gives nan: such a step must show in the values, as in the original. Plain updates (not gradients) have 0 and get 1.
    """
    by_variable: dict[str, float] = {}
    for layout, shard_sums in zip(layouts, sums, strict=True):
        for piece, square in zip((*layout.slices, *layout.tables), shard_sums, strict=True):
            by_variable[piece.variable.name] = by_variable.get(piece.variable.name, 0.0) + square
    radial = {name: _ratio(norms[name], math.sqrt(square)) if name in norms else 1.0 for name, square in by_variable.items()}
    by_variable = {name: square * radial[name] ** 2 for name, square in by_variable.items()}
    factors = {name: _factor(math.sqrt(square), clip.norm) for name, square in by_variable.items()}
    total = math.sqrt(_total(square * factors[name] ** 2 for name, square in by_variable.items()))
    common = _factor(total, clip.global_norm)
    of_variable = {name: radial[name] * factor * common for name, factor in factors.items()}
    return tuple(
        tuple(1.0 if _is_update(piece) else of_variable[piece.variable.name] for piece in (*layout.slices, *layout.tables))
        for layout in layouts
    )


def _total(terms: Iterable[float]) -> float:
    try:
        return math.fsum(terms)
    except OverflowError:  # of finite terms, whose sum is not
        return math.inf


def _factor(norm: float, limit: float) -> float:
    if not limit:
        return 1.0
    if not math.isfinite(norm):
        return math.nan
    return limit / max(norm, limit)


def _is_update(piece: VariableSlice) -> bool:
    return piece.variable.optimizer is not None and piece.variable.optimizer.is_update_rule


# A model as all workers must present it: variables, optimizer, placement policy.


STRATEGIES = ("greedy_bytes", "round_robin")
DEFAULT_SPLIT_BYTES = 64 << 20
_MAX_SPLIT_BYTES = (1 << 64) - 1  # a uint64 on the wire
_MAX_SHARD = (1 << 31) - 1


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The placement of variables: a strategy, and the size above which a variable without a partition is split along axis 0 (0: never).

    `loads` (name, load): what "greedy_bytes" balances instead of bytes; a variable's slices share its load by their size. `pins` (name,
    shard): variables that lie there, whatever the strategy; they are not split, count as loads there, and take no turn of "round_robin".
    """

    strategy: str = "greedy_bytes"
    split_bytes: int = DEFAULT_SPLIT_BYTES
    loads: tuple[tuple[str, float], ...] = ()
    pins: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in STRATEGIES:
            raise InvalidSpec(f"placement strategy {shown(self.strategy)}; want one of {', '.join(STRATEGIES)}")
        # Not isinstance: a bool is an int, but no size.
        if type(self.split_bytes) is not int or self.split_bytes < 0:
            raise InvalidSpec(f"split_bytes: got {shown(self.split_bytes)}, want a whole number >= 0 (an int; 0: never split)")
        if self.split_bytes > _MAX_SPLIT_BYTES:
            raise InvalidSpec("split_bytes: got more than 2^64 - 1; want 0 to never split")
        for name, load in self.loads:
            if isinstance(load, bool) or not isinstance(load, (int, float)) or not 0 <= load < math.inf:
                raise InvalidSpec(f"placement: the load of variable {name!r} is {load!r}, want a finite number >= 0")
        for name, shard in self.pins:
            if type(shard) is not int or not 0 <= shard <= _MAX_SHARD:
                raise InvalidSpec(f"placement: variable {name!r} is pinned to {shown(shard)}, want the index of a ps, from 0")
        for what, pairs in (("loads", self.loads), ("pins", self.pins)):
            if len({name for name, _ in pairs}) < len(pairs):
                raise InvalidSpec(f"placement: {what} name a variable twice; name each once")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSlice:
    """A slice and the shard that holds it."""

    slice: VariableSlice
    shard: int


Placement = tuple[PlacedSlice, ...]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Variables in order of creation, the optimizer that trains them, and how they are placed."""

    variables: tuple[VariableSpec, ...]
    optimizer: OptimizerSpec
    placement: PlacementPolicy
    averages: AverageSpec | None = None
    clip: ClipSpec = NO_CLIP

    def __post_init__(self) -> None:
        if not self.variables:
            raise InvalidSpec("the model has no variables; give at least one")
        if len(self.variables) > MAX_VARIABLES:
            raise LimitExceeded(f"the model has {len(self.variables)} variables, {MAX_VARIABLES} at most")
        seen: set[str] = set()
        for variable in self.variables:
            if variable.name in seen:
                raise InvalidSpec(f"variable {variable.name!r} occurs twice; names must be unique")
            seen.add(variable.name)
        self._check_references()
        self._check_groups()

    def _check_groups(self) -> None:
        keys: dict[str, str] = {}
        for variable in self.variables:
            own = variable.optimizer
            if own is not None and own.group and keys.setdefault(own.group, own.key) != own.key:
                raise InvalidSpec(f"variable {variable.name!r}: its optimizer is another than that of the same group {own.group!r}")

    def _check_references(self) -> None:
        by_name = {variable.name: variable for variable in self.variables}
        for name, _ in (*self.placement.pins, *self.placement.loads):
            if name not in by_name:
                raise InvalidSpec(f"placement: there is no variable {name!r} in the model; correct the name, or leave it out")
        for name, _ in self.placement.pins:
            partition = by_name[name].partition
            if partition is not None and partition.num_slices > 1:
                raise InvalidSpec(f"variable {name!r} is pinned to one ps and cut into {partition.num_slices} slices; do one of the two")
        self._check_whole_variables()
        for name in self.averages.variables if self.averages is not None else ():
            if name not in by_name:
                raise InvalidSpec(f"averages: there is no variable {name!r} in the model; correct the name, or leave it out")
            if by_name[name].is_sparse or by_name[name].is_state:
                raise InvalidSpec(f"averages: variable {name!r} is a table or takes plain updates; others have averages")

    def _check_whole_variables(self) -> None:
        of_model = self.optimizer.needs_whole_variables
        for variable in self.variables:
            optimizer = variable.optimizer
            if not (of_model if optimizer is None else optimizer.needs_whole_variables):
                continue
            what = f"variable {variable.name!r}: its optimizer's formula has a sum or a norm"
            if variable.is_sparse:
                raise InvalidSpec(f"{what}, and a table is updated by rows; give the table another optimizer, or make the variable dense")
            if variable.partition is not None and variable.partition.num_slices > 1:
                raise InvalidSpec(f"{what}, which needs the whole variable in one place; take away the partition, or the sum or norm")

    def groups(self) -> dict[str, OptimizerSpec]:
        """Returns the optimizers that contributions can give numbers of their own, by group; the model's has an empty name."""
        own = (variable.optimizer for variable in self.variables)
        return {"": self.optimizer} | {optimizer.group: optimizer for optimizer in own if optimizer is not None and optimizer.group}

    def optimizer_changes(self, other: "ModelSpec") -> dict[str, tuple[str, OptimizerSpec]] | None:
        """Returns what makes this model `other` by new numbers of optimizers; None if those are not all that differs.

        By the key of an optimizer as it is here: a variable that has it of its own (empty: the model), and as it is in `other`.
        """
        mine, theirs = (_optimizers_by_owner(model) for model in (self, other))
        if _but_for_optimizers(self) != _but_for_optimizers(other) or mine.keys() != theirs.keys():
            return None
        changes: dict[str, tuple[str, OptimizerSpec]] = {}
        for owner, optimizer in mine.items():
            new = theirs[owner]
            # One optimizer cannot become two.
            if not optimizer.differs_in_numbers(new) or changes.setdefault(optimizer.key, (owner, new))[1] != new:
                return None
        return changes

    def phase(self, other: "ModelSpec") -> "PhaseNumbers":
        """Returns what makes steps of this model a phase of training with the optimizers of `other`, which has some of its variables.

        Raises ModelMismatch for variables, limits and formulas that this model does not have.
        """
        mine, groups = {variable.name: variable for variable in self.variables}, dict[str, dict[str, None]]()
        numbers: dict[str, OptimizerSpec] = {}
        if other.clip not in (NO_CLIP, self.clip) or other.averages not in (None, self.averages):
            raise ModelMismatch("the limits on the gradient and the averages are those of the first optimizer in all phases; give the same")
        for variable in other.variables:
            known = mine.get(variable.name)
            if known is None or (known.shape, known.data_type) != (variable.shape, variable.data_type):
                raise ModelMismatch(
                    f"variable {variable.name!r} of this optimizer is not in the cluster's model: give the first optimizer all variables"
                    " that any phase trains; without a gradient a variable stays as it is"
                )
            before, new = known.optimizer or self.optimizer, variable.optimizer or other.optimizer
            group = "" if known.optimizer is None else known.optimizer.group
            if not before.differs_in_numbers(new.in_group(before.group)):
                raise ModelMismatch(
                    f"variable {variable.name!r}: a phase cannot have another formula ({new.title}) than the first optimizer"
                    f" ({before.title}), only other numbers. Begin with this one, or train in another cluster from the values of this one"
                )
            if before.is_update_rule:
                continue
            if known.optimizer is not None and not group:
                if before != new:
                    raise ModelMismatch(
                        f"variable {variable.name!r} has an optimizer of its own, in no group: no phase can give it numbers"
                    )
                continue
            if numbers.setdefault(group, new).in_group("") != new.in_group(""):
                raise ModelMismatch(
                    f"variable {variable.name!r} has other numbers than others that had one optimizer in the first phase; give the first"
                    " optimizer the groups of all phases"
                )
            groups.setdefault(new.group, {})[group] = None
        return PhaseNumbers(numbers, {own: tuple(those) for own, those in groups.items()})

    def differences(self, other: "ModelSpec") -> list[str]:
        """Describes how `other` differs from this model, the cluster's, part by part; empty if it does not."""
        return list(differences(self, other, whose="the cluster's"))


class PhaseNumbers:
    """The numbers that steps of a phase of training have. Knows the groups of its optimizers, and those of the model."""

    def __init__(self, optimizers: Mapping[str, OptimizerSpec], groups: Mapping[str, tuple[str, ...]]) -> None:
        self._groups = groups
        self._numbers: dict[tuple[str, str], float] = {}
        # Of the last step: the number of its phase, what its contribution gave, and what came of both.
        self._last: tuple[int, tuple[StepHyperparameter, ...], tuple[StepHyperparameter, ...]] = 0, (), ()
        for group, optimizer in optimizers.items():
            rate = optimizer.learning_rate
            if rate.name != "constant":
                raise ModelMismatch("a phase's learning rate is a number; give a changing one with each step")
            changing = {name: number for name, number in optimizer.numbers.items() if name not in optimizer.fixed_hyperparameters}
            for name, number in {RATE: rate.argument("value"), **changing}.items():
                self._numbers[group, name] = number

    def of_step(self, phase: int, given: tuple[StepHyperparameter, ...]) -> tuple[StepHyperparameter, ...]:
        """Returns the numbers of a step of the phase with this number; `given`: those that its contribution has in their place."""
        if self._last[:2] == (phase, given):
            return self._last[2]
        numbers = dict(self._numbers)
        for one in given:
            for group in self._groups.get(one.group, (one.group,)):
                numbers[group, one.name] = one.value
        numbers["", PHASE] = float(phase)
        found = tuple(StepHyperparameter(group=group, name=name, value=value) for (group, name), value in numbers.items())
        self._last = phase, given, found
        return found


class StepNumbers:
    """Checks numbers that shall hold for one step of a model."""

    def __init__(self, model: ModelSpec) -> None:
        self._groups = model.groups()
        self._found_good: tuple[StepHyperparameter, ...] = ()

    def check(self, given: tuple[StepHyperparameter, ...], *, applies_on_arrival: bool) -> None:
        """Raises InvalidSpec unless each may hold for a step. Those that were checked last cost nothing."""
        if applies_on_arrival:
            raise InvalidSpec("hyperparameters: where contributions are applied on arrival, none has numbers of its own; use locking")
        if given == self._found_good:
            return
        seen: set[tuple[str, str]] = set()
        for one in given:
            if one.group not in self._groups:
                known = ", ".join(repr(group) for group in list(self._groups)[1:6]) or "none"
                raise InvalidSpec(f"hyperparameters: the model has no group {one.group[:80]!r} of variables; it has {known}")
            if (one.group, one.name) in seen:
                raise InvalidSpec(f"hyperparameters: {one.name!r} of group {one.group!r} occurs twice; give it once")
            seen.add((one.group, one.name))
            if one.name == PHASE and not one.group:
                _check_phase(one.value)
            else:
                self._groups[one.group].check_for_step(one.name, one.value)
        self._found_good = given


def _check_phase(number: float) -> None:
    if not (1 <= number < 1 << 32 and number == int(number)):
        raise InvalidSpec(f"hyperparameters: {PHASE} = {number!r}, want a whole number from 1")


def _optimizers_by_owner(model: ModelSpec) -> dict[str, OptimizerSpec]:
    """Returns the model's optimizer, without a name, and those that variables have of their own."""
    own = {variable.name: variable.optimizer for variable in model.variables if variable.optimizer is not None}
    return {"": model.optimizer, **own}


def _but_for_optimizers(model: ModelSpec) -> tuple[object, ...]:
    variables = tuple(replace(variable, optimizer=None) for variable in model.variables)
    return variables, model.placement, model.averages, model.clip


# Which shard holds which rows, decided once from the model alone: the same model and number of shards give the same answer everywhere.


def place(model: ModelSpec, *, num_shards: int) -> Placement:
    """Places every variable, cut as its partition says, or by rows where it is larger than the policy's threshold.

    "round_robin" deals the slices out in order. "greedy_bytes" gives each to the shard with the least load so far (ties: the lowest
    index), as the original's GreedyLoadBalancingStrategy does; a slice's load is its bytes, or its share of the load that the policy has
    for its variable. What is pinned lies where it is pinned, and counts as load from the beginning.
    """
    if num_shards < 1:
        raise InvalidSpec("there are no parameter servers to place variables on; give at least one")
    pins, loads = dict(model.placement.pins), dict(model.placement.loads)
    pieces = [piece for variable in model.variables for piece in _slices(variable, model, num_shards)]
    totals = [0.0] * num_shards
    for piece in pieces:
        if (shard := pins.get(piece.variable.name)) is not None:
            _check_pin(piece.variable.name, shard, num_shards)
            totals[shard] += _load(piece, loads)
    placed, turn = [], itertools.cycle(range(num_shards))
    for piece in pieces:
        shard = pins.get(piece.variable.name)
        if shard is None and piece.variable.keys is not None:
            # Each shard gets the same share.
            shard = piece.start * num_shards // piece.extent
        if shard is None:
            shard = next(turn) if model.placement.strategy == "round_robin" else totals.index(min(totals))
            totals[shard] += _load(piece, loads)
        placed.append(PlacedSlice(slice=piece, shard=shard))
    return tuple(placed)


def split_rows(num_rows: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cuts `num_rows` into `num_pieces` runs; the first `num_rows % num_pieces` have one row more."""
    size, rest = divmod(num_rows, num_pieces)
    bounds = [index * size + min(index, rest) for index in range(num_pieces + 1)]
    return list(itertools.pairwise(bounds))


def check_placement(placement: Placement, model: ModelSpec, *, num_shards: int) -> None:
    """Raises InvalidSpec unless all of the model's variables lie on some of so many shards, each row once, and nothing else does."""
    variables = {variable.name: variable for variable in model.variables}
    num_units = dict.fromkeys(variables, 0)
    check_disjoint([placed.slice for placed in placement])
    for placed in placement:
        piece = placed.slice
        name = piece.variable.name
        if placed.shard >= num_shards:
            raise InvalidSpec(f"variable {name!r} lies on ps {placed.shard}, there are {num_shards}")
        if name not in variables or _kind_of(piece.variable) != _kind_of(variables[name]):
            raise InvalidSpec(f"variable {name!r} is placed as another one than the model's")
        num_units[name] += max(1, piece.stop - piece.start)
    extents = {placed.slice.variable.name: max(1, placed.slice.extent) for placed in placement}
    for name, units in num_units.items():
        if name not in extents or units != extents[name]:
            raise InvalidSpec(f"variable {name!r} is not placed, or not all of it")


def _kind_of(variable: VariableSpec) -> tuple[object, ...]:
    return variable.data_type, variable.shape, variable.is_sparse, variable.keys


def layouts(placement: Placement, *, num_shards: int) -> tuple[Layout, ...]:
    """Returns the layout of each shard; one without variables has an empty layout."""
    slices: list[list[VariableSlice]] = [[] for _ in range(num_shards)]
    for placed in placement:
        slices[placed.shard].append(placed.slice)
    return tuple(Layout(pieces) for pieces in slices)


def _slices(variable: VariableSpec, model: ModelSpec, num_shards: int) -> Iterator[VariableSlice]:
    partition = variable.partition or Partition(axis=0, num_slices=_num_pieces(variable, model, num_shards))
    for start, stop in split_rows(variable.extent(partition.axis), partition.num_slices):
        yield VariableSlice(variable=variable, start=start, stop=stop, axis=partition.axis)


def _num_pieces(variable: VariableSpec, model: ModelSpec, num_shards: int) -> int:
    policy, optimizer = model.placement, variable.optimizer or model.optimizer
    is_whole = optimizer.needs_whole_variables or (variable.constraint is not None and variable.constraint.needs_whole_variable)
    # Nobody knows how large a keyed table will be.
    num_wanted = num_shards if variable.keys is not None else math.ceil(variable.nbytes / policy.split_bytes) if policy.split_bytes else 1
    if num_wanted <= 1 or not variable.shape or not policy.split_bytes or is_whole:
        return 1
    if any(name == variable.name for name, _ in policy.pins):  # asked last: with many variables there may be as many pins
        return 1
    # More pieces than shards would only lie side by side again.
    return max(1, min(num_wanted, variable.num_rows, num_shards))


def _load(piece: VariableSlice, loads: dict[str, float]) -> float:
    load = loads.get(piece.variable.name)
    if load is None:
        return piece.nbytes
    return load * (piece.stop - piece.start) / piece.extent if piece.extent else load


def _check_pin(name: str, shard: int, num_shards: int) -> None:
    if shard >= num_shards:
        raise InvalidSpec(f"variable {name!r} is pinned to ps {shard}; there are {num_shards}, ps 0 to {num_shards - 1}")
