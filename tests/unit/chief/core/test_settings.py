"""Policy and optimizers change while the cluster runs: when a change applies, what shards are sent, and that no contribution is lost."""

import dataclasses

import pytest

from chief.core.messages import Asked, CallCancelled, ShardFailed, ShardSeen
from ps_protocol.errors import InvalidSpec, LimitExceeded, NotInitialized, TrainingFailed, VariableNotFound, WorkerIndexOutOfRange
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode
from ps_protocol.model.spec import ClipSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    ClusterState,
    FinishTrainingRequest,
    HyperparameterChange,
    ModelReply,
    ModelState,
    PushOutcome,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.chief_driver import MODEL, Driver, Worker

# Policy and optimizers change while the cluster lives: when that holds, what is told to shards, and that nothing counted is lost.


ACCEPTED, STALE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.LATE
SYNC, FIFO = PolicySpec(), PolicySpec(tokens=TokenMode.FIFO)
SSP, ASYNC = PolicySpec(name=PolicyName.SSP, staleness=1), PolicySpec(name=PolicyName.ASYNC)
UNLOCKED = PolicySpec(name=PolicyName.ASYNC, use_locking=False)
FASTER = HyperparameterChange(learning_rate=constant(0.5))
CLIPPED = dataclasses.replace(MODEL, clip=ClipSpec(global_norm=1.0))
MOMENTUM = OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters={"momentum": 0.9})


def policy_of(driver: Driver) -> str:
    return driver.coordinator.status(driver.now).policy.text


def test_before_there_is_a_model_a_policy_holds_at_once_and_shards_hear_of_it_with_the_first_values() -> None:
    driver = Driver()
    driver.is_manual = True
    reply = driver.settings(driver.set_policy(ASYNC))
    assert (reply.version, reply.step, policy_of(driver)) == (1, 0, "async")
    assert not driver.orders
    first, second = Worker(driver), Worker(driver)
    initialise, wait = driver.ask_model(first), driver.ask_model(second)
    assert driver.answers[initialise].policy == ASYNC
    first.complete(1)
    change = driver.orders[0].settings
    assert (change.accepts_stale, change.applies_on_arrival) == (True, False)
    assert (wait in driver.answers, driver.coordinator.cluster.state) == (False, ClusterState.WAITING_FOR_MODEL), "nobody pushes before"
    driver.work_off()
    assert driver.answers[wait].state is ModelState.READY


def test_shards_of_a_strict_cluster_get_no_settings() -> None:
    driver = Driver()
    driver.train(0)
    driver.set_policy(FIFO)
    driver.set_policy(SYNC)
    assert (driver.configured, policy_of(driver)) == ([], "sync")


def test_a_change_waits_for_the_step_that_is_being_applied() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    call = driver.set_policy(ASYNC)
    assert (call in driver.answers, driver.to_configure) == (False, [])
    driver.apply()
    assert (driver.step, driver.to_configure[0].record.settings_version, policy_of(driver)) == (1, 1, "sync")
    driver.configure()
    assert (driver.settings(call).version, driver.settings(call).step, policy_of(driver)) == (1, 1, "async")


def test_a_step_that_becomes_complete_meanwhile_is_applied_after_the_change() -> None:
    driver = Driver(total_num_replicas=2, applies_at_once=False)
    first, second = driver.train(0, 1)
    first.push()
    driver.set_hyperparameters(FASTER)
    assert second.push() is ACCEPTED
    assert not driver.to_apply
    driver.configure()
    assert [len(step.request.contributors) for step in driver.to_apply] == [2]


def test_a_change_holds_although_no_server_keeps_the_record_of_it() -> None:
    driver = Driver(applies_at_once=False)
    driver.train(0)
    call = driver.set_policy(ASYNC)
    driver.done(driver.to_configure.pop(), LimitExceeded("record: too large"))
    assert (driver.settings(call).version, policy_of(driver)) == (1, "async")
    assert "do not keep what another chief would have to know: record: too large" in driver.said[-2]


def test_a_repeated_request_is_one_change_and_gets_one_answer() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    asked = driver.set_policy(ASYNC, request_id=5, max_wait_s=0.0)
    assert driver.answers[asked] is None
    waiting = driver.set_policy(ASYNC, request_id=5, max_wait_s=2.0)
    driver.pass_time(2.0)
    assert driver.answers[waiting] is None
    driver.apply()
    driver.configure()
    later = driver.set_policy(ASYNC, request_id=5)
    assert (driver.settings(later).version, len(driver.configured)) == (1, 1)


