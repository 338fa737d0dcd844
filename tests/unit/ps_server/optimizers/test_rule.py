"""A rule from step to step: rates and their schedules, powers, weight decay, and changed settings."""

import math

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import SCHEDULES, OptimizerSpec, Schedule, constant
from ps_protocol.model.variables import Array
from ps_server.optimizers.rule import NUM_SCRATCH, UpdateRule, learning_rate

# A rule from step to step: rates, powers, weight decay, and new numbers on the way.


def _spec(name: str, rate: float | Schedule = 0.5, **hyperparameters: float) -> OptimizerSpec:
    schedule = rate if isinstance(rate, Schedule) else constant(rate)
    return OptimizerSpec(name=name, learning_rate=schedule, hyperparameters=hyperparameters)


def _apply(rule: UpdateRule, value: Array, gradient: Array, *slots: Array) -> Array:
    out, scratch = np.empty_like(value), [np.empty_like(value) for _ in range(NUM_SCRATCH)]
    rule.apply(value, out=out, slots=slots, gradient=gradient, scratch=scratch)
    return out


def test_an_update_uses_the_learning_rate_of_the_step_that_has_begun() -> None:
    rule = UpdateRule(_spec("sgd", Schedule(name="piecewise_constant", boundaries=(10.0,), values=(1.0, 0.25))))
    one = np.ones(1)
    rule.begin(10)
    assert _apply(rule, one, one)[0] == 0.0
    rule.begin(11)
    assert _apply(rule, one, one)[0] == 0.75


def test_a_piece_ends_with_its_boundary_and_the_first_of_equal_boundaries_has_no_steps_of_its_own() -> None:
    pieces = Schedule(name="piecewise_constant", boundaries=(2.0, 2.5, 2.5, 4), values=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert [learning_rate(pieces, step=step) for step in range(6)] == [1.0, 1.0, 1.0, 4.0, 4.0, 5.0]


def test_scalars_are_float32_numbers_as_in_the_original_also_for_float64() -> None:
    rule = UpdateRule(_spec("sgd", 0.1))
    rule.begin(0)
    assert _apply(rule, np.zeros(1), np.ones(1))[0] == -float(np.float32(0.1))


def test_powers_move_once_a_step_however_many_blocks_and_begins_it_has() -> None:
    rule = UpdateRule(_spec("adam", 1.0, beta1=0.5, beta2=0.75, epsilon=0.0))
    moments = [np.zeros((2, 1)) for _ in range(4)]
    value, gradient = np.zeros(1), np.ones(1)
    for step, t in ((0, 1), (1, 2)):
        for m, v in zip(moments[::2], moments[1::2], strict=True):
            rule.begin(step)
            before = m[step - 1].copy() if step else np.zeros(1), v[step - 1].copy() if step else np.zeros(1)
            m[step], v[step] = before
            out = _apply(rule, value, gradient, m[step], v[step])
            expected = -np.sqrt(1 - 0.75**t) / (1 - 0.5**t) * m[step] / np.sqrt(v[step])
            np.testing.assert_allclose(out, expected, rtol=1e-12)
        rule.advance()


def test_only_adam_without_lazy_changes_rows_that_have_no_gradient() -> None:
    assert not UpdateRule(_spec("adam")).is_lazy
    assert all(UpdateRule(spec).is_lazy for spec in (_spec("adam", lazy=1.0), _spec("adagrad"), _spec("ftrl"), _spec("rmsprop")))


def test_only_add_wants_the_sum() -> None:
    assert UpdateRule(_spec("add")).sums
    assert not any(UpdateRule(_spec(name)).sums for name in ("sgd", "assign_mean", "moving_average"))


def test_new_numbers_count_from_the_next_step_and_powers_stay() -> None:
    rule, fresh = (UpdateRule(_spec("adam", 1.0, beta1=0.5, epsilon=0.0)) for _ in range(2))
    one = np.ones(1)
    for step in range(3):
        for each in (rule, fresh):
            each.begin(step)
            each.advance()
    rule.change(_spec("adam", 0.25, beta1=0.5, epsilon=0.0))
    for each in (rule, fresh):
        each.begin(3)
    changed, unchanged = (_apply(each, np.zeros(1), one, np.zeros(1), np.zeros(1)) for each in (rule, fresh))
    np.testing.assert_allclose(changed, 0.25 * unchanged, rtol=1e-15)
    assert rule.spec.learning_rate == constant(0.25)


def test_numbers_of_a_step_that_is_under_way_do_not_change() -> None:
    rule = UpdateRule(_spec("sgd", 1.0))
    rule.begin(0)
    rule.change(_spec("sgd", 0.5))
    rule.advance()
    assert _apply(rule, np.zeros(1), np.ones(1))[0] == -1.0
    rule.begin(1)
    assert _apply(rule, np.zeros(1), np.ones(1))[0] == -0.5


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (_spec("sgd"), _spec("momentum"), "'sgd' cannot become 'momentum'"),
        (_spec("adagrad"), _spec("adagrad", initial_accumulator_value=0.5), "initial_accumulator_value only counts when"),
        (_spec("rmsprop"), _spec("rmsprop", centered=1.0), "centered only counts when"),
        (_spec("adam"), _spec("adam", lazy=1.0), "lazy only counts when"),
    ],
)
def test_an_optimizer_option_that_slots_depend_on_cannot_change(before: OptimizerSpec, after: OptimizerSpec, match: str) -> None:
    rule = UpdateRule(before)
    with pytest.raises(InvalidSpec, match=match):
        rule.change(after)
    assert rule.spec == before


