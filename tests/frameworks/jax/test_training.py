"""A JAX model in a session: names of leaves, memory, types, updates that workers compute, and an error for each wrong call."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")
jnp = jax.numpy

import lockstep
import lockstep.jax as lj
from lockstep.in_process import InProcessCluster
from tests.support.repository import ROOT

pytestmark = pytest.mark.timeout(300)  # each shape is compiled anew, which takes minutes on a busy machine


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Opaque:
    """As frameworks had it before JAX knew of keys."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux: None, parts: tuple[Any, ...]) -> "Opaque":
        return cls(*parts)


W, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(3, np.float32)
ONES = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def _params() -> dict[str, Any]:
    return {"w": jnp.asarray(W.copy()), "b": jnp.asarray(B.copy())}


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"w": W, "b": B}, ["b", "w"]),
        ([W, (B, W)], ["0", "1/0", "1/1"]),
        ({"params": {"Dense_0": {"kernel": W, "bias": B}}}, ["params/Dense_0/bias", "params/Dense_0/kernel"]),
        (Pair(W, {"x": B}), ["first", "second/x"]),
        ({"layer": Layer(W, B)}, ["layer/kernel", "layer/bias"]),
        (Opaque(W, [B]), ["0", "1/0"]),
        (W, ["value"]),
        ({"a": None, "w": W}, ["w"]),
    ],
    ids=["dict", "lists", "nested", "namedtuple", "dataclass", "without keys", "one array", "with None"],
)
def test_leaves_are_named_by_their_path_and_come_back_in_their_places(params: Any, names: list[str]) -> None:
    with lockstep.local() as session:
        read = lj.create_or_join(session, params, optax.sgd(0.5))
        assert sorted(session.read()) == sorted(names)
        assert jax.tree.structure(read) == jax.tree.structure(params)
        after = lj.step(session, jax.tree.map(jnp.ones_like, read))
    for start, end in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True):
        assert isinstance(end, jax.Array)
        np.testing.assert_array_equal(end, start - 0.5)


def test_two_leaves_of_one_name_are_refused() -> None:
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match="two leaves are called 'a/b'; use keys without '/'"):
        lj.create_or_join(session, {"a/b": W, "a": {"b": W}}, optax.sgd(0.1))


def test_values_that_were_read_do_not_change_while_training_continues() -> None:
    large = {"w": jnp.zeros(1 << 20)}  # so large that JAX uses NumPy's memory in place, where it is aligned
    with lockstep.local() as session:
        kept = [lj.create_or_join(session, large, optax.sgd(1.0))]
        for number in range(4):
            kept += [lj.step(session, {"w": jnp.full(1 << 20, -1.0)}), lj.read(session)]
            assert float(kept[-1]["w"][0]) == number + 1
    assert [float(one["w"].max()) for one in kept] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [float(one["w"].min()) for one in kept] == [0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_parameters_and_gradients_may_be_donated() -> None:
    def update(params: Any, scale: float) -> Any:
        return jax.tree.map(lambda leaf: leaf * scale, params)

    first = {"w": jnp.ones(1 << 18)}
    with lockstep.local() as session:
        params = lj.create_or_join(session, first, optax.sgd(1.0))
        jax.jit(update, donate_argnums=0)(first, 9.0)
        for _ in range(5):
            gradients = jax.jit(update, donate_argnums=0)(params, 0.5)
            params = lj.step(session, gradients)
            jax.jit(update, donate_argnums=0)(gradients, 7.0)
        np.testing.assert_array_equal(lj.read(session)["w"], np.full(1 << 18, 0.5**5, np.float32))


def test_bfloat16_parameters_are_trained_as_such() -> None:
    pytest.importorskip("ml_dtypes")
    with lockstep.local() as session:
        params = lj.create_or_join(session, {"w": jnp.ones(8, jnp.bfloat16)}, optax.adam(0.125))
        assert params["w"].dtype == jnp.bfloat16
        params = lj.step(session, {"w": jnp.full(8, 3.0, jnp.bfloat16)})
        assert params["w"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params["w"].astype(jnp.float32), np.full(8, 0.875, np.float32))


def test_float64_becomes_what_jax_computes_with() -> None:
    with lockstep.local() as session:
        assert lj.create_or_join(session, {"w": np.ones(3)}, optax.sgd(0.5))["w"].dtype == jnp.float32
        lj.step(session, {"w": jnp.ones(3)})


def test_none_is_no_gradient_and_metrics_may_be_scalars_of_jax() -> None:
    with lockstep.local() as session:
        lj.create_or_join(session, _params(), optax.sgd(1.0))
        assert lj.outcome(session) is None
        params = lj.step(session, {"w": jnp.ones((2, 3)), "b": None}, metrics={"loss": jnp.float32(2.5)})
        np.testing.assert_array_equal(params["b"], B)
        np.testing.assert_array_equal(params["w"], W - 1)
        assert session.read_metrics()["loss"].mean == 2.5
        push = lj.outcome(session)
        assert push is not None and push.is_accepted


def test_rows_of_any_keys_are_read_once_each_and_trained_with_the_parameters() -> None:
    def loss(params: Any, values: Any, positions: Any) -> Any:
        return (values[positions] @ params["w"]).sum()

    keys, known = np.array([[7, -3, 7], [1 << 40, 7, -3]]), np.array([7, -3, 1 << 40])
    table = lockstep.EmbeddingTable(4, keys="int64", initializer=lockstep.uniform_initializer(-1.0, 1.0, seed=1))
    with lockstep.local() as session:
        params = lj.create_or_join(session, {"w": jnp.ones(4)}, optax.sgd(0.5), tables={"users": table})
        first, rows = session.read_rows("users", known), lj.read_rows(session, "users", keys)
        assert rows.values.shape == (4, 4), "three rows, and zeros up to a power of two"
        of_batch = session.read_rows("users", keys)
        np.testing.assert_array_equal(rows.values[rows.positions], of_batch)
        gradients, of_rows = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, rows.values, rows.positions)
        after = lj.step(session, gradients, tables={"users": rows.gradient(of_rows)})
        np.testing.assert_allclose(after["w"], 1 - 0.5 * of_batch.sum((0, 1)), rtol=1e-5)
        np.testing.assert_array_equal(session.read_rows("users", known), first - 0.5 * np.array([[3], [2], [1]], np.float32))
        lj.step(session, gradients)
        np.testing.assert_array_equal(session.read_rows("users", known), first - 0.5 * np.array([[3], [2], [1]], np.float32))


