"""The facade's optimizers: arguments, gradients, slots and errors are those of tf.compat.v1.train."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.model.policy import PolicyName, PolicySpec
from tests.support.sessions.facade import quadratic
from worker_client import Buffer, IndexedSlices, Variable, sync_replicas
from worker_client.sync_replicas import (
    AdadeltaOptimizer,
    AdagradDAOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    Graph,
    ModelVariable,
    MomentumOptimizer,
    Optimizer,
    ProximalAdagradOptimizer,
    ProximalGradientDescentOptimizer,
    RMSPropOptimizer,
    SyncReplicasOptimizer,
    get_variable,
)

LOSS = quadratic()

# Optimizer -> its name on servers, and the sorted names of its slots.
KINDS: list[tuple[Callable[[], Optimizer], str, list[str]]] = [
    (lambda: GradientDescentOptimizer(0.1), "sgd", []),
    (lambda: MomentumOptimizer(0.1, 0.9, use_nesterov=True), "momentum", ["momentum"]),
    (lambda: AdagradOptimizer(0.1), "adagrad", ["accumulator"]),
    (lambda: AdagradDAOptimizer(0.1, None), "adagrad_da", ["gradient_accumulator", "gradient_squared_accumulator"]),
    (AdamOptimizer, "adam", ["m", "v"]),
    (lambda: RMSPropOptimizer(0.1), "rmsprop", ["momentum", "rms"]),
    (lambda: RMSPropOptimizer(0.1, centered=True), "rmsprop", ["mg", "momentum", "rms"]),
    (AdadeltaOptimizer, "adadelta", ["accum", "accum_update"]),
    (lambda: FtrlOptimizer(0.1, beta=1.0), "ftrl", ["accum", "linear"]),
    (lambda: ProximalGradientDescentOptimizer(0.1), "proximal_sgd", []),
    (lambda: ProximalAdagradOptimizer(0.1), "proximal_adagrad", ["accumulator"]),
]


@pytest.fixture(autouse=True)
def graph() -> Iterator[Graph]:
    with Graph().as_default() as made:
        yield made


@pytest.fixture
def w() -> ModelVariable:
    return get_variable("w", np.zeros(3))


@pytest.mark.parametrize(("make", "name", "slots"), KINDS)
def test_optimizer_has_its_name_and_its_slots_once_applied(
    make: Callable[[], Optimizer], name: str, slots: list[str], w: ModelVariable
) -> None:
    optimizer = make()
    assert (optimizer.spec.name, optimizer.get_slot_names(), optimizer.get_slot(w, "momentum")) == (name, [], None)
    optimizer.minimize(LOSS)
    assert optimizer.get_slot_names() == slots
    assert [getattr(optimizer.get_slot(w, slot), "slot", None) for slot in slots] == slots
    assert optimizer.get_slot(w, "no such slot") is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientDescentOptimizer(-0.1),
        lambda: GradientDescentOptimizer(math.nan),
        lambda: GradientDescentOptimizer(0.1, name=""),
        lambda: AdagradOptimizer(0.1, initial_accumulator_value=0.0),
        lambda: AdagradDAOptimizer(0.1, None, initial_gradient_squared_accumulator_value=-1.0),
        lambda: ProximalAdagradOptimizer(0.1, initial_accumulator_value=0.0),
        lambda: FtrlOptimizer(0.1, learning_rate_power=0.5),
        lambda: FtrlOptimizer(0.1, initial_accumulator_value=-0.1),
        lambda: FtrlOptimizer(0.1, l1_regularization_strength=-0.1),
        lambda: FtrlOptimizer(0.1, l2_shrinkage_regularization_strength=-0.1),
    ],
)
def test_numbers_that_the_original_refuses_are_value_errors(make: Callable[[], Optimizer]) -> None:
    with pytest.raises(ValueError):
        make()


def test_hyperparameters_may_be_functions(w: ModelVariable) -> None:
    optimizer = AdamOptimizer(lambda: 0.5, beta1=lambda: 0.25)
    assert (optimizer.spec.learning_rate.argument("value"), optimizer.spec.hyperparameter("beta1")) == (0.5, 0.25)


def test_variables_without_gradient_get_no_slots(w: ModelVariable) -> None:
    other = get_variable("other", np.zeros(2))
    optimizer = MomentumOptimizer(0.1, 0.9)
    optimizer.apply_gradients([(np.ones(3), w), (None, other)])
    assert (optimizer.get_slot(w, "momentum") is None, optimizer.get_slot(other, "momentum")) == (False, None)


def test_plain_optimizer_trains_asynchronously_with_its_locking(graph: Graph, w: ModelVariable) -> None:
    GradientDescentOptimizer(0.1).minimize(LOSS)
    assert graph.policy == PolicySpec(name=PolicyName.ASYNC, use_locking=False)
    with Graph().as_default() as locked:
        get_variable("w", np.zeros(3))
        GradientDescentOptimizer(0.1, use_locking=True).minimize(LOSS)
        assert locked.policy == PolicySpec(name=PolicyName.ASYNC, use_locking=True)


def test_optimizer_that_keeps_the_policy_asks_for_none(graph: Graph, w: ModelVariable) -> None:
    sync_replicas.as_optimizer(worker_client.sgd(0.1), keeps_policy=True).minimize(LOSS)
    assert graph.policy is None


def test_apply_gradients_refuses_what_the_original_refuses(w: ModelVariable) -> None:
    optimizer = GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match=r"^No variables provided\.$"):
        optimizer.apply_gradients(zip([], [], strict=True))
    with pytest.raises(ValueError, match="No gradients provided for any variable: \\['w'\\]"):
        optimizer.apply_gradients([(None, w)])
    with pytest.raises(TypeError, match="Gradient must be a Tensor, IndexedSlices, or None"):
        optimizer.apply_gradients([("ones", w)])
    with pytest.raises(TypeError, match="want pairs"):
        optimizer.apply_gradients([w])


def test_variable_named_twice_is_refused(w: ModelVariable) -> None:
    with pytest.raises(ValueError, match="'w' occurs twice"):
        GradientDescentOptimizer(0.1).apply_gradients([(np.ones(3), w), (np.ones(3), w)])


def test_rows_for_a_variable_with_a_constraint_are_refused() -> None:
    bounded = get_variable("bounded", Variable(np.zeros((3, 2)), constraint=worker_client.non_negative()))
    with pytest.raises(RuntimeError, match="Cannot use a constraint function on a sparse variable"):
        GradientDescentOptimizer(0.1).apply_gradients([(IndexedSlices([0], np.ones((1, 2))), bounded)])


def test_compute_gradients_checks_its_arguments(w: ModelVariable) -> None:
    optimizer = GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match="gate_gradients must be one of"):
        optimizer.compute_gradients(LOSS, gate_gradients=3)
    with pytest.raises(ValueError, match="should be a function"):
        optimizer.compute_gradients(3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a variable"):
        optimizer.minimize(LOSS, var_list=["w"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="No variables to optimize"):
        optimizer.minimize(LOSS, var_list=[])
    assert (Optimizer.GATE_NONE, Optimizer.GATE_OP, Optimizer.GATE_GRAPH) == (0, 1, 2)


def test_var_list_defaults_to_trainable_variables(w: ModelVariable) -> None:
    get_variable("fixed", np.zeros(2), trainable=False)
    get_variable("count", Buffer(np.zeros(()), "add"))
    assert [variable for _, variable in GradientDescentOptimizer(0.1).compute_gradients(LOSS)] == [w]


def test_variable_has_one_optimizer_and_the_model_may_have_several(graph: Graph, w: ModelVariable) -> None:
    other = get_variable("other", np.zeros(2))
    MomentumOptimizer(0.1, 0.9).minimize(LOSS, var_list=[w])
    with pytest.raises(ValueError, match="trained by 'momentum' already"):
        AdamOptimizer().minimize(LOSS, var_list=[w])
    AdamOptimizer().minimize(LOSS, var_list=[other])
    values, optimizer = graph.declared()
    assert (optimizer.name, values["other"].optimizer.name) == ("momentum", "adam")


def test_names_are_declared_once_and_before_the_session(graph: Graph, w: ModelVariable) -> None:
    with pytest.raises(ValueError, match="Variable w already exists, disallowed"):
        get_variable("w", np.zeros(1))
    graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized and cannot be modified"):
        get_variable("late", np.zeros(1))


def test_global_step_is_one_a_graph() -> None:
    assert sync_replicas.get_global_step() is None
    step = sync_replicas.create_global_step()
    assert sync_replicas.get_or_create_global_step() is step is sync_replicas.get_global_step()
    with pytest.raises(ValueError, match='"global_step" already exists'):
        sync_replicas.create_global_step()


def test_variables_of_another_graph_are_refused(w: ModelVariable) -> None:
    with Graph().as_default(), pytest.raises(ValueError, match="belongs to another graph"):
        GradientDescentOptimizer(0.1).apply_gradients([(np.ones(3), w)])


@pytest.mark.parametrize("replicas", [0, -1, True, 1.5])
def test_number_of_replicas_is_checked(replicas: Any) -> None:
    with pytest.raises(ValueError, match="replicas"):
        SyncReplicasOptimizer(GradientDescentOptimizer(0.1), replicas)
    with pytest.raises(ValueError, match="replicas"):
        SyncReplicasOptimizer(GradientDescentOptimizer(0.1), 1, replicas)
