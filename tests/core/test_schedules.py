"""Learning-rate schedules at chosen steps, against the original's formulas worked out by hand."""

import math

import pytest

from ps_protocol.model.optimizers import SCHEDULES, Schedule, constant
from ps_server.optimizers.rule import learning_rate

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