def test_an_optimizer_of_the_workers_is_refused_for_rows() -> None:
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match=r"'users': local_updates.* is not for rows"):
        table = lockstep.EmbeddingTable(4, keys="int64")
        lj.create_or_join(session, {"w": jnp.ones(4)}, lj.local_updates(optax.sgd(0.5)), tables={"users": table})


def test_final_parameters_are_read_after_the_end() -> None:
    with lockstep.local(max_steps=2) as session:
        lj.create_or_join(session, _params(), optax.sgd(1.0))
        while not session.is_finished:
            params = lj.step(session, ONES)
        np.testing.assert_array_equal(params["w"], W - 2)
        np.testing.assert_array_equal(lj.read(session)["w"], W - 2)


def test_an_optimizer_of_the_workers_changes_one_workers_model_as_optax_does() -> None:
    transformation = optax.adafactor(0.1, min_dim_size_to_factor=2)
    params = _params()
    state = transformation.init(params)
    with lockstep.local() as session:
        ours = lj.create_or_join(session, params, lj.local_updates(transformation))
        for number in range(5):
            gradients = jax.tree.map(lambda leaf: jnp.cos(leaf + number), params)  # noqa: B023
            updates, state = transformation.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            ours = lj.step(session, gradients)
            np.testing.assert_allclose(ours["w"], params["w"], rtol=1e-5, atol=1e-6)
        assert session.get_slot_names() == []


