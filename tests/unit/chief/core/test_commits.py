"""Waits for tokens, and commits: which contributions count. Whole situations are in test_situations."""

import pytest

from chief.core import messages as ev
from ps_protocol.errors import (
    InvalidSpec,
    NotInitialized,
    PushIdReused,
    StepAhead,
    Unavailable,
)
from ps_protocol.roles.chief import CommitResult, ParticipantKind, PushOutcome, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker

# Who waits for a token, for how long, and who is released.


ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


def test_a_waiting_worker_learns_the_reason_after_each_slice_of_its_wait() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    call = first.ask(max_wait_s=2.0)
    driver.pass_time(1.9)
    assert call not in driver.answers
    driver.pass_time(0.2)
    reply = first.answer(call)
    assert (reply.result, reply.step) == (TokenResult.WAIT, 0)
    assert "last seen: worker 1 2.0 s ago" in reply.waiting_for
    assert second.heartbeat() is False


def test_no_slice_is_longer_than_twenty_seconds() -> None:
    driver = Driver(total_num_replicas=2, lease_s=100.0)
    first, _ = driver.train(0, 1)
    call = first.ask(max_wait_s=1e9)
    driver.pass_time(20.0)
    assert first.answer(call).result is TokenResult.WAIT


@pytest.mark.parametrize("max_wait_s", [0.0, -1.0, float("nan")])
def test_without_time_to_wait_the_answer_is_immediate(max_wait_s: float) -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    assert first.answer(first.ask(max_wait_s=max_wait_s)).result is TokenResult.WAIT


def test_a_commit_that_rides_along_is_answered_with_the_token() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    call = worker.ask(commit=worker.next_commit())
    assert call not in driver.answers
    driver.apply()
    reply = worker.answer(call)
    commit = CommitResult(outcome=ACCEPTED, global_step=0, applied_step=0)
    assert (reply.result, reply.step, reply.global_step, reply.commit) == (TokenResult.TOKEN, 1, 1, commit)


def test_a_call_that_is_refused_has_not_counted_its_commit() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    first.local_step = 5
    with pytest.raises(StepAhead):
        first.ask(commit=first.next_commit(0))
    assert driver.coordinator.status(driver.now).num_contributions == 0


def test_a_caller_that_goes_away_loses_no_token() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    call = worker.ask()
    driver.send(ev.CallCancelled(call=call))
    driver.apply()
    assert call not in driver.answers
    assert worker.has_token(worker.ask(repeat=True))
    assert worker.local_step == 1


def test_a_repeated_call_takes_the_place_of_the_lost_one() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    lost = first.ask()
    repeated = first.ask(repeat=True)
    assert first.answer(lost).result is TokenResult.WAIT
    second.push()
    assert first.has_token(repeated)


def test_observers_get_no_tokens_and_contribute_nothing() -> None:
    driver = Driver()
    driver.train(0)
    observer = Worker(driver, kind=ParticipantKind.OBSERVER)
    for attempt in (observer.ask, observer.commit, lambda: driver.ask_model(observer)):
        with pytest.raises(InvalidSpec, match="an observer cannot"):
            attempt()


# When a contribution counts; whole situations are in test_coordinator_situations.


def test_a_commit_completes_the_step_with_sorted_contributors() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, second = driver.train(0, 1)
    assert second.commit() == CommitResult(outcome=ACCEPTED, global_step=0, applied_step=0)
    assert first.commit().outcome is ACCEPTED
    (applied,) = driver.applied
    assert (applied.fence.epoch, applied.request.step, [push.worker for push in applied.request.contributors]) == (1, 0, [0, 1])
    assert driver.step == 1


def test_a_repeated_commit_has_its_effect_once_and_tells_the_first_outcome() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    push = first.next_push()
    assert first.commit(push_id=push).outcome is ACCEPTED
    assert first.commit(push_id=push) == CommitResult(outcome=DUPLICATE, global_step=0, first_outcome=ACCEPTED, applied_step=0)
    assert driver.coordinator.status(driver.now).num_contributions == 1


def test_a_repeated_commit_is_recognised_after_its_step() -> None:
    driver = Driver(replicas_to_aggregate=1)
    (worker,) = driver.train(0)
    push = worker.next_push()
    worker.commit(push_id=push)
    assert worker.commit(step=0, push_id=push) == CommitResult(outcome=DUPLICATE, global_step=1, first_outcome=ACCEPTED, applied_step=0)
    assert driver.coordinator.status(driver.now).num_accepted == 1


def test_a_push_id_for_another_step_is_refused() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    push = worker.next_push()
    worker.commit(push_id=push)
    with pytest.raises(PushIdReused, match="push 0/1/1 was for step 0, now for step 1"):
        worker.commit(step=1, push_id=push)


def test_a_push_id_that_was_passed_over_counts_for_nothing() -> None:
    driver = Driver(replicas_to_aggregate=2)
    first, _ = driver.train(0, 1)
    abandoned = first.next_push()
    assert first.push() is ACCEPTED
    assert first.commit(push_id=abandoned).outcome is DUPLICATE
    assert driver.coordinator.status(driver.now).num_contributions == 1


def test_a_push_for_a_past_step_is_stale_and_one_for_a_step_being_applied_is_late() -> None:
    driver = Driver(replicas_to_aggregate=1, applies_at_once=False)
    first, second, third = driver.train(0, 1, 2)
    assert first.push() is ACCEPTED
    assert second.push() is LATE
    driver.apply()
    assert third.push() is STALE
    status = driver.coordinator.status(driver.now, max_ledger_entries=1)
    assert (status.num_accepted, status.num_late, status.num_stale) == (1, 1, 1)
    assert (status.ledger[0].num_late, status.ledger[0].num_stale, status.ledger[0].last_worker) == (1, 1, 0)


def test_a_push_that_a_shard_dropped_counts_as_stale() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    assert worker.commit(staged=False).outcome is STALE
    assert driver.applied == []


def test_a_push_ahead_of_the_cluster_is_refused_and_changes_nothing() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    push = worker.next_push()
    with pytest.raises(StepAhead, match="local_step 12 is ahead of global_step 0; read again"):
        worker.commit(step=12, push_id=push)
    assert worker.commit(step=0, push_id=push).outcome is ACCEPTED


@pytest.mark.parametrize("step", [-1, (1 << 62) + 1])
def test_a_step_that_no_cluster_can_have_is_refused(step: int) -> None:
    (worker,) = Driver().train(0)
    with pytest.raises(InvalidSpec, match="local_step"):
        worker.commit(step=step)


def test_a_push_before_initialisation_is_refused_with_a_reason() -> None:
    driver = Driver()
    worker = Worker(driver)
    with pytest.raises(NotInitialized, match=r"no values yet: Waiting 0 s for a model \(1 worker joined\)"):
        worker.commit()


def test_dedupe_memory_is_bounded() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    for step in range(200):
        worker.commit(step=step)
    outcomes = driver.coordinator.cluster.members.check(worker.participant, now=driver.now).outcomes
    assert len(outcomes._recent) <= 16
    assert worker.commit(step=3, push_id=PushId(worker=0, incarnation=1, sequence=4)).outcome is DUPLICATE


def test_a_worker_that_read_the_step_under_way_before_a_change_to_sync_is_to_ask_again() -> None:
    driver = Driver(applies_at_once=False)
    first, second = driver.train(0, 1)
    for worker in (first, second):
        worker.send_commit(0)
    with pytest.raises(Unavailable, match="step 1 is not open yet"):
        first.commit(1)
    driver.apply()
    assert first.commit(1).outcome is ACCEPTED
