"""Lost variables and unreadable storage: the cluster goes back to a checkpoint under a new epoch. No process, no file, no clock."""

import pytest

from chief.core import messages
from chief.options import CheckpointConfig
from ps_protocol.errors import EpochMismatch, LeaseExpired, Superseded, TrainingFailed, Unavailable
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import (
    ClusterState,
    CompleteInitializationRequest,
    FinishTrainingRequest,
    ModelReply,
    ModelState,
    PushOutcome,
    SaveCheckpointRequest,
)
from ps_protocol.roles.shard import Adoption, AppliedPush, WorkerPushes
from tests.support.chief.chief_driver import Driver, Worker, model_of

# Parameter servers that lose their variables: the cluster goes back to a checkpoint under a new epoch. No process, no file, no clock.


ACCEPTED = PushOutcome.ACCEPTED
EVERY_2 = CheckpointConfig(every_steps=2)


def steps(driver: Driver, workers: list[Worker], number: int) -> None:
    for _ in range(number):
        calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
        assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))


def test_a_restarted_server_takes_all_back_to_the_newest_checkpoint_under_a_new_epoch() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=EVERY_2)
    workers = driver.train(0, 1)
    steps(driver, workers, 5)
    driver.restart(1)
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch, driver.step) == (ClusterState.TRAINING, 2, 4)
    assert [shard.step for shard in driver.shards] == [4, 4], "the survivor too"
    status = driver.coordinator.status(driver.now)
    why = "ps 1 at host-p:5001 was restarted; 1 step is computed again"
    assert (status.num_rollbacks, status.last_rollback) == (1, f"rolled back to step 4 (epoch 2): {why}")


def test_a_rollback_that_costs_no_step_is_reported_as_such() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=EVERY_2)
    workers = driver.train(0, 1)
    steps(driver, workers, 4)
    driver.restart(1)
    assert driver.coordinator.status(driver.now).last_rollback.endswith("ps 1 at host-p:5001 was restarted; no step is lost")


def test_workers_keep_their_places_and_the_steps_are_done_again() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=EVERY_2)
    workers = driver.train(0, 1)
    steps(driver, workers, 5)
    driver.restart(0)
    with pytest.raises(EpochMismatch) as caught:
        workers[0].heartbeat()
    assert str(caught.value) == "cluster epoch is 2, you have 1 (rolled back to step 4). Connect again"
    assert caught.value.facts == {"epoch": "2", "step": "4"}
    before = [(worker.participant.index, worker.participant.incarnation) for worker in workers]
    for worker in workers:
        registration = driver.come_back(worker)
        assert registration.may_contribute
        assert registration.global_step == 4
    assert [(worker.participant.index, worker.participant.incarnation) for worker in workers] == before
    steps(driver, workers, 3)
    assert driver.step == 7


def test_a_worker_that_waits_when_a_server_is_lost_learns_of_the_new_epoch() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    call = first.ask(commit=first.next_commit())
    driver.restart(0)
    assert isinstance(first.error(call), EpochMismatch)


def test_a_call_that_waits_for_a_restoration_learns_its_progress() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    steps(driver, [worker], 2)
    driver.is_manual = True
    driver.restart(1)
    driver.do(driver.orders.pop())
    driver.send(messages.ShardRestoring(shard=1, num_bytes_read=0, num_bytes=0))
    assert "has read" not in driver.coordinator.cluster.explain(driver.now)
    driver.send(messages.ShardRestoring(shard=1, num_bytes_read=3 << 30, num_bytes=4 << 30))
    told = driver.coordinator.cluster.explain(driver.now)
    assert "Then step 0 of checkpoint step-000000000. Ps 1 at host-p:5001 has read 75 % of 4.0 GiB." in told, told
    driver.is_manual = False
    driver.work_off()
    assert "has read" not in driver.coordinator.cluster.explain(driver.now)


