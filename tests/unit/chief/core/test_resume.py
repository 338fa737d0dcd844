"""A chief that takes over from another: it continues at the shards' step, repeats interrupted work, and counts nothing twice."""

import dataclasses
from typing import Any

import pytest

from chief.core import messages as ev
from chief.options import CheckpointConfig
from ps_protocol.errors import InternalError, LeaseExpired, ModelMismatch, NotInitialized, TrainingFailed
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode
from ps_protocol.model.spec import ClipSpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, ModelState, PushOutcome, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import MODEL, Driver, Worker, model_of

ACCEPTED, DUPLICATE = PushOutcome.ACCEPTED, PushOutcome.DUPLICATE


def trained(num_steps: int = 3, **config: Any) -> tuple[Driver, list[Worker]]:
    driver = Driver.outlived(**{"total_num_replicas": 2, "checkpoints": None} | config)
    workers = driver.train(0, 1)
    for _ in range(num_steps):
        calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
        assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    return driver, workers


def test_a_new_chief_continues_at_the_shards_step_in_the_same_epoch() -> None:
    driver, workers = trained()
    driver.new_chief()
    coordinator = driver.coordinator
    assert (coordinator.cluster.state, coordinator.cluster.members.epoch, coordinator.cluster.members.chief_incarnation, driver.step) == (
        ClusterState.TRAINING,
        1,
        2,
        3,
    )
    with pytest.raises(LeaseExpired, match=r"is not registered here\. Register again"):
        workers[0].heartbeat()
    before = [worker.participant for worker in workers]
    for worker in workers:
        driver.come_back(worker)
    assert [worker.participant for worker in workers] == before
    calls = [worker.ask(commit=worker.next_commit()) for worker in workers]
    assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    assert driver.step == 4


def test_a_worker_that_the_chief_before_had_given_up_comes_back_as_a_new_incarnation() -> None:
    driver, workers = trained()
    before = [worker.participant for worker in workers]
    driver.shards[0].given_up = (PushId(worker=1, incarnation=before[1].incarnation, sequence=0),)
    driver.new_chief()
    for worker in workers:
        driver.come_back(worker)
    assert workers[0].participant == before[0]
    assert workers[1].participant.incarnation > before[1].incarnation


@pytest.mark.parametrize("num_tokens", [1_020, 0])
def test_a_new_chief_with_other_options_continues_though_the_initial_tokens_do_not_go_with_them(num_tokens: int) -> None:
    driver, _ = trained()
    driver.set_policy(PolicySpec(tokens=TokenMode.FIFO, num_tokens=num_tokens))
    driver.new_chief(total_num_replicas=1, replicas_to_aggregate=1 if num_tokens else 2)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 3)
    assert driver.coordinator.status(driver.now).policy == PolicySpec(tokens=TokenMode.FIFO)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_that_one_shard_has_applied_is_repeated_with_the_same_contributions(ahead: int) -> None:
    driver, workers = trained()
    driver.applies_at_once = False
    for worker in workers:
        worker.send_commit()
    made_of = driver.to_apply[0].request.contributors
    driver.apply_at(ahead)
    driver.new_chief()
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING
    assert "Step 3 is repeated with its 2 contributions" in driver.coordinator.cluster.explain(driver.now)
    assert (driver.to_apply[0].request.step, driver.to_apply[0].request.contributors) == (3, made_of)
    driver.apply()
    assert (driver.step, [shard.step for shard in driver.shards], driver.coordinator.cluster.state) == (4, [4, 4], ClusterState.TRAINING)
    for worker in workers:
        driver.come_back(worker)
        result = worker.commit(3, push_id=made_of[worker.index])
        assert (result.outcome, result.first_outcome, result.applied_step) == (DUPLICATE, ACCEPTED, 3)


def test_a_step_that_no_shard_had_applied_is_completed_by_repeated_commits() -> None:
    driver, workers = trained()
    driver.applies_at_once = False
    pushes = [worker.next_push() for worker in workers]
    for worker, push in zip(workers, pushes, strict=True):
        worker.send_commit(push_id=push)
        driver.pass_time(0.01)
    driver.new_chief()
    assert driver.step == 3
    for worker, push, outcome in zip(workers, pushes, (DUPLICATE, ACCEPTED), strict=True):
        driver.come_back(worker)
        call = worker.send_commit(3, push_id=push)
        if outcome is DUPLICATE:
            assert driver.answers[call].first_outcome is ACCEPTED, "it was told so"
    driver.apply()
    assert driver.step == 4
    assert driver.applied[-1].request.contributors == tuple(pushes)


