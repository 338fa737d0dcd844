"""`lockstep policy`, `lockstep set`, `lockstep status --placement` and `--table` on a running cluster, and their errors for mistakes."""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from lockstep.cli.access import chief_of
from ps_protocol.errors import DeadlineExceeded
from ps_protocol.model.variables import Array
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import lockstep_here
from worker_client import EmbeddingTable, IndexedSlices


@pytest.fixture
def running(socket_dir: Path) -> Iterator[ServedCluster]:
    """Servers and a chief that waits for two workers."""
    with ExitStack() as stack:
        yield ServedCluster(Shape(num_ps=2, num_workers=2), stack, directory=socket_dir)


def contribute(session: worker_client.Session) -> worker_client.Push:
    gradients: dict[str, Array] = {"w": np.ones(4), "head": np.ones((2, 3), np.float32)}
    return session.step(gradients, timeout_s=20)


def join(session: worker_client.Session, *, num_elements: int = 4) -> None:
    values: dict[str, Array] = {"w": np.zeros(num_elements), "head": np.zeros((2, 3), np.float32)}
    session.create_or_join(values, optimizer=worker_client.sgd(0.5), timeout_s=20)


def test_policy_and_learning_rate_change_between_two_steps(running: ServedCluster) -> None:
    chief = running.chief_address
    with worker_client.connect(chief, worker_index=0, timeout_s=20) as session:
        join(session)
        assert lockstep_here("policy", "--chief", chief).stdout == "policy sync: a step needs 2 contributions, 2 workers expected\n"
        # A step needs the contributions of two workers; there is one.
        changed = lockstep_here("policy", "async", "--chief", chief)
        assert (changed.returncode, changed.stdout) == (0, "policy async from step 0 on\n"), changed.stderr
        assert contribute(session).applied_step == 0
        changed = lockstep_here("set", "learning_rate=0.25", "--chief", chief)
        assert changed.returncode == 0, changed.stderr
        assert changed.stdout.startswith("learning_rate=0.25 from step 1 on, version ")
        contribute(session)
        np.testing.assert_array_equal(session.read()["w"], np.full(4, -0.75))
        status = lockstep_here("status", "--chief", chief).stdout
        assert "policy async: every contribution is a step" in status
        assert "optimizer sgd" in status and "0.25" in status and ", version " in status


def test_backup_workers_are_counted_from_the_workers_that_the_cluster_has(running: ServedCluster) -> None:
    chief = running.chief_address
    changed = lockstep_here("policy", "sync", "--backup-workers", "1", "--chief", chief)
    assert (changed.returncode, changed.stderr) == (0, "")
    shown = lockstep_here("policy", "--chief", chief).stdout
    assert shown == "policy sync: a step needs 1 contribution, 2 workers expected\n"


def test_a_deadline_of_what_is_asked_for_is_not_taken_for_an_absent_chief(running: ServedCluster) -> None:
    with pytest.raises(DeadlineExceeded, match="not within 1 s"), chief_of(argparse.Namespace(chief=running.chief_address)):
        raise DeadlineExceeded("not within 1 s")


def test_the_placement_is_shown_as_text_and_as_json(running: ServedCluster) -> None:
    chief = running.chief_address
    assert "no model yet" in lockstep_here("status", "--placement", "--chief", chief).stdout
    with worker_client.connect(chief, worker_index=0, timeout_s=20) as session:
        join(session, num_elements=400)
        text = lockstep_here("status", "--placement", "--chief", chief).stdout
        lines = [line.split() for line in text.splitlines()]
        assert ["w", "0", "float64", "400", "3.1", "KiB"] in lines and ["head", "1", "float32", "2×3", "24", "B"] in lines
        plain = json.loads(lockstep_here("status", "--placement", "--json", "--chief", chief).stdout)
    assert [(one["variable"], one["shard"], one["bytes"]) for one in plain["placement"]] == [("w", 0, 3200), ("head", 1, 24)]