def test_while_servers_are_restored_members_join_the_model_and_wait_with_an_explanation() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    steps(driver, [worker], 2)
    driver.is_manual = True
    driver.restart(1)
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING
    text = "Recovering: servers are brought to one step. Ps 1 at host-p:5001 was restarted. Looking for the newest whole checkpoint. "
    assert driver.coordinator.status(driver.now).waiting_for.startswith(text)
    driver.come_back(worker)
    with pytest.raises(Unavailable, match=r"Recovering: .* Ps 1"):
        worker.commit()
    call = driver.ask_model(worker)
    driver.do(driver.orders.pop())
    driver.send(messages.ShardUnreachable(shard=1, why="connection refused"))
    driver.now += 3.0
    told = driver.coordinator.cluster.explain(driver.now)
    assert "Waiting 3 s for ps 1 (connection refused)" in told and "Then step 0 of checkpoint step-000000000" in told
    driver.is_manual = False
    driver.come_back(worker)  # the epoch rose once more
    call = call if call not in driver.answers else driver.ask_model(worker)
    driver.work_off()
    reply = driver.answers[call]
    assert isinstance(reply, (ModelReply, EpochMismatch))
    again = driver.answers[driver.ask_model(worker)]
    assert (again.state, again.global_step) == (ModelState.READY, 0)


def test_reports_about_an_epoch_that_is_over_are_ignored() -> None:
    driver = Driver.outlived(total_num_replicas=1, applies_at_once=False)
    (worker,) = driver.train(0)
    worker.send_commit()
    step = driver.to_apply.pop()
    driver.restart(0)
    driver.done(step)
    driver.fail(step, EpochMismatch("ps 0: it is of another epoch"))
    assert (driver.step, driver.coordinator.cluster.state) == (0, ClusterState.TRAINING)


def test_a_server_restarted_while_it_is_brought_back_is_brought_back_once_more_under_a_later_epoch() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    steps(driver, [worker], 1)
    driver.is_manual = True
    driver.restart(0)
    driver.do(driver.orders.pop())
    late = driver.orders.pop()
    assert isinstance(late, messages.RestoreShards)
    driver.restart(1)
    driver.done(late, (107, 7))
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING, "what was reported is not true any more"
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch) == (ClusterState.TRAINING, late.fence.epoch + 1)
    assert driver.coordinator.status(driver.now).num_rollbacks == 1


def test_a_server_restarted_before_its_record_is_kept_is_restored_once_more() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    steps(driver, [worker], 1)
    driver.is_manual = True
    driver.new_chief()
    driver.kill(0)
    driver.orders.clear()
    driver.new_chief()
    while not any(isinstance(order, messages.KeepRecord) for order in driver.orders):
        driver.do(driver.orders.pop(0))
    epoch = driver.coordinator.cluster.members.epoch
    driver.restart(1)
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch) == (ClusterState.TRAINING, epoch + 1)
    assert driver.shards[0].step is not None


def test_a_late_answer_of_a_process_that_has_ended_causes_no_rollback() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    driver.train(0)
    driver.restart(0)
    driver.send(messages.ShardSeen(shard=0, process_incarnation=7))
    assert driver.coordinator.cluster.members.epoch == 2


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_restored() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    (worker,) = driver.train(0)
    steps(driver, [worker], 4)
    driver.damaged.add("step-000000004")
    driver.restart(0)
    assert driver.step == 2
    assert [note.text for note in driver.notes if note.is_warning and "damaged" in note.text] == [
        "checkpoint step-000000004 is damaged, an older one is tried: ps-0 is not what was written"
    ]
    assert driver.coordinator.cluster.members.epoch == 3, "another attempt is another epoch"


def test_without_a_whole_checkpoint_training_fails_with_a_reason() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    (worker,) = driver.train(0)
    steps(driver, [worker], 3)
    driver.restart(1)
    text = r"ps 1 at host-p:5001 was restarted and has lost its variables \(global_step 3\), and there is no whole checkpoint to go back to"
    with pytest.raises(TrainingFailed, match=text):
        driver.register()