def test_a_repeated_step_with_a_limit_on_the_norm_is_measured_again() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    (worker,) = driver.train(0, model=dataclasses.replace(MODEL, clip=ClipSpec(global_norm=1.0)))
    driver.sums = ((4.0,), ())
    driver.applies_at_once = False
    worker.send_commit()
    driver.prepare()
    driver.apply_at(0)
    scales = driver.to_apply[0].scales
    driver.new_chief()
    driver.prepare()
    assert driver.to_apply[0].scales == scales
    driver.apply()
    assert driver.step == 1


def test_new_incarnations_are_above_all_that_earlier_chiefs_gave() -> None:
    driver, workers = trained()
    driver.new_chief()
    newcomer = Worker(driver, 0)
    assert newcomer.participant.incarnation == (1 << 20) + 1
    assert newcomer.participant.incarnation > workers[0].participant.incarnation
    with pytest.raises(Exception, match="replaced"):
        driver.register(0, former=workers[0].participant, pid=1)


def test_settings_that_were_changed_hold_under_the_new_chief() -> None:
    driver, _ = trained(lease_s=1e6)
    call = driver.set_policy(PolicySpec(name=PolicyName.SSP, staleness=2))
    version = driver.settings(call).version
    driver.new_chief()
    status = driver.coordinator.status(driver.now)
    assert (status.policy.text, status.settings_version) == ("ssp(2)", version)
    assert len(driver.configured) == 1, "the shards know"


@pytest.mark.parametrize("has_heard", [True, False])
def test_a_change_that_nobody_was_told_of_holds_under_the_new_chief_if_one_shard_has_heard_of_it(has_heard: bool) -> None:
    driver, _ = trained(lease_s=1e6)
    driver.applies_at_once = False
    call = driver.set_policy(PolicySpec(name=PolicyName.ASYNC))
    (order,) = driver.to_configure
    if has_heard:
        driver.shards[1].record, driver.shards[1].record_version = order.record, order.version
    driver.new_chief()
    assert call not in driver.answers
    assert driver.coordinator.status(driver.now).policy.text == ("async" if has_heard else "sync")
    assert [told.accepts_stale for told in driver.configured] == [True] * has_heard


def test_without_a_record_the_first_worker_that_presents_the_shards_model_brings_it() -> None:
    driver, workers = trained()
    for shard in driver.shards:
        shard.record, shard.record_version = None, 0
    driver.new_chief()
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL
    driver.come_back(workers[0])
    with pytest.raises(ModelMismatch, match="not the one whose values the parameter servers hold"):
        driver.ask_model(workers[0], model_of(4))
    reply = driver.answers[driver.ask_model(workers[0])]
    assert (reply.state, reply.global_step, driver.step) == (ModelState.READY, 3, 3)


def test_a_new_chief_that_does_not_know_the_model_yet_refuses_no_commit_as_ahead() -> None:
    driver, workers = trained()
    for shard in driver.shards:
        shard.record, shard.record_version = None, 0
    driver.new_chief()
    open_commit, worker = workers[0].next_commit(3), workers[0]
    driver.come_back(worker)
    with pytest.raises(NotInitialized, match="the model is not known here yet"):
        worker.commit(3, push_id=open_commit.push_id)
    with pytest.raises(NotInitialized, match="the model is not known here yet"):
        worker.ask(commit=open_commit)


def test_a_returned_worker_presents_the_model_that_shards_hold_although_it_only_joins() -> None:
    driver, workers = trained()
    for shard in driver.shards:
        shard.record, shard.record_version = None, 0
    driver.new_chief()
    driver.come_back(workers[0])
    driver.ask_model(workers[0], joins_only=True, max_wait_s=0.0)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 3)


def test_a_model_that_is_presented_before_a_checkpoint_is_found_is_the_trained_one_after_it() -> None:
    driver, workers = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    for shard in driver.shards:
        assert shard.record is not None
        shard.last_apply, shard.record = None, dataclasses.replace(shard.record, epoch=77)
    driver.is_manual = True
    driver.new_chief()
    driver.do(driver.orders.pop(0))
    driver.come_back(workers[0])
    driver.ask_model(workers[0], max_wait_s=0.0)
    driver.is_manual = False
    driver.work_off()
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 4)
    driver.restart(0)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 4), "not begun anew"


