"""Numbers of optimizers that change while the cluster lives, limits on norms over all shards, and who brings the model."""

import dataclasses

import pytest

from ps_protocol.errors import InvalidSpec, NotInitialized
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ClipSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import ClusterState, HyperparameterChange, ModelReply, ModelState
from tests.core.chief_driver import MODEL, Driver, Worker

FASTER = HyperparameterChange(learning_rate=constant(0.5))
CLIPPED = dataclasses.replace(MODEL, clip=ClipSpec(global_norm=1.0))
MOMENTUM = OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters={"momentum": 0.9})


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
    assert (status.hyperparameters_version, status.optimizer) == (
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
    assert driver.coordinator.state is ClusterState.FAILED


def test_who_only_joins_does_not_bring_the_model() -> None:
    driver = Driver()
    joiner, maker = Worker(driver), Worker(driver)
    joins = driver.ask_model(joiner, may_initialize=False)
    assert joins not in driver.answers
    asked = driver.ask_model(joiner, may_initialize=False, max_wait_s=0.0)
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
