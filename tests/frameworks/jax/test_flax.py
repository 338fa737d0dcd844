"""Models of flax, in both of its APIs: the values that optax computes in one process, and leaves named by their layers."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")
pytest.importorskip("flax", reason="flax is not installed: `make test-frameworks` has it")
from flax import linen, nnx

import lockstep
import lockstep.jax as lj

pytestmark = pytest.mark.timeout(300)  # each shape is compiled anew, which takes minutes on a busy machine
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
NUM_STEPS = 5


class Net(linen.Module):  # type: ignore[misc]
    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> Any:
        return linen.Dense(1, name="out")(linen.tanh(linen.Dense(3, name="hidden")(x)))


class Block(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.hidden, self.out = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(jax.numpy.tanh(self.hidden(x))))


def of_linen() -> tuple[Any, Any]:
    net = Net()
    return net.init(jax.random.key(0), X)["params"], lambda params: net.apply({"params": params}, X)


def of_nnx() -> tuple[Any, Any]:
    graph, params, others = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)
    return params, lambda params: nnx.merge(graph, params, others)(X)


@pytest.mark.parametrize(("made", "ending"), [(of_linen, ""), (of_nnx, "/value")], ids=["linen", "nnx"])
def test_a_model_of_flax_trains_as_with_optax_alone(made: Any, ending: str) -> None:
    alone, apply = made()
    gradients = jax.jit(jax.grad(lambda params: ((apply(params) - X.sum(axis=1, keepdims=True)) ** 2).mean()))
    transformation = optax.adamw(0.01, eps=1e-5)  # no tiny gradient becomes a whole step of another sign
    state = transformation.init(alone)
    with lockstep.local() as session:
        params = lj.create_or_join(session, alone, transformation)
        for _ in range(NUM_STEPS):
            updates, state = transformation.update(gradients(alone), state, alone)
            alone = optax.apply_updates(alone, updates)
            params = lj.step(session, gradients(params))
        assert sorted(session.read()) == [f"{layer}/{array}{ending}" for layer in ("hidden", "out") for array in ("bias", "kernel")]
    assert jax.tree.structure(params) == jax.tree.structure(alone)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
