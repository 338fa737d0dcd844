"""Two chiefs at the same time: each finds what the other has announced, and does not rely on anything that neither can know."""

import pytest

from chief.core import messages
from chief.options import CheckpointConfig
from ps_protocol.errors import EpochMismatch, Superseded, Unavailable
from ps_protocol.model.data import DataSpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, LeaseReply, LeaseResult, ModelReply
from tests.support.chief.chief_driver import Driver, Worker

DATA = DataSpec(name="train", num_samples=12, range_size=2, num_epochs=1)


def trained(num_steps: int, durability: Durability = Durability.STEP) -> tuple[Driver, Worker]:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=durability, every_steps=1))
    (worker,) = driver.train(0)
    for _ in range(num_steps):
        assert worker.has_token(worker.ask(commit=worker.next_commit()))
    return driver, worker


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_chief_that_starts_takes_the_shards_before_it_looks_for_a_checkpoint(num_lost: int) -> None:
    driver, _ = trained(3)
    for shard in range(num_lost):
        driver.kill(shard)
    driver.is_manual = True
    driver.new_chief()
    assert [type(order) for order in driver.orders] == [messages.AdoptShards]
    driver.do(driver.orders.pop())
    assert [type(order) for order in driver.orders] == [messages.FindCheckpoint]


def test_a_chief_whose_shard_is_restarted_looks_for_a_checkpoint_without_taking_the_shards_again() -> None:
    driver, _ = trained(3)
    driver.is_manual = True
    driver.restart(1)
    assert [type(order) for order in driver.orders] == [messages.FindCheckpoint]


@pytest.mark.parametrize(("durability", "is_awaited"), [(Durability.STEP, True), (Durability.INTERVAL, False)])
def test_only_a_checkpoint_that_a_step_waits_for_must_be_whole_in_time(durability: Durability, is_awaited: bool) -> None:
    driver, worker = trained(1, durability)
    driver.is_manual = True
    worker.send_commit()
    while not any(isinstance(order, messages.CommitCheckpoint) for order in driver.orders):
        driver.do(driver.orders.pop(0))
    assert [order.is_awaited for order in driver.orders if isinstance(order, messages.CommitCheckpoint)] == [is_awaited]


def test_shards_restored_by_a_chief_that_ended_before_it_configured_them_are_restored_once_more() -> None:
    driver, _ = trained(3)
    for shard in driver.shards:  # restored by a chief that was superseded before it could say which training data is done
        shard.last_apply, shard.record, shard.record_version = None, None, 0
    driver.new_chief()
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch, driver.step) == (ClusterState.TRAINING, 3, 3)
    assert any("ended while it brought the parameter servers back" in note.text for note in driver.notes)


def test_a_copy_of_a_registration_that_comes_late_leases_nothing_again() -> None:
    driver = Driver.outlived(total_num_replicas=2, replicas_to_aggregate=1)
    first, second = driver.train(0, 1)
    call = driver.lease(first, DATA, max_ranges=2)
    held = tuple(one.id for one in driver.answers[call].ranges)
    assert second.has_token(second.ask(commit=second.next_commit()))
    driver.new_chief()
    driver.come_back(first, held=held, request_id=77)
    first.commit(0, staged=False, ranges=held)  # dropped, and so they are free again
    driver.come_back(first, held=held, request_id=77)
    driver.come_back(second)
    reply = driver.answers[driver.lease(second, DATA, max_ranges=9)]
    assert isinstance(reply, LeaseReply)
    assert (reply.result, {*held} <= {one.id for one in reply.ranges}) == (LeaseResult.GRANTED, True)


def test_a_wish_for_data_of_a_worker_that_was_replaced_is_refused_and_gets_nothing() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    first, second = driver.train(0, 1)
    held = driver.answers[driver.lease(first, DATA, max_ranges=6)].ranges
    waiting = driver.lease(second, DATA, max_wait_s=5.0)
    replacement = driver.register(1, pid=99, request_id=88, takeover=True)
    assert isinstance(driver.answers[waiting], Superseded)
    driver.register(0, pid=98, request_id=89, takeover=True)  # what the first one held is free
    second.participant = replacement.participant
    reply = driver.answers[driver.lease(second, DATA, max_ranges=9)]
    assert {one.id for one in reply.ranges} == {one.id for one in held}


def test_first_values_are_not_counted_on_while_a_server_does_not_answer_since_it_may_be_another_process() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    worker = Worker(driver, 0)
    reply = driver.answers[driver.ask_model(worker)]
    assert isinstance(reply, ModelReply)
    driver.send(messages.ShardUnreachable(shard=1, why="connection refused"))
    with pytest.raises(Unavailable, match=r"first values are not safe yet: ps 1 at host-p:5001 has not answered"):
        worker.complete(reply.attempt)
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
    driver.send(messages.ShardSeen(shard=1, process_incarnation=driver.shards[1].process))
    for shard in driver.shards:
        shard.step = 0
    worker.complete(reply.attempt)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 0)


def test_first_values_given_to_another_process_than_the_chief_has_come_to_nothing() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    worker = Worker(driver, 0)
    reply = driver.answers[driver.ask_model(worker)]
    assert isinstance(reply, ModelReply)
    driver.send(messages.ShardUnreachable(shard=1, why="connection refused"))
    driver.restart(1)
    with pytest.raises(EpochMismatch):
        worker.complete(reply.attempt)
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
