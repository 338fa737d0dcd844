"""The example of a strategy, over the processes of a cluster and alone: it learns, and both ways give the same."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.commands import run_up
from tests.support.processes.processes import run
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "strategy_digits.py"

# Of three workers the second dies in the middle of its work, without a word.
DIES = """
import os, signal
import numpy as np
import lockstep
from worker_client.strategy import CollectiveHints, ParameterServerStrategy
with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    for number in range(3):
        value = strategy.experimental_distribute_values_from_function(lambda c: np.float64(c.replica_id_in_sync_group))
        if number == 2 and session.worker_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total = strategy.extended.reduce_to("SUM", value, value, CollectiveHints(timeout_seconds=3.0))
            print("reduced to", float(np.asarray(total)), flush=True)
        except lockstep.PsError as error:
            print("failed:", error, flush=True)
"""

# Every public item, once, in each of three processes with two replicas: what it gives there.
ITEMS = """
import numpy as np
import lockstep
from worker_client.strategy import *

EXTENDED = (
    "experimental_require_static_shapes parameter_devices worker_devices batch_reduce_to reduce_to colocate_vars_with non_slot_devices "
    "update update_non_slot value_container variable_created_in_scope"
).split()

def replica():
    return get_replica_context().replica_id_in_sync_group

with lockstep.connect() as session, ParameterServerStrategy(2, session=session) as strategy:
    extended, own = strategy.extended, range(2 * session.worker_index, 2 * session.worker_index + 2)
    assert all(hasattr(extended, item) for item in EXTENDED)
    assert not in_cross_replica_context() and not has_strategy() and get_replica_context().num_replicas_in_sync == 1
    assert not extended.experimental_require_static_shapes
    assert len(extended.parameter_devices) == 2
    assert extended.worker_devices == tuple(f"worker:{one // 2}/replica:{one}" for one in range(6)) and strategy.num_replicas_in_sync == 6
    with strategy.scope():
        assert in_cross_replica_context() and get_strategy() is strategy and get_replica_context() is None
        names = [name for name in VariableAggregation.__members__]
        written = {name: Variable(np.zeros(3), name=name, aggregation=VariableAggregation[name]) for name in names}
        on_read = VariableSynchronization.ON_READ
        read = {n: Variable(0.0, name=n + "_read", aggregation=VariableAggregation[n], synchronization=on_read) for n in names}
        v = Variable(np.ones(3), name="a")
        with extended.colocate_vars_with(v):
            slot = Variable(np.zeros(3), name="b")
        other = Variable(np.ones(2), name="z")
        with extended.colocate_vars_with(extended.non_slot_devices([other, v])):
            count = Variable(0.0, name="count")
        optimizer = Optimizer(lockstep.adam(0.1))
        optimizer.build([other])
    outside = Variable(0.0, name="outside")
    assert v.device == slot.device == count.device and extended.non_slot_devices([other, v]) is v
    assert extended.variable_created_in_scope(v) and not extended.variable_created_in_scope(outside)
    x = strategy.experimental_distribute_values_from_function(lambda c: np.full(3, 1.0 + c.replica_id_in_sync_group))
    assert strategy.experimental_local_results(x)[0][0] == 1 + own[0]

    # Reductions: to a variable, a device, the value itself; dense and sparse; one and many.
    assert np.asarray(extended.reduce_to("SUM", x, v)).tolist() == [21] * 3
    everywhere = extended.reduce_to(ReduceOp.MEAN, x, x, CollectiveHints(timeout_seconds=30))
    assert isinstance(everywhere, Mirrored) and sorted(everywhere.values) == list(own) and np.asarray(everywhere).tolist() == [3.5] * 3
    one_row = lambda c: lockstep.IndexedSlices([c.replica_id_in_sync_group], np.ones((1, 2)))
    rows = strategy.experimental_distribute_values_from_function(one_row)
    dense, sparse = extended.batch_reduce_to("MEAN", [(x, v), (rows, extended.parameter_devices[0])], CollectiveHints(bytes_per_pack=8))
    assert (dense.tolist(), sparse.indices.tolist(), sparse.values.tolist()) == ([3.5] * 3, list(range(6)), [[1 / 6] * 2] * 6)
    assert float(strategy.reduce("SUM", x, axis=0)) == 63

    # Writes of replicas, by aggregation; copies that are made one when they are read.
    def write(name, x):
        written[name].assign_add(x)
    for name, value in {"SUM": 21, "MEAN": 3.5, "ONLY_FIRST_REPLICA": 1}.items():
        strategy.run(write, args=(name, x))
        assert written[name].read_value().tolist() == [value] * 3
        strategy.run(lambda: read[name].assign(1.0 + replica()))
        assert float(read[name].read_value()) == value
    for make in (lambda: strategy.run(write, args=("NONE", x)), lambda: read["NONE"].read_value()):
        try:
            make()
        except ValueError:
            pass
        else:
            raise SystemExit("no error")

    # Updates: by a function, by a formula, of what belongs to no variable; containers; wrong contexts.
    assert extended.update(v, lambda copy, g: copy.assign_sub(g), args=(everywhere,)).tolist() == [-2.5] * 3
    assert extended.update(v, "b = b + g; v = v * b", kwargs={"b": slot, "g": 2.0}) is v
    assert (v.read_value().tolist(), slot.read_value().tolist()) == ([-5.0] * 3, [2.0] * 3)
    assert extended.update(v, lambda copy: copy.assign_add(np.ones(3)), group=False)[0].tolist() == [-4.0] * 3
    assert float(extended.update_non_slot(extended.non_slot_devices([v, other]), lambda: count.assign_add(1.0))) == 1
    (copy,) = extended.update(v, lambda copy: (copy,))
    assert copy is v and extended.value_container(v.copies[min(v.copies)]) is v and extended.value_container(x) is x
    for refused in (
        lambda: extended.reduce_to("SUM", x, v),
        lambda: extended.batch_reduce_to("SUM", [(x, v)]),
        lambda: extended.update_non_slot(v, lambda: None),
        lambda: strategy.run(replica),
        lambda: strategy.scope().__enter__(),
        lambda: extended.colocate_vars_with(v).__enter__(),
    ):
        try:
            strategy.run(refused)
        except RuntimeError:
            pass
        else:
            raise SystemExit("no error")

    # Merging what replicas return; merge_call and all_reduce; an optimizer.
    same = object()
    one, each, nested = strategy.run(lambda x: (same, replica(), {"x": x}), args=(x,))
    assert one is same and isinstance(each, PerReplica) and list(each.values.values()) == list(own) and sorted(nested) == ["x"]
    to_first = lambda strategy, value: strategy.extended.reduce_to("SUM", value, strategy.extended.parameter_devices[0])
    merged = strategy.run(lambda: get_replica_context().merge_call(to_first, (replica() + 0.0,)))
    assert [float(value) for value in strategy.experimental_local_results(merged)] == [15, 15]
    total = strategy.run(lambda: get_replica_context().all_reduce("SUM", {"a": 1.0}))
    assert [float(a) for a in strategy.experimental_local_results(total["a"])][0] == 6
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), other)], reduce_op="MEAN"))
    np.testing.assert_allclose(other.read_value(), 0.9, rtol=1e-6)
    found = session.read()
    assert found["a"].tolist() == [-4.0] * 3 and found["count"] == 1 and found["b"].tolist() == [2.0] * 3
    print("all items, at step", session.global_step, flush=True)

    # Closures, by worker 0.
    def square(x):
        return x * x
    if session.worker_index:
        print("ran", serve(session, {"square": square, "numbers": lambda: iter(range(9)), "next": next}), flush=True)
    else:
        with ClusterCoordinator(session) as coordinator:
            values = [coordinator.schedule(square, (float(n),), key=str(n)) for n in range(20)]
            rows = iter(coordinator.create_per_worker_dataset("numbers"))
            coordinator.join(60)
            assert coordinator.done() and isinstance(values[0], RemoteValue)
            assert coordinator.fetch(values) == [float(n * n) for n in range(20)]
            assert coordinator.schedule("next", (rows,)).fetch(60) == 0
        print("all closures", flush=True)
