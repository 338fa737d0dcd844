"""Checkpoints in the core: when a step is saved, when a held step is announced, and the cost of a failed save. No file and no clock."""

from dataclasses import replace
from typing import Any

import pytest

from chief.core import messages
from chief.options import CheckpointConfig
from ps_protocol.errors import CheckpointStorageMissing, NotInitialized, StorageFull
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, FinishTrainingRequest, PushOutcome, SaveCheckpointRequest, SavedCheckpoint
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver

BY_STEP = CheckpointConfig(durability=Durability.STEP)
ON_DEMAND = CheckpointConfig(durability=Durability.NONE)


def save(driver: Driver, request_id: int, max_wait_s: float = 10.0) -> int:
    call = driver.call()
    driver.send(messages.Asked(call=call, request=SaveCheckpointRequest(request_id=request_id, max_wait_s=max_wait_s)))
    return call


def step(driver: Driver, worker: Any) -> None:
    call = worker.ask(commit=worker.next_commit())
    assert worker.has_token(call)


def test_the_first_values_are_saved_as_soon_as_the_model_is_initialised() -> None:
    driver = Driver.outlived()
    driver.train(0)
    assert list(driver.storage) == ["step-000000000"]


def test_a_checkpoint_is_made_every_so_many_steps_or_seconds_and_the_newest_are_kept() -> None:
    driver = Driver.outlived(total_num_replicas=1, lease_s=1e6, checkpoints=CheckpointConfig(every_steps=3, interval_s=60.0, keep=2))
    (worker,) = driver.train(0)
    for _ in range(7):
        step(driver, worker)
    assert list(driver.storage) == ["step-000000003", "step-000000006"]
    driver.pass_time(59.0)
    assert list(driver.storage) == ["step-000000003", "step-000000006"]
    driver.pass_time(2.0)
    assert list(driver.storage) == ["step-000000006", "step-000000007"]
    driver.pass_time(200.0)
    assert list(driver.storage) == ["step-000000006", "step-000000007"], "nothing new to save"


def test_deltas_rest_on_the_checkpoint_before_until_the_next_full_one() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.STEP, full_every=3, keep=9))
    driver.has_deltas = True
    (worker,) = driver.train(0)
    for _ in range(5):
        step(driver, worker)
    assert driver.since == [-1, 0, 1, -1, 3, 4]
    names = {tag: tuple(f"{file.tag}/{file.name}" for file in one.files_of(1)) for tag, one in driver.storage.items()}
    assert names["step-000000005"] == ("step-000000003/ps-1", "step-000000004/ps-1", "/ps-1")
    assert names["step-000000003"] == ("/ps-1",)


def test_after_a_rollback_the_first_checkpoint_is_full() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.STEP, full_every=9, keep=9))
    driver.has_deltas = True
    (worker,) = driver.train(0)
    step(driver, worker)
    driver.restart(0)
    assert driver.since == [-1, 0, -1]


def test_checkpoints_that_are_all_full_ask_nobody_to_note_changes() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=BY_STEP)
    (worker,) = driver.train(0)
    step(driver, worker)
    assert driver.since == [None, None]


def test_steps_wait_while_a_checkpoint_is_copied_and_continue_while_it_is_written() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    (worker,) = driver.train(0)
    driver.is_manual = True
    save(driver, 1)
    (order,) = [order for order in driver.orders if isinstance(order, messages.CopyStep)]
    call = worker.ask(commit=worker.next_commit())
    assert call not in driver.answers
    assert "copying step 0 for checkpoint step-000000000" in driver.coordinator.cluster.explain(driver.now)
    driver.done(order)
    driver.work()
    assert worker.has_token(call)
    step(driver, worker)


def test_a_manifest_has_the_contributions_applied_lately_by_worker() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=CheckpointConfig(every_steps=3))
    workers = driver.train(0, 1)
    for _ in range(3):
        calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
        assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    checkpoint = driver.storage["step-000000003"]
    assert [(p.worker, p.incarnation, [(a.sequence, a.step) for a in p.applied]) for p in checkpoint.pushes] == [
        (worker, 1, [(1, 0), (2, 1), (3, 2)]) for worker in (0, 1)
    ]
    assert checkpoint.record.model is not None
    assert (checkpoint.num_shards, len(checkpoint.files)) == (2, 2)


