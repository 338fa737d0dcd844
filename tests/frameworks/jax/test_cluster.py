"""A JAX model on a cluster of real processes computes what one process computes, also when processes are killed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")

from tests.support.sessions.trained_by_three import IN_THE_MIDDLE, alone, arrays_in, together

# What the program is on one process, and on three workers with a third of each batch.
MODEL = """
import sys
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
    with open(sys.argv[1], "wb") as file:
        np.savez(file, *jax.tree.leaves(params))
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
    + IN_THE_MIDDLE
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
            in_the_middle()
        params = lj.step(session, gradients)
    if session.worker_index == 0:
        save(params)
"""
)


RECOVERY = ("--checkpoint-steps", "5")


@pytest.mark.timeout(300)
def test_three_workers_with_a_third_of_each_batch_train_what_one_process_does(tmp_path: Path) -> None:
    for found, of_one in zip(arrays_in(together(TOGETHER, tmp_path)), arrays_in(alone(ALONE, tmp_path)), strict=True):
        assert found.dtype == of_one.dtype == np.float32
        np.testing.assert_allclose(found, of_one, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return [one.tobytes() for one in arrays_in(together(TOGETHER, tmp_path_factory.mktemp("undisturbed")))]


@pytest.mark.chaos
@pytest.mark.timeout(700)
@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
def test_a_killed_process_leaves_the_bits_as_they_are(victim: str, undisturbed: list[Any], tmp_path: Path) -> None:
    killed = arrays_in(together(TOGETHER, tmp_path, victim=victim, recovery=RECOVERY))
    assert [one.tobytes() for one in killed] == undisturbed
