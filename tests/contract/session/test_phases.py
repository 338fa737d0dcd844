"""Phases of training: a session joins its model again, with other numbers, and the optimizer begins anew on the values that there are."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import InvalidSpec, ModelMismatch
from ps_protocol.model.optimizers import constant
from tests.support.cluster.shape import Cluster, Shape, Start
from worker_client import EmbeddingTable, IndexedSlices, OptimizerSpec, Session, Variable

W = np.arange(3.0)
GRADIENTS = [np.random.default_rng(seed).normal(size=3) for seed in range(8)]
# Powers, slots that begin with another value than 0, and a formula that has the number of the step.
OPTIMIZERS = {
    "adam": worker_client.adam(0.1),
    "momentum": worker_client.momentum(0.1),
    "adagrad": worker_client.adagrad(0.1),
    "a formula": worker_client.custom_optimizer("m = m * b + g; v = v - lr * m / (1 - b ** t)", 0.1, slots={"m": 0.5}, b=0.9),
}


def slower(optimizer: OptimizerSpec, rate: float = 0.01) -> OptimizerSpec:
    return replace(optimizer, learning_rate=constant(rate))


def values(session: Session) -> dict[str, Any]:
    return {**session.read(), "t": session.read_rows("t")}


def trained(session: Session, first: dict[str, Any], optimizer: OptimizerSpec, gradients: list[Any], *, freezes: bool = False) -> Any:
    """Joins, with the values of `first`, and makes a step of each gradient; the variable `b` may be frozen."""
    declared = {**first, "t": EmbeddingTable(first["t"], optimizer=optimizer.in_group("tables"))}
    session.create_or_join(declared, optimizer=optimizer, timeout_s=20)
    for one in gradients:
        rows = IndexedSlices([1], one[None])
        session.step({"w": one, "b": None if freezes else one[:2], "t": rows}, timeout_s=20)
    return values(session)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_phase_trains_as_a_new_optimizer_does_on_the_values_that_there_are(start: Start, name: str) -> None:
    optimizer = OPTIMIZERS[name]
    session = start(Shape(num_ps=2, num_workers=1)).session()
    first = {"w": W, "b": np.zeros(2), "t": np.zeros((4, 3))}
    middle = trained(session, first, optimizer, GRADIENTS[:4], freezes=True)
    assert not middle["b"].any() and session.phase == 0
    end = trained(session, first, slower(optimizer), GRADIENTS[4:])
    assert session.phase == 1 and session.local_step == 8
    alone = trained(start(Shape(num_ps=2, num_workers=1)).session(), middle, slower(optimizer), GRADIENTS[4:])
    for name, value in alone.items():
        np.testing.assert_array_equal(end[name], value)


def joined(session: Session, rate: float = 1.0, decay: float = 0.5, **groups: OptimizerSpec) -> Session:
    named = {name: Variable(np.zeros(3), optimizer=optimizer.in_group(name)) for name, optimizer in groups.items()}
    session.create_or_join({"w": np.zeros(3), **named}, optimizer=worker_client.momentum(rate, decay), timeout_s=20)
    return session


def velocity(cluster: Cluster) -> float:
    return float(cluster.observer().get_slot("w", "momentum")[0])


def test_workers_that_come_to_a_phase_one_after_the_other_begin_it_once(start: Start) -> None:
    cluster = start(Shape(num_workers=2))

    def train(index: int) -> None:
        session = joined(cluster.session(index))
        for step in range(6):
            if step == 2 + index:
                joined(session, 0.5)
            session.step({"w": np.ones(3)}, timeout_s=20)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, range(2)))
    # Worker 0 began the phase with step 2: four steps since.
    assert velocity(cluster) == 1 + 0.5 + 0.25 + 0.125


def test_a_worker_that_is_started_again_in_a_phase_goes_through_the_program_and_changes_nothing() -> None:
    cluster = InProcessCluster(total_num_replicas=1)
    session = joined(worker_client.local(cluster))
    for rate in (None, 0.5):
        if rate is not None:
            joined(session, rate)
        for _ in range(2):
            session.step({"w": np.ones(3)}, timeout_s=20)
    # Its process has ended without a word.
    with joined(worker_client.local(cluster, worker_index=0, takeover=True)) as again:
        joined(again, 0.5)
        again.step({"w": np.ones(3)}, timeout_s=20)
        assert float(again.get_slot("w", "momentum")[0]) == 1 + 0.5 + 0.25


def test_each_group_has_its_numbers_of_the_phase_and_steps_may_have_others(start: Start) -> None:
    session = joined(start(Shape(num_ps=2, num_workers=1)).session(), head=worker_client.sgd(1.0))
    ones = {"w": np.ones(3), "head": np.ones(3)}
    session.step(ones, timeout_s=20)
    joined(session, 0.25, head=worker_client.sgd(0.5))
    session.step(ones, timeout_s=20)
    session.step(ones, hyperparameters={"learning_rate": 2.0, "momentum": 0.0, "head": {"learning_rate": 4.0}}, timeout_s=20)
    found = session.read()
    np.testing.assert_array_equal(found["w"], -(1 + 0.25 + 2) * np.ones(3))
    np.testing.assert_array_equal(found["head"], -(1 + 0.5 + 4) * np.ones(3))


def test_one_optimizer_of_a_phase_gives_its_numbers_to_several_groups_of_the_first(start: Start) -> None:
    session = start(Shape(num_workers=1)).session()
    head = worker_client.momentum(1.0, 0.5).in_group("head")
    session.create_or_join({"w": np.zeros(3), "h": Variable(np.zeros(3), optimizer=head)}, optimizer=worker_client.momentum(2.0, 0.5))
    session.create_or_join({"w": np.zeros(3), "h": np.zeros(3)}, optimizer=worker_client.momentum(0.5, 0.0))
    session.step({"w": np.ones(3), "h": np.ones(3)}, timeout_s=20)
    session.step({"w": np.ones(3), "h": np.ones(3)}, hyperparameters={"learning_rate": 0.25}, timeout_s=20)
    for value in session.read().values():
        np.testing.assert_array_equal(value, -0.75 * np.ones(3))


BAD: dict[str, tuple[Callable[[Session], object], str]] = {
    "another variable": (lambda s: s.create_or_join({"x": W}, optimizer=worker_client.momentum(0.1)), "'x'.*give the first optimizer all"),
    "another shape": (lambda s: s.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.momentum(0.1)), "'w'.*is not in the cluster"),
    "another formula": (lambda s: s.create_or_join({"w": W}, optimizer=worker_client.adam(0.1)), r"formula \(adam\).*\(momentum\)"),
    "a limit": (lambda s: s.create_or_join({"w": W}, optimizer=worker_client.momentum(0.1), clip_norm=1.0), "limits .* first optimizer"),
    "a schedule": (
        lambda s: s.create_or_join({"w": W}, optimizer=worker_client.momentum(worker_client.cosine_decay(0.1, 9), 0.5)),
        "a phase's learning rate is a number",
    ),
    "other numbers within a group": (
        lambda s: s.create_or_join(
            {"w": W, "head": Variable(W, optimizer=worker_client.momentum(0.2, 0.5))}, optimizer=worker_client.momentum(0.1, 0.5)
        ),
        "give the first optimizer the groups of all phases",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_phase_of_another_model_is_refused_and_training_goes_on_in_the_phase_that_there_is(start: Start, name: str) -> None:
    call, words = BAD[name]
    session = start(Shape(num_workers=1)).session()
    session.create_or_join({"w": W, "head": W}, optimizer=worker_client.momentum(1.0, 0.5))
    session.step({"w": np.ones(3), "head": None}, timeout_s=20)
    with pytest.raises(ModelMismatch, match=words):
        call(session)
    assert session.phase == 0
    session.step({"w": np.ones(3), "head": None}, timeout_s=20)
    np.testing.assert_array_equal(session.read()["w"], W - 1 - 1.5)


def test_where_contributions_are_applied_on_arrival_training_has_one_phase(start: Start) -> None:
    session = start(Shape(num_workers=1)).session()
    session.set_policy(worker_client.async_policy(use_locking=False), timeout_s=20)
    joined(session)
    with pytest.raises(InvalidSpec, match="training has one phase"):
        joined(session)


@pytest.mark.parametrize("number", [0.0, 0.5, -1.0, float("nan"), 2.0**40])
def test_a_phase_has_a_whole_number(start: Start, number: float) -> None:
    session = joined(start(Shape(num_workers=1)).session())
    with pytest.raises(InvalidSpec, match=r"phase of training = .*, want a whole number from 1"):
        session.step({"w": np.ones(3)}, hyperparameters={"phase of training": number}, timeout_s=20)
