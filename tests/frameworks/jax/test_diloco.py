"""DiLoCo of pytrees: what optax computes in a worker by itself comes out of outer steps, and goes on in a worker that is started again."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")
jnp = jax.numpy

import lockstep
import lockstep.jax as lj
from lockstep.errors import InvalidSpec, NotInitialized
from lockstep.in_process import InProcessCluster

pytestmark = pytest.mark.timeout(300)  # each shape is compiled anew, which takes minutes on a busy machine

INNER = optax.adam(0.1)


def first() -> Any:
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": (jnp.ones(3),)}


def _inner_step(params: Any, state: Any, number: Any) -> tuple[Any, Any]:
    gradients = jax.grad(lambda given: jnp.sum((given["w"] - number) ** 2) + jnp.sum(jnp.sin(given["b"][0] + number)))(params)
    updates, state = INNER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


inner_step = jax.jit(_inner_step)


def trained(session: Any, num_inner: int, **options: Any) -> Any:
    lj.create_or_join(session, first(), lockstep.sgd(1.0))
    loop = lj.DiLoCo(session, **options)
    params, state = loop.params, loop.inner_state(INNER.init(first()))
    for number in range(loop.outer.num_inner_steps, num_inner):
        params, state = inner_step(params, state, float(number))
        params = loop.step(params, state)
    return params


def plain(num_inner: int) -> Any:
    params, state = first(), INNER.init(first())
    for number in range(num_inner):
        params, state = inner_step(params, state, float(number))
    return params


def test_with_a_rate_of_one_a_worker_alone_goes_its_own_way() -> None:
    for options in ({}, {"fragments": 2}, {"fragments": 2, "delay": 1}):
        with lockstep.local() as session:
            found = trained(session, 12, sync_every=4, **options)
        if "delay" not in options:
            jax.tree_util.tree_map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), found, plain(12))


def test_a_worker_that_is_started_again_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    options = {"sync_every": 4, "fragments": 2, "delay": 1, "alpha": 0.5}
    with lockstep.local() as session:
        whole = trained(session, 15, **options)
    cluster = InProcessCluster()
    trained(lockstep.local(cluster, worker_index=0), 8, inner_state_dir=tmp_path, **options)
    found = trained(lockstep.local(cluster, worker_index=0, takeover=True), 15, inner_state_dir=tmp_path, **options)
    jax.tree_util.tree_map(np.testing.assert_array_equal, found, whole)


def test_misuse_is_said() -> None:
    with lockstep.local() as session:
        with pytest.raises(NotInitialized, match=r"DiLoCo\(\): this session has no JAX model yet"):
            lj.DiLoCo(session, sync_every=2)
        lj.create_or_join(session, first(), lockstep.sgd(1.0))
        loop = lj.DiLoCo(session, sync_every=2)
        with pytest.raises(InvalidSpec, match="params: another tree"):
            loop.step({"w": 1})
        with pytest.raises(InvalidSpec, match="inside a function that JAX transforms"):
            jax.jit(loop.step)(loop.params)


def test_state_that_was_kept_of_another_optimizer_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster, options = InProcessCluster(), dict[str, Any](sync_every=2, inner_state_dir=tmp_path)
    trained(lockstep.local(cluster, worker_index=0), 4, **options)
    with lockstep.local(cluster, worker_index=0, takeover=True) as session:
        lj.create_or_join(session, first(), lockstep.sgd(1.0))
        state = {"step": jnp.zeros(())}
        assert lj.DiLoCo(session, **options).inner_state(state) is state
    assert "the inner optimizer begins anew: its state that was kept has other arrays than this optimizer's" in caplog.text
