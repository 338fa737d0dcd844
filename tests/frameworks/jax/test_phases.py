"""Fine-tuning: freeze, then train all, on one session: each phase is that of a new optax optimizer on the values that there are."""

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")
jnp = jax.numpy

import lockstep
import lockstep.jax as lj
from tests.support.processes.commands import up
from tests.support.repository import program_of_page

pytestmark = pytest.mark.timeout(300)  # each shape is compiled anew, which takes minutes on a busy machine

W = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
PARAMS: dict[str, Any] = {"body": {"w": W, "b": np.zeros(3, np.float32)}, "head": [np.ones(3, np.float32)]}
RANDOM = np.random.default_rng(3)
GRADIENTS = [jax.tree.map(lambda leaf: jnp.asarray(RANDOM.normal(size=leaf.shape), jnp.float32), PARAMS) for _ in range(9)]
KINDS = {
    "adam": lambda rate: optax.adam(rate),
    "adamw": lambda rate: optax.adamw(rate, b1=0.8, weight_decay=rate),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adagrad": lambda rate: optax.adagrad(rate),
    "a schedule": lambda rate: optax.adam(optax.linear_schedule(rate, 0.0, 100)) if rate == 0.1 else optax.adam(rate),
    "two groups": lambda rate: optax.multi_transform(
        {"body": optax.adam(rate), "head": optax.adam(2 * rate)}, {"body": {"w": "body", "b": "body"}, "head": ["head"]}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_is_that_of_a_new_optimizer_on_the_values_that_there_are(kind: str) -> None:
    params = jax.tree.map(jnp.asarray, PARAMS)
    with lockstep.local(num_ps=2) as session:
        for phase, rate in enumerate((0.1, 0.01, 0.02)):
            optimizer, is_frozen = KINDS[kind](rate), phase == 0
            state = optimizer.init(params)
            ours = lj.create_or_join(session, PARAMS, optimizer)
            for gradient in GRADIENTS[3 * phase : 3 * phase + 3]:
                zero = {"body": jax.tree.map(jnp.zeros_like, gradient["body"]), "head": gradient["head"]} if is_frozen else gradient
                updates, state = optimizer.update(zero, state, params)
                changed = optax.apply_updates(params, updates)
                params = {"body": params["body"], "head": changed["head"]} if is_frozen else changed
                ours = lj.step(session, {"body": None, "head": gradient["head"]} if is_frozen else gradient)
                for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
                    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)  # as far as optax rounds its corrections
        assert (session.local_step, session.phase) == (9, 2)


def test_a_phase_may_have_some_of_the_parameters() -> None:
    with lockstep.local() as session:
        lj.create_or_join(session, PARAMS, optax.sgd(1.0))
        lj.step(session, jax.tree.map(jnp.ones_like, PARAMS))
        head = lj.create_or_join(session, {"head": PARAMS["head"]}, optax.sgd(0.5))
        np.testing.assert_array_equal(head["head"][0], np.zeros(3))
        head = lj.step(session, {"head": [jnp.ones(3)]})
        np.testing.assert_array_equal(head["head"][0], -0.5 * np.ones(3))
        np.testing.assert_array_equal(session.read()["body/w"], W - 1)


def test_a_phase_of_other_parameters_or_another_formula_is_refused_with_advice_that_works() -> None:
    with lockstep.local() as session:
        lj.create_or_join(session, {"head": PARAMS["head"]}, optax.sgd(0.1))
        with pytest.raises(lockstep.errors.ModelMismatch, match=r"'body/b'.*give the first optimizer all variables that any phase trains"):
            lj.create_or_join(session, PARAMS, optax.sgd(0.01))
        with pytest.raises(lockstep.errors.ModelMismatch, match=r"another formula \(optax scale_by_adam\).*only other numbers"):
            lj.create_or_join(session, {"head": PARAMS["head"]}, optax.adam(0.01))
        lj.step(session, {"head": [jnp.ones(3)]})


def test_updates_of_the_workers_go_through_phases() -> None:
    with lockstep.local() as session:
        params: Any = {"w": jnp.zeros(3)}
        for rate in (0.1, 0.01):
            state = optax.adam(rate).init(params)
            ours = lj.create_or_join(session, params, lj.local_updates(optax.adam(rate)))
            for _ in range(2):
                updates, state = optax.adam(rate).update({"w": jnp.ones(3)}, state, params)
                params = optax.apply_updates(params, updates)
                ours = lj.step(session, {"w": jnp.ones(3)})
            np.testing.assert_allclose(ours["w"], params["w"], rtol=1e-6)


@pytest.mark.timeout(300)
def test_two_workers_train_the_program_of_the_page(tmp_path: Any) -> None:
    program = program_of_page("docs/tutorials/jax.md", '"body": None') + "\nprint('ended', session.local_step, session.phase)\n"
    with up("--ps", "1", "--workers", "2", worker=program, run_dir=tmp_path / "run") as process:
        out, _ = process.communicate(timeout=250)
    assert process.returncode == 0 and all(f"[worker {index}] ended 20 1" in out for index in range(2)), out