# Learning-rate schedules at chosen steps, against the original's formulas worked out by hand.


PIECES = Schedule(name="piecewise_constant", boundaries=(100.0, 200.0), values=(1.0, 0.5, 0.1))


def _decay(name: str, **arguments: float) -> Schedule:
    return Schedule(name=name, arguments={"initial": 0.8, "decay_steps": 10.0, **arguments})


ROWS: list[tuple[Schedule, int, float]] = [
    (constant(0.3), 12_345, 0.3),
    # A boundary belongs to the piece before it.
    (PIECES, 0, 1.0),
    (PIECES, 100, 1.0),
    (PIECES, 101, 0.5),
    (PIECES, 200, 0.5),
    (PIECES, 201, 0.1),
    (Schedule(name="piecewise_constant", values=(0.7,)), 5, 0.7),
    (_decay("exponential_decay", decay_rate=0.5), 0, 0.8),
    (_decay("exponential_decay", decay_rate=0.5), 5, 0.8 * math.sqrt(0.5)),
    (_decay("exponential_decay", decay_rate=0.5, staircase=1.0), 19, 0.4),
    (_decay("inverse_time_decay", decay_rate=0.5), 5, 0.8 / 1.25),
    (_decay("inverse_time_decay", decay_rate=0.5, staircase=1.0), 15, 0.8 / 1.5),
    (_decay("polynomial_decay"), 0, 0.8),
    (_decay("polynomial_decay", final=0.2), 5, 0.5),
    (_decay("polynomial_decay", final=0.2, power=2.0), 5, 0.6 * 0.25 + 0.2),
    (_decay("polynomial_decay", final=0.2), 99, 0.2),
    # With cycle the span grows to the next multiple of decay_steps; at step 0 it is one span.
    (_decay("polynomial_decay", final=0.2, cycle=1.0), 0, 0.8),
    (_decay("polynomial_decay", final=0.2, cycle=1.0), 10, 0.2),
    (_decay("polynomial_decay", final=0.2, cycle=1.0), 15, 0.6 * 0.25 + 0.2),
    (_decay("cosine_decay"), 0, 0.8),
    (_decay("cosine_decay"), 5, 0.4),
    (_decay("cosine_decay"), 10, 0.0),
    (_decay("cosine_decay", alpha=0.1), 1_000, 0.08),
]


def test_every_known_schedule_has_a_row() -> None:
    assert {schedule.name for schedule, _, _ in ROWS} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "step", "expected"), ROWS, ids=lambda value: value.name if isinstance(value, Schedule) else str(value)
)
def test_schedule_at_step(schedule: Schedule, step: int, expected: float) -> None:
    assert learning_rate(schedule, step=step) == pytest.approx(expected, rel=1e-14, abs=1e-16)


@pytest.mark.parametrize(
    "schedule",
    [
        _decay("exponential_decay", decay_rate=0.0),
        _decay("exponential_decay", decay_rate=1e300),
        _decay("inverse_time_decay", decay_rate=1e308),
        _decay("polynomial_decay", power=0.0),
        _decay("polynomial_decay", decay_steps=5e-324, cycle=1.0),
        _decay("cosine_decay", decay_steps=1e308),
    ],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("step", [0, 1, 1 << 62])
def test_extreme_arguments_give_a_number_and_no_exception(schedule: Schedule, step: int) -> None:
    assert isinstance(learning_rate(schedule, step=step), float)
