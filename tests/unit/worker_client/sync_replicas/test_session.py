"""The monitored session: the values of a run, and the order of calls of hooks."""

from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import PushOutcome
from tests.support.sessions.facade import FakeCluster, Recording, quadratic, train_op
from worker_client import Buffer
from worker_client.sync_replicas import (
    AdamOptimizer,
    GradientDescentOptimizer,
    Graph,
    LossResult,
    MonitoredTrainingSession,
    SessionRunArgs,
    SessionRunHook,
    default_graph,
    get_or_create_global_step,
    get_variable,
    map_gradients,
)

LOSS = quadratic()


def test_run_evaluates_each_thing_once_in_the_structure_asked_for(graph: Graph, cluster: FakeCluster) -> None:
    calls = []

    def loss(variables: Any) -> Any:
        calls.append(dict(variables))
        return LOSS(variables)

    op, step = train_op(loss), get_or_create_global_step()
    with MonitoredTrainingSession(cluster) as session:
        values = session.run({"all": (op, [loss, step], None), "by name": ("w", "loss", "global_step", "w:0"), "op": op})
        assert len(calls) == len(cluster.pushes) == 1
        result, (loss_value, step_value), nothing = values["all"]
        assert (result.loss, loss_value, step_value, nothing) == (1.0, 1.0, 1, None)
        assert (result.outcome, result.is_accepted, result.step, result.global_step) == (PushOutcome.ACCEPTED, True, 0, 1)
        np.testing.assert_equal(values["by name"][0], np.zeros(2))  # what the gradients were computed from
        assert values["by name"][1:3] == (1.0, 1)
        assert values["op"] is result
        np.testing.assert_equal(session.run("w"), np.ones(2))


def test_loss_is_called_with_what_is_fed(cluster: FakeCluster) -> None:
    op = train_op(lambda variables, target: (0.0, {"w": variables["w"] - target}))
    with MonitoredTrainingSession(cluster) as session:
        session.run(op, feed_dict=3.0)
        np.testing.assert_equal(session.read()["w"], np.full(2, 3.0))


def test_loss_may_take_nothing_as_under_eager_execution(cluster: FakeCluster) -> None:
    w = default_graph().variables["w"]
    op = train_op(lambda: (float(w.value().sum()), {w: w.value() - 4.0}))
    with MonitoredTrainingSession(cluster) as session:
        assert session.run([op, w])[0].loss == 0.0
        np.testing.assert_equal(session.read()["w"], np.full(2, 4.0))
        with pytest.raises(TypeError, match="takes no arguments, so it cannot be fed"):
            session.run(op, feed_dict=1.0)
        with pytest.raises(RuntimeError, match="has a value only while a loss is computed"):
            w.value()


def test_updates_and_metrics_ride_along(cluster: FakeCluster) -> None:
    get_variable("mean", Buffer(np.zeros(())))
    op = train_op(lambda _: LossResult(value=1.0, gradients={"w": np.ones(2)}, updates={"mean": 2.0}, metrics={"accuracy": 0.5}))
    with MonitoredTrainingSession(cluster) as session:
        session.run(op)
    assert (cluster.pushes[0]["updates"], cluster.pushes[0]["metrics"], list(cluster.pushes[0]["gradients"])) == (
        {"mean": 2.0},
        {"accuracy": 0.5},
        ["w"],
    )


def test_variables_outside_the_list_or_without_gradient_are_pushed_as_none(cluster: FakeCluster) -> None:
    get_variable("other", np.zeros(2))
    get_variable("fixed", np.zeros(2), trainable=False)
    op = train_op(lambda _: (0.0, {"w": np.ones(2), "fixed": np.ones(2)}))
    with MonitoredTrainingSession(cluster) as session:
        session.run(op)
    gradients = cluster.pushes[0]["gradients"]
    assert {name: gradient is None for name, gradient in gradients.items()} == {"w": False, "other": True, "fixed": True}


def test_gradients_can_be_changed_before_they_are_applied(cluster: FakeCluster) -> None:
    get_variable("b", np.zeros(1))
    optimizer = GradientDescentOptimizer(1.0)
    pairs = optimizer.compute_gradients(lambda _: (0.0, {"w": np.array([3.0, 4.0])}))
    halves = [(gradient.map(lambda array: array / 2), variable) for gradient, variable in pairs]
    clipped = map_gradients(
        lambda gradients: [None if g is None else g / max(1.0, float(np.linalg.norm(g))) for g in gradients], [g for g, _ in halves]
    )
    op = optimizer.apply_gradients([(gradient, variable) for gradient, (_, variable) in zip(clipped, halves, strict=True)])
    with MonitoredTrainingSession(cluster) as session:
        assert session.run(op).loss == 0.0
    np.testing.assert_allclose(cluster.pushes[0]["gradients"]["w"], [0.6, 0.8])
    assert cluster.pushes[0]["gradients"]["b"] is None