def test_checkpoints_of_abandoned_steps_are_not_restored() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    (worker,) = driver.train(0)
    steps(driver, [worker], 4)
    driver.damaged.add("step-000000004")
    driver.restart(0)
    assert driver.step == 2
    driver.damaged.clear()
    driver.restart(0)
    assert driver.step == 2, "step 4 of epoch 1 is not what followed from step 2 in epoch 3"


def test_a_worker_whose_lease_ended_comes_back_as_a_new_incarnation() -> None:
    driver = Driver.outlived(total_num_replicas=2, lease_s=10.0)
    sleeper, other = driver.train(0, 1)
    for _ in range(4):
        driver.pass_time(3.0)
        other.heartbeat()
    with pytest.raises(LeaseExpired):
        sleeper.heartbeat()
    assert driver.come_back(sleeper).participant.incarnation == 2


def test_a_worker_that_was_replaced_meanwhile_is_superseded() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    old, _ = driver.train(0, 1)
    Worker(driver, 0, takeover=True, pid=913)
    with pytest.raises(Superseded):
        driver.come_back(old)


def test_another_process_cannot_come_back_as_a_live_worker() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    _, second = driver.train(0, 1)
    with pytest.raises(Exception, match="worker 1 is already running"):
        driver.register(1, former=second.participant, pid=4711)


def test_a_server_restarted_while_the_model_is_initialised_makes_all_servers_start_over() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    worker = Worker(driver, 0)
    assert driver.answers[driver.ask_model(worker)].state is ModelState.INITIALIZE
    driver.restart(1)
    assert (driver.coordinator.cluster.members.epoch, driver.coordinator.cluster.state) == (2, ClusterState.WAITING_FOR_MODEL)
    driver.come_back(worker)
    assert driver.answers[driver.ask_model(worker)].state is ModelState.INITIALIZE


def test_a_cluster_that_starts_over_has_another_life_whatever_another_chief_did_in_the_last_one() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    worker = Worker(driver, 0)
    driver.ask_model(worker)
    before = driver.shards[0].life
    driver.restart(1)
    # A chief that came meanwhile may have used the next epoch of this life, on the server that is gone.
    assert driver.shards[0].life == driver.shards[1].life != before
    assert driver.come_back(worker).participant.era.life == driver.shards[0].life
    newcomer = driver.register(0, pid=99, takeover=True).participant
    assert newcomer.incarnation == (1 << 20) + 1, "a number that no chief has given in the life before"


def test_data_leased_before_the_cluster_starts_over_is_leased_again() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    worker = Worker(driver, 0)
    driver.ask_model(worker)
    data = DataSpec(name="train", num_samples=20, range_size=10, num_epochs=1)
    assert len(driver.answers[driver.lease(worker, data, max_ranges=2)].ranges) == 2
    driver.restart(1)
    driver.come_back(worker)
    assert len(driver.answers[driver.lease(worker, data, max_ranges=2, request_id=2)].ranges) == 2


def test_an_initialiser_is_told_of_the_new_epoch_when_a_server_loses_the_first_values() -> None:
    driver = Driver.outlived(total_num_replicas=1, policy=PolicySpec(name=PolicyName.ASYNC))
    worker = Worker(driver, 0)
    attempt = driver.answers[driver.ask_model(worker)].attempt
    driver.is_manual = True
    call = driver.call()
    driver.send(messages.Asked(call=call, request=CompleteInitializationRequest(participant=worker.participant, attempt=attempt)))
    assert call not in driver.answers, "waits until the servers know how to work"
    driver.orders.clear()
    driver.restart(1)
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING
    assert isinstance(driver.answers[call], EpochMismatch)


def test_old_members_may_say_goodbye_in_their_old_epoch() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    driver.restart(0)
    worker.leave(failure="boom")
    assert driver.coordinator.status(driver.now).participants[0].state == "left"


