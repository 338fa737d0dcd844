"""Nobody is taken in before the chief knows which chiefs there were before it, since a number might be another's."""

from dataclasses import replace

import pytest

from chief.core import messages
from ps_protocol.errors import LeaseExpired, Unavailable
from ps_protocol.roles.chief import ParticipantKind, RegisterRequest, Registration
from tests.core.chief_driver import Worker
from tests.core.recovery_driver import RecoveryDriver


def arrival(driver: RecoveryDriver, index: int) -> int:
    """Somebody wants to take part; returns the call."""
    call = driver.call()
    request = RegisterRequest(kind=ParticipantKind.WORKER, index=index, host="host-b", pid=4242, request_id=1000 + call)
    driver.send(messages.RegisterWorker(call=call, request=request))
    return call


def test_nobody_is_taken_in_before_the_chief_knows_who_was_here_and_then_nobody_gets_anothers_number() -> None:
    driver = RecoveryDriver(total_num_replicas=2, checkpoints=None)
    workers = driver.train(0, 1)
    for worker in workers:
        worker.push()
    fresh = RecoveryDriver(total_num_replicas=2, checkpoints=None, begin=False)
    fresh.shards = driver.shards
    call = arrival(fresh, 0)
    assert call not in fresh.answers, "it could not know which number is free"
    fresh.begin()
    registration = fresh.answers[call]
    assert isinstance(registration, Registration)
    assert registration.participant.incarnation > workers[0].participant.incarnation


def test_whoever_comes_before_the_parameter_servers_are_found_is_told_what_for_it_waits() -> None:
    fresh = RecoveryDriver(total_num_replicas=2, checkpoints=None, begin=False)
    fresh.send(messages.ShardUnreachable(shard=1, why="connection refused"))
    call, gone = arrival(fresh, 0), arrival(fresh, 1)
    fresh.send(messages.CallCancelled(call=gone))
    fresh.pass_time(1.5)
    assert isinstance(fresh.answers[call], Unavailable), "so that it asks again"
    assert "ps 1 at host-p:5001" in str(fresh.answers[call])
    fresh.begin()
    assert gone not in fresh.answers
    assert fresh.register(0).participant.incarnation == 1


def test_nobody_is_taken_in_before_all_servers_know_the_chief() -> None:
    """Were it lost before that, the next one would have its number, and give the same ones."""
    fresh = RecoveryDriver(num_shards=2, total_num_replicas=2, checkpoints=None, begin=False)
    fresh.is_manual = True
    fresh.begin()
    call = arrival(fresh, 0)
    assert call not in fresh.answers
    fresh.is_manual = False
    fresh.work_off()
    assert isinstance(fresh.answers[call], Registration)


def test_whoever_comes_before_a_checkpoint_is_found_is_numbered_above_all_that_the_checkpoint_knows() -> None:
    driver = RecoveryDriver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.SaveCheckpoint(call=None, request_id=1, max_wait_s=0.0))
    again = RecoveryDriver(total_num_replicas=1, storage=driver.storage, begin=False)
    again.is_manual = True
    again.begin()
    call = arrival(again, 0)
    assert call not in again.answers
    again.is_manual = False
    again.work_off()
    registration = again.answers[call]
    assert isinstance(registration, Registration)
    assert registration.chief_incarnation == 2
    assert registration.participant.incarnation == (1 << 20) + 1


def test_a_chief_that_takes_a_higher_number_later_disowns_whom_it_took_in_before() -> None:
    """The newest checkpoint is damaged, and the older one is of a chief with a higher number than this one has by then."""
    driver = RecoveryDriver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.SaveCheckpoint(call=None, request_id=1, max_wait_s=0.0))
    tags = sorted(driver.storage)
    driver.storage[tags[0]] = replace(driver.storage[tags[0]], chief_incarnation=5)
    again = RecoveryDriver(total_num_replicas=1, storage=driver.storage, begin=False)
    again.damaged, again.is_manual = {tags[-1]}, True
    again.begin()
    again.do(again.orders.pop(0))
    early = Worker(again, 0, pid=4242)
    again.is_manual = False
    again.work_off()
    assert again.coordinator.chief_incarnation == 6
    assert again.come_back(early, pid=4242).participant.incarnation == (5 << 20) + 1


def test_a_chief_that_knows_nothing_yet_names_no_epoch_that_it_has_made_up() -> None:
    driver = RecoveryDriver(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    fresh = RecoveryDriver(total_num_replicas=1, checkpoints=None, begin=False)
    worker.driver = fresh
    worker.participant = replace(worker.participant, epoch=7)
    with pytest.raises(LeaseExpired, match="not registered here"):
        worker.heartbeat()
