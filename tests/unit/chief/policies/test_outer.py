"""outer: a step waits a while for contributions that took long to compute, and takes those that come still later into the next one."""

import pytest

from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import ClusterState, FinishTrainingRequest, InnerSteps, LeaseReply, PushOutcome
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED, STALE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.LATE


def outer(num_required: int, *, grace_s: float = 0.0, max_staleness: int | None = None, applies_at_once: bool = True) -> Driver:
    policy = PolicySpec(name=PolicyName.OUTER, grace_s=grace_s, max_staleness=max_staleness)
    return Driver(policy=policy, replicas_to_aggregate=num_required, applies_at_once=applies_at_once, lease_s=1000.0)


def workers_of(step: tuple[PushId, ...]) -> list[int]:
    return [push_id.worker for push_id in step]


def trained(driver: Driver, *indices: int) -> list[Worker]:
    workers = driver.train(*indices)
    if driver.to_configure:
        driver.configure()
    return workers


def test_a_step_that_has_enough_waits_for_the_others_until_its_grace_is_over() -> None:
    driver = outer(2, grace_s=5.0)
    first, second, _ = driver.train(0, 1, 2)
    first.push()
    driver.pass_time(60.0)
    second.push()
    driver.pass_time(4.9)
    assert driver.step == 0
    assert "has enough contributions, and is applied without these after 5 s of grace" in driver.coordinator.cluster.explain(driver.now)
    driver.pass_time(0.2)
    assert driver.step == 1
    assert workers_of(driver.applied[0].request.contributors) == [0, 1]


def test_a_step_that_all_live_workers_have_given_to_waits_no_longer() -> None:
    driver = outer(2, grace_s=5.0)
    first, second, third = driver.train(0, 1, 2)
    for worker in (first, second, third):
        worker.push()
    assert driver.step == 1
    assert workers_of(driver.applied[0].request.contributors) == [0, 1, 2]


def test_a_step_does_not_wait_for_a_worker_that_leaves() -> None:
    driver = outer(2, grace_s=5.0)
    first, second, third = driver.train(0, 1, 2)
    first.push()
    second.push()
    third.leave(failure="boom")
    assert driver.step == 1


def test_what_is_accepted_is_applied_when_training_is_finished_in_grace() -> None:
    driver = outer(2, grace_s=3600.0)
    first, second, _ = driver.train(0, 1, 2)
    first.push()
    second.push()
    driver.ask(FinishTrainingRequest(reason="done"))
    assert (driver.step, driver.coordinator.cluster.state) == (1, ClusterState.FINISHED)


def test_another_grace_holds_at_once() -> None:
    driver = outer(1, grace_s=3600.0)
    first, _ = driver.train(0, 1)
    first.push()
    driver.set_policy(PolicySpec(name=PolicyName.OUTER, grace_s=5.0))
    driver.pass_time(6.0)
    assert driver.step == 1


def test_a_step_does_not_wait_for_workers_without_data() -> None:
    driver = outer(1, grace_s=3600.0)
    first, second = driver.train(0, 1)
    data = DataSpec(name="train", num_samples=2, range_size=2, num_epochs=1)
    lease = driver.answers[driver.lease(first, data)]
    assert isinstance(lease, LeaseReply)
    first.commit(ranges=tuple(one.id for one in lease.ranges))
    assert driver.step == 0
    driver.lease(second, data, max_wait_s=20.0)
    assert driver.step == 1


def test_the_grace_of_each_step_begins_anew() -> None:
    driver = outer(1, grace_s=5.0)
    first, _ = driver.train(0, 1)
    for step in range(3):
        call = first.ask(commit=first.next_commit())
        driver.pass_time(4.0)
        assert driver.step == step
        driver.pass_time(2.0)
        assert first.has_token(call)
        assert driver.step == step + 1


def test_a_late_contribution_is_a_part_of_the_next_step_and_its_worker_goes_on_at_once() -> None:
    driver = outer(2)
    first, second, slow = driver.train(0, 1, 2)
    calls = [first.ask(commit=first.next_commit()), second.ask(commit=second.next_commit())]
    assert first.has_token(calls[0])
    assert second.has_token(calls[1])
    call = slow.ask(commit=slow.next_commit(0))
    reply = slow.answer(call)
    assert reply.commit is not None
    assert (reply.commit.outcome, reply.commit.applied_step, reply.commit.staleness) == (ACCEPTED, 1, 1)
    assert slow.has_token(call)
    assert (driver.step, slow.local_step) == (1, 1)
    first.push()
    assert driver.step == 2
    assert workers_of(driver.applied[1].request.contributors) == [0, 2]


def test_a_late_worker_waits_for_the_step_that_its_contribution_completes() -> None:
    driver = outer(1)
    first, slow = driver.train(0, 1)
    first.push()
    assert slow.has_token(slow.ask(commit=slow.next_commit(0)))
    assert (driver.step, slow.local_step) == (2, 2)


def test_a_late_worker_may_give_to_the_open_step_as_well_once() -> None:
    driver = outer(3)
    *others, slow = driver.train(0, 1, 2, 3)
    for worker in others:
        worker.push()
    assert slow.commit(0).outcome is ACCEPTED
    assert slow.commit(1).outcome is ACCEPTED
    assert slow.commit(1).outcome is LATE
    assert driver.step == 1


def test_a_contribution_that_is_too_late_is_dropped() -> None:
    driver = outer(1, max_staleness=1)
    first, slow = driver.train(0, 1)
    for _ in range(2):
        first.local_step = driver.step
        first.push()
    assert slow.commit(0).outcome is STALE
    assert slow.commit(1).outcome is ACCEPTED


