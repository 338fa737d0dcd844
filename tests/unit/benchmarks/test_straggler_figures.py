"""Figures of the stragglers' benchmark, from reports written down here."""

import pytest

from benchmarks.report.straggler_figures import Look, StragglerReport, arm_figures, look_at_time, predict, run_of_arm
from benchmarks.suites.coordination.straggler import StragglerWork, delay_s


def work(*, probability: float = 0.2, seed: int = 1) -> StragglerWork:
    return StragglerWork(num_workers=5, learning_rate=0.1, pace_s=0.0, delay_s=0.2, probability=probability, seed=seed, look_every=1)


def look(step: int, at: float, loss: float = 1.0) -> Look:
    return Look(step=step, at=at, loss=loss, accuracy=1 - loss / 10)


# Two workers, two steps; worker 1 is late in step 0 and its contribution to it comes too late.
REPORTS = (
    StragglerReport(
        steps=[0, 1],
        began_at=[100.0, 100.1],
        computed_s=[0.08, 0.07],
        num_accepted=2,
        ended_at=100.2,
        last_step=2,
        looks=[look(0, 100.0, 4.0), look(1, 100.1, 2.0), look(2, 100.2, 1.0)],
    ),
    StragglerReport(steps=[0], began_at=[100.02], computed_s=[0.25], num_accepted=0, num_delayed=1, ended_at=100.3, last_step=2),
)


def test_delays_are_the_same_for_the_same_seed_worker_and_step() -> None:
    drawn = [delay_s(work(), worker=worker, step=step) for worker in range(5) for step in range(400)]
    assert drawn == [delay_s(work(), worker=worker, step=step) for worker in range(5) for step in range(400)]
    assert drawn != [delay_s(work(seed=2), worker=worker, step=step) for worker in range(5) for step in range(400)]
    assert set(drawn) == {0.0, 0.2}
    assert 0.17 < sum(delay > 0 for delay in drawn) / len(drawn) < 0.23


def test_no_worker_is_late_with_probability_zero_and_every_worker_with_one() -> None:
    assert {delay_s(work(probability=0.0), worker=0, step=step) for step in range(50)} == {0.0}
    assert {delay_s(work(probability=1.0), worker=0, step=step) for step in range(50)} == {0.2}


def test_step_lasts_from_its_first_token_to_that_of_the_next() -> None:
    run = run_of_arm(REPORTS, num_required=1)
    assert run.step_s == pytest.approx([0.1, 0.1])
    assert run.seconds == pytest.approx(0.2)
    assert (run.num_accepted, run.num_dropped, run.num_delayed) == (2, 1, 1)
    assert [(row.worker, row.step, row.seconds) for row in run.times] == [(0, 0, 0.08), (0, 1, 0.07), (1, 0, 0.25)]


def test_observations_count_time_from_the_first_step() -> None:
    looks = run_of_arm(REPORTS, num_required=1).looks
    assert [(each.step, each.loss) for each in looks] == [(0, 4.0), (1, 2.0), (2, 1.0)]
    assert [each.at for each in looks] == pytest.approx([0.0, 0.1, 0.2])


def test_overhead_is_what_a_step_takes_beyond_its_slowest_computation() -> None:
    full = [
        StragglerReport(steps=[0, 1, 2], began_at=[0.0, 0.13, 0.36], computed_s=[0.1, 0.2, 0.1], ended_at=0.49, last_step=3),
        StragglerReport(steps=[0, 1, 2], began_at=[0.0, 0.13, 0.36], computed_s=[0.05, 0.1, 0.1], ended_at=0.49, last_step=3),
    ]
    assert run_of_arm(full, num_required=2).overhead_s == pytest.approx(0.03)


def test_arms_are_compared_after_the_same_time() -> None:
    looks = [look(0, 0.0, 4.0), look(10, 1.0, 2.0), look(20, 2.0, 1.0)]
    assert look_at_time(looks, 1.9).step == 10
    assert look_at_time(looks, 2.0).step == 20
    assert look_at_time(looks[1:], 0.5).step == 10  # none was taken by then
    run = run_of_arm(REPORTS, num_required=1)
    figures = arm_figures([run, run], same_time_s=0.15)
    assert figures["num_steps"] == 4
    assert figures["dropped"] == pytest.approx(1 / 3)
    assert figures["same_steps"] == {"loss": 1.0, "accuracy": 0.9}
    assert figures["same_time"] == {"seconds": 0.15, "step": 1.0, "loss": 2.0, "accuracy": 0.8}


def test_prediction_from_a_trace_without_backups_has_the_step_times_that_follow_from_it() -> None:
    report = StragglerReport(steps=[0, 1], began_at=[0.0, 0.1], computed_s=[0.1, 0.1], num_accepted=2, ended_at=0.2, last_step=2)
    run = run_of_arm([report, report, report], num_required=3)
    none, one = predict([run], num_workers=3, backups=[0, 1], calls_s=0.02, seed=0)
    assert (none.num_required, one.num_required) == (3, 2)
    assert none.step_s == pytest.approx(0.12)
