"""Steps with options: missing gradients, factors, clipping, several rules, half precision, constraints, averages."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.model.layout import Layout, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import AverageSpec, ClipSpec
from ps_protocol.model.variables import Array, Constraint, ConstraintKind, DataType, VariableSpec
from ps_server.numbers.apply import FusedApply, StepMemory
from ps_server.optimizers.rule import UpdateRule


def _spec(name: str, rate: float = 1.0, **hyperparameters: float) -> OptimizerSpec:
    return OptimizerSpec(name=name, learning_rate=constant(rate), hyperparameters=hyperparameters)


def _variable(name: str, size: int = 4, *, data_type: DataType = DataType.FLOAT32, rule: OptimizerSpec | None = None) -> VariableSpec:
    return VariableSpec(name=name, data_type=data_type, shape=(size,), optimizer=rule)


class _Shard:
    """Variables with their rules and memories; every element of a variable or gradient has one value, unless written otherwise."""

    def __init__(
        self,
        *variables: VariableSpec,
        model: OptimizerSpec | None = None,
        clip: ClipSpec | None = None,
        averages: AverageSpec | None = None,
        block_bytes: int = 64,
    ) -> None:
        self.layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])
        self.rules = [UpdateRule(rule or model or _spec("sgd")) for rule in self.layout.rules]
        self.fused = FusedApply(self.layout, self.rules, clip=clip or ClipSpec(), averages=averages, block_bytes=block_bytes)
        self.value, self.out, self.average = (aligned_bytes(self.layout.nbytes) for _ in range(3))
        self.slots = {name: aligned_bytes(self.layout.nbytes) for rule in self.rules for name in rule.slots}

    def memory(self, *values: float) -> Array:
        memory = aligned_bytes(self.layout.nbytes)
        for index, value in enumerate(values):
            self.layout.view(memory, index)[...] = value
        return memory

    def step(self, *gradients: Array, **options: Any) -> StepMemory:
        return StepMemory(value=self.value, out=self.out, slots=self.slots, average=self.average, gradients=gradients, step=0, **options)

    def run(self, *gradients: Array, **options: Any) -> list[float]:
        """Returns the first element of each variable after the step, having checked that all of the variable is like it."""
        self.fused.run(self.step(*gradients, **options))
        return self.firsts(self.out)

    def firsts(self, memory: Array) -> list[float]:
        views = [self.layout.view(memory, index) for index in range(len(self.layout.slices))]
        for view in views:
            np.testing.assert_array_equal(view, np.full_like(view, view.flat[0]))
        return [float(view.flat[0]) for view in views]


def test_mean_is_over_the_contributions_that_have_a_gradient() -> None:
    shard = _Shard(_variable("a"), _variable("b", 100), _variable("c"), _variable("d", data_type=DataType.FLOAT64))
    gradients = [shard.memory(1, 2, 3, 4), shard.memory(5, 6, 7, 8), shard.memory(9, 10, 11, 12)]
    absent = ((1,), (0, 1), (1,))
    assert shard.run(*gradients, absent=absent) == [-5.0, 0.0, -7.0, -8.0]


def test_variable_without_any_gradient_keeps_its_values_and_slots() -> None:
    shard = _Shard(_variable("a", 40), _variable("b", 40), model=_spec("momentum", momentum=0.5))
    shard.value[:] = shard.memory(3, 4)
    shard.slots["momentum"][:] = shard.memory(8, 8)
    assert shard.run(shard.memory(1, np.nan), absent=((1,),)) == [3.0 - 5.0, 4.0]
    assert shard.firsts(shard.slots["momentum"]) == [5.0, 8.0]
    assert shard.fused.run(shard.step(shard.memory(1, np.nan), absent=((1,),))) == 0


def test_contribution_without_any_gradient_may_be_empty() -> None:
    shard = _Shard(_variable("a"), _variable("b"))
    assert shard.run(aligned_bytes(0), shard.memory(2, 3), absent=((0, 1), ())) == [-2.0, -3.0]
    assert shard.run(aligned_bytes(0), absent=((0, 1),)) == [0.0, 0.0]


def test_weights_make_a_weighted_mean_and_one_alone_is_a_factor() -> None:
    shard = _Shard(_variable("a", 100))
    assert shard.run(shard.memory(4), shard.memory(8), weights=(3.0, 1.0)) == [-5.0]
    assert shard.run(shard.memory(4), weights=(0.5,)) == [-2.0]
    assert shard.run(shard.memory(4), shard.memory(8), weights=(1.0, 1.0)) == [-6.0]


def test_weights_belong_to_contributions_also_where_some_have_no_gradient() -> None:
    shard = _Shard(_variable("a"), _variable("b"))
    gradients = [shard.memory(4, 4), shard.memory(8, 8)]
    assert shard.run(*gradients, absent=((0,), ()), weights=(3.0, 1.0)) == [-8.0, -5.0]


def test_scales_are_factors_of_the_mean_of_each_slice() -> None:
    shard = _Shard(_variable("a", 40), _variable("b", 40), _variable("c", 40))
    assert shard.run(shard.memory(4, 4, 4), scales=(0.5, 1.0, 0.25)) == [-2.0, -4.0, -1.0]
    assert shard.run(shard.memory(4, 4, 4), scales=(1.0, 1.0, 1.0)) == [-4.0, -4.0, -4.0]
    assert np.isnan(shard.run(shard.memory(4, 4, 4), scales=(np.nan, 1.0, np.nan))).tolist() == [True, False, True]


def test_an_own_optimizer_or_update_rule_changes_only_its_variable() -> None:
    shard = _Shard(
        _variable("a"),
        _variable("slow", rule=_spec("sgd", 0.5)),
        _variable("mean", rule=_spec("assign_mean")),
        _variable("count", rule=_spec("add")),
        _variable("average", rule=_spec("moving_average", decay=0.75)),
        _variable("b"),
        clip=ClipSpec(value=3.0),
    )
    shard.value[:] = shard.memory(0, 0, 7, 7, 8, 0)
    # Neither clipping nor weights touch plain updates.
    found = shard.run(shard.memory(2, 2, 2, 2, 2, 2), shard.memory(8, 8, 8, 8, 10, 8), weights=(7.0, 1.0))
    assert found == [-2.75, -1.375, 5.0, 17.0, 7.5, -2.75]


def test_clipping_by_value_is_of_the_mean_and_does_not_hide_non_finite_values() -> None:
    shard = _Shard(_variable("a", 40), clip=ClipSpec(value=2.0))
    assert shard.run(shard.memory(-1), shard.memory(-9)) == [2.0]
    assert shard.run(shard.memory(-1), shard.memory(2)) == [-0.5]
    assert shard.fused.run(shard.step(shard.memory(np.inf))) == 40
    assert shard.firsts(shard.out) == [-2.0]


def test_clipping_leaves_the_pushed_gradient_alone() -> None:
    shard = _Shard(_variable("a"), clip=ClipSpec(value=2.0))
    gradient = shard.memory(9)
    shard.run(gradient, scales=(0.5,))
    assert shard.firsts(gradient) == [9.0]


def test_sums_of_squares_are_those_of_the_clipped_mean_slice_by_slice() -> None:
    sizes, rng = (33, 1, 0, 300, 7, 64), np.random.default_rng(1)
    variables = [_variable(f"v{index}", size) for index, size in enumerate(sizes)]
    variables.insert(2, _variable("d", 129, data_type=DataType.FLOAT64))
    shard = _Shard(*variables, _variable("count", rule=_spec("add")), clip=ClipSpec(value=0.75))
    gradients = [shard.memory() for _ in range(3)]
    for gradient in gradients:
        for index, piece in enumerate(shard.layout.slices):
            shard.layout.view(gradient, index)[...] = rng.standard_normal(piece.shape)
    absent = ((), (3,), (3, 4))
    sums = shard.fused.sums_of_squares(shard.step(*gradients, absent=absent, weights=(1.0, 0.5, 0.25)))
    for index in range(len(shard.layout.slices) - 1):
        views = [(shard.layout.view(g, index), w) for g, w, a in zip(gradients, (1, 0.5, 0.25), absent, strict=True) if index not in a]
        total = sum(view.astype(np.float64) * weight for view, weight in views)
        mean = np.clip(total / sum(weight for _, weight in views), -0.75, 0.75)
        assert sums[index] == pytest.approx(float((mean**2).sum()), rel=1e-5, abs=1e-12), index
    assert sums[-1] == 0.0
    assert len(sums) == len(shard.layout.slices)


def test_sums_of_squares_do_not_overflow_where_float32_squares_would() -> None:
    shard = _Shard(_variable("a", 2), _variable("none", 2))
    assert shard.fused.sums_of_squares(shard.step(shard.memory(1e30, 1), absent=((1,),))) == [pytest.approx(2e60), 0.0]


@pytest.mark.parametrize("data_type", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("in_place", [False, True])
def test_half_precision_is_computed_in_single_precision(data_type: DataType, in_place: bool) -> None:
    shard = _Shard(_variable("h", 100, data_type=data_type), _variable("f"), model=_spec("adam", 0.25, beta1=0.5, beta2=0.5))
    single = _Shard(_variable("h", 100), _variable("f"), model=_spec("adam", 0.25, beta1=0.5, beta2=0.5))
    for each in (shard, single):
        each.value[:] = each.memory(1.5, 1.5)
        if in_place:
            each.out = each.value
    gradients = [0.5] * 300
    found = [each.run(*(each.memory(value, value) for value in gradients)) for each in (shard, single)]
    # A sum of 300 halves in bfloat16 would have stopped growing at 256 of them.
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    assert found[0][1] == found[1][1]
    assert shard.firsts(shard.slots["v"]) == pytest.approx(single.firsts(single.slots["v"]), rel=1e-2)


def test_constraint_holds_after_the_update_and_only_of_its_variable() -> None:
    positive = VariableSpec(name="p", data_type=DataType.FLOAT32, shape=(4,), constraint=Constraint(kind=ConstraintKind.NON_NEGATIVE))
    shard = _Shard(positive, _variable("free"))
    assert shard.run(shard.memory(1, 1)) == [0.0, -1.0]


def test_constrained_variable_without_gradient_is_not_touched() -> None:
    positive = VariableSpec(name="p", data_type=DataType.FLOAT32, shape=(4,), constraint=Constraint(kind=ConstraintKind.NON_NEGATIVE))
    shard = _Shard(positive, _variable("free"))
    shard.value[:] = shard.memory(-5, 0)
    assert shard.run(shard.memory(1, 1), absent=((0,),)) == [-5.0, -1.0]
    assert shard.run(shard.memory(1, 1), shard.memory(1, 1), absent=((0,), ())) == [0.0, -1.0]


def test_average_follows_what_the_step_made_constraint_included() -> None:
    positive = VariableSpec(name="p", data_type=DataType.FLOAT32, shape=(4,), constraint=Constraint(kind=ConstraintKind.NON_NEGATIVE))
    shard = _Shard(positive, _variable("free"), averages=AverageSpec(decay=0.75))
    shard.value[:] = shard.memory(4, 4)
    shard.average[:] = shard.memory(4, 4)
    assert shard.run(shard.memory(9, 2)) == [0.0, 2.0]
    assert shard.firsts(shard.average) == [3.0, 3.5]


def test_the_absent_gradients_of_one_step_do_not_affect_the_next() -> None:
    shard = _Shard(_variable("a"), _variable("b"))
    both = [shard.memory(1, 1), shard.memory(3, 3)]
    assert shard.run(*both, absent=((0,), ())) == [-3.0, -2.0]
    assert shard.run(*both) == [-2.0, -2.0]
    assert shard.run(*both, absent=((), (1,))) == [-2.0, -1.0]
    assert shard.run(both[0]) == [-1.0, -1.0]