def test_a_cluster_that_starts_continues_with_the_newest_checkpoint_of_its_place() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    (worker,) = driver.train(0)
    steps(driver, [worker], 4)
    later = Driver.outlived(num_shards=3, storage=driver.storage, total_num_replicas=1)
    assert (later.step, later.coordinator.cluster.members.epoch, later.coordinator.cluster.members.chief_incarnation) == (4, 2, 2)
    assert later.coordinator.status(later.now).num_rollbacks == 0
    newcomer = Worker(later, 0)
    reply = later.answers[later.ask_model(newcomer)]
    assert (reply.state, reply.global_step, len({placed.shard for placed in reply.placement})) == (ModelState.READY, 4, 1)
    assert newcomer.participant.incarnation > worker.participant.incarnation
    assert newcomer.push() is ACCEPTED


def test_a_cluster_that_starts_with_a_finished_training_stays_until_each_worker_has_read_it() -> None:
    driver = Driver.outlived(total_num_replicas=2, max_steps=4, checkpoints=EVERY_2)
    steps(driver, driver.train(0, 1), 3)
    later = Driver.outlived(storage=driver.storage, total_num_replicas=2, max_steps=2)
    assert (later.coordinator.cluster.state, later.step, later.ended) == (ClusterState.FINISHED, 2, [])
    assert "Waiting for 2 workers to come" in later.coordinator.status(later.now).waiting_for
    for index in (0, 1):
        assert later.ended == [], "one comes after the other has left"
        worker = Worker(later, index)
        assert later.answers[later.ask_model(worker)].state is ModelState.READY
        worker.leave()
    assert later.ended == [messages.EndProcesses(exit_code=0, reason="max_steps 2 reached")]


@pytest.mark.parametrize("is_asked", [False, True], ids=["nobody comes within a minute", "asked to finish"])
def test_a_cluster_that_starts_with_a_finished_training_does_not_stay_for_ever(is_asked: bool) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(driver, driver.train(0), 2)
    later = Driver.outlived(storage=driver.storage, total_num_replicas=1, max_steps=2)
    later.pass_time(59.0)
    assert later.ended == []
    if is_asked:
        later.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    else:
        later.pass_time(1.0)
    assert later.ended == [messages.EndProcesses(exit_code=0, reason="max_steps 2 reached")]


@pytest.mark.parametrize(("restore", "step", "epoch"), [("none", 0, 2), ("step-000000002", 2, 2), ("latest", 4, 2)])
def test_the_restore_option_chooses_what_a_cluster_begins_with(restore: str, step: int, epoch: int) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(driver, driver.train(0), 4)
    later = Driver.outlived(storage=driver.storage, total_num_replicas=1, checkpoints=CheckpointConfig(restore=restore))
    assert (later.step, later.coordinator.cluster.members.epoch) == (step, epoch)


def test_a_named_checkpoint_that_is_not_there_is_not_replaced_by_a_fresh_start() -> None:
    driver = Driver.outlived(checkpoints=CheckpointConfig(restore="step-000000008"))
    with pytest.raises(TrainingFailed, match="there is no whole checkpoint 'step-000000008' to begin with"):
        driver.register()


def test_a_run_that_starts_over_does_not_roll_back_to_checkpoints_of_an_earlier_run() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(driver, driver.train(0), 4)
    fresh = CheckpointConfig(restore="none", durability=Durability.NONE)
    later = Driver.outlived(storage=driver.storage, total_num_replicas=1, checkpoints=fresh)
    later.train(0)
    later.restart(0)
    with pytest.raises(TrainingFailed, match="no whole checkpoint to go back to"):
        later.register()


def test_another_models_checkpoint_is_not_restored() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    driver.train(0)
    other = Driver.outlived(storage={}, total_num_replicas=1)
    other.train(0, model=model_of(5))
    driver.storage.clear()
    driver.storage.update(other.storage)
    driver.restart(0)
    assert driver.coordinator.cluster.state is ClusterState.FAILED
    assert any("it is of another model" in note.text for note in driver.notes)