def test_a_caller_that_goes_away_leaves_its_change_behind() -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    call = driver.set_policy(FIFO)
    driver.send(CallCancelled(call=call))
    driver.apply()
    driver.configure()
    assert (call in driver.answers, policy_of(driver)) == (False, "sync, fifo tokens")


def test_contributions_counted_under_sync_make_a_last_step_together_before_async() -> None:
    driver = Driver(total_num_replicas=3)
    workers = driver.train(0, 1, 2)
    calls = [worker.ask(commit=worker.next_commit()) for worker in workers[:2]]
    driver.set_policy(ASYNC)
    assert [len(step.request.contributors) for step in driver.applied] == [2]
    commits = [worker.answer(call).commit for worker, call in zip(workers[:2], calls, strict=True)]
    assert [(one.outcome, one.applied_step) for one in commits if one] == [(ACCEPTED, 0)] * 2, "as they were promised"
    assert workers[2].commit(0).outcome is STALE, "the shards have dropped it with the step"
    assert workers[2].commit(1).applied_step == 1


def test_before_async_the_last_step_takes_no_more_and_who_comes_late_waits_for_the_new_policy() -> None:
    driver = Driver(total_num_replicas=3, applies_at_once=False)
    first, second, third = driver.train(0, 1, 2)
    first.push()
    driver.set_policy(ASYNC)
    assert second.push() is LATE
    waiting = second.ask()
    driver.apply()
    change = driver.to_configure[0].settings
    assert (driver.step, change.accepts_stale) == (1, True)
    assert third.commit(1).outcome is LATE, "the new policy does not hold yet"
    driver.configure()
    assert (policy_of(driver), second.has_token(waiting)) == ("async", True)
    assert third.commit(1).outcome is ACCEPTED


def test_a_change_to_async_that_is_followed_by_one_back_leaves_the_step_to_its_contributions() -> None:
    driver = Driver(total_num_replicas=2, applies_at_once=False)
    first, second = driver.train(0, 1)
    first.push()
    for policy in (ASYNC, SYNC):
        driver.set_policy(policy)
    driver.apply()
    for _ in range(2):
        driver.configure()
    assert (policy_of(driver), driver.step) == ("sync", 1)
    assert [worker.commit(1).outcome for worker in (first, second)] == [ACCEPTED] * 2


def test_queued_async_contributions_are_applied_before_sync_begins_and_new_ones_are_late() -> None:
    driver = Driver(policy=ASYNC, total_num_replicas=3, applies_at_once=False)
    first, second, third = driver.train(0, 1, 2)
    waiting = first.ask(commit=first.next_commit())
    assert second.commit().applied_step == 1
    driver.set_policy(SYNC)
    assert third.push() is LATE
    late = third.ask()
    driver.apply()
    assert waiting not in driver.answers, "it continues under the new policy"
    driver.apply()
    change = driver.to_configure[0].settings
    assert (driver.step, change.accepts_stale) == (2, False)
    driver.configure()
    assert policy_of(driver) == "sync"
    assert [worker.has_token(call) for worker, call in ((first, waiting), (third, late))] == [True, True]
    second.local_step = 2
    assert [worker.push() for worker in (first, second, third)] == [ACCEPTED] * 3
    driver.apply()
    assert driver.step == 3


def test_between_ssp_and_async_the_queue_goes_over() -> None:
    driver = Driver(policy=ASYNC, applies_at_once=False)
    first, second = driver.train(0, 1)
    first.push()
    second.push()
    driver.set_policy(SSP)
    driver.apply()
    driver.configure()
    assert policy_of(driver) == "ssp(1)"
    driver.apply()
    assert (driver.step, len(driver.configured)) == (2, 1)


@pytest.mark.parametrize(("before", "after"), [(SYNC, UNLOCKED), (ASYNC, UNLOCKED), (UNLOCKED, SYNC), (UNLOCKED, ASYNC)], ids=str)
def test_whether_shards_apply_on_arrival_is_chosen_before_there_is_a_model(before: PolicySpec, after: PolicySpec) -> None:
    driver = Driver(policy=before)
    driver.train(0)
    with pytest.raises(InvalidSpec, match="cannot change once there is a model: choose it when the cluster is started"):
        driver.set_policy(after)
    assert policy_of(driver) == before.text
    assert driver.settings(driver.set_policy(before)).version


