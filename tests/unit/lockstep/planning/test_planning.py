"""Recommendations of a plan, and their words."""

import pytest

from lockstep.cli.advice.plan import plan_text
from lockstep.planning.latencies import constant, lognormal, measured, with_stragglers
from lockstep.planning.plan import Plan, Question, make_plan
from lockstep.planning.simulation import Costs
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicyName, PolicySpec

ONE_IS_SLOW = measured({**{worker: [1.0, 1.01, 0.99] for worker in range(9)}, 9: [5.0]})


@pytest.fixture(scope="module")
def slow_one() -> Plan:
    compared = (PolicySpec(name=PolicyName.SSP, staleness=2), PolicySpec(name=PolicyName.ASYNC))
    return make_plan(Question(latency=ONE_IS_SLOW, num_workers=10, num_rounds=60, compared=compared))


def test_one_backup_is_recommended_for_one_slow_worker(slow_one: Plan) -> None:
    assert [row.num_backups for row in slow_one.rows] == [0, 1, 2, 3, 4, 5]
    assert slow_one.best.num_backups == 1
    assert slow_one.speed(slow_one.best) == pytest.approx(9 / 10 * 5, rel=0.02)


def test_the_plan_names_the_flags_that_follow_from_it(slow_one: Plan) -> None:
    text = plan_text(slow_one)
    assert "10 workers; computing: 28 measured times of 10 workers" in text
    assert "recommended: b = 1 (+3" in text and "--workers 10 --backup-workers 1" in text
    assert "a step is then the mean of 9 contributions, not 10" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("ssp", "async"))] == ["ssp(2)", "async"]


def test_the_fields_for_programs_have_all_figures(slow_one: Plan) -> None:
    fields = slow_one.as_fields()
    assert fields["recommended_backups"] == 1
    rows = fields["rows"]
    assert isinstance(rows, list) and rows[1]["num_backups"] == 1 and rows[1]["num_required"] == 9


def test_equal_workers_need_no_backups() -> None:
    plan = make_plan(Question(latency=constant(1.0), num_required=8, num_rounds=10))
    assert plan.best.num_backups == plan.shortest.num_backups == 0
    assert [row.num_workers for row in plan.rows] == [8, 9, 10, 11, 12]
    assert "recommended: b = 0 (backups gain nothing)" in plan_text(plan)


@pytest.mark.slow
def test_with_stragglers_the_shortest_step_wants_more_backups_than_the_best_use_of_workers() -> None:
    latency = with_stragglers(lognormal(1.0, 0.1), probability=0.03, factor=2.0)
    plan = make_plan(Question(latency=latency, costs=Costs(apply_s=0.01), num_required=20, num_rounds=60))
    assert 0 < plan.best.num_backups < plan.shortest.num_backups
    assert f"the shortest step has b = {plan.shortest.num_backups}" in plan_text(plan)


@pytest.mark.parametrize(("num_workers", "most"), [(1, 0), (2, 1), (3, 1), (50, 10), (10_000, 2000)])
def test_candidates_begin_with_no_backup_worker_and_leave_at_least_one_required_worker(num_workers: int, most: int) -> None:
    found = Question(latency=constant(1.0), num_workers=num_workers).candidates
    assert found[0] == 0 and found[-1] == most and found == sorted(set(found)) and len(found) <= 14


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "want either"),
        ({"num_workers": 3, "num_required": 3}, "want either"),
        ({"num_workers": 10_001}, "workers: got 10001"),
        ({"num_required": 0}, "contributions a step needs: got 0"),
        ({"num_workers": 3, "backups": (3,)}, "backups: got 3, want 0 to 2 with 3 workers"),
    ],
)
def test_a_question_without_sense_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        Question(latency=constant(1.0), **fields)  # type: ignore[arg-type]
