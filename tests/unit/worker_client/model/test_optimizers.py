"""Arguments of a worker's program: addresses, optimizers, learning rates."""

import inspect
import json
from typing import Any

import grpc
import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec, Schedule
from ps_protocol.model.optimizers import OPTIMIZERS as SPECIFIED
from ps_protocol.model.spec import ClipSpec
from ps_protocol.process.waiting import Wait, checked_timeout
from worker_client.opening import Target, resolve

TF_CONFIG = json.dumps({"cluster": {"chief": ["t:1"], "ps": ["p:1"], "worker": ["w:1", "x:1"]}, "task": {"type": "worker", "index": 1}})
LOCKSTEP = {"LOCKSTEP_CHIEF": "l:1", "LOCKSTEP_WORKER_INDEX": "5", "LOCKSTEP_CLUSTER": "job-a"}


def resolved(environment: dict[str, str], **arguments: Any) -> Target:
    return resolve(environment, **{"chief": None, "worker_index": None, "cluster": None, **arguments})


def test_arguments_come_before_lockstep_variables_and_those_before_tf_config() -> None:
    everything = {**LOCKSTEP, "TF_CONFIG": TF_CONFIG}
    assert resolved(everything, chief="a:1", worker_index=0, cluster="") == Target(chief="a:1", worker_index=0, cluster="")
    assert resolved(everything) == Target(chief="l:1", worker_index=5, cluster="job-a")
    assert resolved({"TF_CONFIG": TF_CONFIG}) == Target(chief="t:1", worker_index=1, cluster="")
    assert resolved({"LOCKSTEP_CHIEF": "l:1"}) == Target(chief="l:1", worker_index=None, cluster="")


def test_index_of_another_job_is_not_a_workers() -> None:
    chief = json.dumps({"cluster": {"chief": ["t:1"]}, "task": {"type": "chief", "index": 0}})
    assert resolved({"TF_CONFIG": chief}).worker_index is None


def test_another_systems_tf_config_does_no_harm_if_the_arguments_are_complete() -> None:
    assert resolved({**LOCKSTEP, "TF_CONFIG": "{"}).chief == "l:1"


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({}, {}, r"no chief to connect to: pass connect\('host:port'\), set LOCKSTEP_CHIEF, or start this program by `lockstep up`"),
        ({"LOCKSTEP_CHIEF": "l:1", "LOCKSTEP_WORKER_INDEX": "two"}, {}, "LOCKSTEP_WORKER_INDEX: got 'two', want a number from 0"),
        ({"LOCKSTEP_CHIEF": "l:1"}, {"worker_index": -1}, "worker_index: got -1, want an int from 0"),
        ({"LOCKSTEP_CHIEF": "l:1"}, {"worker_index": True}, "worker_index: got True"),
        ({"LOCKSTEP_CHIEF": "l:1"}, {"worker_index": "1"}, "worker_index: got '1'"),
        ({"TF_CONFIG": "{"}, {}, "TF_CONFIG is not JSON"),
    ],
)
def test_bad_argument_is_refused_with_a_reason(environment: dict[str, str], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        resolved(environment, **arguments)


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:99999", ":5000", "unix:relative", "http://a:1"])
def test_an_invalid_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(InvalidSpec, match="want host:port or unix:/path"):
        worker_client.connect(address)


def test_optimizers_spell_out_their_defaults_so_that_workers_agree() -> None:
    assert worker_client.momentum(0.1) == worker_client.momentum(0.1, momentum=0.9, use_nesterov=False)
    assert worker_client.adam() == worker_client.adam(0.001, beta1=0.9, beta2=0.999, epsilon=1e-8)
    assert worker_client.adagrad(np.float64(0.5)) == worker_client.adagrad(0.5, initial_accumulator_value=np.float64(0.1))
    assert worker_client.sgd(1) == worker_client.sgd(1.0)


OPTIMIZERS = [
    worker_client.sgd(0.1),
    worker_client.momentum(0.1),
    worker_client.adagrad(0.1),
    worker_client.adagrad_da(0.1),
    worker_client.adam(),
    worker_client.rmsprop(0.1),
    worker_client.rmsprop(0.1, centered=True),
    worker_client.adadelta(),
    worker_client.ftrl(0.1),
    worker_client.proximal_sgd(0.1),
    worker_client.proximal_adagrad(0.1),
    worker_client.adamw(),
    worker_client.adamw(amsgrad=True),
    worker_client.nadam(),
    worker_client.delayed_nesterov(0.1),
    worker_client.lion(),
    worker_client.lamb(),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_every_optimizer_says_all_of_its_numbers_and_has_the_slots_that_servers_keep(optimizer: OptimizerSpec) -> None:
    assert optimizer.hyperparameters == {name: default for name, (default, _) in SPECIFIED[optimizer.name].hyperparameters.items()} | {
        name: value for name, value in optimizer.hyperparameters.items() if name in ("centered", "amsgrad")
    }
    with worker_client.local() as session:
        table_optimizer = worker_client.adamw() if optimizer.needs_whole_variables else optimizer
        table = worker_client.EmbeddingTable((4, 2), optimizer=table_optimizer)
        session.create_or_join({"w": np.zeros(2), "t": table}, optimizer=optimizer)
        assert tuple(session.get_slot_names()) == tuple(optimizer.slots)
        session.step({"w": np.ones(2), "t": worker_client.IndexedSlices([1], np.ones((1, 2), np.float32))})
        for name in optimizer.slots:
            assert (session.get_slot("w", name).shape, session.get_slot("t", name).shape) == ((2,), (4, 2))
        assert (session.read()["w"] < 0).all()


SCHEDULES = [
    worker_client.exponential_decay(0.1, decay_steps=100, decay_rate=0.5, staircase=True),
    worker_client.inverse_time_decay(0.1, decay_steps=100, decay_rate=0.5),
    worker_client.polynomial_decay(0.1, decay_steps=100, final=0.01, power=2.0, cycle=True),
    worker_client.cosine_decay(0.1, decay_steps=np.float64(100), alpha=0.1),
    worker_client.piecewise_constant([10, 20], values=[0.1, 0.01, 0.001]),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_learning_rate_may_be_a_schedule_that_the_servers_know(schedule: Schedule) -> None:
    with worker_client.local() as session:
        session.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.sgd(schedule))
        session.step({"w": np.ones(2)})
        np.testing.assert_allclose(session.read()["w"], [-0.1, -0.1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: worker_client.sgd(True), "learning_rate = True, want a number or a schedule"),
        (lambda: worker_client.delayed_nesterov(0.7, delay=0), "delay = 0, want a whole number >= 1"),
        (lambda: worker_client.adam(beta1=1.5), "beta1 = 1.5, want >= 0 and < 1"),
        (lambda: worker_client.cosine_decay(0.1, decay_steps=0), "decay_steps = 0, want > 0"),
        (lambda: worker_client.piecewise_constant([10], values=[0.1]), "1 boundaries want 2 values, got 1"),
    ],
)
def test_hyperparameter_out_of_its_range_is_refused_where_it_is_written(make: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        make()


def test_the_public_surface_has_the_listed_names() -> None:
    assert all(hasattr(worker_client, name) for name in worker_client.__all__)
    assert isinstance(worker_client.sgd(0.1), OptimizerSpec)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, "x", [1.0], np.ones(2)])