def test_a_policy_that_applies_on_arrival_may_be_set_before_there_is_a_model() -> None:
    driver = Driver()
    assert driver.settings(driver.set_policy(UNLOCKED)).step == 0
    (worker,) = driver.train(0)
    assert [(change.accepts_stale, change.applies_on_arrival) for change in driver.configured] == [(True, True)]
    assert worker.commit(0, is_applied=True).outcome is ACCEPTED


def test_a_change_that_has_become_impossible_while_it_waited_is_refused() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    driver.train(0)
    driver.is_manual = True
    driver.new_chief()
    call = driver.set_policy(UNLOCKED)
    assert call not in driver.answers, "whether there is a model is not known yet"
    driver.is_manual = False
    driver.work_off()
    assert isinstance(driver.answers[call], InvalidSpec)
    assert (driver.coordinator.cluster.state, policy_of(driver)) == (ClusterState.TRAINING, "sync")


def test_a_report_of_an_apply_on_arrival_is_refused_under_a_policy_of_steps() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    with pytest.raises(InvalidSpec, match="cannot have been applied on arrival; under the policy sync it waits"):
        worker.commit(0, is_applied=True)
    assert worker.push() is ACCEPTED


def test_another_number_of_contributions_completes_the_step_that_has_so_many() -> None:
    driver = Driver(total_num_replicas=3)
    first, second, _ = driver.train(0, 1, 2)
    first.push()
    second.push()
    driver.set_policy(PolicySpec(replicas_to_aggregate=2))
    assert [len(step.request.contributors) for step in driver.applied] == [2]
    status = driver.coordinator.status(driver.now)
    assert (status.replicas_to_aggregate, status.total_num_replicas) == (2, 3)


def test_a_policy_with_more_workers_opens_their_places() -> None:
    driver = Driver(total_num_replicas=1)
    driver.train(0)
    with pytest.raises(WorkerIndexOutOfRange):
        Worker(driver, 1)
    driver.set_policy(PolicySpec(total_num_replicas=2))
    assert Worker(driver, 1).index == 1
    driver.set_policy(SYNC)
    with pytest.raises(WorkerIndexOutOfRange):
        Worker(driver, 2)


def test_workers_that_are_behind_when_fifo_begins_find_a_token_each() -> None:
    driver = Driver(policy=ASYNC, total_num_replicas=2)
    first, second = driver.train(0, 1)
    for _ in range(3):
        first.commit(driver.step)
    driver.set_policy(PolicySpec(tokens=TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=2))
    for worker in (first, second):
        assert worker.push() is STALE, "it is at step 0"
        assert worker.has_token(worker.ask())
        assert worker.local_step == 3
        worker.push()
    assert driver.step == 4


def test_a_worker_that_waits_when_fifo_begins_gets_one_of_its_tokens() -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    call = first.ask(commit=first.next_commit())
    driver.set_policy(FIFO)
    reply = first.answer(call)
    assert (reply.result, reply.step, reply.reads_latest) == (TokenResult.TOKEN, 0, True)
    assert first.push() is ACCEPTED
    assert driver.step == 1, "what was counted went over"


def test_contributions_that_shards_may_have_dropped_as_stale_are_not_counted() -> None:
    driver = Driver(policy=ASYNC)
    first, second = driver.train(0, 1)
    staged = second.next_push()
    first.push()
    driver.set_policy(SYNC)
    driver.set_policy(ASYNC)
    assert second.commit(0, push_id=staged).outcome is STALE
    assert second.commit(1).outcome is ACCEPTED


def test_settings_that_cannot_be_are_refused_and_nothing_changes() -> None:
    driver = Driver(total_num_replicas=1)
    (worker,) = driver.train(0, model=CLIPPED)
    with pytest.raises(InvalidSpec, match="Too few tokens to finish the first step: 0"):
        driver.set_policy(PolicySpec(tokens=TokenMode.FIFO, num_tokens=0, replicas_to_aggregate=2))
    with pytest.raises(InvalidSpec, match="use use_locking=True, or clip by value"):
        driver.set_policy(UNLOCKED)
    with pytest.raises(VariableNotFound, match="the model has no variable 'x'; it has 'w'"):
        driver.set_hyperparameters(HyperparameterChange(variable="x"))
    with pytest.raises(InvalidSpec, match="'w' has no optimizer of its own"):
        driver.set_hyperparameters(HyperparameterChange(variable="w"))
    with pytest.raises(InvalidSpec, match="unknown hyper-parameter 'beta1'"):
        driver.set_hyperparameters(HyperparameterChange(hyperparameters={"beta1": 0.5}))
    status = driver.coordinator.status(driver.now)
    assert (status.policy.text, status.settings_version) == ("sync", 0)
    assert worker.heartbeat() is False


