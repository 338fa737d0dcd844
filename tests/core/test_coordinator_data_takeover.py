"""The way through the training data when a chief dies: what steps have applied is done, what workers have is theirs. No clock."""

from typing import Any

import pytest

from chief.core.replies import _MAX_UNKEPT
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import LeaseReply, LeaseResult, PushOutcome, TokenResult
from tests.core.chief_driver import Worker
from tests.core.recovery_driver import RecoveryDriver

ACCEPTED, LATE = PushOutcome.ACCEPTED, PushOutcome.LATE
DATA = DataSpec(name="train", num_samples=12, range_size=1)


def started(**config: Any) -> tuple[RecoveryDriver, list[Worker]]:
    driver = RecoveryDriver(**{"total_num_replicas": 2, "checkpoints": None} | config)
    return driver, driver.train(0, 1)


def leased(driver: RecoveryDriver, worker: Worker, number: int = 1, *, data: DataSpec = DATA, request_id: int = 1) -> tuple[int, ...]:
    reply = driver.answers[driver.lease(worker, data, max_ranges=number, request_id=request_id)]
    assert isinstance(reply, LeaseReply)
    return tuple(one.id for one in reply.ranges)


def done(driver: RecoveryDriver) -> set[int]:
    progress = driver.coordinator._cluster.data.progress()
    assert progress is not None
    return {*range(progress.epoch * progress.data.num_ranges), *progress.done}


def step(driver: RecoveryDriver, workers: list[Worker], *, request_id: int, data: DataSpec = DATA, number: int = 1) -> set[int]:
    ranges = [leased(driver, worker, number, data=data, request_id=request_id) for worker in workers]
    calls = [worker.ask(commit=worker.next_commit(ranges=mine)) for worker, mine in zip(workers, ranges, strict=True)]
    assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    return {identity for mine in ranges for identity in mine}


def test_what_steps_have_applied_is_done_for_the_next_chief_and_the_one_after_it() -> None:
    driver, workers = started()
    used = step(driver, workers, request_id=1) | step(driver, workers, request_id=2)
    for number in (3, 4):
        driver.new_chief()
        for worker in workers:
            driver.come_back(worker)
        assert done(driver) == used
        used |= step(driver, workers, request_id=number)
    assert used == set(range(8)), "each once"


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_an_interrupted_step_was_made_from_is_done_when_it_is_repeated(ahead: int) -> None:
    driver, workers = started()
    used = step(driver, workers, request_id=1)
    driver.applies_at_once = False
    for worker in workers:
        mine = leased(driver, worker, request_id=2)
        used |= {*mine}
        worker.ask(commit=worker.next_commit(ranges=mine))
    driver.apply_at(ahead)
    driver.applies_at_once = True
    driver.new_chief()
    driver.work()
    assert driver.step == 2
    assert done(driver) == used


def test_what_a_told_contribution_was_made_from_is_not_handed_out_again() -> None:
    driver, workers = started()
    mine = leased(driver, workers[0])
    assert workers[0].commit(ranges=mine).outcome is ACCEPTED
    driver.new_chief()
    driver.come_back(workers[0])
    driver.come_back(workers[1])
    assert not {*mine} & {*leased(driver, workers[1], 12, request_id=2)}


def test_many_ranges_are_put_into_a_record_and_no_longer_travel_with_each_step() -> None:
    data = DataSpec(name="train", num_samples=4 * _MAX_UNKEPT, range_size=1, shuffle_seed=3)
    driver, workers = started()
    used: set[int] = set()
    sent = []
    for number in range(12):
        used |= step(driver, workers, request_id=number + 1, data=data, number=_MAX_UNKEPT // 10)
        sent.append(len(driver.applied[-1].ranges))
    assert max(sent) <= 1.4 * _MAX_UNKEPT
    assert sent[-2] < max(sent)
    driver.new_chief()
    assert done(driver) == used


def test_what_workers_have_stays_theirs_and_nothing_is_handed_out_before_they_said_so() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    mine = leased(driver, workers[0], 3, request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=3, max_wait_s=20.0)
    assert call not in driver.answers
    driver.come_back(workers[0], held=mine)
    reply = driver.answers[call]
    assert not {*mine} & {one.id for one in reply.ranges}
    assert workers[0].commit(ranges=mine).outcome is ACCEPTED


def test_one_that_does_not_come_back_is_not_waited_for_long_and_words_say_for_whom() -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    driver.new_chief()
    driver.come_back(workers[1])
    words = driver.answers[driver.lease(workers[1], DATA, request_id=3)]
    assert (words.result, "worker 0" in words.waiting_for) == (LeaseResult.WAIT, True)
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=4, max_wait_s=20.0)
    driver.pass_time(2.1)
    assert len(driver.answers[call].ranges) == 10


def test_a_contribution_from_samples_that_another_has_by_now_is_dropped_and_its_worker_gives_another() -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    mine = leased(driver, workers[0], request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    driver.pass_time(2.1)
    assert {*mine} <= {*leased(driver, workers[1], 12, request_id=4)}
    driver.come_back(workers[0], held=mine)
    assert workers[0].commit(ranges=mine).outcome is LATE
    token = workers[0].answer(workers[0].ask())
    assert (token.result, token.step) == (TokenResult.TOKEN, driver.step), "it may contribute to the step all the same"


def test_a_new_incarnation_holds_nothing_of_the_former_one() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    mine = leased(driver, workers[0], request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    registration = driver.register(0, held=mine)
    assert registration.participant != workers[0].participant
    assert {*mine} <= {*leased(driver, workers[1], 12, request_id=4)}


def test_shards_that_apply_on_arrival_have_told_nobody_of_what_the_next_chief_does_not_know() -> None:
    driver, workers = started(policy=PolicySpec(name=PolicyName.ASYNC, use_locking=False))
    mine = leased(driver, workers[0])
    driver.is_manual = True
    call = workers[0].send_commit(is_applied=True, ranges=mine)
    assert call not in driver.answers
    driver.is_manual = False
    driver.work_off()
    assert driver.answers[call].outcome is ACCEPTED
    driver.new_chief()
    assert done(driver) == {*mine}


def test_a_chief_that_died_while_shards_were_brought_back_leaves_that_to_its_successor() -> None:
    driver = RecoveryDriver(total_num_replicas=2)
    workers = driver.train(0, 1)
    used = step(driver, workers, request_id=1)
    driver.is_manual = True
    driver.restart(0)
    while driver.coordinator.status(driver.now).num_rollbacks == 0:
        driver.do(driver.orders.pop(0))
    driver.orders.clear()
    driver.is_manual = False
    driver.new_chief()
    assert driver.step == 0
    assert driver.coordinator.epoch > 2, "brought back once more"
    for worker in workers:
        driver.come_back(worker)
    assert step(driver, workers, request_id=2) == used, "nothing of it is done"
