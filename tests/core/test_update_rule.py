"""A rule from step to step: rates, powers, weight decay, and new numbers on the way."""

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, constant
from ps_protocol.model.variables import Array
from ps_server.optimizers.formulas import NUM_SCRATCH
from ps_server.optimizers.rule import UpdateRule


def _spec(name: str, rate: float | Schedule = 0.5, **hyperparameters: float) -> OptimizerSpec:
    schedule = rate if isinstance(rate, Schedule) else constant(rate)
    return OptimizerSpec(name=name, learning_rate=schedule, hyperparameters=hyperparameters)


def _apply(rule: UpdateRule, value: Array, gradient: Array, *slots: Array) -> Array:
    out, scratch = np.empty_like(value), [np.empty_like(value) for _ in range(NUM_SCRATCH)]
    rule.apply(value, out=out, slots=slots, gradient=gradient, scratch=scratch)
    return out


def test_rate_is_that_of_the_step_begun() -> None:
    rule = UpdateRule(_spec("sgd", Schedule(name="piecewise_constant", boundaries=(10.0,), values=(1.0, 0.25))))
    one = np.ones(1)
    rule.begin(10)
    assert _apply(rule, one, one)[0] == 0.0
    rule.begin(11)
    assert _apply(rule, one, one)[0] == 0.75


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


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "proximal_sgd"])
def test_weight_decay_is_beside_what_the_optimizer_does(name: str) -> None:
    value, gradient = np.array([2.0, -4.0]), np.array([1.0, 3.0])
    outs = []
    for weight_decay in (0.0, 0.25):
        rule = UpdateRule(_spec(name, 0.5, weight_decay=weight_decay))
        rule.begin(0)
        outs.append(_apply(rule, value, gradient, *(np.full(2, first) for first in rule.slots.values())))
    np.testing.assert_allclose(outs[1], outs[0] - 0.5 * 0.25 * value, rtol=1e-15)


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
def test_what_the_slots_depend_on_cannot_change(before: OptimizerSpec, after: OptimizerSpec, match: str) -> None:
    rule = UpdateRule(before)
    with pytest.raises(InvalidSpec, match=match):
        rule.change(after)
    assert rule.spec == before
