"""Who waits for a token, for how long, and who is released."""

import pytest

from chief.core import messages as ev
from ps_protocol.errors import (
    InvalidSpec,
    StepAhead,
)
from ps_protocol.roles.chief import CommitResult, ParticipantKind, PushOutcome, TokenResult
from tests.core.chief_driver import Driver, Worker

ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


def test_a_waiting_worker_is_told_after_its_slice_what_it_waits_for() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    call = first.ask(max_wait_s=2.0)
    driver.pass_time(1.9)
    assert call not in driver.answers
    driver.pass_time(0.2)
    reply = first.answer(call)
    assert (reply.result, reply.step) == (TokenResult.WAIT, 0)
    assert "missing: worker 1 (last seen 2.0 s ago" in reply.waiting_for
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


def test_all_who_wait_are_released_by_the_step() -> None:
    driver = Driver(total_num_replicas=3)
    workers = driver.train(0, 1, 2)
    calls = []
    for worker in workers:
        worker.push()
        calls.append(worker.ask())
    assert [worker.has_token(call) for worker, call in zip(workers, calls, strict=True)] == [True] * 3
    assert [worker.local_step for worker in workers] == [1, 1, 1]


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
