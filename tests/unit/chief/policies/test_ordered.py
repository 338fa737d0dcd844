"""ssp and async: each contribution is a step by itself; its staleness, when its worker continues, and which workers wait."""

import pytest

from chief.core.messages import Asked
from chief.policies.base import Grant
from chief.policies.ordered import OrderedPolicy
from ps_protocol.model.policy import PolicyName, PolicySpec, TooStale
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import ClusterState, FinishTrainingRequest, PushOutcome, TokenReply, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED, STALE, LATE, DUPLICATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.LATE, PushOutcome.DUPLICATE


def asynchronous(*, applies_at_once: bool = True, max_steps: int | None = None, **spec: object) -> Driver:
    policy = PolicySpec(name=PolicyName.ASYNC, **spec)  # type: ignore[arg-type]
    return Driver(policy=policy, applies_at_once=applies_at_once, lease_s=10.0, max_steps=max_steps)


def ssp(staleness: int, *, applies_at_once: bool = True) -> Driver:
    return Driver(policy=PolicySpec(name=PolicyName.SSP, staleness=staleness), applies_at_once=applies_at_once, lease_s=10.0)


def trained(driver: Driver, *indices: int) -> list[Worker]:
    """Has workers join a cluster whose shards obey when told, and its shards learn the policy."""
    workers = driver.train(*indices)
    if driver.to_configure:
        driver.configure()
    return workers


def is_answered(worker: Worker, call: int) -> bool:
    return call in worker.driver.answers and worker.has_token(call)


def test_contributions_are_applied_one_by_one_in_order_of_their_commit() -> None:
    driver = asynchronous(applies_at_once=False)
    workers = trained(driver, 2, 0, 1)
    pushes = [worker.next_push() for worker in workers]
    results = [worker.commit(0, push_id=push) for worker, push in zip(workers, pushes, strict=True)]
    assert [(result.outcome, result.applied_step, result.staleness) for result in results] == [(ACCEPTED, n, n) for n in range(3)]
    while driver.to_apply:
        driver.apply()
    assert [(step.request.step, step.request.contributors) for step in driver.applied] == [(n, (push,)) for n, push in enumerate(pushes)]
    assert driver.step == 3
    status = driver.coordinator.status(driver.now, max_ledger_entries=3)
    assert [entry.contributors for entry in status.ledger] == [(push,) for push in reversed(pushes)]
    assert (status.policy.text, status.num_accepted, status.max_observed_staleness) == ("async", 3, 2)


def test_the_token_comes_when_the_contribution_is_applied_and_not_before() -> None:
    driver = asynchronous(applies_at_once=False)
    first, second = trained(driver, 0, 1)
    waiting = [first.ask(commit=first.next_commit()), second.ask(commit=second.next_commit())]
    assert not set(waiting) & set(driver.answers)
    driver.apply()
    assert is_answered(first, waiting[0])
    assert waiting[1] not in driver.answers
    driver.apply()
    reply = second.answer(waiting[1])
    assert (reply.result, reply.step, reply.global_step, reply.reads_latest) == (TokenResult.TOKEN, 2, 2, True)
    assert reply.commit is not None
    assert (reply.commit.applied_step, reply.commit.staleness) == (1, 1)


def test_without_anything_to_wait_for_the_token_comes_at_once() -> None:
    (worker,) = asynchronous().train(0)
    assert worker.has_token(worker.ask())
    assert worker.has_token(worker.ask(repeat=True))


def test_a_worker_may_have_read_what_the_chief_has_not_heard_of_yet() -> None:
    driver = asynchronous(applies_at_once=False)
    first, second = trained(driver, 0, 1)
    first.push()
    result = second.commit(1)
    assert (result.outcome, result.applied_step, result.staleness) == (ACCEPTED, 1, 0)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_contribution_too_stale_by_its_turn_is_dropped_at_the_chief_and_at_the_shards(max_staleness: int) -> None:
    driver = asynchronous(max_staleness=max_staleness)
    slow, fast = driver.train(0, 1)
    for _ in range(max_staleness + 1):
        fast.local_step = driver.step
        assert fast.push() is ACCEPTED
    push = slow.next_push()
    result = slow.commit(0, push_id=push)
    assert (result.outcome, result.applied_step, result.staleness) == (STALE, None, max_staleness + 1)
    assert slow.has_token(slow.ask()), "and it continues"
    slow.local_step = driver.step
    assert slow.push() is ACCEPTED
    assert [step.request.discards for step in driver.applied] == [()] * (max_staleness + 1) + [(push,)]
    assert driver.coordinator.status(driver.now).max_observed_staleness == 0


