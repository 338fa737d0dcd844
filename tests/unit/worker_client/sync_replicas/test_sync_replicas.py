"""SyncReplicasOptimizer and ExponentialMovingAverage: the original's interface, and its errors in the same cases."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.model.policy import PolicySpec, TokenMode
from tests.support.sessions.facade import FakeCluster, quadratic
from worker_client import Buffer, EmbeddingTable, IndexedSlices, sync_replicas
from worker_client.sync_replicas import (
    AdamOptimizer,
    ExponentialMovingAverage,
    GradientDescentOptimizer,
    Graph,
    ModelVariable,
    MomentumOptimizer,
    MonitoredTrainingSession,
    SyncReplicasOptimizer,
    get_or_create_global_step,
    get_variable,
)

LOSS = quadratic()


@pytest.fixture(autouse=True)
def graph() -> Iterator[Graph]:
    with Graph().as_default() as made:
        yield made


@pytest.fixture
def w() -> ModelVariable:
    return get_variable("w", np.zeros(3))


def sync(replicas: int = 2, total: int | None = None, **options: Any) -> SyncReplicasOptimizer:
    return SyncReplicasOptimizer(GradientDescentOptimizer(0.1), replicas, total, **options)


def test_total_is_the_number_to_aggregate_unless_given(graph: Graph, w: ModelVariable) -> None:
    sync(3).minimize(LOSS, global_step=get_or_create_global_step())
    assert graph.policy == PolicySpec(tokens=TokenMode.FIFO, num_tokens=-1, replicas_to_aggregate=3, total_num_replicas=3)


def test_apply_gradients_refuses_what_the_original_refuses(w: ModelVariable) -> None:
    step = get_or_create_global_step()
    with pytest.raises(ValueError, match=r"^Must supply at least one variable$"):
        sync().apply_gradients([], global_step=None)
    with pytest.raises(ValueError, match=r"^Must supply at least one variable$"):
        sync().apply_gradients(zip([], [], strict=True), global_step=step)
    with pytest.raises(ValueError, match=r"^Global step is required to check staleness$"):
        sync().apply_gradients([(np.ones(3), w)])
    with pytest.raises(ValueError, match=r"^Global step is required to check staleness$"):
        sync().minimize(LOSS)
    with pytest.raises(ValueError, match="Unknown grad type!"):
        sync().apply_gradients([("ones", w)], global_step=step)
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        sync().apply_gradients([(None, w)], global_step=step)
    with pytest.raises(ValueError, match="'w' occurs twice"):
        sync().apply_gradients([(np.ones(3), w), (np.ones(3), w)], global_step=step)


def test_rows_and_missing_gradients_are_taken(w: ModelVariable) -> None:
    table = get_variable("table", EmbeddingTable((4, 2)))
    rows = IndexedSlices([1], np.ones((1, 2), np.float32))
    op = sync().apply_gradients([(None, w), (rows, table)], global_step=get_or_create_global_step())
    assert op.name == "sync_replicas"


def test_tokens_queue_runner_and_hook_want_apply_gradients_first(w: ModelVariable) -> None:
    optimizer = sync()
    hook = optimizer.make_session_run_hook(is_chief=True)
    with pytest.raises(ValueError, match=r"^Should be called after apply_gradients\(\)\.$"):
        optimizer.get_chief_queue_runner()
    with pytest.raises(ValueError, match=r"^get_init_tokens_op\(\) should be called after apply_gradients\(\)\.$"):
        optimizer.get_init_tokens_op()
    with pytest.raises(ValueError, match="apply_gradient should be called before using the hook"):
        hook.begin()
    optimizer.minimize(LOSS, global_step=get_or_create_global_step())
    hook.begin()
    assert optimizer.get_chief_queue_runner().create_threads(None, start=True) == []


@pytest.mark.parametrize(
    ("num_tokens", "replicas", "total", "is_enough"),
    [
        (-1, 5, 2, True),
        (3, 5, 2, True),
        (2, 5, 2, False),
        (0, 2, 2, True),
        (0, 2, 3, True),
        (0, 3, 2, False),
        (-2, 3, 2, False),
        (-5, 2, 9, True),
    ],
)
def test_initial_tokens_must_do_for_the_first_step(num_tokens: int, replicas: int, total: int, is_enough: bool, w: ModelVariable) -> None:
    optimizer = sync(replicas, total)
    optimizer.minimize(LOSS, global_step=get_or_create_global_step())
    hook = optimizer.make_session_run_hook(is_chief=True, num_tokens=num_tokens)
    if is_enough:
        assert optimizer.get_init_tokens_op(num_tokens).policy.num_tokens == (-1 if num_tokens == -1 else max(0, num_tokens))
        hook.begin()
        return
    words = f"Too few tokens to finish the first step: {num_tokens} \\(given\\) vs {replicas - total} \\(needed\\)"
    with pytest.raises(ValueError, match=words):
        optimizer.get_init_tokens_op(num_tokens)
    with pytest.raises(ValueError, match=words):
        hook.begin()
    optimizer.make_session_run_hook(is_chief=False, num_tokens=num_tokens).begin()  # others put no tokens in


def test_names_slots_and_variables_are_those_of_the_wrapped_optimizer(w: ModelVariable) -> None:
    optimizer = SyncReplicasOptimizer(AdamOptimizer(), 2, use_locking=True, name="in_step")
    assert (optimizer.get_name(), optimizer.get_slot_names(), optimizer.get_slot(w, "m")) == ("in_step", [], None)
    optimizer.minimize(LOSS, global_step=get_or_create_global_step())
    slot = optimizer.get_slot(w, "m")
    assert slot is not None and slot.variable is w
    assert optimizer.get_slot_names() == ["m", "v"]
    assert [variable.name for variable in optimizer.variables()] == ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]
    assert (optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH) == (0, 1, 2)


def test_only_a_specification_is_accepted_in_place_of_an_optimizer(w: ModelVariable) -> None:
    assert SyncReplicasOptimizer(worker_client.adam(lazy=True), 2).spec.hyperparameter("lazy") == 1
    with pytest.raises(TypeError, match="want an optimizer"):
        SyncReplicasOptimizer("adam", 2)  # type: ignore[arg-type]


def test_optimizers_of_one_graph_with_different_policies_are_refused(w: ModelVariable) -> None:
    other = get_variable("other", np.zeros(1))
    sync(2).minimize(LOSS, get_or_create_global_step(), var_list=[w])
    with pytest.raises(ValueError, match="one cluster has one policy"):
        sync(3).minimize(LOSS, get_or_create_global_step(), var_list=[other])
    with pytest.raises(ValueError, match="one cluster has one policy"):
        MomentumOptimizer(0.1, 0.9).minimize(LOSS, var_list=[other])


def test_chief_sets_policy_and_tokens_before_the_model_and_others_only_join(w: ModelVariable) -> None:
    optimizer, cluster = sync(2), FakeCluster()
    optimizer.minimize(LOSS, get_or_create_global_step())
    with MonitoredTrainingSession(cluster, is_chief=True, hooks=[optimizer.make_session_run_hook(True, num_tokens=0)]):
        assert cluster.asked == ["policy sync, fifo tokens 0", "model create=True"]
        with Graph().as_default():
            get_variable("w", np.zeros(3))
            workers = sync(2)
            workers.minimize(LOSS, get_or_create_global_step())
            with MonitoredTrainingSession(cluster, is_chief=False, hooks=[workers.make_session_run_hook(False)]):
                assert cluster.asked[2:] == ["model create=False"]
        assert not cluster.is_finished
    assert cluster.asked[3:] == ["finish"]


def test_chief_that_comes_back_to_a_living_training_adds_no_tokens(w: ModelVariable) -> None:
    optimizer, cluster = sync(2), FakeCluster()
    optimizer.minimize(LOSS, get_or_create_global_step())
    hook = optimizer.make_session_run_hook(True)
    first = MonitoredTrainingSession(cluster, hooks=[hook])
    cluster.asked.clear()
    MonitoredTrainingSession(cluster, hooks=[hook])
    assert cluster.asked == ["model create=True"]
    first.run(optimizer.get_init_tokens_op())
    assert cluster.asked == ["model create=True"]


def test_initial_tokens_can_be_put_in_by_hand(w: ModelVariable) -> None:
    optimizer, cluster = sync(2), FakeCluster()
    optimizer.minimize(LOSS, get_or_create_global_step())
    session = MonitoredTrainingSession(cluster)
    session.run(optimizer.get_init_tokens_op(num_tokens=4))
    assert cluster.policy.num_tokens == 4


def test_hook_says_when_the_cluster_trains_in_another_way(w: ModelVariable) -> None:
    optimizer, cluster = sync(2), FakeCluster()
    optimizer.minimize(LOSS, get_or_create_global_step())
    cluster.policy = worker_client.async_policy()
    cluster.variables = {"w": np.zeros(3)}
    with pytest.raises(RuntimeError, match="did not make model ready for SyncReplicasOptimizer local_init: the cluster trains async"):
        MonitoredTrainingSession(cluster, is_chief=False, hooks=[optimizer.make_session_run_hook(False)])


def test_averages_of_the_optimizer_belong_to_the_model(graph: Graph, w: ModelVariable) -> None:
    get_variable("other", np.zeros(2))
    step = get_or_create_global_step()
    averages = ExponentialMovingAverage(0.9, num_updates=step)
    assert averages.average(w) is None and averages.average("w") is None  # type: ignore[arg-type]
    sync(variable_averages=averages, variables_to_average=[w]).minimize(LOSS, global_step=step)
    spec = graph.averages
    assert spec is not None and (spec.decay, spec.use_num_updates, spec.variables) == (0.9, True, ("w",))
    average = averages.average(w)
    assert average is not None and average.name == averages.average_name(w) == "w/ExponentialMovingAverage"


def test_averages_follow_all_trainable_variables_unless_told(graph: Graph, w: ModelVariable) -> None:
    get_variable("fixed", np.zeros(2), trainable=False)
    ExponentialMovingAverage(0.9).apply()
    assert graph.averages is not None and graph.averages.variables == ("w",)


def test_number_of_updates_bounds_the_decay(graph: Graph, w: ModelVariable) -> None:
    assert ExponentialMovingAverage(0.9, num_updates=2).apply([w]).spec.decay == pytest.approx(0.25)
    with pytest.raises(ValueError, match="num_updates"):
        ExponentialMovingAverage(0.9, num_updates="many")
    with pytest.raises(ValueError, match=r"decay = 1\.5"):
        ExponentialMovingAverage(1.5)


def test_a_variable_without_an_average_is_refused(w: ModelVariable) -> None:
    averages = ExponentialMovingAverage(0.9)
    for wrong in (get_variable("table", EmbeddingTable((4, 2))), get_variable("state", Buffer(np.zeros(())))):
        with pytest.raises(ValueError, match="no moving average"):
            averages.apply([wrong])
    with pytest.raises(TypeError, match="must be half, float, or double"):
        averages.apply([get_variable("number", np.zeros(2, np.int64))])
    averages.apply([w])
    with pytest.raises(ValueError, match="Moving average already computed"):
        ExponentialMovingAverage(0.5).apply([w])


def test_variables_are_restored_from_their_averages(w: ModelVariable) -> None:
    fixed = get_variable("fixed", np.ones(2), trainable=False)
    step = get_or_create_global_step()
    averages = ExponentialMovingAverage(0.9)
    averages.apply([w])
    names = averages.variables_to_restore()
    assert names == {"w/ExponentialMovingAverage": w, "fixed": fixed, "global_step": step}
    GradientDescentOptimizer(0.1).minimize(LOSS)
    cluster = FakeCluster()
    with MonitoredTrainingSession(cluster) as session:
        cluster.variables["w"] = np.full(3, 4.0)
        restored = sync_replicas.restored_values(session.session, names)
        np.testing.assert_equal(restored, {"w": np.full(3, 2.0), "fixed": np.ones(2)})
    saved = {"w/ExponentialMovingAverage": np.full(3, 5.0), "w": np.zeros(3), "fixed": np.ones(2)}
    np.testing.assert_equal(sync_replicas.restored_values(saved, names)["w"], np.full(3, 5.0))
    assert averages.variables_to_restore([]) == {"w": w, "fixed": fixed, "global_step": step}


def test_a_variable_without_an_average_is_restored_from_itself(w: ModelVariable) -> None:
    averages = ExponentialMovingAverage(0.9)
    averages.apply([w])
    other = get_variable("other", np.ones(2))
    names = averages.variables_to_restore()
    assert names == {"w/ExponentialMovingAverage": w, "other/ExponentialMovingAverage": other}, "as in the original"
    GradientDescentOptimizer(0.1).minimize(lambda variables: (0.0, {"w": np.ones(3), "other": np.ones(2)}), get_or_create_global_step())
    cluster = FakeCluster()
    with MonitoredTrainingSession(cluster) as session:
        cluster.variables |= {"w": np.full(3, 4.0), "other": np.full(2, 7.0)}
        restored = sync_replicas.restored_values(session.session, names)
        np.testing.assert_equal(restored, {"w": np.full(3, 2.0), "other": np.full(2, 7.0)})
    saved = {"w/ExponentialMovingAverage": np.full(3, 5.0), "w": np.zeros(3), "other": np.ones(2)}
    np.testing.assert_equal(sync_replicas.restored_values(saved, names), {"w": np.full(3, 5.0), "other": np.ones(2)})
    for incomplete in ({"w": np.zeros(3), "other": np.ones(2)}, {"w/ExponentialMovingAverage": np.zeros(3)}):
        with pytest.raises(KeyError, match=r"there is no value of '(w|other)/ExponentialMovingAverage' to restore"):
            sync_replicas.restored_values(incomplete, names)