def test_rows_of_a_table_with_keys_are_counted_by_their_last_use_at_all_servers(running: ServedCluster) -> None:
    chief, rows = running.chief_address, np.ones((400, 2), np.float32)
    tables = {"users": EmbeddingTable(2, keys="int64", max_rows=1000), "free": EmbeddingTable(2, keys="int64")}
    assert lockstep_here("policy", "sync", "--replicas-to-aggregate", "1", "--chief", chief).returncode == 0
    with worker_client.connect(chief, worker_index=0, timeout_s=20) as session:
        session.create_or_join(tables, optimizer=worker_client.sgd(0.5), timeout_s=20)
        for step in range(6):
            keys = np.arange(400 if not step else 100)
            session.step({"users": IndexedSlices(keys, rows[: keys.size]), "free": IndexedSlices(keys, rows[: keys.size])})
        text = lockstep_here("status", "--table", "users", "--chief", chief).stdout
        assert "rows of 'users': 400 of at most 1,000 (40 %)" in text
        lines = [line.split() for line in text.splitlines()]
        assert ["in", "the", "newest", "step", "100", "25", "%", "█" * 13] in lines
        assert ["4", "to", "7", "steps", "ago", "300", "75", "%", "█" * 40] in lines
        fields = json.loads(lockstep_here("status", "--table", "users", "--json", "--chief", chief).stdout)
        assert fields["rows_by_last_use"][:4] == [100, 0, 300, 0]
        text = lockstep_here("status", "--table", "free", "--chief", chief).stdout
        assert "rows of 'free': their last use is not kept" in text
        found = lockstep_here("status", "--table", "w", "--chief", chief)
        assert (found.returncode, "no such table with keys; the model has free, users" in found.stderr) == (2, True)


def test_rows_of_servers_that_answer_are_counted_and_the_others_named(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2, num_workers=1), stack, directory=socket_dir, has_relays=True)
        with worker_client.connect(cluster.chief_address, worker_index=0, timeout_s=20) as session:
            session.create_or_join(
                {"users": EmbeddingTable(2, keys="int64", max_rows=1000)}, optimizer=worker_client.sgd(0.5), timeout_s=20
            )
            session.step({"users": IndexedSlices(np.arange(400), np.ones((400, 2), np.float32))})
            cluster.relays[1].__exit__(None, None, None)
            found = lockstep_here("status", "--table", "users", "--json", "--chief", cluster.chief_address)
            fields = json.loads(found.stdout)
            assert found.returncode == 1 and 0 < sum(fields["rows_by_last_use"]) < 400 and [*fields["rows_not_counted"]] == ["1"]
            assert "rows of ps 1 are not counted: " in lockstep_here("status", "--table", "users", "--chief", cluster.chief_address).stdout


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("set learning_rate", 2, "want NAME=VALUE"),
        ("set learning_rate=0.1", 1, "model"),
        ("policy --staleness 3", 2, "--staleness: of which policy? name it: lockstep policy sync | ssp | async"),
        (
            "policy sync --tokens fifo --num-tokens 0 --replicas-to-aggregate 3",
            2,
            "Too few tokens to finish the first step: 0 (given) vs 1",
        ),
        ("policy sync --backup-workers 2", 2, "--backup-workers: got 2, want 0 to 1: there are 2 workers, and a step needs one"),
        ("policy --backup-workers 1", 2, "--backup-workers: of which policy? name it: lockstep policy sync | ssp | async"),
        ("policy sync --timeout 0", 2, "--timeout: got 0.0, want more than 0 seconds"),
    ],
)
def test_a_change_that_cannot_be_made_is_reported_in_one_line(running: ServedCluster, command: str, code: int, words: str) -> None:
    result = lockstep_here(*command.split(), "--chief", running.chief_address)
    assert result.returncode == code, result.stderr
    assert words in result.stderr and len(result.stderr.splitlines()) == 1
