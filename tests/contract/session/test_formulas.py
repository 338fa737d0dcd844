"""Formulas as text against the parameter servers' own optimizers: the same formula gives the same bits."""

from collections.abc import Mapping

import numpy as np
import pytest

import worker_client
from ps_protocol.model.expressions import parse_formula
from worker_client import OptimizerSpec

# The optimizer, its formula, its slots with their first values, and its numbers. An optimizer's numbers travel as float32: these are exact.
SAME: list[tuple[OptimizerSpec, str, Mapping[str, float], Mapping[str, float]]] = [
    (worker_client.sgd(0.125), "v - lr * g", {}, {"lr": 0.125}),
    (worker_client.momentum(0.125, 0.875), "m = m * mu + g; v = v - m * lr", {"m": 0.0}, {"lr": 0.125, "mu": 0.875}),
    (worker_client.adagrad(0.125, 0.25), "s = s + g * g; v = v - g * lr * (1 / sqrt(s))", {"s": 0.25}, {"lr": 0.125}),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("optimizer", "text", "slots", "numbers"), SAME, ids=[text for _, text, _, _ in SAME])
def test_a_formula_has_the_bits_of_the_optimizer_with_that_formula(
    optimizer: OptimizerSpec, text: str, slots: Mapping[str, float], numbers: Mapping[str, float], dtype: str
) -> None:
    rng = np.random.default_rng(1)
    formula = parse_formula(text, variable="v", others=["g", *slots, *numbers], writable=slots)
    values = {"v": rng.normal(size=1000).astype(dtype), **{name: np.full(1000, first, dtype) for name, first in slots.items()}}
    constants = {name: np.asarray(number, dtype) for name, number in numbers.items()}
    with worker_client.local() as session:
        session.create_or_join({"v": values["v"]}, optimizer=optimizer)
        for _ in range(5):
            gradient = rng.normal(size=1000).astype(dtype)
            session.step({"v": gradient})
            values.update(formula.compute({**values, **constants, "g": gradient}))
            assert session.read()["v"].tobytes() == values["v"].tobytes()
