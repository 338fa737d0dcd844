"""State of a worker's program: it belongs to the step of the next contribution that counts, and is saved and restored with that step."""

from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, LimitExceeded, NotInitialized
from tests.support.chief.rolling import RollingCluster
from tests.support.cluster.shape import Cluster, Shape, Start
from worker_client import PushOutcome, Session

ONES = {"w": np.ones(3)}
POLICIES = [
    None,
    worker_client.ssp_policy(1),
    worker_client.async_policy(),
    worker_client.async_policy(use_locking=False),
]


def join(session: Session) -> Session:
    session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
    return session


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_replacement_finds_the_user_state_of_the_lost_workers_last_contribution(start: Start, policy: Any) -> None:
    cluster = start(Shape(num_ps=2, num_workers=1))
    first = cluster.session(0)
    if policy is not None:
        first.set_policy(policy, timeout_s=20)
    # Otherwise training would be finished when the first leaves.
    with cluster.observer(), join(first):
        state = first.user_state
        assert dict(state) == {}
        state["best"], state["sampler"] = 0.5, {"position": 3, "seed": np.arange(2)}
        first.step(ONES, timeout_s=20)
        first.step(ONES, timeout_s=20)
        state["best"] = 0.25
        del state["sampler"]
        state["tag"] = b"\0\1"
        first.step(ONES, timeout_s=20)
        state["best"] = 0.125  # no contribution brings it
        second = worker(cluster, first)
        assert dict(join(second).user_state) == {"best": 0.25, "tag": b"\0\1"}
        second.step(ONES, timeout_s=20)
        assert dict(second.user_state) == {"best": 0.25, "tag": b"\0\1"}


def worker(cluster: Cluster, former: Session) -> Session:
    """Returns a session with the place of another that leaves as if it had failed."""
    former.__exit__(ValueError, ValueError("lost"), None)
    return cluster.session(former.worker_index)


def test_after_a_rollback_the_state_is_that_of_the_step() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        state = session.user_state
        state["n"] = 1
        assert session.step(ONES, timeout_s=20).is_accepted
        cluster.roll_back()
        state["n"] = 2
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ROLLED_BACK
        assert dict(state) == {}
        state["n"] = 3
        assert session.step(ONES, timeout_s=20).is_accepted
        assert dict(state) == {"n": 3}


def test_a_user_state_that_was_set_stays_under_another_chief() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        session.user_state["n"] = 1
        session.step(ONES, timeout_s=20)
        session.user_state["n"] = 2
        cluster.replace_chief()
        assert session.step(ONES, timeout_s=20).is_accepted
        assert dict(session.user_state) == {"n": 2}


def test_an_unsupported_user_state_is_refused_at_the_line_that_sets_it(start: Start) -> None:
    session = start(Shape(num_workers=1)).session()
    with pytest.raises(NotInitialized, match=r"call create_or_join\(\) first"):
        session.user_state["n"] = 1
    join(session)
    for value in (float("nan"), {1}, {"a": object()}):
        with pytest.raises(InvalidSpec, match=r"user_state\['n'\]"):
            session.user_state["n"] = value
    with pytest.raises(LimitExceeded, match=r"user_state\['n'\]: with its 80002 bytes the state has 80008 bytes as JSON, 65536 at most"):
        session.user_state["n"] = "a" * 80000
    assert session.step(ONES, timeout_s=20).is_accepted