def test_under_durability_step_no_step_is_reported_before_it_is_saved() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=BY_STEP)
    (worker,) = driver.train(0)
    driver.is_manual = True
    call = worker.ask(commit=worker.next_commit())
    (order,) = [order for order in driver.orders if isinstance(order, messages.CopyStep)]
    assert (order.step, driver.step) == (1, 0)
    driver.do(driver.orders.pop(0))
    assert call not in driver.answers
    assert driver.coordinator.cluster.explain(driver.now) == "Waiting 0 s for a checkpoint. Step 0 is applied; it counts once it is saved"
    driver.is_manual = False
    driver.work_off()
    assert worker.has_token(call)
    assert driver.step == 1
    assert driver.storage[order.tag].pushes[0].applied[-1].step == 0, "the step itself is among what was applied"


def test_under_durability_step_a_full_disk_holds_the_step_and_it_is_tried_again() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=BY_STEP)
    (worker,) = driver.train(0)
    driver.full = True
    call = worker.ask(commit=worker.next_commit())
    assert call not in driver.answers
    assert "the chief tries again by itself" in driver.coordinator.cluster.explain(driver.now)
    driver.pass_time(2.5)
    driver.full = False
    driver.pass_time(1.0)
    assert worker.has_token(call)
    assert list(driver.storage) == ["step-000000000", "step-000000001-retry-3"]


def test_under_durability_step_a_lost_server_costs_no_reported_step() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=BY_STEP)
    (worker,) = driver.train(0)
    for _ in range(4):
        step(driver, worker)
    driver.restart(0)
    assert driver.step == 4


def test_a_failed_checkpoint_is_reported_and_training_continues() -> None:
    driver = Driver.outlived(total_num_replicas=1, lease_s=1e6)
    (worker,) = driver.train(0)
    driver.full = True
    step(driver, worker)
    driver.pass_time(61.0)
    step(driver, worker)
    status = driver.coordinator.status(driver.now).checkpoint
    assert status is not None
    assert (status.tag, status.failure, status.saving) == ("step-000000000", "no space left on device", "")
    words = "checkpoint step-000000001 failed: no space left on device; training continues; the next attempt"
    assert any(note.is_warning and words in note.text for note in driver.notes)
    driver.full = False
    driver.pass_time(60.0)
    status = driver.coordinator.status(driver.now).checkpoint
    assert status is not None
    assert (status.tag, status.failure) == ("step-000000002", "")


def test_each_request_for_a_checkpoint_makes_one_checkpoint() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    (worker,) = driver.train(0)
    step(driver, worker)
    first = save(driver, 5)
    assert driver.answers[first] == SavedCheckpoint(tag="step-000000001", step=1)
    step(driver, worker)
    assert driver.answers[save(driver, 5)] == driver.answers[first]
    assert driver.answers[save(driver, 6)] == SavedCheckpoint(tag="step-000000002", step=2)


def test_a_request_for_a_checkpoint_joins_the_save_of_the_same_step() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    driver.train(0)
    driver.is_manual = True
    calls = [save(driver, 1), save(driver, 2)]
    assert len([order for order in driver.orders if isinstance(order, messages.CopyStep)]) == 1
    driver.is_manual = False
    driver.work_off()
    assert [driver.answers[call].tag for call in calls] == ["step-000000000"] * 2


