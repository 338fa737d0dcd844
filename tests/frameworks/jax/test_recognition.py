"""Each optax optimizer that is recognized changes a model as optax does, step by step; others are refused with the part at fault."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-frameworks` has it")
optax = pytest.importorskip("optax", reason="optax is not installed: `make test-frameworks` has it")
jnp = jax.numpy

import lockstep
import lockstep.jax as lj
from lockstep.jax import proof
from lockstep.jax.recognition import recognize
from lockstep.jax.trees import tree_of

pytestmark = pytest.mark.timeout(300)  # each shape is compiled anew, which takes minutes on a busy machine

RANDOM = np.random.default_rng(3)
PARAMS = {
    "layers": [
        {"w": RANDOM.normal(size=(3, 4)).astype(np.float32), "b": np.zeros(4, np.float32)},
        {"w": RANDOM.normal(size=(4, 1)).astype(np.float32), "b": np.ones(1, np.float32)},
    ],
    "scale": np.float32(1.5),
}


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "trained" if leaf.ndim > 1 else "frozen", params)


KNOWN: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "adam with eps_root": lambda: optax.adam(0.01, b1=0.8, b2=0.99, eps=1e-3, eps_root=1e-6),
    "nadam": lambda: optax.nadam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "adamw with a mask": lambda: optax.adamw(0.01, weight_decay=0.1, mask=_matrices),
    "adamax": lambda: optax.adamax(0.01),
    "amsgrad": lambda: optax.amsgrad(0.01),
    "adabelief": lambda: optax.adabelief(0.01),
    "lion": lambda: optax.lion(0.01, weight_decay=0.1),
    "lamb": lambda: optax.lamb(0.01, weight_decay=0.1),
    "lars": lambda: optax.lars(0.01, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "rmsprop, centered, momentum": lambda: optax.rmsprop(0.01, centered=True, momentum=0.9, nesterov=True),
    "rmsprop, corrected": lambda: optax.rmsprop(0.01, bias_correction=True, eps_in_sqrt=False, initial_scale=0.5),
    "adagrad": lambda: optax.adagrad(0.1),
    "adadelta": lambda: optax.adadelta(1.0, weight_decay=0.01),
    "sign_sgd": lambda: optax.sign_sgd(0.01),
    "l2 and momentum": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)),
    "average": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.1)),
    "clip, then adam": lambda: optax.chain(optax.clip(0.5), optax.adam(0.01)),
    "clip by global norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)),
    "both clips": lambda: optax.chain(optax.clip(0.5), optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "two factors": lambda: optax.chain(optax.adam(0.01), optax.scale(0.5)),
    "masked": lambda: optax.masked(optax.adam(0.01), _matrices),
    "some frozen": lambda: optax.multi_transform({"trained": optax.adam(0.01), "frozen": optax.set_to_zero()}, _labels),
    "a schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.01, 4, 9)),
    "a schedule and a mask": lambda: optax.adamw(optax.exponential_decay(0.01, 3, 0.5), mask=_matrices),
    "a schedule for some": lambda: optax.multi_transform(
        {"trained": optax.sgd(lambda step: 0.1 / (1 + step)), "frozen": optax.sgd(0.1)}, _labels
    ),
    "two schedules": lambda: optax.multi_transform(
        {"trained": optax.sgd(lambda step: 0.1 / (1 + step)), "frozen": optax.sgd(lambda step: 0.2 / (1 + step))}, _labels
    ),
    "a schedule as a part, and a sign": lambda: optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 0.01, 4, 9)), optax.scale(-1.0)
    ),
    "a schedule of factors below 0": lambda: optax.chain(
        optax.scale_by_adam(), optax.scale_by_schedule(lambda step: -optax.linear_schedule(0.0, 0.01, 5)(step))
    ),
    "two groups": lambda: optax.multi_transform({"trained": optax.adam(0.01), "frozen": optax.sgd(0.1)}, _labels),
}


@pytest.mark.parametrize("name", KNOWN)
def test_servers_change_the_model_as_optax_does(name: str) -> None:
    transformation = KNOWN[name]()
    random = np.random.default_rng(5)
    gradients = [jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=np.shape(leaf)), jnp.float32), PARAMS) for _ in range(10)]
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = transformation.init(params)
    with lockstep.local() as session:
        ours = lj.create_or_join(session, PARAMS, transformation)
        for gradient in gradients:
            updates, state = transformation.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            ours = lj.step(session, gradient)
            for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=1e-6)


UNKNOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "a function of the user's": (lambda: optax.stateless(lambda updates, params: updates), "its part stateless is not known"),
    "a class of the user's": (
        lambda: optax.GradientTransformation(lambda params: (), lambda updates, state, params=None: (updates, state)),
        "its part .*<lambda> is not known",
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), "its part apply_if_finite is not known"),
    "adafactor": (lambda: optax.adafactor(0.1), "its part scale_by_factored_rms is not known"),
    "a limit in the middle": (
        lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1.0)),
        "it has clip_by_global_norm elsewhere than first",
    ),
    "a moment of another type": (lambda: optax.adam(0.1, mu_dtype="bfloat16"), "a moment in a type of its own .mu_dtype=bfloat16."),
    "lion that is smooth": (lambda: optax.chain(optax.scale_by_lion(mode="smooth"), optax.scale(-0.1)), "mode='smooth' is not known"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_optimizer_that_servers_have_no_formula_for_is_refused_with_its_part_and_what_to_do(name: str) -> None:
    make, words = UNKNOWN[name]
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match=words) as caught:
        lj.create_or_join(session, PARAMS, make())
    assert "lockstep.jax.local_updates(optimizer)" in str(caught.value)


def test_the_status_names_the_parts_of_optax_that_the_optimizer_consists_of() -> None:
    (spec,) = recognize(optax.adam(0.01), {"w": jax.numpy.zeros(2)}).optimizers
    assert spec.title == "optax scale_by_adam"


def test_a_schedule_whose_sign_changes_is_refused_at_that_step() -> None:
    changing = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda step: jnp.where(step < 5, -0.1, 0.1)))
    with lockstep.local() as session:
        lj.create_or_join(session, PARAMS, changing)
        gradients = jax.tree.map(jnp.ones_like, PARAMS)
        for _ in range(5):
            lj.step(session, gradients)
        with pytest.raises(lockstep.errors.InvalidSpec, match=r"learning_rate = -0\.1\d*, want >= 0"):
            lj.step(session, gradients)


def test_a_formula_that_optax_has_changed_since_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, values = tree_of(PARAMS)
    other = recognize(optax.adam(0.01, eps=1e-8), PARAMS)
    with pytest.raises(lockstep.errors.InvalidSpec, match="it would change 'layers/0/b' in another way than optax does"):
        proof.compare(optax.adam(0.01, eps=1e-5), other, tree, values)
    with pytest.raises(lockstep.errors.InvalidSpec, match="in another way than optax does"):
        proof.compare(optax.nadam(0.01), other, tree, values)
    proof.compare(optax.adam(0.01), other, tree, values)


def test_a_large_model_is_compared_on_a_few_elements_of_each_array() -> None:
    params = {"w": jnp.zeros((2000, 3000)), "b": jnp.zeros(3000)}
    tree, values = tree_of(params)
    proof.compare(optax.adamw(0.01, mask=_matrices), recognize(optax.adamw(0.01, mask=_matrices), params), tree, values)


def test_an_optimizer_of_lockstep_is_used_as_it_is() -> None:
    with lockstep.local() as session:
        lj.create_or_join(session, PARAMS, lockstep.momentum(0.1))
        assert session.get_slot_names() == ["momentum"]


@pytest.mark.parametrize("optimizer", [0.1, "adam", None])
def test_an_object_that_is_not_an_optimizer_is_refused(optimizer: object) -> None:
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match="want an optax transformation such as"):
        lj.create_or_join(session, PARAMS, optimizer)


def test_a_limit_that_is_given_twice_is_refused() -> None:
    limited = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    with lockstep.local() as session, pytest.raises(lockstep.errors.InvalidSpec, match="clip_global_norm: the optimizer limits"):
        lj.create_or_join(session, PARAMS, limited, clip_global_norm=1.0)


def test_steps_of_several_microbatches_name_the_exact_way_and_it_is_exact() -> None:
    params = {"w": jax.numpy.ones(3)}
    batches = [{"w": jax.numpy.full(3, float(number))} for number in (1, 2, 6)]
    accumulating = optax.MultiSteps(optax.adam(0.1), 3)
    with lockstep.local() as session:
        with pytest.raises(lockstep.errors.InvalidSpec, match=r"take the mean of the gradients .* call step\(\) once"):
            lj.create_or_join(session, params, accumulating)
        ours = lj.create_or_join(session, params, optax.adam(0.1))
        ours = lj.step(session, jax.tree.map(lambda *gradients: sum(gradients) / len(gradients), *batches))
    state = accumulating.init(params)
    for gradients in batches:
        updates, state = accumulating.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ours["w"], params["w"], rtol=0, atol=1e-6)
