"""Updates of buffers by formulas, as programs give them: computed by the parameter servers, refused before anything is sent."""

from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, LimitExceeded, ShapeMismatch, Unavailable, VariableNotFound
from ps_protocol.model.updates import MAX_UPDATES
from tests.contract.session.test_faults import FaultyCluster
from tests.support.cluster.shape import Shape, Start
from worker_client import Buffer, Placement, PushOutcome, Session, UpdateFormula

DECLARED = {
    "w": np.zeros(3, np.float32),
    "a": Buffer(np.full((2, 3), 2.0, np.float32)),
    "slot": Buffer(np.ones((2, 3), np.float32)),
    "far": Buffer(np.ones((2, 3), np.float32)),
    "count": Buffer(np.zeros(())),
}
PLACES = Placement(pins={"a": 0, "slot": 0, "far": 1, "count": 1, "w": 1}, split_bytes=0)
GRADIENTS = {"w": np.zeros(3, np.float32)}


def opened(start: Start, *, num_workers: int = 1) -> list[Session]:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=num_workers, num_workers=num_workers))
    sessions = [cluster.session(index) for index in range(num_workers)]
    for session in sessions:
        session.create_or_join(DECLARED, optimizer=worker_client.sgd(1.0), placement=PLACES, timeout_s=20)
    return sessions


def test_servers_compute_what_a_program_gives_as_a_formula(start: Start) -> None:
    (session,) = opened(start)
    gradient = np.arange(6, dtype=np.float32).reshape(2, 3)
    text = "s = s + g * g; v = v - rate * g / sqrt(s)"
    updates = {
        "a": UpdateFormula(text, s="slot", g=gradient, rate=0.5),
        "count": UpdateFormula("v + 1"),
        "far": np.zeros((2, 3), np.float32),
    }
    assert session.step(GRADIENTS, updates=updates, timeout_s=20).outcome is PushOutcome.ACCEPTED
    found, slot = session.read(), 1 + gradient * gradient
    np.testing.assert_array_equal(found["slot"], slot)
    np.testing.assert_array_equal(found["a"], 2 - np.float32(0.5) * gradient / np.sqrt(slot))
    assert found["count"] == 1
    np.testing.assert_array_equal(found["far"], 0)


def test_a_formula_whose_answer_is_lost_is_sent_again_and_counts_once() -> None:
    faulty = FaultyCluster(values={"w": np.zeros(3), "count": Buffer(np.zeros(()))})
    for shard in faulty.shards:
        shard.lose_answers("push_gradients", count=1)
        shard.refuse("push_gradients", Unavailable("on its way"))
    with faulty.session as session:
        for step in range(3):
            assert session.step({"w": np.zeros(3)}, updates={"count": UpdateFormula("v + 1")}, timeout_s=20).outcome is PushOutcome.ACCEPTED
            assert session.read()["count"] == step + 1


ARRAY = np.ones((2, 3), np.float32)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"a": UpdateFormula("v + other", other="nothing")}, VariableNotFound, r"variable 'nothing' not found"),
    ({"a": UpdateFormula("v + other", other="w")}, InvalidSpec, r"update for 'w': it takes gradients"),
    (
        {"a": UpdateFormula("v + far", far="far")},
        InvalidSpec,
        r"'a': its variables lie on different parameter servers; place them together",
    ),
    ({"a": UpdateFormula("v + g + h", g=ARRAY, h=ARRAY)}, InvalidSpec, r"'h' is one more array than the formula assigns to variables"),
    ({"a": UpdateFormula("v + g", g=np.ones(3, np.float32))}, ShapeMismatch, r"update for 'a': shape \(3,\), variable \(2, 3\)"),
    ({"a": UpdateFormula("v + s", s="a")}, InvalidSpec, r"two of its variables are at one position"),
    ({"a": UpdateFormula("s = v", s="slot"), "slot": ARRAY}, InvalidSpec, r"the update of 'slot' occurs twice"),
    ({"w": UpdateFormula("v + 1")}, InvalidSpec, r"update for 'w': it takes gradients"),
]


@pytest.mark.parametrize(("updates", "kind", "reason"), WRONG, ids=[reason for *_, reason in WRONG])
def test_formulas_that_cannot_be_computed_are_refused_before_anything_is_sent(
    start: Start, updates: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    (session,) = opened(start)
    with pytest.raises(kind, match=reason):
        session.step(GRADIENTS, updates=updates, timeout_s=20)
    assert session.step(GRADIENTS, updates={"a": UpdateFormula("v * 2")}, timeout_s=20).outcome is PushOutcome.ACCEPTED
    assert set(session.read()["a"].ravel().tolist()) == {4}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: UpdateFormula("v + unknown"), r"line 1, column 5: unknown name 'unknown'"),
        (lambda: UpdateFormula("v.__class__"), r"line 1, column 1: attributes are not allowed"),
        (lambda: UpdateFormula("v + v", v=1.0), r"'v' is the variable itself"),
        (lambda: UpdateFormula("v + sum", sum=1.0), r"name 'sum': this name has a meaning in formulas"),
        (lambda: UpdateFormula("g = 1", g=ARRAY), r"'g' is an argument and cannot be assigned to"),
    ],
)
def test_an_invalid_formula_is_refused_at_its_declaration(make: Any, reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        make()


def test_one_contribution_has_a_bounded_number_of_formulas() -> None:
    names = [f"b{index}" for index in range(MAX_UPDATES + 1)]
    with worker_client.local() as session:
        session.create_or_join({name: Buffer(np.zeros(())) for name in names}, optimizer=worker_client.sgd(1.0), split_bytes=0)
        with pytest.raises(LimitExceeded, match=r"formulas: 513 of 2565 characters in one contribution, 512 of 65536 at most"):
            session.step({}, updates={name: UpdateFormula("v + 1") for name in names})
        session.step({}, updates={name: UpdateFormula("v + 1") for name in names[:-1]})
        assert sum(session.read().values()) == MAX_UPDATES