def test_an_optimizer_of_the_workers_adds_the_mean_of_their_updates() -> None:
    cluster = InProcessCluster(total_num_replicas=2, max_steps=3)
    final: dict[int, Any] = {}

    def work(index: int) -> None:
        with lockstep.local(cluster, worker_index=index) as session:
            params = lj.create_or_join(session, {"w": jnp.zeros(2)}, lj.local_updates(optax.sgd(1.0, momentum=0.5)))
            while not session.is_finished:
                params = lj.step(session, {"w": jnp.full(2, float(index + 1))})
            final[index] = params

    threads = [Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Momentum is linear in the gradient, so this is what it does with the mean, 1.5.
    expected = -1.5 * (1 + 1.5 + 1.75)
    for index in range(2):
        np.testing.assert_allclose(final[index]["w"], np.full(2, expected), rtol=1e-6)


# Wrong calls: each has a sentence, and training continues after it.


def _in_jit(session: Any) -> None:
    jax.jit(lambda gradients: lj.step(session, gradients))(ONES)


def _in_jit_with_constants(session: Any) -> None:
    jax.jit(lambda x: (lj.step(session, ONES), x))(1.0)


def _in_grad(session: Any) -> None:
    jax.grad(lambda w: lj.step(session, {"w": w, "b": jnp.ones(3)})["w"].sum())(jnp.ones((2, 3)))


def _writes_to_what_was_read(session: Any) -> None:
    np.asarray(lj.read(session)["w"])[0] = 5


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "under jit": (_in_jit, r"step\(\) was called inside a function that JAX transforms"),
    "under jit, with nothing traced": (_in_jit_with_constants, r"step\(\) was called inside a function that JAX transforms"),
    "under grad": (_in_grad, r"step\(\) was called inside a function that JAX transforms"),
    "writing to what was read": (_writes_to_what_was_read, "read-only"),
    "a part of the tree": (lambda session: lj.step(session, {"w": jnp.ones((2, 3))}), "gradients: another tree .* it lacks 'b'"),
    "another tree": (lambda session: lj.step(session, {**ONES, "c": jnp.ones(1)}), "it has 'c', unknown to the model"),
    "another shape": (lambda session: lj.step(session, {**ONES, "w": jnp.ones((3, 2))}), r"gradient for 'w': shape \(3, 2\)"),
    "another type": (lambda session: lj.step(session, {**ONES, "w": jnp.ones((2, 3), jnp.int32)}), "gradient for 'w' is int32"),
    "no gradients": (lambda session: lj.step(session, None), "it lacks 'b', 'w'"),
    "gradients that are used up": (
        lambda session: lj.step(session, _deleted()),
        "'w'.* cannot be read as an array: Array has been del",
    ),
    "no session": (
        lambda session: lj.step("host:5000", ONES),  # type: ignore[arg-type]
        "got a str, want a session",
    ),
    "a view of a random key": (lambda session: lj.step(session, {**ONES, "w": jax.random.key(0)}), "'w'"),
}


def _deleted() -> dict[str, Any]:
    gradients = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    gradients["w"].delete()
    return gradients


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_call_is_refused_with_a_reason_and_training_continues(name: str) -> None:
    call, words = BAD[name]
    with lockstep.local() as session:
        lj.create_or_join(session, _params(), optax.sgd(1.0))
        with pytest.raises((lockstep.PsError, RuntimeError, ValueError), match=words):
            call(session)
        np.testing.assert_array_equal(lj.step(session, ONES)["w"], W - 1)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"w": W, "n": np.arange(3)}, "'n' is int.*, want floats: only they have gradients"),
        ({"w": jax.random.key(0)}, "'w' is a random key; keep it out of the parameters"),
        ({"w": W, "name": "dense"}, "'name' is <U5, want floats|'name', a str, cannot be read"),
        ({"w": W.astype(np.complex64)}, "'w' is complex64, want floats"),
        ({}, "got dict without any array in it"),
    ],
)
def test_an_array_without_a_gradient_is_refused_as_a_parameter(params: Any, words: str) -> None:
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match=words):
        lj.create_or_join(session, params, optax.sgd(0.1))


def test_a_step_before_the_model_is_refused() -> None:
    with lockstep.local() as session, pytest.raises(lockstep.errors.NotInitialized, match=r"call lockstep\.jax\.create_or_join"):
        lj.step(session, ONES)


def test_a_changed_model_on_one_worker_is_refused() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        lj.create_or_join(first, _params(), optax.sgd(1.0))
        with pytest.raises(lockstep.errors.ModelMismatch, match="'b'"):
            lj.create_or_join(second, {"w": jnp.ones((2, 3)), "b": jnp.ones(4)}, optax.sgd(1.0))
        with pytest.raises(lockstep.errors.ModelMismatch):
            lj.create_or_join(second, _params(), optax.adam(1.0))
        with pytest.raises(lockstep.errors.ModelMismatch, match=r"'b'.*data_type is bfloat16"):
            lj.create_or_join(second, {**_params(), "b": jnp.zeros(3, jnp.bfloat16)}, optax.sgd(1.0))