def test_a_request_to_finish_is_not_held_up_by_a_lost_server() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    driver.is_manual = True
    driver.restart(0)
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert driver.coordinator.cluster.state is ClusterState.FINISHED
    worker.leave()
    assert [end.exit_code for end in driver.ended] == [0]


# Storage of checkpoints that cannot be read when it is needed: it is said, and tried again until it can be.


BROKEN = "cannot list /ckpt: Input/output error"


def saved() -> Driver:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.Asked(call=None, request=SaveCheckpointRequest(request_id=1, max_wait_s=0.0)))
    return driver


def test_a_chief_that_starts_waits_for_storage_and_continues_from_its_newest_checkpoint() -> None:
    again = Driver.outlived(total_num_replicas=1, storage=saved().storage, begin=False)
    again.unreadable = BROKEN
    again.begin()
    assert again.coordinator.cluster.state is ClusterState.RECOVERING
    assert f"{BROKEN}; it is tried again".upper() in again.coordinator.cluster.explain(again.now).upper()
    again.pass_time(60.0)
    assert again.coordinator.cluster.state is ClusterState.RECOVERING
    assert len([note for note in again.notes if BROKEN in note.text]) < 10, "said, but not for ever"
    again.unreadable = ""
    again.pass_time(10.0)
    assert (again.coordinator.cluster.state, again.step) == (ClusterState.TRAINING, 1)


def test_a_rollback_waits_for_storage_that_cannot_be_read_and_loses_nothing_by_it() -> None:
    driver = saved()
    driver.unreadable = BROKEN
    driver.restart(0)
    driver.pass_time(20.0)
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING
    driver.unreadable = ""
    driver.pass_time(10.0)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 1)


def test_servers_that_cannot_read_a_checkpoint_for_now_are_given_the_same_one_again() -> None:
    driver = saved()
    driver.is_manual = True
    driver.restart(0)
    driver.do(driver.orders.pop(0))  # found
    driver.unreadable, driver.is_manual = BROKEN, False
    driver.work_off()
    assert BROKEN in driver.coordinator.cluster.explain(driver.now)
    driver.unreadable = ""
    driver.pass_time(2.0)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 1)


def test_a_training_that_is_finished_during_a_rollback_is_not_restored() -> None:
    driver = saved()
    driver.unreadable = BROKEN
    driver.restart(0)
    driver.send(messages.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    driver.unreadable = ""
    driver.pass_time(20.0)
    assert driver.coordinator.cluster.state is ClusterState.FINISHED


@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_chief_that_was_cut_off_does_not_begin_with_what_another_has_trained_meanwhile(has_checkpoints: bool) -> None:
    """Once it has taken such a parameter server, neither chief's workers may continue with what is there."""
    driver = Driver.outlived(checkpoints=CheckpointConfig(restore="latest") if has_checkpoints else None)
    driver.new_chief()  # so its epoch is a later one
    driver.is_manual = True
    driver.send(messages.ShardSeen(shard=1, process_incarnation=77))
    if has_checkpoints:
        driver.do(driver.orders.pop(0))  # nothing is found yet
    (order,) = driver.orders
    assert isinstance(order, messages.AdoptShards)
    driver.orders.clear()
    trained = Adoption(step=1, layout_hash="a", pushes=(WorkerPushes(worker=0, incarnation=1, applied=(AppliedPush(sequence=1, step=0),)),))
    adoptions = (Adoption(step=None, layout_hash=""), trained)
    driver.done(order, messages.Adopted(process_incarnations=(driver.shards[0].process, 77), adoptions=adoptions))
    if has_checkpoints:
        assert driver.coordinator.cluster.state is ClusterState.RECOVERING
        assert any(isinstance(order, messages.FindCheckpoint) for order in driver.orders)
        # What the other one has saved is of an earlier epoch than this one's, and all the same to go back to.
        other = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
        steps(other, other.train(0), 3)
        driver.storage.update(other.storage)
        driver.model, driver.is_manual = other.model, False
        driver.work_off()
        assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 2)
    else:
        assert driver.coordinator.cluster.state is ClusterState.FAILED
        assert "another chief had trained meanwhile" in driver.coordinator.status(driver.now).reason


