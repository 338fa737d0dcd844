"""The page's curves of a training: means include every value, and memory is bounded."""

import itertools
import math

import pytest

from chief.page.curves import MAX_METRICS, MAX_NAME, MAX_POINTS, NUM_NEWEST, Curves, Series
from ps_protocol.roles.shard import MetricCell


def cell(name: str, *, total: float, weight: float, worker: int = 0) -> MetricCell:
    return MetricCell(name=name, worker=worker, total=total, weight=weight, count=1, last=0.0)


def test_a_point_is_the_mean_of_all_reports_between_two_looks() -> None:
    series = Series()
    series.add(at=1.0, step=1, total=10.0, weight=2.0)
    series.add(at=2.0, step=5, total=25.0, weight=5.0)
    assert series.points() == [(2.0, 5, 5.0)]


def test_a_metric_that_has_not_changed_adds_no_point() -> None:
    series = Series()
    for at in range(5):
        series.add(at=float(at), step=1, total=1.0, weight=1.0)
    assert series.points() == []


def test_a_rollback_leaves_a_gap_in_the_curves() -> None:
    series = Series()
    for at, step, total in ((1.0, 10, 10.0), (2.0, 20, 20.0), (3.0, 12, 12.0), (4.0, 16, 20.0)):
        series.add(at=at, step=step, total=total, weight=total)
    assert series.points() == [(2.0, 20, 1.0), (3.0, 12, None), (4.0, 16, 1.0)]


@pytest.mark.parametrize("total", [math.inf, math.nan])
def test_a_value_that_is_not_finite_is_a_gap(total: float) -> None:
    series = Series()
    series.add(at=1.0, step=1, total=0.0, weight=1.0)
    series.add(at=2.0, step=2, total=total, weight=2.0)
    assert series.points() == [(2.0, 2, None)]


def test_a_steady_speed_is_a_straight_line() -> None:
    curves = Curves()
    for second in range(200):
        curves.add_step(int(second * 4.8), at=float(second))
    values = [value for at, _, value in curves.speed.points() if at >= 10.0]
    assert values and all(value is not None and abs(value - 4.8) <= 0.15 for value in values)


def test_speed_falls_to_zero_while_no_step_is_applied() -> None:
    curves = Curves()
    for second in range(100):
        curves.add_step(min(second * 5, 250), at=float(second))
    assert [value for at, _, value in curves.speed.points() if at > 85.0] == [0.0] * 14


def test_a_reader_gets_what_is_new_to_it() -> None:
    series = Series()
    for number in range(1000):
        series.add(at=float(number), step=number, total=number * 2.0, weight=float(number))
    assert series.points(after=996.5) == [(997.0, 997, 2.0), (998.0, 998, 2.0), (999.0, 999, 2.0)]
    assert series.points(after=999.0) == []


def test_memory_is_bounded_and_the_whole_course_stays_evenly_spread() -> None:
    series = Series()
    for number in range(20_000):
        series.add(at=float(number), step=number, total=float(number), weight=float(number))
    points = series.points()
    assert len(points) <= MAX_POINTS + NUM_NEWEST
    older = [at for at, _, _ in points if at < 20_000 - NUM_NEWEST]
    assert len(older) > MAX_POINTS / 3
    assert max(later - earlier for earlier, later in itertools.pairwise(older)) <= 4 * 20_000 / MAX_POINTS
    assert [at for at, _, _ in points[-3:]] == [19_997.0, 19_998.0, 19_999.0]


def test_workers_are_taken_together_by_weight() -> None:
    curves = Curves()
    curves.add_metrics([cell("loss", total=1.0, weight=1.0), cell("loss", total=0.0, weight=1.0, worker=1)], step=1, at=1.0)
    curves.add_metrics([cell("loss", total=3.0, weight=2.0), cell("loss", total=12.0, weight=4.0, worker=1)], step=2, at=2.0)
    assert curves.metrics() == {"loss": [(2.0, 2, 3.5)]}


def test_names_without_number_and_without_end_are_bounded() -> None:
    curves = Curves()
    for at in (1.0, 2.0):
        curves.add_metrics([cell(f"{number:04} {'x' * 5000}", total=at, weight=at) for number in range(1000)], step=int(at), at=at)
    found = curves.metrics()
    assert len(found) == MAX_METRICS
    assert curves.num_left_out == 1000 - MAX_METRICS
    assert max(map(len, found)) <= MAX_NAME