def test_a_request_for_a_checkpoint_that_times_out_says_what_it_waited_for_and_may_be_repeated() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    driver.train(0)
    driver.is_manual = True
    call = save(driver, 1, max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[call].tag == ""
    assert driver.answers[call].waiting_for == "the parameter servers are copying step 0 for checkpoint step-000000000"
    again = save(driver, 1)
    driver.is_manual = False
    driver.work_off()
    assert driver.answers[again].tag == "step-000000000"


def test_a_checkpoint_that_cannot_be_made_is_refused_with_a_reason() -> None:
    with pytest.raises(CheckpointStorageMissing, match="--checkpoint-dir"):
        save(Driver.outlived(checkpoints=None), 1)
    driver = Driver.outlived(checkpoints=ON_DEMAND)
    with pytest.raises(NotInitialized):
        save(driver, 1)
    driver.train(0)
    driver.full = True
    assert isinstance(driver.answers[save(driver, 2)], StorageFull)
    assert driver.coordinator.cluster.state is ClusterState.TRAINING


def test_the_last_step_is_saved_before_the_processes_end() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    (worker,) = driver.train(0)
    step(driver, worker)
    driver.is_manual = True
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    worker.leave()
    assert not driver.ended
    driver.is_manual = False
    driver.work_off()
    assert list(driver.storage) == ["step-000000001"]
    assert [end.exit_code for end in driver.ended] == [0]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_step_that_is_held_after_a_failure_is_saved_when_training_is_finished(is_full: bool) -> None:
    driver = Driver.outlived(total_num_replicas=1, lease_s=1e6, checkpoints=BY_STEP)
    (worker,) = driver.train(0)
    driver.is_manual = True
    worker.ask(commit=worker.next_commit())
    (order,) = (order for order in driver.orders if isinstance(order, messages.CopyStep))
    driver.orders.clear()
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    driver.pass_time(0.5)
    driver.fail(order, StorageFull("no space left on device"))
    driver.is_manual, driver.full = False, is_full
    driver.pass_time(0.5)
    assert driver.coordinator.cluster.state is ClusterState.FINISHED
    worker.leave()
    driver.full = False
    driver.pass_time(1.0)
    assert list(driver.storage) == ["step-000000000", f"step-000000001-retry-{2 if is_full else 1}"]
    assert (driver.step, [end.exit_code for end in driver.ended]) == (1, [0])


@pytest.mark.parametrize("how", ["full", "silent"])
def test_a_last_step_that_cannot_be_saved_does_not_keep_the_processes(how: str) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    (worker,) = driver.train(0)
    driver.full, driver.is_manual = how == "full", how == "silent"
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    worker.leave()
    driver.pass_time(31.0)
    assert [end.exit_code for end in driver.ended] == [0]
    (words,) = (note.text for note in driver.notes if "there is no checkpoint of the last step 0" in note.text)
    assert "training continues" not in words


def test_a_checkpoint_in_progress_is_abandoned_when_a_server_is_lost() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(every_steps=2))
    (worker,) = driver.train(0)
    step(driver, worker)
    driver.is_manual = True
    step(driver, worker)
    while not any(isinstance(order, messages.WriteStep) for order in driver.orders):
        driver.do(driver.orders.pop(0))
    (order,) = (order for order in driver.orders if isinstance(order, messages.WriteStep))
    driver.orders.clear()
    driver.restart(0)
    driver.done(order, ())
    assert not [order for order in driver.orders if isinstance(order, messages.CommitCheckpoint)]
    driver.is_manual = False
    driver.work_off()
    assert driver.step == 0


def test_without_a_place_for_checkpoints_nothing_is_ever_saved() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0)
    driver.is_manual = True
    for _ in range(3):
        step(driver, worker)
    assert not driver.orders
    assert driver.applied[0].request.contributors == (PushId(worker=0, incarnation=1, sequence=1),)
    assert worker.push() is PushOutcome.ACCEPTED


def test_a_server_that_is_asked_to_end_has_the_step_saved_once_but_not_where_its_standby_has_it_too() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=ON_DEMAND)
    (worker,) = driver.train(0)
    step(driver, worker)
    incarnation = driver.coordinator.cluster.servers[0].process_incarnation
    leaves = messages.ShardSeen(shard=0, process_incarnation=incarnation, is_leaving=True)
    driver.send(leaves)
    assert list(driver.storage) == ["step-000000001"]
    assert any("was asked to end: saving step 1 first" in note.text for note in driver.notes)
    step(driver, worker)
    driver.send(leaves)
    assert list(driver.storage) == ["step-000000001"], "it has been saved for this process"
    driver.send(messages.ReplicasChanged(shard=1, address="host-p:5001", standby="host-s:1", missing=""))
    driver.send(replace(leaves, shard=1, process_incarnation=driver.coordinator.cluster.servers[1].process_incarnation))
    assert list(driver.storage) == ["step-000000001"]