def test_an_untrained_model_is_initialised_again_when_a_shard_lost_it_too() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=None)
    driver.shards[0].step, driver.shards[0].epoch, driver.shards[0].chief = 0, 1, 1
    driver.new_chief()
    assert (driver.coordinator.cluster.state, driver.coordinator.cluster.members.epoch) == (ClusterState.WAITING_FOR_MODEL, 2)


def test_a_chief_and_a_server_lost_together_cost_the_steps_since_the_checkpoint() -> None:
    driver, _ = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    driver.kill(1)
    driver.new_chief()
    assert (driver.step, driver.coordinator.cluster.members.epoch, driver.coordinator.cluster.state) == (4, 3, ClusterState.TRAINING)
    assert driver.coordinator.status(driver.now).num_rollbacks == 1


def test_a_checkpoint_that_the_earlier_chief_makes_whole_while_its_servers_are_taken_is_gone_back_to() -> None:
    driver, _ = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    storage = {**driver.storage}
    driver.storage.clear()  # its manifest is on its way
    driver.kill(1)
    driver.is_manual = True
    driver.new_chief()
    assert [type(order) for order in driver.orders] == [ev.AdoptShards]
    driver.storage.update(storage)
    driver.is_manual = False
    driver.work_off()
    assert (driver.step, driver.coordinator.cluster.state) == (4, ClusterState.TRAINING)


@pytest.mark.parametrize("checkpoints", [CheckpointConfig(every_steps=2), None])
def test_a_chief_and_a_server_lost_together_without_a_checkpoint_fail_the_training_with_a_reason(
    checkpoints: CheckpointConfig | None,
) -> None:
    driver, _ = trained(num_steps=5, checkpoints=checkpoints)
    driver.storage.clear()
    driver.kill(1)
    driver.new_chief()
    with pytest.raises(TrainingFailed, match=r"ps 1 .* has lost the variables.*, and there is no whole checkpoint"):
        driver.register()


def test_empty_servers_with_the_record_of_a_model_that_was_given_up_begin_anew() -> None:
    """One was restarted before anything was trained, so all began anew; then the chief was lost, too."""
    driver, _ = trained(num_steps=0)
    for shard in driver.shards:
        assert shard.record is not None and shard.record.model is not None
        shard.step = None
    driver.new_chief()
    assert driver.coordinator.cluster.state is ClusterState.WAITING_FOR_MODEL


HALF_WAY = "ps 1 at host-p:5001: it failed half-way through step 5"


def refused(driver: Driver) -> None:
    """A new chief comes, and a shard refuses it."""
    driver.is_manual = True
    driver.new_chief()
    (order,) = driver.orders
    driver.orders.clear()
    driver.fail(order, InternalError(HALF_WAY))
    driver.is_manual = False
    driver.work_off()


def test_a_shard_that_refuses_a_new_chief_has_lost_its_values_and_all_go_back_to_a_checkpoint() -> None:
    driver, _ = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    refused(driver)
    assert (driver.step, driver.coordinator.cluster.members.epoch, driver.coordinator.cluster.state) == (4, 3, ClusterState.TRAINING)
    assert HALF_WAY in driver.coordinator.status(driver.now).last_rollback


def test_a_shard_that_refuses_a_new_chief_fails_the_training_where_there_is_no_checkpoint() -> None:
    driver, _ = trained(num_steps=5)
    refused(driver)
    with pytest.raises(TrainingFailed, match=f"{HALF_WAY}, and there is no whole checkpoint"):
        driver.register()


def test_a_shard_that_refuses_its_first_chief_fails_the_training_with_its_reason() -> None:
    driver = Driver.outlived(begin=False, checkpoints=None)
    driver.is_manual = True
    driver.begin()
    driver.fail(driver.orders[0], InternalError(HALF_WAY))
    with pytest.raises(TrainingFailed, match=HALF_WAY):
        driver.register()


def test_a_shard_that_refuses_a_chief_after_all_was_told_otherwise_changes_nothing() -> None:
    driver, _ = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    driver.is_manual = True
    driver.new_chief()
    order = driver.orders[0]
    driver.is_manual = False
    driver.work_off()
    driver.fail(order, InternalError(HALF_WAY))
    assert (driver.step, driver.coordinator.cluster.members.epoch, driver.coordinator.cluster.state) == (5, 1, ClusterState.TRAINING)