@pytest.mark.parametrize("is_second", [False, True], ids=["the first chief", "a second chief"])
@pytest.mark.parametrize("has_trained", [False, True])
def test_a_chief_without_a_model_looks_for_checkpoints_when_a_server_was_restarted(has_trained: bool, is_second: bool) -> None:
    """Another chief may have trained there and saved, of which this one knows nothing: in a lower epoch, if that was in another life."""
    other = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(other, other.train(0), 5)
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    if is_second:
        driver.new_chief()
    epoch = driver.coordinator.cluster.members.epoch
    assert (driver.coordinator.cluster.state, epoch) == (ClusterState.WAITING_FOR_MODEL, 2 if is_second else 1)
    if has_trained:
        driver.storage.update(other.storage)
    driver.shards[0].process = 77
    driver.send(messages.ShardSeen(shard=0, process_incarnation=77))
    if has_trained:
        assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 4)
    else:
        assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
        assert driver.coordinator.cluster.members.epoch == epoch + 1


def test_a_chief_that_has_trained_nothing_continues_from_a_checkpoint_completed_since_its_first_look() -> None:
    """That checkpoint is of an earlier epoch than this chief's: all servers were lost, and the other one began again in epoch 1."""
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    driver.is_manual = True
    driver.new_chief()
    driver.do(driver.orders.pop())
    search = driver.orders.pop()
    assert isinstance(search, messages.FindCheckpoint)
    skipped = (("step-000000000", "incomplete: it has no manifest"),)
    driver.done(search, messages.Found(checkpoint=None, skipped=skipped, highest_epoch=1))
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch) == (ClusterState.WAITING_FOR_MODEL, 2)
    save_as_another_chief_in_epoch_1(driver)
    driver.shards[0].process = 77
    driver.send(messages.ShardSeen(shard=0, process_incarnation=77))
    assert (driver.coordinator.cluster.state, driver.step, driver.coordinator.cluster.members.epoch) == (ClusterState.TRAINING, 4, 3)


def test_a_chief_that_has_saved_nothing_continues_from_anothers_checkpoint_after_all_was_lost() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    driver.new_chief()
    driver.train(0)
    assert (driver.coordinator.cluster.members.epoch, driver.storage) == (2, {})
    save_as_another_chief_in_epoch_1(driver)
    driver.restart(0)
    assert (driver.coordinator.cluster.state, driver.step, driver.coordinator.cluster.members.epoch) == (ClusterState.TRAINING, 4, 3)


def save_as_another_chief_in_epoch_1(driver: Driver) -> None:
    """Puts the checkpoints of another life, up to step 4, into the driver's storage."""
    other = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(other, other.train(0), 4)
    assert {checkpoint.fence.epoch for checkpoint in other.storage.values()} == {1}
    driver.storage.update(other.storage)
    driver.model = other.model


@pytest.mark.parametrize(("steps_before", "goes_back_to"), [(0, 0), (5, 4)])
def test_servers_that_all_die_between_a_chiefs_look_and_its_takeover_are_brought_back(steps_before: int, goes_back_to: int) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    workers = driver.train(0)
    steps(driver, workers, steps_before)
    driver.is_manual = True
    driver.new_chief()
    driver.kill(0)
    driver.kill(1)
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, goes_back_to)
    assert [shard.step for shard in driver.shards] == [goes_back_to] * 2


def test_a_training_whose_servers_all_die_before_a_takeover_is_never_silently_restarted_from_nothing() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=EVERY_2)
    steps(driver, driver.train(0), 5)
    driver.is_manual = True
    driver.new_chief()
    driver.kill(0)
    driver.kill(1)
    driver.storage.clear()
    driver.is_manual = False
    driver.work_off()
    assert driver.coordinator.cluster.state is ClusterState.FAILED
    with pytest.raises(TrainingFailed, match="no whole checkpoint to go back to"):
        driver.register()