def test_a_model_whose_limits_the_policy_cannot_keep_is_refused() -> None:
    driver = Driver(policy=UNLOCKED)
    with pytest.raises(InvalidSpec, match="clip: a norm over all"):
        driver.ask_model(Worker(driver), CLIPPED)


@pytest.mark.parametrize("how", ["finished", "failed"])
def test_a_change_of_settings_is_answered_when_training_ends(how: str) -> None:
    driver = Driver(applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    call = driver.set_policy(ASYNC)
    if how == "finished":
        driver.send(Asked(call=None, request=FinishTrainingRequest(reason="enough")))
        driver.apply()
    else:
        driver.send(ShardFailed(shard=0, why="gone"))
    assert isinstance(driver.answers[call], TrainingFailed)
    with pytest.raises(TrainingFailed):
        driver.set_policy(ASYNC)


def test_shards_that_cannot_be_told_how_to_work_fail_the_initialiser() -> None:
    driver = Driver()
    worker = Worker(driver)
    driver.ask_model(worker)
    driver.is_manual = True
    worker.complete(1)
    driver.send(ShardFailed(shard=0, why="gone"))
    assert [type(answer) for answer in driver.answers.values()][-1] is TrainingFailed


def test_a_token_reply_tells_what_to_read() -> None:
    driver = Driver()
    (worker,) = driver.train(0)
    reply = driver.answers[worker.ask(commit=worker.next_commit())]
    assert isinstance(reply, TokenReply)
    assert (reply.reads_latest, reply.global_step, reply.settings_version) == (False, 1, 0)
    worker.local_step = 1
    driver.set_policy(ASYNC)
    reply = worker.answer(worker.ask())
    assert (reply.reads_latest, reply.global_step, reply.settings_version) == (True, 1, 1)


# Numbers of optimizers that change while the cluster lives, limits on norms over all shards, and who brings the model.


def test_hyperparameters_need_a_model() -> None:
    with pytest.raises(NotInitialized, match="create the model first"):
        Driver().set_hyperparameters(FASTER)


def model_with_own_optimizer() -> ModelSpec:
    own = OptimizerSpec(name="adagrad", learning_rate=constant(0.2), hyperparameters={})
    names = (("w", None), ("v", own))
    variables = tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(3,), optimizer=spec) for name, spec in names)
    return ModelSpec(variables=variables, optimizer=MOMENTUM, placement=PlacementPolicy())


def test_optimizers_change_one_by_one_and_shards_hear_of_all_that_differ_from_the_model() -> None:
    driver = Driver()
    driver.train(0, model=model_with_own_optimizer())
    first = driver.settings(driver.set_hyperparameters(HyperparameterChange(hyperparameters={"momentum": 0.5})))
    second = driver.settings(driver.set_hyperparameters(HyperparameterChange(variable="v", learning_rate=constant(0.3))))
    assert (first.version, second.version) == (1, 2)
    (model_was, model_is), (own_was, own_is) = driver.configured[-1].optimizers
    assert (model_was, model_is.hyperparameters, model_is.learning_rate) == (MOMENTUM, {"momentum": 0.5}, constant(0.1))
    assert (own_was.learning_rate, own_is.learning_rate) == (constant(0.2), constant(0.3))
    status = driver.coordinator.status(driver.now)
    assert (status.settings_version, status.optimizer) == (
        2,
        "momentum (learning_rate 0.1, momentum 0.5); v: adagrad (learning_rate 0.3)",
    )
    with pytest.raises(InvalidSpec, match="initial_accumulator_value cannot be changed while training"):
        driver.set_hyperparameters(HyperparameterChange(variable="v", hyperparameters={"initial_accumulator_value": 0.2}))


