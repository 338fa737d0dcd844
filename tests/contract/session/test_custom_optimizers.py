"""Optimizers given as formulas, as a program uses them: tables, norms, and changes while training."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Shape, Start
from worker_client import EmbeddingTable, IndexedSlices, OptimizerSpec, Session, Variable, fixed_size_partitioner

# The formulas of built-in optimizers, written by somebody else: with other names, and all in other lines.
ADAMW = """
m = m + (g - m) * (1 - b1)
s = b2 * s + (1 - b2) * (g * g)
v = v * (1 - lr * decay) - lr * sqrt(1 - b2 ** t) / (1 - b1 ** t) * m / (sqrt(s) + eps * sqrt(1 - b2 ** t))
"""
LION = "v = v - lr * sign(b1 * m + (1 - b1) * g); m = b2 * m + (1 - b2) * g"
SCHEDULE = worker_client.exponential_decay(0.05, 3, 0.5)
TEXTS = {
    "adamw": (
        worker_client.adamw(SCHEDULE, lazy=True),
        worker_client.custom_optimizer(ADAMW, SCHEDULE, slots={"m": 0, "s": 0}, b1=0.9, b2=0.999, eps=1e-8, decay=0.01),
    ),
    "lion": (worker_client.lion(SCHEDULE), worker_client.custom_optimizer(LION, SCHEDULE, slots={"m": 0}, b1=0.9, b2=0.99)),
}


def trained(session: Session, optimizer: OptimizerSpec, *, num_steps: int = 6) -> Mapping[str, Any]:
    """Trains dense variables, one of them split, and a table; returns what came out."""
    rng = np.random.default_rng(1)
    cut = Variable(rng.normal(size=(40, 5)).astype(np.float32), partitioner=fixed_size_partitioner(2))
    values = {"a": rng.normal(size=7), "half": np.ones(9, np.float16), "cut": cut, "t": EmbeddingTable((10, 2))}
    session.create_or_join(values, optimizer=optimizer, timeout_s=20)
    for step in range(num_steps):
        gradients = {
            "a": rng.normal(size=7),
            "half": rng.normal(size=9).astype(np.float16),
            "cut": rng.normal(size=(40, 5)).astype(np.float32),
        }
        rows = IndexedSlices([step, 8], rng.normal(size=(2, 2)).astype(np.float32))
        session.step({**gradients, "t": rows}, timeout_s=20)
    return {**session.read(), "t": session.read_rows("t", np.arange(10))}


@pytest.mark.parametrize("name", TEXTS)
def test_the_formula_of_a_built_in_optimizer_has_its_bits(start: Start, name: str) -> None:
    built_in, formula = TEXTS[name]
    found = trained(start(Shape(num_ps=2, num_workers=1)).session(), formula)
    with worker_client.local() as alone:
        want = trained(alone, built_in)
    for variable, value in found.items():
        assert value.tobytes() == want[variable].tobytes(), variable


def test_numbers_of_a_formula_are_not_rounded_to_float32() -> None:
    """1 - 0.999 in float32 is wrong in the fifth digit, and so would be every step."""
    one_minus = worker_client.custom_optimizer("v - lr * (1 - b) * g / (1 - b ** t)", 0.1, b=0.999)
    with worker_client.local() as session:
        session.create_or_join({"w": np.zeros(1), "half": np.zeros(1, np.float32)}, optimizer=one_minus)
        for _ in range(3):
            session.step({"w": np.ones(1), "half": np.ones(1, np.float32)})
        want = -sum(0.1 * 0.001 / (1 - 0.999**t) for t in (1, 2, 3))
        assert session.read()["w"][0] == pytest.approx(want, rel=1e-12)
        assert session.read()["half"][0] == pytest.approx(want, rel=2e-7)


def test_slots_are_read_by_their_names_and_numbers_change_while_training(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=1))
    session = cluster.session()
    lion = worker_client.custom_optimizer(
        "v = v - lr * (sign(b1 * m + (1 - b1) * g) + decay * v); m = b2 * m + (1 - b2) * g",
        learning_rate=0.5, slots={"m": 0.0}, b1=0.75, b2=0.5, decay=0.0,
    )  # fmt: skip
    session.create_or_join({"w": np.array([1.0, -2.0, 0.0])}, optimizer=lion, timeout_s=20)
    session.step({"w": np.array([4.0, -2.0, 0.0])})
    assert session.read()["w"].tolist() == [0.5, -1.5, 0.0]
    assert session.get_slot("w", "m").tolist() == [2.0, -1.0, 0.0]
    assert "custom ('v = v - lr * (sign(b1 * m" in cluster.observer().status().optimizer
    session.set_hyperparameters(learning_rate=0.25, decay=1.0, timeout_s=20)
    session.step({"w": np.zeros(3)})
    assert session.read()["w"].tolist() == [0.5 - 0.25 - 0.125, -1.5 + 0.25 + 0.375, 0.0]
    with pytest.raises(InvalidSpec, match="'b9' does not occur in the formula"):
        session.set_hyperparameters(b9=1.0, timeout_s=20)


def test_norms_of_cut_variables_and_tables_are_refused(start: Start) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    normed = worker_client.custom_optimizer("v - lr * g / (norm(g) + 1)", 0.1)
    with pytest.raises(InvalidSpec, match="variable 't': its optimizer's formula has a sum or a norm, and a table is updated by rows"):
        session.create_or_join({"t": EmbeddingTable((10, 2))}, optimizer=normed)
    cut = Variable(np.zeros((4, 2)), partitioner=fixed_size_partitioner(2), optimizer=normed)
    with pytest.raises(InvalidSpec, match=r"variable 'w': .* needs the whole variable in one place; take away the partition"):
        session.create_or_join({"w": cut}, optimizer=worker_client.sgd(0.1))
    session.create_or_join({"w": np.zeros((4, 2))}, optimizer=normed, timeout_s=20)


@also_over("grpc")
def test_variables_of_one_model_may_have_formulas_of_their_own(start: Start) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    up = worker_client.custom_optimizer("n = n + 1; v = v + lr * g * n", 1.0, slots={"n": 0.5})
    down = worker_client.custom_optimizer("v - lr * clip(g, -1, 1)", 1.0)
    variables = {
        f"{kind}{index}": Variable(np.zeros(2), optimizer=rule)
        for (kind, rule), index in itertools.product({"up": up, "down": down}.items(), range(2))
    }
    session.create_or_join({**variables, "plain": np.zeros(2)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
    session.step({name: np.full(2, 2.0) for name in (*variables, "plain")})
    assert {name: value[0] for name, value in session.read().items()} == {"up0": 3, "up1": 3, "down0": -1, "down1": -1, "plain": -2}


def test_a_constraint_may_be_a_formula(start: Start) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    unit, half = worker_client.custom_constraint("v / max(norm(v), 1)"), worker_client.custom_constraint("clip(v, -0.5, 0.5)")
    cut = Variable(np.zeros((4, 2)), constraint=unit, partitioner=fixed_size_partitioner(2))
    with pytest.raises(InvalidSpec, match="its constraint needs the whole variable in one place"):
        session.create_or_join({"unit": cut}, optimizer=worker_client.sgd(1.0))
    values = {"unit": Variable(np.zeros((2, 2)), constraint=unit), "half": Variable(np.zeros((200, 2)), constraint=half)}
    session.create_or_join(values, optimizer=worker_client.sgd(1.0), split_bytes=8, timeout_s=20)
    session.step({"unit": -np.array([[3.0, 0.0], [0.0, 4.0]]), "half": -np.linspace([-1, 0], [0, 1], 200)})
    found = session.read()
    assert found["unit"].tolist() == [[0.6, 0.0], [0.0, 0.8]]
    np.testing.assert_array_equal(found["half"], np.clip(np.linspace([-1, 0], [0, 1], 200), -0.5, 0.5))
    with pytest.raises(InvalidSpec, match=r"line 1, column 5: unknown name 'g'; known are v"):
        worker_client.custom_constraint("v - g")