def test_a_contribution_that_is_too_stale_may_get_a_lower_weight_instead() -> None:
    driver = asynchronous(max_staleness=1, too_stale=TooStale.SCALE)
    slow, fast = driver.train(0, 1)
    for _ in range(4):
        fast.local_step = driver.step
        fast.push()
    push = slow.next_push()
    result = slow.commit(0, push_id=push)
    assert (result.outcome, result.applied_step, result.staleness, result.factor) == (ACCEPTED, 4, 4, 0.25)
    assert [step.request.weights for step in driver.applied] == [()] * 4 + [(0.25,)]
    again = slow.commit(0, push_id=push)
    assert (again.outcome, again.first_outcome, again.applied_step, again.staleness, again.factor) == (DUPLICATE, ACCEPTED, 4, 4, 0.25)


def test_the_contributions_of_a_dead_worker_are_applied_before_its_incarnation_is_forgotten() -> None:
    driver = asynchronous(applies_at_once=False)
    first, dead = trained(driver, 0, 1)
    first.push()
    push = dead.next_push()
    dead.commit(push_id=push)
    dead.leave(failure="boom")
    for _ in range(2):
        driver.apply()
    assert [step.request.discards for step in driver.applied] == [(), ()]
    assert driver.applied[1].request.contributors == (push,)
    first.local_step = 2
    first.push()
    driver.apply()
    assert driver.applied[2].request.discards == (PushId(worker=1, incarnation=1, sequence=0),)


def test_a_restarted_worker_does_not_wait_for_contributions_of_its_former_incarnation() -> None:
    driver = asynchronous(applies_at_once=False)
    (dead,) = trained(driver, 0)
    dead.push()
    dead.push()
    restarted = Worker(driver, 0, takeover=True)
    assert restarted.registration.may_contribute
    assert restarted.has_token(restarted.ask())
    call = restarted.ask(commit=restarted.next_commit(0))
    for _ in range(2):
        driver.apply()
        assert call not in driver.answers
    driver.apply()
    assert is_answered(restarted, call)


def test_no_contribution_is_promised_a_step_after_the_last() -> None:
    driver = asynchronous(applies_at_once=False, max_steps=2)
    workers = trained(driver, 0, 1, 2)
    assert [worker.push() for worker in workers] == [ACCEPTED, ACCEPTED, LATE]
    call = workers[2].ask()
    assert call not in driver.answers, "it would compute in vain"
    while driver.to_apply:
        driver.apply()
    assert (driver.step, driver.coordinator.cluster.state) == (2, ClusterState.FINISHED)
    assert workers[2].answer(call).result is TokenResult.FINISHED