def test_gradients_of_a_scan_over_microbatches_are_those_of_the_batch() -> None:
    x, y = np.random.default_rng(1).normal(size=(2, 12, 2)).astype(np.float32)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"] + params["b"])[:, :2] - y) ** 2)

    def of_microbatches(params: Any) -> Any:
        def add(so_far: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, so_far, jax.grad(loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, (x.reshape(3, 4, 2), y.reshape(3, 4, 2)))
        return jax.tree.map(lambda leaf: leaf / 3, total)

    compiled = jax.jit(of_microbatches)
    with lockstep.local() as session, lockstep.local() as other:
        ours, whole = (lj.create_or_join(one, _params(), optax.adam(0.1)) for one in (session, other))
        for _ in range(3):
            ours, whole = lj.step(session, compiled(ours)), lj.step(other, jax.grad(loss)(whole, x, y))
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_gradients_count_each_time_that_they_are_given_and_nothing_is_kept_of_them() -> None:
    with lockstep.local() as session:
        lj.create_or_join(session, _params(), optax.sgd(1.0))
        for _ in range(2):
            params = lj.step(session, ONES)
        np.testing.assert_array_equal(params["w"], W - 2)


# Programs, and what they print at last. On other devices than the default one; as a child of a process; beside processes that load data.
BEGIN = """
import multiprocessing, os, sys, warnings
warnings.filterwarnings("ignore")
import jax, jax.numpy as jnp, numpy as np, optax, lockstep, lockstep.jax as lj
def load(number):
    return np.full(3, float(number), np.float32)
def main():
    with lockstep.local() as session:
        params = lj.create_or_join(session, {"w": jnp.ones(3)}, optax.sgd(1.0))
"""
END = """
if __name__ == "__main__":
    main()
"""
PROGRAMS = {
    "gradients on another device": (
        """
        gradients = jax.device_put({"w": jnp.ones(3)}, jax.devices()[1])
        params = lj.step(session, gradients)
        print(params["w"].devices() == {jax.devices()[0]}, float(params["w"].sum()))
        """,
        "True 0.0",
    ),
    "parameters on another device": (
        """
        with lockstep.local() as other:
            there = lj.create_or_join(other, jax.device_put({"w": jnp.ones(3)}, jax.devices()[1]), optax.sgd(1.0))
            gradients = jax.grad(lambda tree, x: (tree["w"] * x).sum())(there, jax.device_put(jnp.ones(3), jax.devices()[1]))
            print(float(lj.step(other, gradients)["w"].sum()))
        """,
        "0.0",
    ),
    "parameters on all devices": (
        """
        mesh = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
        with lockstep.local() as other:
            there = lj.create_or_join(other, jax.device_put({"w": jnp.ones(4)}, mesh), optax.sgd(1.0))
            there = lj.step(other, jax.tree.map(jnp.ones_like, there))
            print(there["w"].sharding == mesh, float(there["w"].sum()))
        """,
        "True 0.0",
    ),
    "fork": (
        """
        child = os.fork()
        if not child:
            try:
                session.step({"w": None})
            except RuntimeError as error:
                print("a fork must connect anew" in str(error), flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1], float(lj.step(session, {"w": jnp.ones(3)})["w"].sum()))
        """,
        "True\n0 0.0",
    ),
    "workers that load data": (
        """
        for how in ("fork", "spawn"):
            with multiprocessing.get_context(how).Pool(2) as pool:
                for value in pool.imap(load, range(4)):
                    params = lj.step(session, {"w": jnp.asarray(value)})
        print(session.local_step, float(params["w"][0]))
        """,
        "8 -11.0",
    ),
    "a session for a worker that loads data": (
        """
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            try:
                pool.apply(print, (session,))
            except TypeError as error:
                print(error)
        """,
        "the session of worker 0 belongs to one process: it cannot be copied or pickled; another process connects anew",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_and_devices_of_the_programs_own_do_no_harm(name: str, tmp_path: Path) -> None:
    code, want = PROGRAMS[name]
    script = tmp_path / "program.py"
    script.write_text(BEGIN + code + END, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    result = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, want), result.stderr


def test_all_workers_read_the_parameters_of_the_last_step_when_the_data_ends() -> None:
    cluster, ended, found = InProcessCluster(total_num_replicas=2), Barrier(2), []

    def work() -> None:
        with lockstep.local(cluster) as session:
            params = lj.create_or_join(session, {"w": jax.numpy.zeros(3)}, optax.sgd(0.1))
            for _ in session.batches("train", num_samples=9, batch_size=1):  # an odd number: one makes the last step alone
                lj.step(session, jax.tree.map(jax.numpy.ones_like, params))
            found.append(np.asarray(lj.read(session)["w"]))
            ended.wait(30)

    threads = [Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    np.testing.assert_array_equal(found[0], found[1])
