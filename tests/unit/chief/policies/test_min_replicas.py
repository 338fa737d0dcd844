"""Fewer contributions a step after workers are lost: at least the minimum, and none fewer while a worker may still contribute."""

from chief.policies.sync import StrictTokens, SyncPolicy
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED = PushOutcome.ACCEPTED


def silence(driver: Driver, living: list[Worker], duration_s: float = 12.0) -> None:
    """Time passes; only these give signs of life."""
    for _ in range(int(duration_s / 3.0)):
        driver.pass_time(3.0)
        for worker in living:
            worker.heartbeat()


def test_a_step_continues_with_the_living_as_soon_as_a_lease_ends() -> None:
    driver = Driver(total_num_replicas=3, min_replicas=1, lease_s=10.0)
    first, second, _dead = driver.train(0, 1, 2)
    calls = [first.ask(commit=first.next_commit()), second.ask(commit=second.next_commit())]
    silence(driver, [first, second], 9.0)
    assert driver.step == 0
    silence(driver, [first, second], 3.0)
    assert driver.step == 1
    assert first.has_token(calls[0])
    assert second.has_token(calls[1])


def test_a_step_never_has_fewer_contributions_than_the_minimum() -> None:
    driver = Driver(total_num_replicas=3, min_replicas=2)
    first, second, third = driver.train(0, 1, 2)
    second.leave(failure="boom")
    third.leave(failure="boom")
    first.push()
    assert driver.step == 0
    assert "step 0 has 1 of 2 contributions" in driver.coordinator.cluster.explain(driver.now)
    assert Worker(driver, 1).push() is ACCEPTED
    assert driver.step == 1


def test_a_worker_that_joins_again_is_waited_for_again() -> None:
    driver = Driver(total_num_replicas=2, min_replicas=1)
    first, second = driver.train(0, 1)
    second.leave(failure="boom")
    first.push()
    assert driver.step == 1
    second = Worker(driver, 1)
    assert first.has_token(first.ask())
    first.push()
    assert driver.step == 1
    assert second.push() is ACCEPTED
    assert driver.step == 2


def test_workers_that_never_came_are_waited_for() -> None:
    driver = Driver(total_num_replicas=3, min_replicas=1)
    first, second = driver.train(0, 1)
    second.leave(failure="boom")
    first.push()
    assert driver.step == 0, "worker 2 may still come"
    Worker(driver, 2).push()
    assert driver.step == 1


def test_contributions_of_a_lost_worker_count_besides_those_of_the_living() -> None:
    driver = Driver(total_num_replicas=3, min_replicas=1)
    first, second, third = driver.train(0, 1, 2)
    third.push()
    third.leave(failure="boom")
    first.push()
    assert driver.step == 0, "the second lives and is not done"
    assert second.push() is ACCEPTED
    assert driver.step == 1
    assert len(driver.applied[0].request.contributors) == 3


def test_the_status_has_the_wanted_number_and_the_minimum() -> None:
    driver = Driver(total_num_replicas=2, min_replicas=1)
    _, second = driver.train(0, 1)
    second.leave(failure="boom")
    status = driver.coordinator.status(driver.now)
    assert (status.replicas_to_aggregate, status.min_replicas) == (2, 1)


def test_a_step_that_is_complete_with_fewer_leaves_the_later_ones_what_they_need() -> None:
    policy = SyncPolicy(spec=PolicySpec(), num_required=2, tokens=StrictTokens(), workers=[0, 1])
    policy.require(1)
    policy.commit(PushId(worker=1, incarnation=1, sequence=1), step=0)
    policy.require(2)
    assert policy.is_complete
    policy.advance()
    policy.commit(PushId(worker=1, incarnation=1, sequence=2), step=1)
    assert not policy.is_complete, "the other worker is there again"
