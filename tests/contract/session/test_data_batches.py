"""Ranges of the training data over sessions: each sample counts once in each pass, also after drops, losses and rollbacks."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import DeadlineExceeded
from ps_protocol.model.data import DataRange
from ps_protocol.model.policy import PolicySpec
from tests.support.chief.rolling import RollingCluster
from worker_client import PushOutcome, Session

VALUES = {"w": np.zeros(8)}
ONES = {"w": np.ones(8)}
NUM_SAMPLES = 70


def join(session: Session) -> None:
    session.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))


def give(session: Session, batch: DataRange) -> PushOutcome:
    """Contributes what counts the samples, if it counts."""
    session.read()
    return session.step(ONES, metrics={"samples": batch.stop - batch.start}, timeout_s=20).outcome


def go_through(session: Session, *, num_epochs: int = 2, stop_after: int | None = None) -> None:
    for number, batch in enumerate(session.batches("train", num_samples=NUM_SAMPLES, batch_size=4, num_epochs=num_epochs, timeout_s=20)):
        if number == stop_after:
            return
        give(session, batch)


def num_counted(session: Session) -> float:
    return session.read_metrics()["samples"].sum


def run_all(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a worker is stuck"


def test_one_worker_gets_each_range_of_each_pass_in_order() -> None:
    with worker_client.local() as session:
        join(session)
        found = []
        for batch in session.batches("train", num_samples=10, batch_size=4, num_epochs=2):
            found.append((batch.epoch, batch.start, batch.stop))
            give(session, batch)
        assert found == [(epoch, *rows) for epoch in range(2) for rows in ((0, 4), (4, 8), (8, 10))]
        data = session.status().data
        assert data is not None
        assert (data.name, data.num_done, data.num_ranges) == ("train", 3, 3)


@pytest.mark.parametrize(
    ("num_workers", "sizes", "policy"),
    [
        (2, {"total_num_replicas": 2}, None),
        (3, {"total_num_replicas": 3}, None),
        (3, {"replicas_to_aggregate": 1, "total_num_replicas": 3}, None),
        (2, {}, worker_client.ssp_policy(1)),
        (2, {}, worker_client.async_policy()),
    ],
    ids=["sync of 2", "sync of 3", "with backups", "ssp", "async"],
)
def test_all_workers_together_count_each_sample_once_a_pass(num_workers: int, sizes: dict[str, int], policy: PolicySpec | None) -> None:
    cluster = InProcessCluster(policy=policy, **sizes)  # type: ignore[arg-type]
    sessions = [worker_client.local(cluster) for _ in range(num_workers)]
    for session in sessions:
        join(session)
    run_all([lambda session=session: go_through(session) for session in sessions])  # type: ignore[misc]
    assert num_counted(sessions[0]) == 2 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("sizes", "policy"),
    [
        ({"total_num_replicas": 2}, None),
        ({"replicas_to_aggregate": 1, "total_num_replicas": 2}, None),
        ({}, worker_client.ssp_policy(3)),
        ({}, worker_client.async_policy()),
    ],
    ids=["sync", "with backups", "ssp", "async"],
)
def test_workers_have_the_values_of_the_last_step_when_the_data_ends(sizes: dict[str, int], policy: PolicySpec | None) -> None:
    cluster = InProcessCluster(policy=policy, **sizes)  # type: ignore[arg-type]
    sessions = [worker_client.local(cluster) for _ in range(2)]
    for session in sessions:
        join(session)
    found: list[tuple[float, int]] = []
    begun, ended = threading.Barrier(2), threading.Barrier(2)

    def go_on(session: Session, num_ranges: int) -> None:
        batches = session.batches("train", num_samples=4 * num_ranges, batch_size=4, timeout_s=20)
        give(session, next(batches))
        begun.wait(20)
        for batch in batches:
            give(session, batch)
        ended.wait(20)  # nobody reads before both loops have ended
        found.append((session.read()["w"][0], session.global_step))

    # An odd number: at the end one of them makes a step alone.
    run_all([lambda session=session: go_on(session, 9) for session in sessions])  # type: ignore[misc]
    assert found[0] == found[1] and found[0][0] != 0.0


def test_contribution_from_a_range_of_before_a_rollback_is_not_counted() -> None:
    """Another call finds out first: the variables are then of the checkpoint, but the samples go to the next worker that asks."""
    cluster = RollingCluster(join)
    with cluster.session() as session:
        outcomes = []
        for number, batch in enumerate(session.batches("train", num_samples=NUM_SAMPLES, batch_size=4, timeout_s=20)):
            if number == 5:
                cluster.roll_back()
                session.read_metrics()
            outcomes.append(give(session, batch))
        assert (outcomes[5], outcomes.count(PushOutcome.ROLLED_BACK), session.num_rollbacks) == (PushOutcome.ROLLED_BACK, 1, 1)
        assert num_counted(session) == NUM_SAMPLES


def test_ranges_of_which_only_some_are_of_before_a_rollback_are_all_done_again() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session:
        gathered: list[DataRange] = []
        outcomes = []
        for number, batch in enumerate(session.batches("train", num_samples=64, batch_size=4, timeout_s=20)):
            gathered.append(batch)
            if number == 4:  # the first of two
                cluster.roll_back()
            if len(gathered) == 2:
                samples = sum(part.stop - part.start for part in gathered)
                outcomes.append(session.step(ONES, metrics={"samples": samples}, timeout_s=20).outcome)
                gathered.clear()
        assert outcomes.count(PushOutcome.ROLLED_BACK) == 1
        assert num_counted(session) == 64


def test_a_worker_that_skips_a_range_does_not_wait_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    with worker_client.local() as session:
        join(session)
        for number, batch in enumerate(session.batches("train", num_samples=12, batch_size=4, timeout_s=20)):
            if number != 2:
                give(session, batch)
        assert num_counted(session) == 8
        assert any("1 ranges of 'train' were yielded here and no contribution was made from them" in text for text in caplog.messages)


def test_range_without_a_contribution_is_named_with_the_next() -> None:
    with worker_client.local() as session:
        join(session)
        batches = session.batches("train", num_samples=8, batch_size=4, timeout_s=0.05)
        next(iter(batches)), next(iter(batches))
        with pytest.raises(DeadlineExceeded, match="wants ranges of 'train'"):
            next(iter(batches))
        assert session.step(ONES, timeout_s=20).is_accepted
        assert list(session.batches("train", num_samples=8, batch_size=4)) == []
