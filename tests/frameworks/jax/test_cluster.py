"""A JAX model on a cluster of real processes: what one process computes, also when processes are killed."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")

from tests.support.commands import descendants, read_until, up

# What the program is on one process, and on three workers with a third of each batch.
MODEL = """
import sys, time
import jax, jax.numpy as jnp, numpy as np, optax

NUM_STEPS, BATCH = 20, 48
key = jax.random.key(1)
first, second = jax.random.split(key)
params = {
    "dense": {"kernel": jax.random.normal(first, (8, 16)) * 0.3, "bias": jnp.zeros(16)},
    "out": {"kernel": jax.random.normal(second, (16, 1)) * 0.3, "bias": jnp.zeros(1)},
}
optimizer = optax.adamw(0.01, weight_decay=0.01, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))

@jax.jit
def loss_and_gradients(params, x, y):
    def loss(params):
        hidden = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)
    return jax.value_and_grad(loss)(params)

def batch(step):
    random = np.random.default_rng(step)
    x = random.normal(size=(BATCH, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))

def save(params):
    np.savez(sys.argv[1], *jax.tree.leaves(params))
"""
ALONE = (
    MODEL
    + """
state = optimizer.init(params)
for step in range(NUM_STEPS):
    loss, gradients = loss_and_gradients(params, *batch(step))
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
save(params)
"""
)
TOGETHER = (
    MODEL
    + """
import lockstep
import lockstep.jax as lj
with lockstep.connect() as session:
    params = lj.create_or_join(session, params, optimizer)
    while not session.is_finished:
        x, y = batch(session.local_step)
        part = slice(session.worker_index, None, 3)
        loss, gradients = loss_and_gradients(params, x[part], y[part])
        if session.local_step == 8 and session.worker_index == 0:
            print("in the middle", flush=True)
        if len(sys.argv) > 2:
            time.sleep(0.1)
        params = lj.step(session, gradients)
    if session.worker_index == 0:
        save(params)
"""
)


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _together(tmp_path: Path, *, victim: str = "") -> list[np.ndarray]:
    """The final parameters of three workers on two parameter servers, after a kill -9 of one process in the middle."""
    options = ["--restart-workers", "3", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-steps", "5"] if victim else []
    out, slow = tmp_path / "together.npz", ["slow"] if victim else []
    arguments = ("--ps", "2", "--workers", "3", "--max-steps", "20", *options, "--", str(out), *slow)
    with up(*arguments, worker=TOGETHER, run_dir=tmp_path / "run") as process:
        if victim:
            read_until(process, "in the middle")
            for one in descendants(process):
                if victim in one.cmdline() or (victim == "worker" and one.environ().get("LOCKSTEP_WORKER_INDEX") == "1"):
                    one.kill()
                    break
            else:
                raise AssertionError(f"no {victim} is running")
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    return _arrays(out)


@pytest.mark.timeout(240)
def test_three_workers_with_a_third_of_each_batch_train_what_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "alone.py"), str(tmp_path / "alone.npz")], check=True, timeout=100)
    for together, alone in zip(_together(tmp_path), _arrays(tmp_path / "alone.npz"), strict=True):
        assert together.dtype == alone.dtype == np.float32
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
def test_a_killed_process_leaves_the_bits_as_they_are(victim: str, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, killed = _together(tmp_path / "undisturbed"), _together(tmp_path / "killed", victim=victim)
    for one, other in zip(undisturbed, killed, strict=True):
        assert one.tobytes() == other.tobytes()