def test_slots_averages_and_powers_are_read_by_their_handles(cluster: FakeCluster) -> None:
    optimizer = AdamOptimizer(beta1=0.5)
    op = optimizer.minimize(LOSS)
    with MonitoredTrainingSession(cluster) as session:
        session.run(op)
        beta1_power, _, first, _ = session.run(optimizer.variables())
        assert (float(beta1_power), first.tolist()) == (0.25, [7.0, 7.0])


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda _: (1.0, {}), ValueError, r"No gradients provided for any variable: \['w'\]"),
        (lambda _: (1.0, {"W": np.ones(2)}), ValueError, "gradient for 'W', which the graph does not have"),
        (lambda _: (np.ones(2), {"w": np.ones(2)}), ValueError, r"array of shape \(2,\), want one number"),
        (lambda _: (1.0, 2.0), TypeError, "want \\(value, gradients by variable or name\\)"),
    ],
)
def test_loss_that_cannot_train_is_refused(loss: Any, error: type[Exception], words: str, cluster: FakeCluster) -> None:
    op = train_op(loss)
    with pytest.raises(error, match=words), MonitoredTrainingSession(cluster) as session:
        session.run(op)
    assert not cluster.pushes


def test_push_that_the_session_refuses_is_a_value_error(cluster: FakeCluster) -> None:
    op = train_op()
    cluster.faults.append(InvalidSpec("No gradients provided for any variable: w"))
    with pytest.raises(ValueError, match="No gradients provided"), MonitoredTrainingSession(cluster) as session:
        session.run(op)


def test_an_object_that_cannot_be_fetched_is_refused_before_anything_runs(cluster: FakeCluster) -> None:
    op = train_op()
    with MonitoredTrainingSession(cluster) as session:
        with pytest.raises(ValueError, match="'v' is no variable"):
            session.run([op, "v"])
        with pytest.raises(TypeError, match="invalid type int"):
            session.run([op, 3])
    assert not cluster.pushes


def test_a_monitored_session_without_a_train_op_is_refused(cluster: FakeCluster) -> None:
    with pytest.raises(RuntimeError, match="nothing trains this model"):
        MonitoredTrainingSession(cluster)


def test_hooks_are_called_at_their_moments_and_can_stop(cluster: FakeCluster) -> None:
    op, record = train_op(), list[str]()
    with MonitoredTrainingSession(cluster, hooks=[Recording(record, stop_at=2)], log_step_count_steps=None) as session:
        while not session.should_stop():
            session.run(op)
        with pytest.raises(RuntimeError, match="Run called even after should_stop requested"):
            session.run(op)
        assert session.run("global_step") == 2  # looking is always allowed
    runs = ["before", "after 1", "before", "after 2", "before", "after 2"]
    assert record == ["begin", "created w=[0.0, 0.0]", *runs, "end w=[1.0, 1.0]"]
    with pytest.raises(RuntimeError, match="closed Session"):
        session.run("w")


def test_error_ends_the_session_without_end_and_stop_iteration_is_an_end(cluster: FakeCluster) -> None:
    train_op()
    record: list[str] = []
    with pytest.raises(KeyError) as raised, MonitoredTrainingSession(cluster, hooks=[Recording(record)]) as session:
        raise KeyError("of the program")
    assert not [word for word in record if word.startswith("end")]
    assert (session.session.is_closed, session.session.failure) == (True, raised.value)  # the chief is told why
    with MonitoredTrainingSession(cluster, hooks=[Recording(record)]):
        raise StopIteration
    assert record[-1].startswith("end")


def test_only_the_chief_runs_chief_only_hooks(cluster: FakeCluster) -> None:
    train_op()
    record: list[str] = []
    MonitoredTrainingSession(cluster, is_chief=False, chief_only_hooks=[Recording(record)])
    assert record == []
    MonitoredTrainingSession(cluster, is_chief=True, chief_only_hooks=[Recording(record)])
    assert record[0] == "begin"


def test_two_feeds_are_merged_and_must_not_overlap(cluster: FakeCluster) -> None:
    class Feeding(SessionRunHook):
        def before_run(self, run_context: Any) -> SessionRunArgs:
            return SessionRunArgs(None, feed_dict={"scale": 2.0})

    op = train_op(lambda _, feed: (0.0, {"w": np.full(2, feed["scale"] * feed["x"])}))
    with MonitoredTrainingSession(cluster, hooks=[Feeding()]) as session:
        session.run(op, feed_dict={"x": 3.0})
        np.testing.assert_equal(cluster.pushes[0]["gradients"]["w"], np.full(2, 6.0))
        with pytest.raises(RuntimeError, match="Same tensor is fed"):
            session.run(op, feed_dict={"x": 3.0, "scale": 1.0})


def test_finished_training_pushes_no_more(cluster: FakeCluster) -> None:
    op = train_op()
    with MonitoredTrainingSession(cluster) as session:
        cluster.is_finished = True
        assert session.should_stop()
        result = session.run(op)
        assert (result.outcome, result.is_finished, cluster.pushes) == (None, True, [])


def test_asynchronous_chief_leaves_the_others_alone(cluster: FakeCluster) -> None:
    train_op()
    with MonitoredTrainingSession(cluster):
        pass
    assert not cluster.is_finished