def test_an_invalid_time_limit_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidSpec, match="timeout_s: got"):
        Wait("worker 0", timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, 10**400])
def test_an_infinite_time_limit_is_one_that_grpc_can_take(timeout_s: float) -> None:
    with pytest.raises(grpc.FutureTimeoutError), grpc.insecure_channel("unix:/no/such/socket") as channel:
        method: Any = channel.unary_unary("/a/b")
        method.future(b"", timeout=checked_timeout(timeout_s), wait_for_ready=True).result(timeout=0.05)


@pytest.mark.parametrize("timeout_s", [float("nan"), 0, "3", None, np.ones(2)])
def test_connecting_refuses_an_invalid_time_limit(timeout_s: Any) -> None:
    with pytest.raises(InvalidSpec, match="timeout_s: got"):
        worker_client.connect("127.0.0.1:1", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"chief": 5000}, "chief: got 5000, want a str"), ({"chief": "127.0.0.1:1", "cluster": 3}, "cluster: got 3, want a str")],
)
def test_connecting_refuses_what_is_no_text(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        worker_client.connect(**arguments)


@pytest.mark.parametrize("limit", ["x", None, float("nan"), -1, 10**400, -(10**5000), np.ones(2)], ids=lambda limit: type(limit).__name__)
def test_clipping_refuses_a_limit_that_is_no_finite_number(limit: Any) -> None:
    with pytest.raises(InvalidSpec, match="clip: norm = "):
        ClipSpec(norm=limit)


FACTORIES = [
    *(getattr(worker_client, name) for name in GRADIENT_OPTIMIZERS),
    *(getattr(worker_client, f"{name}_decay") for name in ("exponential", "inverse_time", "polynomial", "cosine")),
    worker_client.piecewise_constant,
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_the_refusal_of_a_misspelt_argument_of_an_optimizer_or_schedule_suggests_the_nearest_name(factory: Any) -> None:
    name = next(iter(inspect.signature(factory).parameters))
    words = rf"{factory.__name__}\(\): unknown argument '{name}x'; want one of {name}, .*; did you mean '{name}'\?"
    with pytest.raises(InvalidSpec, match=words):
        factory(**{f"{name}x": 0.1})


def test_a_missing_argument_stays_what_python_says_of_it() -> None:
    with pytest.raises(TypeError, match=r"sgd\(\) missing 1 required positional argument: 'learning_rate'"):
        worker_client.sgd()  # type: ignore[call-arg]


def test_a_piecewise_schedule_of_numbers_instead_of_lists_is_refused() -> None:
    wrong: Any = 5
    with pytest.raises(InvalidSpec, match=r"piecewise_constant\(\): boundaries: got 5, want a list of numbers"):
        worker_client.piecewise_constant(wrong, [1.0])
    with pytest.raises(InvalidSpec, match=r"piecewise_constant\(\): values: got 5, want a list of numbers"):
        worker_client.piecewise_constant([1.0], wrong)
