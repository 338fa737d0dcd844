"""How training ends, well or badly."""

from typing import Any

import pytest

from chief.core import messages as ev
from chief.options import CheckpointConfig
from ps_protocol.errors import (
    TrainingFailed,
    Unavailable,
)
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import (
    ClusterState,
    CompleteInitializationRequest,
    FinishTrainingRequest,
    HyperparameterChange,
    ParticipantKind,
    PushOutcome,
    TokenResult,
)
from tests.support.chief.chief_driver import Driver, Worker

ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


# -- the end


def test_finishing_releases_all_participants_and_ends_the_processes_when_all_have_left() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    observer = Worker(driver, kind=ParticipantKind.OBSERVER)
    call = first.ask()
    finish = driver.call()
    driver.send(ev.Asked(call=finish, request=FinishTrainingRequest(reason="enough")))
    assert driver.answers[finish] == 0
    assert first.answer(call).result is TokenResult.FINISHED
    assert second.heartbeat() is True
    assert second.push() is LATE
    assert second.answer(second.ask()).result is TokenResult.FINISHED
    for participant in (first, second):
        participant.leave()
    assert driver.ended == []
    observer.leave()
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="enough")]


def test_the_last_step_finishes_training() -> None:
    driver = Driver(max_steps=2)
    (worker,) = driver.train(0)
    worker.push()
    assert worker.has_token(worker.ask())
    worker.push()
    reply = worker.answer(worker.ask())
    assert (reply.result, reply.step) == (TokenResult.FINISHED, 2)
    assert driver.coordinator.status(driver.now).reason == "max_steps 2 reached"


def test_finishing_while_a_step_is_applied_waits_for_it() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    finish = driver.call()
    driver.send(ev.Asked(call=finish, request=FinishTrainingRequest(reason="")))
    assert finish not in driver.answers
    driver.apply()
    assert driver.answers[finish] == 1
    assert driver.coordinator.cluster.state is ClusterState.FINISHED


def test_finishing_does_not_wait_long_for_a_step_that_cannot_be_applied() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    finish = driver.call()
    driver.send(ev.Asked(call=finish, request=FinishTrainingRequest(reason="")))
    driver.pass_time(1.0)
    assert driver.answers[finish] == 0
    driver.apply()
    assert driver.step == 1


def test_lapsed_participants_do_not_hold_up_the_end() -> None:
    driver = Driver(lease_s=10.0)
    driver.train(0)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    driver.pass_time(10.0)
    assert len(driver.ended) == 1


def test_training_is_finished_when_the_last_worker_leaves_in_peace() -> None:
    driver = Driver()
    first, second = driver.train(0, 1)
    first.leave()
    assert driver.coordinator.cluster.state is ClusterState.TRAINING
    second.leave()
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="all workers have left")]


def test_the_end_waits_for_workers_that_have_not_come_to_hear_it() -> None:
    driver = Driver(total_num_replicas=2, replicas_to_aggregate=1)
    (first,) = driver.train(0)
    first.leave()
    assert driver.coordinator.cluster.state is ClusterState.FINISHED
    assert (driver.ended, driver.said[-1]) == ([], "waiting for 1 worker to come and hear it, for 60 s")
    second = Worker(driver, 1)
    assert second.heartbeat() is True
    second.leave()
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="all workers have left")]


def test_the_end_waits_for_workers_that_never_come_for_a_limited_time() -> None:
    driver = Driver(total_num_replicas=2, replicas_to_aggregate=1)
    (first,) = driver.train(0)
    first.leave()
    driver.pass_time(61.0)
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="all workers have left")]


def test_training_waits_for_a_replacement_when_the_last_worker_failed() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.leave(failure="boom")
    assert driver.coordinator.cluster.state is ClusterState.TRAINING
    assert "worker 0 (program failed). It said: Boom." in driver.coordinator.cluster.explain(driver.now)
    assert Worker(driver, 0).push() is ACCEPTED


def test_a_worker_that_looks_in_and_leaves_before_there_is_a_model_ends_nothing() -> None:
    driver = Driver()
    Worker(driver).leave()
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL


def test_a_worker_woken_after_the_end_learns_that_training_is_finished() -> None:
    driver = Driver(lease_s=10.0)
    sleeper, _ = driver.train(0, 1)
    driver.pass_time(11.0)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert sleeper.answer(sleeper.ask()).result is TokenResult.FINISHED
    assert sleeper.heartbeat() is True


def test_no_participant_joins_once_the_processes_end() -> None:
    driver = Driver()
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    with pytest.raises(Exception, match="the chief is shutting down: enough"):
        driver.register()


# -- a chief that is asked to end, which ends no training


TERM = ev.AskedToEnd(why="SIGTERM")


def test_a_chief_that_is_asked_to_end_leaves_the_training_to_its_successor() -> None:
    driver = Driver(total_num_replicas=2)
    worker, _ = driver.train(0, 1)
    call = worker.ask(commit=worker.next_commit())
    driver.send(TERM)
    assert [(end.exit_code, end.has_successor) for end in driver.ended] == [(0, True)]
    assert driver.coordinator.cluster.state is ClusterState.TRAINING
    assert call not in driver.answers, "nobody is told that training is finished"


def test_a_chief_that_is_asked_to_end_before_there_is_a_model_ends_at_once() -> None:
    driver = Driver.outlived()
    driver.send(TERM)
    assert [end.has_successor for end in driver.ended] == [True]


def at_work(**config: Any) -> Driver:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE), **config)
    (worker,) = driver.train(0)
    worker.ask(commit=worker.next_commit())
    return driver


def test_a_chief_that_is_asked_to_end_has_its_step_saved_first() -> None:
    driver = at_work()
    driver.is_manual = True
    driver.send(TERM)
    driver.pass_time(3.0)
    assert driver.ended == []
    driver.work_off()
    driver.pass_time(0.1)
    assert [*driver.storage] == ["step-000000001"]
    assert [end.has_successor for end in driver.ended] == [True]
    assert driver.coordinator.cluster.state is ClusterState.TRAINING


@pytest.mark.parametrize("is_full", [False, True])
def test_a_checkpoint_that_does_not_become_whole_keeps_no_chief_that_is_asked_to_end(is_full: bool) -> None:
    driver = at_work()
    driver.is_manual, driver.full = not is_full, is_full
    driver.send(TERM)
    assert driver.ended == []
    driver.pass_time(0.1 if is_full else 7.1)
    assert [end.has_successor for end in driver.ended] == [True]


def test_a_chief_that_is_asked_to_end_twice_ends_at_once() -> None:
    driver = at_work()
    driver.is_manual = True
    driver.send(TERM)
    driver.pass_time(0.2)
    assert driver.ended == []
    driver.send(TERM)
    assert [end.has_successor for end in driver.ended] == [True]


def test_a_training_that_is_over_ends_with_a_chief_that_is_asked_to_end_while_a_worker_stays() -> None:
    driver = Driver()
    driver.train(0)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    driver.send(TERM)
    driver.pass_time(1.0)
    assert driver.ended == []
    driver.pass_time(1.0)
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="enough")]


@pytest.mark.parametrize("leaves", [False, True])
def test_workers_of_a_training_that_ends_during_the_save_before_the_end_get_time_to_hear_it(leaves: bool) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    (worker,) = driver.train(0)
    driver.is_manual = True
    driver.send(TERM)
    driver.pass_time(3.0)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    driver.work_off()
    driver.pass_time(1.0)
    assert driver.ended == []
    if leaves:
        worker.leave()
    else:
        driver.pass_time(1.0)
    assert driver.ended == [ev.EndProcesses(exit_code=0, reason="enough")]


def test_who_joins_a_chief_that_leaves_the_training_to_its_successor_asks_again() -> None:
    driver = Driver()
    driver.send(TERM)
    with pytest.raises(Unavailable, match="waiting for the next one"):
        driver.register()


# -- shards


