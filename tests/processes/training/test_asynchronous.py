"""Asynchronous training between processes: without a lock updates overwrite each other, with a lock none is lost."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import worker_client
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.cluster.task_workers import TaskWorker, all_do
from worker_client import Observer, PolicySpec

# One overwritten block of one update in this many rounds is enough to show the race; some five rounds show it on an idle machine.
MAX_ROUNDS = 60
PUSHES_A_ROUND = 25
LOCKED = worker_client.async_policy()
UNLOCKED = worker_client.async_policy(use_locking=False)
Workers = list[TaskWorker]
Launch = Callable[[PolicySpec], tuple[Workers, Observer]]


@pytest.fixture
def launch(socket_dir: Path) -> Iterator[Launch]:
    """Starts one parameter server and two workers that have joined; with an observer."""
    with ExitStack() as stack:

        def launched(policy: PolicySpec) -> tuple[Workers, Observer]:
            cluster = ProcessCluster(Plan(num_workers=2), stack, directory=socket_dir).start()
            observer = cluster.observer()
            observer.set_policy(policy, timeout_s=20)
            workers = [TaskWorker(cluster.chief_address, index, stack) for index in range(2)]
            all_do(workers, "join")
            return workers, observer

        yield launched


def push_round(workers: Workers) -> list[list[Any]]:
    """Both workers push at the same time, as fast as they can, without waiting for a token; returns the records of both."""
    return [record for records in all_do(workers, "push_ones", times=PUSHES_A_ROUND) for record in records]


def assert_complete(records: list[list[Any]]) -> None:
    """Every push says at which step it was applied: all are different, and none is missing."""
    assert {outcome for outcome, *_ in records} == {"ACCEPTED"}
    assert sorted(applied for _, _, applied, _ in records) == list(range(len(records)))
    assert all(staleness == applied - step >= 0 for _, step, applied, staleness in records)


def test_without_a_lock_updates_are_lost_and_every_push_is_counted(launch: Launch) -> None:
    workers, observer = launch(UNLOCKED)
    records: list[list[Any]] = []
    fewest = 0.0
    for _ in range(MAX_ROUNDS):
        records += push_round(workers)
        fewest = -workers[0].do("read")[1]
        if fewest < len(records):
            break
    assert_complete(records)
    assert observer.status().global_step == len(records)
    assert fewest < len(records), f"all {len(records)} updates of both workers came through: they are not made at the same time"
    # What is lost is some blocks of some updates, not whole variables.
    assert fewest > len(records) / 2


def test_with_a_lock_no_update_is_ever_lost(launch: Launch) -> None:
    workers, observer = launch(LOCKED)
    records: list[list[Any]] = []
    for _ in range(4):
        records += push_round(workers)
        all_do(workers, "await_token")
        assert all_do(workers, "read") == [[-len(records)] * 2] * 2
    assert_complete(records)
    assert observer.status().global_step == len(records)
