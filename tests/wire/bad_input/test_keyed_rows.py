"""Workers that would fill a table with keys: bounds hold, what is refused is named, and rows that are there go on training."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import LimitExceeded, NonFiniteGradient
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until
from worker_client import EmbeddingTable, IndexedSlices, Session

LIMIT_BYTES = 16 << 20
KNOWN = np.arange(100)


@contextmanager
def training(*, options: dict[str, Any] | None = None, **config: Any) -> Iterator[Session]:
    """A worker of a server with bounds, and a table of 8 float32 with Adagrad in which the known keys have rows."""
    with (
        open_server(ParameterServerConfig(index=0, max_memory_bytes=LIMIT_BYTES, **config)) as server,
        RunningChief(server.address, replicas_to_aggregate=1, **(options or {})) as chief,
        worker_client.connect(chief.address) as session,
    ):
        session.create_or_join({"ids": EmbeddingTable(8, keys="int64")}, optimizer=worker_client.adagrad(0.1))
        train(session, KNOWN)
        yield session


def train(session: Session, keys: Any, value: float = 1.0) -> None:
    session.step({"ids": IndexedSlices(keys, np.full((len(keys), 8), value, np.float32))}, timeout_s=20)


def assert_trains(session: Session) -> None:
    before = session.read_rows("ids", KNOWN)
    train(session, KNOWN)
    assert (session.read_rows("ids", KNOWN) < before).all()


def test_a_worker_that_pushes_new_keys_without_end_is_refused_at_the_servers_bound() -> None:
    with training() as session:
        with pytest.raises(LimitExceeded, match=r"ps 0: .* of 16\.0 MiB"):
            for first in range(1000, 10_000_000, 10_000):
                train(session, np.arange(first, first + 10_000))

        def allocated_bytes() -> int:
            report = session.status().shards[0].report
            return 0 if report is None else report.allocated_bytes

        # The chief asks its servers again and again: a report may be older than the last step.
        wait_until(lambda: allocated_bytes() > LIMIT_BYTES // 3, what="the rows take a third of the bound: they grow into larger ones")
        assert allocated_bytes() <= LIMIT_BYTES
        assert_trains(session)


def test_a_million_new_keys_in_one_push_are_refused_and_none_of_them_gets_a_row() -> None:
    with training() as session:
        keys = np.arange(1 << 20, 1 << 21)
        first = session.read_rows("ids", keys[:1000])
        with pytest.raises(LimitExceeded, match=r"ps 0: .* of 16\.0 MiB"):
            train(session, keys)
        assert session.read_rows("ids", keys[:1000]).tobytes() == first.tobytes()
        assert_trains(session)


def test_rows_that_are_not_finite_are_refused_where_the_cluster_refuses_such_gradients() -> None:
    with training(options={"reject_nonfinite": True}) as session:
        with pytest.raises(NonFiniteGradient, match="'ids'"):
            train(session, np.arange(1000, 1010), np.nan)
        assert np.isfinite(session.read_rows("ids", np.arange(1000, 1010))).all()
        assert_trains(session)


def test_a_full_disk_refuses_new_rows_and_those_in_files_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with training(table_dir=tmp_path) as session:
        monkeypatch.setattr(os, "posix_fallocate", full)
        # More than the room that the file has already.
        num_keys = (17 << 20) // (2 * 8 * 4)
        with pytest.raises(LimitExceeded, match=r"its disk has no room for .* more of tables \(No space left on device\); make room there"):
            for first in range(1000, num_keys, 20_000):
                train(session, np.arange(first, first + 20_000))
        assert_trains(session)