def test_shards_too_far_apart_are_brought_together_by_a_checkpoint() -> None:
    driver, _ = trained(num_steps=5, checkpoints=CheckpointConfig(every_steps=2))
    driver.shards[0].step = 2
    driver.new_chief()
    assert driver.step == 4
    assert driver.coordinator.cluster.members.epoch > 1


def test_the_waiting_worker_gets_its_token_from_the_new_chief() -> None:
    driver, workers = trained()
    driver.applies_at_once = False
    for worker in workers:
        worker.ask(commit=worker.next_commit())
    driver.apply_at(0, 1)
    driver.new_chief()
    driver.come_back(workers[0])
    workers[0].local_step = 3
    assert workers[0].answer(workers[0].ask(repeat=True)).result is TokenResult.TOKEN


def test_under_durability_step_a_new_chief_tells_no_step_that_is_not_saved() -> None:
    driver, workers = trained(num_steps=2, checkpoints=CheckpointConfig(durability=Durability.STEP))
    driver.is_manual = True
    for worker in workers:
        worker.send_commit()
    assert [shard.step for shard in driver.shards] == [3, 3], "applied, and not saved: nobody was told"
    driver.full = True
    driver.is_manual = False
    driver.new_chief()
    assert driver.coordinator.cluster.state is ClusterState.RECOVERING
    assert "Step 3 is saved before it is announced" in driver.coordinator.cluster.explain(driver.now)
    driver.full = False
    driver.pass_time(1.5)
    assert (driver.coordinator.cluster.state, driver.step) == (ClusterState.TRAINING, 3)
    assert max(checkpoint.step for checkpoint in driver.storage.values()) == 3


def test_a_contribution_from_before_a_change_of_policy_is_stale_for_the_next_chief_too() -> None:
    driver, workers = trained()
    late = workers[0].next_commit(2)
    driver.set_policy(PolicySpec(name=PolicyName.ASYNC))
    driver.new_chief()
    driver.come_back(workers[0])
    assert workers[0].commit(2, push_id=late.push_id).outcome is PushOutcome.STALE


def two_promised(driver: Driver) -> tuple[list[Worker], list[PushId]]:
    """Has two workers contribute under async, and a record name both contributions before either is applied."""
    workers = driver.train(0, 1)
    driver.applies_at_once = False
    pushes = [worker.next_push() for worker in workers]
    calls = [worker.send_commit(push_id=push) for worker, push in zip(workers, pushes, strict=True)]
    driver.lease(workers[0], DataSpec(name="train", num_samples=1_000, range_size=1))
    record = driver.shards[0].record
    assert record is not None and [one.push_id for one in record.chosen] == pushes
    assert driver.answers[calls[1]].outcome is ACCEPTED, "it is certain, though not applied"
    return workers, pushes


@pytest.mark.parametrize("num_since", [0, 1, 40])
def test_under_async_a_promised_contribution_is_applied_once_however_long_ago_the_promise_was_kept(num_since: int) -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None, policy=PolicySpec(name=PolicyName.ASYNC))
    workers, pushes = two_promised(driver)
    if num_since > 1:
        driver.apply()
        driver.apply()
        driver.applies_at_once = True
        for number in range(num_since):
            workers[number % 2].commit()
        driver.applies_at_once = False
    elif num_since:
        driver.apply()
    driver.new_chief()
    left = pushes[num_since:]
    assert [order.request.contributors for order in driver.to_apply] == [(push,) for push in left[:1]]
    for push in left:
        driver.apply()
        assert driver.applied[-1].request.contributors == (push,)
    assert not driver.to_apply


def test_under_async_a_contribution_that_was_promised_behind_an_interrupted_step_follows_it() -> None:
    driver = Driver.outlived(total_num_replicas=2, checkpoints=None, policy=PolicySpec(name=PolicyName.ASYNC))
    workers, pushes = two_promised(driver)
    driver.apply_at(0)
    driver.new_chief()
    for push in pushes:
        driver.apply()
        assert driver.applied[-1].request.contributors == (push,)
    assert (driver.step, driver.to_apply) == (2, [])
    for worker, push in zip(workers, pushes, strict=True):
        driver.come_back(worker)
        result = worker.commit(0, push_id=push)
        assert (result.outcome, result.first_outcome, result.applied_step) == (DUPLICATE, ACCEPTED, worker.index)
