"""Learning rates and hyper-parameters that come with a contribution: they hold for its step, for that one only, and for each group."""

from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from tests.support.cluster.shape import Shape, Start
from worker_client import EmbeddingTable, IndexedSlices, OptimizerSpec, Session, Variable

ONES = np.ones(3)


def joined(session: Session, optimizer: OptimizerSpec | None = None, **values: Any) -> Session:
    session.create_or_join({"w": np.zeros(3), **values}, optimizer=optimizer or worker_client.sgd(1.0), timeout_s=20)
    return session


@pytest.mark.parametrize("policy", [None, worker_client.ssp_policy(1), worker_client.async_policy()], ids=str)
def test_a_rate_holds_for_the_step_that_the_contribution_counts_for_and_no_other(start: Start, policy: Any) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    if policy is not None:
        session.set_policy(policy, timeout_s=20)
    joined(session, b=np.zeros(2))
    for rate in (0.5, None, 0.25):
        given = None if rate is None else {"learning_rate": rate}
        session.step({"w": ONES, "b": None}, hyperparameters=given, timeout_s=20)
    while session.local_step < 3 and session.wait(20):
        session.read()
    np.testing.assert_array_equal(session.read()["w"], -(0.5 + 1.0 + 0.25) * ONES)


def test_each_group_has_its_own_numbers_tables_too_and_the_rest_keeps_the_settings(start: Start) -> None:
    session = start(Shape(num_ps=2, num_workers=1)).session()
    head = worker_client.momentum(1.0, 0.5).in_group("head")
    joined(
        session,
        worker_client.sgd(worker_client.piecewise_constant([0], [8.0, 4.0])),
        h=Variable(np.zeros(3), optimizer=head),
        other=Variable(np.zeros(3), optimizer=worker_client.sgd(2.0)),
        t=EmbeddingTable((4, 3), optimizer=worker_client.sgd(1.0).in_group("rows")),
    )
    gradients = {"w": ONES, "h": ONES, "other": ONES, "t": IndexedSlices([1], ONES[None].astype(np.float32))}
    given: dict[str, Any] = {"learning_rate": 0.5, "head": {"learning_rate": 0.25, "momentum": 0.0}, "rows": {"learning_rate": 3.0}}
    session.step(gradients, timeout_s=20)
    session.step(gradients, hyperparameters=given, timeout_s=20)
    session.step(gradients, timeout_s=20)
    values = session.read()
    np.testing.assert_array_equal(values["w"], -(8 + 0.5 + 4) * ONES)
    # The velocity is 1, then 0 * 1 + 1, then 0.5 * 1 + 1.
    np.testing.assert_array_equal(values["h"], -(1 + 0.25 * 1 + 1.5) * ONES)
    np.testing.assert_array_equal(values["other"], -6 * ONES)
    np.testing.assert_array_equal(session.read_rows("t", [0, 1]), [np.zeros(3), -(1 + 3 + 1) * ONES])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rat": 0.1}, "unknown hyper-parameter 'learning_rat'; want one of learning_rate.*did you mean 'learning_rate'"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0, want >= 0"),
        ({"learning_rate": float("nan")}, "learning_rate = nan, want a finite number"),
        ({"learning_rate": "0.1"}, "want a finite number"),
        ({"lazy": 1.0}, "lazy only counts when the model is created"),
        ({"beta1": 1.5}, "beta1 = 1.5, want >= 0 and < 1"),
        ({"head": {"learning_rate": 0.1}}, "no group 'head' of variables; it has none"),
        ([0.1], "got a list, want a dict"),
        ({3: 0.1}, "got the name 3, want a str"),
    ],
)
def test_numbers_that_no_step_can_use_are_refused_before_anything_is_sent(start: Start, given: Any, words: str) -> None:
    session = joined(start(Shape(num_workers=1)).session(), worker_client.adam(0.5))
    with pytest.raises(InvalidSpec, match=words):
        session.step({"w": ONES}, hyperparameters=given, timeout_s=20)
    assert session.step({"w": ONES}, hyperparameters={"beta1": 0.5}, timeout_s=20).applied_step == 0


def test_where_contributions_are_applied_on_arrival_numbers_of_a_step_are_refused(start: Start) -> None:
    session = start(Shape(num_workers=1)).session()
    session.set_policy(worker_client.async_policy(use_locking=False), timeout_s=20)
    joined(session)
    with pytest.raises(InvalidSpec, match="applied on arrival, none has numbers of its own"):
        session.step({"w": ONES}, hyperparameters={"learning_rate": 0.5}, timeout_s=20)


def test_two_optimizers_of_one_group_are_refused() -> None:
    with worker_client.local() as session, pytest.raises(InvalidSpec, match=r"'b'.*another than that of the same group 'g'"):
        values = {name: Variable(ONES, optimizer=worker_client.sgd(rate).in_group("g")) for name, rate in (("a", 1.0), ("b", 2.0))}
        session.create_or_join(values, optimizer=worker_client.sgd(1.0))