"""

pytestmark = pytest.mark.timeout(120)


def _results(out: str) -> list[tuple[Any, ...]]:
    found = re.findall(r"(\d+ replicas): mean loss ([\d.]+), accuracy ([\d.]+)", out)
    return [(replicas, float(loss), float(accuracy)) for replicas, loss, accuracy in found]


def test_six_replicas_in_three_processes_learn_what_two_in_one_process_do(tmp_path: Path) -> None:
    ((replicas, _, accuracy),) = _results(run(EXAMPLE).stdout)
    assert (replicas, accuracy >= 0.95) == ("2 replicas", True)
    # What both ways give is compared after a quarter of the steps.
    program = EXAMPLE.read_text(encoding="utf-8").replace("NUM_STEPS = 120", "NUM_STEPS = 30")
    ((replicas, loss, accuracy),) = _results(run("-c", program).stdout)
    assert (replicas, 0.5 < accuracy < 0.95) == ("2 replicas", True)
    status, out = run_up("--ps", "1", "--workers", "3", worker=program, run_dir=tmp_path / "run")
    assert status == 0, out
    # The same batches, cut otherwise: only the order of the sums differs.
    assert _results(out) == [("6 replicas", pytest.approx(loss, abs=2e-4), pytest.approx(accuracy, abs=0.003))] * 3, out


def test_a_worker_that_is_killed_before_a_reduction_is_named_by_the_others(tmp_path: Path) -> None:
    _, out = run_up("--ps", "1", "--workers", "3", "--min-replicas", "2", worker=DIES, run_dir=tmp_path / "run")
    assert len(re.findall(r"\[worker \d\] reduced to 15.0", out)) == 6, out
    assert len(re.findall(r"failed: .*missing after 3 s: replicas 2 to 3 of worker 1", out)) == 2, out
    assert "waiting for 2 s" in out


def test_every_public_item_works_in_three_processes_with_two_replicas_each(tmp_path: Path) -> None:
    status, out = run_up("--ps", "2", "--workers", "3", worker=ITEMS, run_dir=tmp_path / "run")
    assert status == 0, out
    assert len(re.findall(r"\[worker \d\] all items, at step \d+", out)) == 3, out
    assert "all closures" in out and sum(int(count) for count in re.findall(r"ran (\d+)", out)) == 21, out