def test_a_shard_that_lost_its_variables_fails_the_training_for_all() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    call = first.ask()
    driver.send(ev.ShardSeen(shard=0, process_incarnation=8))
    text = r"ps 0 at host-p:5000 was restarted and has lost its variables \(global_step 0\)"
    assert isinstance(first.error(call), TrainingFailed)
    for attempt in (first.heartbeat, first.commit, first.ask, driver.register, lambda: driver.ask_model(second)):
        with pytest.raises(TrainingFailed, match=text):
            attempt()
    assert driver.coordinator.status(driver.now).state is ClusterState.FAILED
    first.leave()
    second.leave()
    assert [end.exit_code for end in driver.ended] == [1]


def test_a_shard_that_failed_half_way_through_a_step_fails_the_training_where_there_is_no_checkpoint() -> None:
    driver = Driver(total_num_replicas=1)
    driver.train(0)
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, damage="ps 0 failed half-way through step 0"))
    words = driver.coordinator.status(driver.now).reason
    assert words == "ps 0 failed half-way through step 0 and has lost its variables (global_step 0); start the whole cluster again"


def test_all_shards_are_adopted_again_when_one_is_restarted_before_there_is_a_model() -> None:
    driver = Driver(num_shards=2)
    driver.is_manual = True
    driver.restart(1)
    assert driver.coordinator.cluster.explain(driver.now).startswith("Waiting 0 s for ps 0 and 1")
    driver.is_manual = False
    driver.work_off()
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL


def test_a_step_reported_twice_is_applied_once() -> None:
    driver = Driver(replicas_to_aggregate=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.done(driver.applied[0])
    assert driver.step == 1


def test_a_finished_training_takes_no_further_step_when_workers_leave_that_it_would_have_needed() -> None:
    driver = Driver(min_replicas=1, total_num_replicas=2)
    workers = driver.train(0, 1)
    workers[0].send_commit()
    driver.ask(FinishTrainingRequest(reason="enough"))
    driver.pass_time(2 * driver.config.lease_s)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.FINISHED, 0)


def test_a_worker_that_lost_its_place_and_commits_after_the_end_is_told_what_became_of_its_contribution() -> None:
    driver = Driver(lease_s=10.0)
    sleeper, _ = driver.train(0, 1)
    driver.pass_time(11.0)
    driver.ask(FinishTrainingRequest(reason="enough"))
    reply = sleeper.answer(sleeper.ask(commit=sleeper.next_commit(0)))
    assert reply.result is TokenResult.FINISHED
    assert reply.commit is not None and reply.commit.outcome is LATE


def test_a_step_that_had_not_begun_when_training_finished_is_not_begun() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    driver.set_hyperparameters(HyperparameterChange(learning_rate=constant(0.25)))
    worker.send_commit()
    driver.ask(FinishTrainingRequest(reason="enough"))
    driver.pass_time(1.0)
    driver.configure()
    assert driver.coordinator.cluster.state is ClusterState.FINISHED
    assert not driver.to_apply


def test_a_worker_that_creates_the_model_when_training_finishes_is_told_so() -> None:
    driver = Driver(policy=PolicySpec(name=PolicyName.ASYNC))
    worker = Worker(driver, 0)
    driver.ask_model(worker)
    driver.is_manual = True
    call = driver.ask(CompleteInitializationRequest(participant=worker.participant, attempt=1))
    assert call not in driver.answers
    driver.ask(FinishTrainingRequest(reason="enough"))
    assert isinstance(driver.answers[call], TrainingFailed)


def test_a_worker_that_has_created_the_model_after_training_finished_is_told_so() -> None:
    driver = Driver(policy=PolicySpec(name=PolicyName.ASYNC))
    worker = Worker(driver, 0)
    driver.ask_model(worker)
    driver.ask(FinishTrainingRequest(reason="enough"))
    with pytest.raises(TrainingFailed, match="before a model was initialised"):  # no model begins any more: it would wait for ever
        driver.ask(CompleteInitializationRequest(participant=worker.participant, attempt=1))


def test_a_chief_that_is_asked_to_end_while_a_server_is_lost_does_not_wait_for_a_checkpoint() -> None:
    driver = at_work()
    driver.is_manual = True
    driver.send(ev.ShardUnreachable(shard=0, why="connection refused"))
    driver.send(TERM)
    assert [end.has_successor for end in driver.ended] == [True]
