"""An accepted contribution stays so when the chief dies, and costs no record where the step is applied anyway. No process, no clock."""

from typing import Any

import pytest

from chief.core import messages
from ps_protocol.errors import EpochMismatch, InvalidSpec, Unavailable
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode
from ps_protocol.roles.chief import CommitPushRequest, CommitResult, FinishTrainingRequest, PushOutcome, TokenReply, TokenResult
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED, DUPLICATE = PushOutcome.ACCEPTED, PushOutcome.DUPLICATE


def backed_up(**config: Any) -> tuple[Driver, list[Worker]]:
    """Two of three contributions make a step."""
    driver = Driver.outlived(**{"total_num_replicas": 3, "replicas_to_aggregate": 2, "checkpoints": None} | config)
    return driver, driver.train(*range(config.get("total_num_replicas", 3)))


def records(driver: Driver) -> list[messages.KeepRecord]:
    return [order for order in driver.orders if isinstance(order, messages.KeepRecord)]


def test_an_accepted_contribution_is_in_the_step_though_others_are_quicker_at_the_next_chief() -> None:
    driver, workers = backed_up()
    first = workers[2].next_push()
    assert workers[2].commit(push_id=first).outcome is ACCEPTED
    driver.new_chief()
    for worker in workers[:2]:
        driver.come_back(worker)
    assert [worker.push() for worker in workers[:2]] == [ACCEPTED, PushOutcome.STALE]
    assert first in driver.applied[-1].request.contributors
    driver.come_back(workers[2])
    again = workers[2].commit(0, push_id=first)
    assert (again.outcome, again.first_outcome, again.applied_step) == (DUPLICATE, ACCEPTED, 0)


def test_accepted_is_answered_once_a_server_has_a_record_and_one_record_serves_all_that_wait() -> None:
    driver, workers = backed_up(replicas_to_aggregate=3)
    driver.is_manual = True
    calls = [worker.send_commit() for worker in workers[:2]]
    assert not any(call in driver.answers for call in calls)
    (record,) = records(driver)
    assert not record.is_for_all
    driver.is_manual = False
    driver.work_off()
    assert [driver.answers[call].outcome for call in calls] == [ACCEPTED, ACCEPTED]
    assert driver.shards[1].record_version < driver.shards[0].record_version == record.version + 1


def test_a_worker_that_gives_several_contributions_to_a_step_is_not_kept_waiting_for_others() -> None:
    driver, (worker, *_) = backed_up(total_num_replicas=1, replicas_to_aggregate=3)
    before, call = driver.now, driver.call()
    driver.send(messages.Asked(call=call, request=CommitPushRequest(participant=worker.participant, commit=worker.next_commit())))
    assert driver.answers[call].outcome is ACCEPTED
    assert driver.now == before


def test_a_contribution_that_is_answered_with_the_next_token_needs_no_record() -> None:
    driver, workers = backed_up(replicas_to_aggregate=3)
    driver.is_manual = True
    calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
    assert not records(driver)
    replies = [worker.answer(call) for worker, call in zip(workers, calls, strict=True)]
    assert all(reply.result is TokenResult.TOKEN and reply.commit is not None for reply in replies)


def test_a_wait_for_a_token_that_ends_without_one_reports_no_unrecorded_contribution() -> None:
    _, workers = backed_up()
    commit = workers[0].next_commit()
    reply = workers[0].answer(workers[0].ask(commit=commit, max_wait_s=0.0))
    assert (reply.result, reply.commit) == (TokenResult.WAIT, None)
    call = workers[0].ask(repeat=True, commit=commit)
    workers[1].push()
    told = workers[0].answer(call).commit
    assert told is not None
    assert (told.outcome, told.first_outcome) == (DUPLICATE, ACCEPTED)


def test_a_repeated_commit_is_answered_no_sooner() -> None:
    driver, workers = backed_up()
    driver.is_manual = True
    push = workers[0].next_push()
    calls = [workers[0].send_commit(0, push_id=push) for _ in range(2)]
    assert not any(call in driver.answers for call in calls)
    driver.is_manual = False
    driver.work_off()
    assert [driver.answers[call].outcome for call in calls] == [ACCEPTED, DUPLICATE]


