"""What asynchronous local SGD, arXiv 2401.09135, says of its toy, on a part of ours."""

import pytest

from benchmarks.suites.coordination.asynchronous import Toy, arms, train


@pytest.mark.slow
def test_delayed_nesterov_with_inner_steps_by_speed_learns_what_nesterov_momentum_does_not() -> None:
    toy = Toy(num_inner=900)
    loss = {(arm.name, arm.rate, arm.by_speed): train(arm, toy, 0)[0] for arm in arms(0.7, 0.9, 4) if not arm.is_together and arm.by_speed}
    delayed = loss["async, delayed Nesterov", 0.7, True]
    assert delayed < loss["async, Nesterov", 0.7 / 4, True] < loss["async, Nesterov", 0.7, True]
    assert delayed < 2.3, "the logarithm of ten classes"


def test_by_speed_all_workers_come_together() -> None:
    by_speed = next(arm for arm in arms(0.7, 0.9, 4) if arm.by_speed)
    assert [Toy().inner_steps(worker, by_speed) for worker in range(4)] == [50, 50, 50, 12]
