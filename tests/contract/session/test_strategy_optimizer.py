"""Optimizers in replicas: the documented pattern and `apply_gradients()` give the values of SyncReplicasOptimizer, bit for bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DtypeMismatch, InvalidSpec, ShapeMismatch
from tests.support.cluster.shape import Shape, Start
from tests.support.sessions.facade_programs import SHAPES, running_cluster, target_of, train
from worker_client import IndexedSlices, OptimizerSpec, sync_replicas
from worker_client.strategy import Optimizer, ParameterServerStrategy, PerReplica, Variable, get_replica_context

NUM_STEPS, NUM_WORKERS = 5, 3
LION = "v = v - lr * (sign(b1 * m + (1 - b1) * g) + decay * v); m = b2 * m + (1 - b2) * g"
POWERS = "m = b1 * m + (1 - b1) * g; v = v - lr * m / (1 - (b1) ** t) * ((1 - b2  **  (t)) / (2 - b2**t)) ** 2"
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "sgd": worker_client.sgd(0.1),
    "momentum": worker_client.momentum(0.1, 0.9),
    "nesterov": worker_client.momentum(0.1, 0.9, use_nesterov=True),
    "adagrad": worker_client.adagrad(0.1),
    "adam": worker_client.adam(0.1),
    "rmsprop": worker_client.rmsprop(0.01, momentum=0.5),
    "centered rmsprop": worker_client.rmsprop(0.01, centered=True),
    "adadelta": worker_client.adadelta(0.5),
    "ftrl": worker_client.ftrl(0.1, l1_regularization_strength=0.01),
    "proximal adagrad": worker_client.proximal_adagrad(0.1, l1_regularization_strength=0.01),
    "adamw": worker_client.adamw(0.1, weight_decay=0.1, amsgrad=True),
    "nadam": worker_client.nadam(0.1),
    "delayed nesterov": worker_client.delayed_nesterov(0.1, delay=3),
    "lion": worker_client.lion(0.01, weight_decay=0.1),
    "lamb": worker_client.lamb(0.1),
    "custom": worker_client.custom_optimizer(LION, 0.01, slots={"m": 0.0}, b1=0.9, b2=0.99, decay=0.01),
    "custom with powers": worker_client.custom_optimizer(POWERS, 0.01, slots={"m": 0.0}, b1=0.9, b2=0.99),
}


def _synchronous(spec: OptimizerSpec, directory: Path, *, num_workers: int) -> dict[str, Any]:
    """What programs with SyncReplicasOptimizer come to."""

    def build(index: int, loss: Any) -> Any:
        optimizer = sync_replicas.SyncReplicasOptimizer(spec, num_workers, num_workers)
        op = optimizer.minimize(loss, global_step=sync_replicas.get_or_create_global_step())
        return op, [optimizer.make_session_run_hook(index == 0, 0), sync_replicas.StopAtStepHook(last_step=NUM_STEPS)]

    with running_cluster("in process", directory=directory) as master:
        found: dict[str, Any] = train(master, build, num_workers=num_workers)[0].final["variables"]
        return found


def _by_strategy(strategy: ParameterServerStrategy, spec: OptimizerSpec) -> dict[str, Any]:
    """What the same losses come to in replicas."""
    with strategy.scope():
        variables = {name: Variable(np.zeros(shape), name=name) for name, shape in SHAPES.items()}
        optimizer = Optimizer(spec)
        optimizer.build(list(variables.values()))

    def step() -> None:
        context = get_replica_context()
        assert context is not None
        target = target_of(context.replica_id_in_sync_group)
        optimizer.apply_gradients([(one.read_value() - target[name], one) for name, one in variables.items()], reduce_op="MEAN")

    for _ in range(NUM_STEPS):
        strategy.run(step)
    return {name: one.read_value() for name, one in variables.items()}


def _four_steps(strategy: ParameterServerStrategy, spec: OptimizerSpec) -> dict[str, Any]:
    """The pattern that is documented: compute pairs in replicas, merge, reduce to the variables, update each."""
    rate = np.float64(np.float32(spec.learning_rate.argument("value")))
    with strategy.scope():
        variables = {name: Variable(np.zeros(shape), name=name) for name, shape in SHAPES.items()}

    def merged(strategy: ParameterServerStrategy, gradients: dict[str, Any]) -> None:
        pairs = [(gradient, variables[name]) for name, gradient in gradients.items()]
        for (_, variable), mean in zip(pairs, strategy.extended.batch_reduce_to("MEAN", pairs), strict=True):
            strategy.extended.update(variable, lambda copy, mean: copy.assign_sub(rate * mean), args=(mean,))

    def step() -> None:
        context = get_replica_context()
        assert context is not None
        target = target_of(context.replica_id_in_sync_group)
        context.merge_call(merged, args=({name: one.read_value() - target[name] for name, one in variables.items()},))

    for _ in range(NUM_STEPS):
        strategy.run(step)
    return {name: one.read_value() for name, one in variables.items()}


def _bits(values: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(value).tobytes() for name, value in values.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_apply_gradients_in_replicas_gives_the_bits_of_sync_replicas_optimizer(name: str, is_mirrored: bool, tmp_path: Path) -> None:
    spec = OPTIMIZERS[name]
    found = _by_strategy(ParameterServerStrategy(NUM_WORKERS, mirrored=is_mirrored), spec)
    assert _bits(found) == _bits(_synchronous(spec, tmp_path, num_workers=NUM_WORKERS))


def test_the_documented_pattern_gives_the_bits_of_sync_replicas_optimizer(tmp_path: Path) -> None:
    found = _four_steps(ParameterServerStrategy(NUM_WORKERS), OPTIMIZERS["sgd"])
    assert _bits(found) == _bits(_synchronous(OPTIMIZERS["sgd"], tmp_path, num_workers=NUM_WORKERS))


@pytest.mark.parametrize("play", [_by_strategy, _four_steps])
def test_apply_gradients_over_the_workers_of_a_cluster_gives_the_bits_of_sync_replicas_optimizer(
    start: Start, play: Any, tmp_path: Path
) -> None:
    spec = OPTIMIZERS["adam" if play is _by_strategy else "sgd"]
    cluster = start(Shape(num_ps=2, num_workers=NUM_WORKERS, replicas_to_aggregate=NUM_WORKERS))
    meet = threading.Barrier(NUM_WORKERS)

    def work(index: int) -> Any:
        with cluster.session(index) as session, ParameterServerStrategy(session=session) as strategy:
            meet.wait(30)
            found = _bits(play(strategy, spec))
            meet.wait(30)
            return found

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        expected = _bits(_synchronous(spec, tmp_path, num_workers=NUM_WORKERS))
        assert list(pool.map(work, range(NUM_WORKERS))) == [expected] * NUM_WORKERS


def test_gradients_are_added_by_default_and_slots_can_be_read() -> None:
    strategy = ParameterServerStrategy(2)
    with strategy.scope():
        v, other = (Variable(np.zeros(2), name=name) for name in ("v", "other"))
        optimizer = Optimizer(worker_client.momentum(0.5, 0.5))
        optimizer.build([v, other])
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v), (None, other)]))
    optimizer.learning_rate = 0.25
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), v), (None, other)]))
    slot = optimizer.get_slot(v, "momentum")
    assert slot is not None
    assert (v.read_value().tolist(), slot.read_value().tolist()) == ([-1.75] * 2, [3.0] * 2)
    assert (other.read_value().tolist(), optimizer.get_slot_names(), optimizer.get_slot(v, "m")) == ([0, 0], ["momentum"], None)
    assert slot.device == v.device


def test_unsupported_calls_of_an_optimizer_are_refused_and_change_nothing() -> None:
    for spec, reason in (
        ("sgd", r"got 'str', want what sgd\(0.1\) or another of sgd, momentum, .* adamw, .* custom returns"),
        (worker_client.sgd(worker_client.cosine_decay(0.1, 10)), r"learning_rate: want a number"),
        (worker_client.sgd(0.1, weight_decay=0.1), r"weight_decay: 'sgd' has none here; adamw has"),
        (worker_client.adam(0.1, l2=0.1), r"l2: 'adam' has none here"),
    ):
        with pytest.raises(InvalidSpec, match=reason):
            Optimizer(spec)  # type: ignore[arg-type]
    strategy = ParameterServerStrategy(2)
    with strategy.scope():
        v, new = (Variable(np.zeros(2), name=name) for name in ("v", "new"))
        optimizer = Optimizer(worker_client.sgd(0.1))
        for wrong in ([], v, [np.zeros(2)], None):
            with pytest.raises(InvalidSpec, match="want a list of the variables that are optimized, at least one"):
                optimizer.build(wrong)  # type: ignore[arg-type]
        optimizer.build([v])
        with pytest.raises(RuntimeError, match=r"it has been called before"):
            optimizer.build([v])
        with pytest.raises(RuntimeError, match=r"apply_gradients\(\) is called in replicas"):
            optimizer.apply_gradients([(np.ones(2), v)])
    with pytest.raises(RuntimeError, match=r"in replicas of its variables' strategy, by strategy.run\(\)"):
        optimizer.apply_gradients([(np.ones(2), v)])
    for gradients, kind, reason in (
        ([(None, v)], ValueError, r"no gradients provided for any variable"),
        ([(np.ones(2), new)], RuntimeError, r'variable "new" was not built; call build\(\)'),
        ([(IndexedSlices([0], np.ones(1)), v)], InvalidSpec, r'the gradient of "v" is IndexedSlices; want an array of its shape'),
        ([(np.ones(3), v)], ShapeMismatch, r'variable "v" has shape \(2,\), its gradient \(3,\)'),
        ([(np.ones(2, np.float32), v)], DtypeMismatch, r'variable "v" is float64, its gradient float32; cast'),
    ):
        with pytest.raises(kind, match=reason):
            strategy.run(lambda pairs=gradients: optimizer.apply_gradients(pairs))
    for grads_and_vars, got in (([np.ones(2)], "ndarray"), (np.ones(2), "float64"), (None, "NoneType"), ([(np.ones(2), "v")], "tuple")):
        with pytest.raises(InvalidSpec, match=rf"got a {got} among the pairs; want pairs \(gradient, variable\)"):
            strategy.run(lambda given=grads_and_vars: optimizer.apply_gradients(given))
    assert v.read_value().tolist() == [0, 0]


@pytest.mark.parametrize("firsts", [("a", "b"), ("b", "a")])
def test_replicas_with_gradients_of_different_variables_are_refused(firsts: tuple[str, str]) -> None:
    strategy = ParameterServerStrategy(2)
    with strategy.scope():
        variables = {name: Variable(np.zeros(2), name=name) for name in ("a", "b")}
        optimizer = Optimizer(worker_client.sgd(1.0))
        optimizer.build(list(variables.values()))

    def step(has: str) -> None:
        optimizer.apply_gradients([(np.ones(2) if name == has else None, one) for name, one in variables.items()])

    with pytest.raises(ValueError, match=f'replica 1 has gradients of "{firsts[1]}", replica 0 of "{firsts[0]}"; all must have the same'):
        strategy.run(step, args=(PerReplica(dict(enumerate(firsts))),))
    assert [one.read_value().tolist() for one in variables.values()] == [[0, 0], [0, 0]]