def test_a_record_that_fails_is_an_error_and_the_caller_asks_again() -> None:
    driver, workers = backed_up()
    driver.is_manual = True
    call = workers[0].send_commit()
    driver.pass_time(1.5)
    assert isinstance(driver.answers[call], Unavailable)
    (record,) = records(driver)
    driver.orders.clear()
    driver.fail(record, InvalidSpec("record: too large"))
    assert any("record: too large" in note.text and note.is_warning for note in driver.notes)
    assert workers[0].commit(0, push_id=workers[0].next_push(), staged=False).outcome is PushOutcome.STALE


def test_a_rollback_refuses_commits_that_wait_for_their_record() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    workers = driver.train(0, 1)
    driver.is_manual = True
    call = workers[0].send_commit()
    driver.restart(0)
    assert isinstance(driver.answers[call], EpochMismatch)


def test_the_end_of_training_answers_every_commit_that_waits() -> None:
    driver, workers = backed_up()
    driver.is_manual = True
    call = workers[0].send_commit()
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert isinstance(driver.answers[call], CommitResult)


@pytest.mark.parametrize("policy", [PolicySpec(name=PolicyName.ASYNC), PolicySpec(name=PolicyName.SSP, staleness=2)], ids=str)
def test_contributions_that_are_steps_by_themselves_are_accepted_when_they_are_applied(policy: PolicySpec) -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None, policy=policy)
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    calls = [worker.send_commit() for worker in workers]
    driver.apply()
    assert [call in driver.answers for call in calls] == [True, False]
    driver.new_chief()
    driver.come_back(workers[0])
    assert workers[0].commit(0, push_id=driver.applied[-1].request.contributors[0]).first_outcome is ACCEPTED


def test_a_fifo_token_waits_for_the_record_of_the_contribution_that_it_reports() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None, policy=PolicySpec(tokens=TokenMode.FIFO))
    workers = driver.train(0, 1)
    driver.is_manual = True
    commit = workers[0].next_commit()
    call = workers[0].ask(commit=commit)
    assert call not in driver.answers
    driver.is_manual = False
    driver.pass_time(0.01)
    reply = driver.answers[call]
    assert isinstance(reply, TokenReply)
    assert reply.commit is not None
    driver.new_chief()
    assert driver.coordinator.status(driver.now).num_contributions == 1


def test_extras_of_one_worker_are_taken_over_with_the_rest() -> None:
    driver = Driver.outlived(total_num_replicas=1, replicas_to_aggregate=3, checkpoints=None)
    (worker,) = driver.train(0)
    assert worker.push() is ACCEPTED
    assert worker.has_token(worker.ask())
    assert worker.push() is ACCEPTED
    driver.new_chief()
    assert driver.coordinator.status(driver.now).num_contributions == 2
    driver.come_back(worker)
    assert worker.has_token(worker.ask())
    worker.push()
    assert driver.step == 1


def test_a_step_that_had_all_it_needs_when_the_chief_died_is_applied_by_the_next() -> None:
    driver, workers = backed_up(replicas_to_aggregate=3)
    pushes = [worker.next_push() for worker in workers]
    for worker, push in zip(workers[:2], pushes, strict=False):
        worker.commit(push_id=push)
    driver.new_chief(replicas_to_aggregate=2)
    assert driver.step == 1
    assert driver.applied[-1].request.contributors == tuple(pushes[:2])


def test_where_the_chief_cannot_die_alone_nothing_waits() -> None:
    driver = Driver(total_num_replicas=2, applies_at_once=False)
    workers = driver.train(0, 1)
    assert [worker.commit().outcome for worker in workers] == [ACCEPTED, ACCEPTED]


def test_where_all_are_about_equally_fast_no_record_is_needed() -> None:
    driver, workers = backed_up(replicas_to_aggregate=3)
    driver.is_manual = True
    calls = [worker.driver.call() for worker in workers]
    for worker, call in zip(workers, calls, strict=True):
        driver.send(messages.Asked(call=call, request=CommitPushRequest(participant=worker.participant, commit=worker.next_commit())))
    driver.pass_time(0.5)
    assert [driver.answers[call].outcome for call in calls] == [ACCEPTED] * 3
    assert not records(driver)