def test_status_counts_tables_among_what_a_server_holds() -> None:
    driver = Driver(num_shards=2)
    dense = VariableSpec(name="w", data_type=DataType.FLOAT64, shape=(3,))
    table = VariableSpec(name="t", data_type=DataType.FLOAT32, shape=(100, 2), is_sparse=True)
    placement = PlacementPolicy(pins=(("w", 0), ("t", 1)))
    driver.train(0, model=ModelSpec(variables=(dense, table), optimizer=MOMENTUM, placement=placement))
    shards = driver.coordinator.status(driver.now).shards
    assert [(shard.arena_bytes, shard.num_slices) for shard in shards] == [(64, 1), (800, 1)]  # dense ones lie in whole cache lines


def test_status_passes_on_what_a_server_reports_but_not_what_its_predecessor_does() -> None:
    driver = Driver(num_shards=2)
    driver.train(0)
    report = ShardReport(num_pushes=7)
    driver.send(ShardSeen(shard=1, process_incarnation=7, report=report))
    silent, told = driver.coordinator.status(driver.now).shards
    assert silent.report is None and told.report is report
    driver.send(ShardSeen(shard=1, process_incarnation=8, report=ShardReport()))
    driver.send(ShardSeen(shard=1, process_incarnation=7, report=report))
    assert driver.coordinator.status(driver.now).shards[1].report == ShardReport()


def test_status_names_no_number_that_has_no_effect() -> None:
    driver = Driver()
    off = {"momentum": 0.9, "use_nesterov": 0.0, "weight_decay": 0.0}
    driver.train(0, model=dataclasses.replace(model_with_own_optimizer(), optimizer=dataclasses.replace(MOMENTUM, hyperparameters=off)))
    assert driver.coordinator.status(driver.now).optimizer == "momentum (learning_rate 0.1, momentum 0.9); v: adagrad (learning_rate 0.2)"
    driver.set_hyperparameters(HyperparameterChange(hyperparameters={"weight_decay": 0.01}))
    assert driver.coordinator.status(driver.now).optimizer == (
        "momentum (learning_rate 0.1, momentum 0.9, weight_decay 0.01); v: adagrad (learning_rate 0.2)"
    )


def test_a_worker_that_presents_the_original_model_still_joins_after_a_change() -> None:
    driver = Driver()
    driver.train(0)
    driver.set_hyperparameters(FASTER)
    assert driver.answers[driver.ask_model(Worker(driver))].state is ModelState.READY


def test_the_norm_over_all_shards_is_known_before_the_step_is_applied() -> None:
    driver = Driver(num_shards=2)
    model = dataclasses.replace(
        model_with_own_optimizer(), clip=ClipSpec(global_norm=1.0), placement=PlacementPolicy(strategy="round_robin")
    )
    driver.sums = ((9.0,), (16.0,))
    (worker,) = driver.train(0, model=model)
    worker.push()
    (step,) = driver.applied
    assert step.scales == ((0.2,), (0.2,))


def test_a_shard_that_reports_too_few_norms_fails_the_training() -> None:
    driver = Driver(num_shards=2)
    driver.sums = ((9.0,), ())
    (worker,) = driver.train(0, model=dataclasses.replace(CLIPPED, variables=model_with_own_optimizer().variables))
    worker.push()
    assert driver.coordinator.cluster.state is ClusterState.FAILED


def test_a_worker_that_only_joins_does_not_initialise_the_model() -> None:
    driver = Driver()
    joiner, maker = Worker(driver), Worker(driver)
    joins = driver.ask_model(joiner, joins_only=True)
    assert joins not in driver.answers
    asked = driver.ask_model(joiner, joins_only=True, max_wait_s=0.0)
    assert driver.answers[asked].state is ModelState.ABSENT
    reply = driver.answers[driver.ask_model(maker)]
    assert isinstance(reply, ModelReply)
    assert reply.state is ModelState.INITIALIZE
    maker.leave(failure="boom")
    assert joins not in driver.answers, "nor does it take the task over"
    another = Worker(driver)
    reply = driver.answers[driver.ask_model(another)]
    another.complete(reply.attempt)
    assert driver.answers[joins].state is ModelState.READY


def test_a_policy_that_is_asked_for_before_servers_are_found_follows_the_one_that_an_earlier_chief_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver.outlived()
    driver.train(0)
    find_servers = driver.begin
    monkeypatch.setattr(driver, "begin", lambda found: None)
    driver.new_chief()
    call = driver.set_policy(ASYNC)
    assert (call in driver.answers, driver.coordinator.cluster.state) == (False, ClusterState.CONNECTING), "it would be undone"
    find_servers()
    assert (driver.settings(call).step, policy_of(driver)) == (0, "async")