def test_accepted_contributions_are_applied_before_the_end() -> None:
    driver = asynchronous(applies_at_once=False)
    first, second, third = trained(driver, 0, 1, 2)
    waiting = first.ask(commit=first.next_commit())
    second.push()
    driver.send(Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert third.push() is LATE
    assert third.ask() not in driver.answers
    states = []
    for _ in range(2):
        driver.apply()
        states.append(driver.coordinator.cluster.state)
    assert states == [ClusterState.TRAINING, ClusterState.FINISHED]
    assert isinstance(driver.answers[waiting], TokenReply)


def test_without_a_lock_the_chief_only_counts() -> None:
    driver = asynchronous(use_locking=False, max_steps=3)
    first, second = driver.train(0, 1)
    results = [worker.commit(step, is_applied=True) for worker, step in ((first, 0), (second, 0), (first, 7))]
    assert [(result.outcome, result.applied_step, result.staleness) for result in results] == [
        (ACCEPTED, 0, 0),
        (ACCEPTED, 1, 1),
        (ACCEPTED, 2, 0),
    ]
    assert not driver.applied
    assert (driver.step, driver.coordinator.cluster.state) == (3, ClusterState.FINISHED)
    status = driver.coordinator.status(driver.now, max_ledger_entries=9)
    assert (status.policy.text, status.num_accepted, [entry.last_worker for entry in status.ledger]) == ("async, unlocked", 3, [0, 1, 0])


def test_without_a_lock_a_wait_for_a_token_is_answered_at_once() -> None:
    driver = asynchronous(use_locking=False)
    (worker,) = driver.train(0)
    call = worker.ask(commit=worker.next_commit(is_applied=True))
    assert (worker.answer(call).step, worker.answer(call).reads_latest) == (1, True)


def take_steps(worker: Worker, number: int) -> int:
    """Contributes up to so many times; returns how often it continued."""
    for count in range(number):
        worker.local_step = worker.driver.step
        worker.push()
        if not is_answered(worker, worker.ask(max_wait_s=20.0)):
            return count
    return number


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_worker_gets_further_ahead_of_the_slowest_than_allowed(staleness: int) -> None:
    driver = ssp(staleness)
    fast, slow = driver.train(0, 1)
    assert take_steps(fast, 10) == staleness
    call = fast.ask(repeat=True)
    slow.local_step = driver.step
    slow.push()
    assert is_answered(fast, call), "the slowest has moved"
    assert take_steps(fast, 10) == 0


def test_with_no_staleness_two_workers_take_turns() -> None:
    driver = ssp(0)
    workers = driver.train(0, 1)
    for _ in range(3):
        calls = []
        for worker in workers:
            worker.local_step = driver.step
            calls.append(worker.ask(commit=worker.next_commit()))
        assert all(is_answered(worker, call) for worker, call in zip(workers, calls, strict=True))
    assert driver.step == 6


@pytest.mark.parametrize("how", ["leaves", "fails", "falls silent"])
def test_when_the_slowest_is_gone_the_others_continue(how: str) -> None:
    driver = ssp(1)
    fast, slow = driver.train(0, 1)
    assert take_steps(fast, 5) == 1
    call = fast.ask(repeat=True)
    if how == "falls silent":
        driver.pass_time(5.0)
        fast.heartbeat()
        driver.pass_time(5.1)
    else:
        slow.leave(failure="boom" if how == "fails" else "")
    assert is_answered(fast, call)


def test_a_worker_that_joins_is_as_far_as_the_slowest() -> None:
    driver = ssp(1)
    first, second = driver.train(0, 1)
    for _ in range(3):
        take_steps(first, 1)
        take_steps(second, 1)
    newcomer = Worker(driver, 2)
    assert take_steps(first, 5) == 1, "not held up by what happened before it came"
    assert take_steps(newcomer, 5) == 1


def test_a_wait_for_the_slowest_is_explained() -> None:
    driver = ssp(1)
    fast, _ = driver.train(0, 1)
    take_steps(fast, 5)
    driver.pass_time(1.5)
    words = driver.coordinator.status(driver.now).waiting_for
    assert words.startswith("Waiting 2 s for worker 1 (heard 2 s ago)")
    assert words.endswith("worker 0 waits, 2 ahead of the slowest; last seen: worker 1 1.5 s ago on host-b pid 912")


def test_a_cluster_with_slow_workers_names_the_worker_that_computes() -> None:
    driver = asynchronous()
    driver.train(0)
    driver.pass_time(1.5)
    assert driver.coordinator.status(driver.now).waiting_for == ""
    assert driver.coordinator.cluster.explain(driver.now) == "step 0 has no contribution; last seen: worker 0 1.5 s ago on host-b pid 912"


def test_a_worker_that_comes_to_a_new_chief_waits_for_what_the_former_one_counted() -> None:
    counted = (ChosenPush(push_id=PushId(worker=2, incarnation=1, sequence=1), step=0, weight=1.0),)
    policy = OrderedPolicy(spec=PolicySpec(name=PolicyName.ASYNC), step=1, counted=counted)
    policy.join(2, 1)
    assert policy.ask(2, local_step=0, request_id=1) is None
    assert policy.advance() == [Grant(2, 2)]


def test_a_process_that_takes_a_workers_place_does_not_wait_for_what_that_gave() -> None:
    counted = (ChosenPush(push_id=PushId(worker=2, incarnation=1, sequence=1), step=0, weight=1.0),)
    policy = OrderedPolicy(spec=PolicySpec(name=PolicyName.ASYNC), step=1, counted=counted)
    policy.join(2, 2)
    assert policy.ask(2, local_step=0, request_id=1) == 1
