"""Compares an optax transformation with the formula that parameter servers would run for it. Does not train the program's model.

It uses a cluster inside this process, so the comparison runs the same code as the training.
"""

from typing import Any

import jax
import numpy as np

import worker_client
from lockstep.errors import InvalidSpec
from lockstep.jax.recognition import Recognized
from lockstep.jax.trees import Tree
from ps_protocol.model.variables import Array

NUM_STEPS = 4
# The most elements of a variable along an axis that are compared, if the whole model has more elements than the second number.
MAX_EXTENT, MAX_ELEMENTS = 3, 100_000
# Servers store hyper-parameters as float32, in which 1 - 0.9999 has an error of 2e-4.
TOLERANCE = 5e-3


def compare(transformation: Any, recognized: Recognized, tree: Tree, values: dict[str, Array]) -> None:
    """Raises InvalidSpec, naming the leaf, if the two change a model differently in a few steps with the same gradients.

    The model has the structure of the program's and the shapes of its arrays, with smaller extents if it is large.
    """
    is_large = sum(value.size for value in values.values()) > MAX_ELEMENTS
    shapes = {name: tuple(min(n, MAX_EXTENT) for n in value.shape) if is_large else value.shape for name, value in values.items()}
    random = np.random.default_rng(17)
    first = {name: np.asarray(random.normal(size=shape)) for name, shape in shapes.items()}
    # Each gradient element keeps its sign: if updates cancelled each other, only their rounding would be compared.
    signs = {name: random.choice([-1.0, 1.0], size=shape) for name, shape in shapes.items()}
    gradients = [
        {name: np.asarray(sign * 10 ** random.uniform(-6, 0.5, size=np.shape(sign))) for name, sign in signs.items()}
        for _ in range(NUM_STEPS)
    ]
    ours = _by_servers(recognized, first, gradients)
    theirs = _by_optax(transformation, tree, first, gradients)
    for name, start in first.items():
        change, expected = ours[name] - start, theirs[name] - start
        largest = float(np.max(np.abs(expected), initial=0.0))
        is_other = ~np.isclose(change, expected, rtol=TOLERANCE, atol=1e-9 * largest + 1e-15 * np.abs(start))
        if is_other.any():
            raise InvalidSpec(
                f"optimizer: on parameter servers it would change {name!r} in another way than optax does (for example by "
                f"{change[is_other][0]:.6g} and by {expected[is_other][0]:.6g} in {NUM_STEPS} steps), so it was not taken: this release "
                "of optax may have changed it. Use an optimizer of lockstep, such as lockstep.adam(), or local_updates(optimizer)"
            )


def _by_servers(recognized: Recognized, first: dict[str, Array], gradients: list[dict[str, Array]]) -> dict[str, Array]:
    with worker_client.local() as session:
        session.create_or_join(
            recognized.declared(first),
            optimizer=recognized.optimizers[0],
            clip_value=recognized.clip_value,
            clip_global_norm=recognized.clip_global_norm,
        )
        for number, one in enumerate(gradients):
            session.step(one, hyperparameters=recognized.numbers(number))
        return session.read()


def _by_optax(transformation: Any, tree: Tree, first: dict[str, Array], gradients: list[dict[str, Array]]) -> dict[str, Array]:
    # float64 where the servers have it too, so that the formulas are compared and not their rounding.
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = tree.unflatten({name: value.copy() for name, value in first.items()})
        state = transformation.init(params)
        for one in gradients:
            updates, state = transformation.update(tree.unflatten({name: value.copy() for name, value in one.items()}), state, params)
            params = jax.tree_util.tree_map(lambda value, update: value + update, params, updates)
        return {name: np.asarray(value) for name, value in tree.named(params, what="params").items()}
