"""The published goodput of Decoupled DiLoCo (arXiv 2604.21428), by the chief's own coordinator and the assumptions of the suite."""

import pytest

from benchmarks.suites.coordination.goodput import Chips, rows


def test_the_published_goodput_of_failing_chips_has_its_order_and_is_within_four_points() -> None:
    found = list(rows(Chips(), num_phases=200))
    assert all(row.goodput == pytest.approx(row.published, abs=0.04) for row in found if row.published is not None)
    stopped, elastic, sync, *outer = (row.goodput for row in found if row.learners in (1, 8))
    assert stopped < elastic < sync < min(outer)
    eight, sixteen = ([row.goodput for row in found if row.learners == number] for number in (8, 16))
    assert all(many > few for few, many in zip(eight, sixteen, strict=True)), "a failure stops a smaller share of the chips"


def test_chips_that_do_not_fail_lose_what_waits_for_nobody() -> None:
    assert all(row.goodput == pytest.approx(1.0, abs=0.001) for row in rows(Chips(between_s=1e15), learners=(4,), num_phases=20))