def test_what_comes_while_a_step_is_applied_counts_in_the_next_one() -> None:
    driver = outer(1, applies_at_once=False)
    first, slow = trained(driver, 0, 1)
    first.send_commit()
    push_id = slow.next_push()
    with pytest.raises(Unavailable, match="step 0 is being applied: a contribution counts in the next one"):
        slow.send_commit(0, push_id=push_id)
    driver.apply()
    slow.send_commit(0, push_id=push_id)
    driver.apply()
    assert driver.applied[-1].request.contributors == (push_id,)


@pytest.mark.parametrize("name", [PolicyName.OUTER, PolicyName.SYNC])
def test_the_mean_of_a_step_is_weighted(name: PolicyName) -> None:
    driver = Driver(policy=PolicySpec(name=name), replicas_to_aggregate=2)
    first, second = driver.train(0, 1)
    second.commit(weight=30.0)
    first.commit(weight=10.0)
    assert (
        driver.applied[0].request.weights == driver.coordinator.status(driver.now, max_ledger_entries=1).ledger[0].weights == (10.0, 30.0)
    )


def test_workers_are_told_by_their_own_steps_how_fast_they_are_beside_the_fastest_live_one() -> None:
    driver = Driver(policy=PolicySpec(name=PolicyName.OUTER), replicas_to_aggregate=3, min_replicas=1)
    workers = driver.train(0, 1, 2)

    def speeds(*paces_s: float | None) -> list[float]:
        inner = [None if pace_s is None else InnerSteps(num=10, duration_s=10 * pace_s) for pace_s in paces_s]
        calls = [one.ask(commit=one.next_commit(inner=made)) for one, made in zip(workers, inner, strict=True)]
        replies = [one.answer(call) for one, call in zip(workers, calls, strict=True)]
        assert all(one.has_token(call) for one, call in zip(workers, calls, strict=True))
        return [reply.speed for reply in replies]

    assert speeds(None, None, None) == [0, 0, 0], "nobody has told"
    assert speeds(0.5, None, 2.0) == [1, 0, 0.25]
    assert speeds(4.0, 1.0, 2.0) == [0.25, 1, 0.5], "what counts is the latest"
    workers.pop(1).leave()
    assert speeds(4.0, 2.0) == [0.5, 1], "who is gone does not count"


def test_the_status_says_which_share_of_its_time_a_worker_has_made_steps_of_its_own() -> None:
    driver = Driver(policy=PolicySpec(name=PolicyName.OUTER), replicas_to_aggregate=1, lease_s=1000.0)
    (worker,) = driver.train(0)
    worker.commit(inner=InnerSteps(num=10, duration_s=50.0))
    driver.pass_time(80.0)
    worker.commit(driver.step, inner=InnerSteps(num=9, duration_s=60.0))
    (status,) = driver.coordinator.status(driver.now).participants
    assert status.inner == InnerSteps(num=9, duration_s=60.0)
    assert status.utilisation == pytest.approx(0.75, abs=0.001)
    assert status.doing == "at work, 9 inner steps, 75 % used"


@pytest.mark.parametrize(("num", "duration_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_impossible_inner_steps_are_refused(num: int, duration_s: float) -> None:
    with pytest.raises(InvalidSpec, match="inner steps: got"):
        InnerSteps(num=num, duration_s=duration_s)


def test_equal_weights_need_no_factors() -> None:
    driver = outer(2)
    for worker in driver.train(0, 1):
        worker.commit(weight=7.0)
    assert driver.applied[0].request.weights == ()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_weight_is_refused_and_nothing_is_counted(weight: float) -> None:
    driver = outer(1)
    (worker,) = driver.train(0)
    with pytest.raises(InvalidSpec, match="weight: got"):
        worker.send_commit(weight=weight)
    assert worker.push() is ACCEPTED


def test_another_chief_knows_late_contributions_and_their_weights() -> None:
    driver = Driver.outlived(policy=PolicySpec(name=PolicyName.OUTER), replicas_to_aggregate=2)
    first, second, slow = driver.train(0, 1, 2)
    first.push()
    second.push()
    assert slow.commit(0, weight=3.0).outcome is ACCEPTED
    driver.new_chief(driver.look(), policy=PolicySpec(name=PolicyName.OUTER), replicas_to_aggregate=2)
    driver.come_back(first)
    first.commit(1)
    assert workers_of(driver.applied[-1].request.contributors) == [0, 2]
    assert driver.applied[-1].request.weights == (1.0, 3.0)


def test_sync_follows_once_what_is_counted_is_applied() -> None:
    driver = outer(3)
    first, second, slow = driver.train(0, 1, 2)
    first.push()
    driver.set_policy(PolicySpec())
    assert (driver.step, workers_of(driver.applied[0].request.contributors)) == (1, [0])
    assert slow.commit(0).outcome is STALE
    for worker in (first, second, slow):
        assert worker.commit(1).outcome is ACCEPTED
    assert driver.step == 2


def test_outer_takes_over_what_sync_has_counted() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, second, slow = driver.train(0, 1, 2)
    first.push()
    driver.set_policy(PolicySpec(name=PolicyName.OUTER))
    second.push()
    assert (driver.step, workers_of(driver.applied[0].request.contributors)) == (1, [0, 1])
    assert slow.commit(0).outcome is ACCEPTED


def test_a_worker_that_joins_while_the_policy_changes_gives_to_the_step_that_the_next_one_begins_with() -> None:
    driver = outer(2, applies_at_once=False)
    (first,) = trained(driver, 0)
    driver.set_policy(PolicySpec(name=PolicyName.SYNC))
    second = Worker(driver, 1)
    assert second.registration.may_contribute
    driver.configure()
    for worker in (first, second):
        worker.push()
    assert workers_of(driver.to_apply[0].request.contributors) == [0, 1]
