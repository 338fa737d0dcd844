"""A model that takes long to create: the worker that creates it and all that wait for it are told its progress."""

import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import worker_client
from ps_protocol.model.layout import Segments, VariableSlice
from ps_protocol.model.variables import Array, Initializer
from ps_protocol.process.waiting import FIRST_NOTICE_S
from tests.support.chief.running_chief import RunningChief, client_of, parameter_server
from tests.support.waiting import wait_until
from worker_client import EmbeddingTable
from worker_client.model.memory import with_tables


class Halting(Segments):
    """Values of which some are sent, and the rest once the test says so."""

    release = threading.Event()

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
        (whole,) = self.pieces
        part = self.nbytes // 8
        for number in range(8):
            if number == 6:
                assert self.release.wait(60)
            yield part * number, whole[part * number : part * (number + 1)].data


def test_a_slow_creation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("worker_client.shards.shards.with_tables", lambda *given: Halting(with_tables(*given).pieces))
    monkeypatch.setattr("worker_client.shards.shards.CREATION_NOTICE_S", 0.1)
    monkeypatch.setattr(Halting, "release", threading.Event())
    values = {"w": np.zeros(1 << 18, np.float32)}

    told_after: list[str] = []

    def work() -> None:
        with worker_client.connect(chief.address, transport="grpc") as session:
            session.create_or_join(values, optimizer=worker_client.sgd(0.5))
            told_after.append(client.status().waiting_for)  # here: once its worker has left, the chief may end

    with parameter_server() as server, RunningChief(server.address, total_num_replicas=2) as chief, client_of(chief) as client:
        worker = threading.Thread(target=work)
        worker.start()
        try:
            told = re.compile(r"Ps 0 receives its first values: [1-9]\d %$")
            wait_until(lambda: told.search(client.status().waiting_for), timeout_s=20, what="the status says how far it is")
            said = re.compile(r"creating the model: ps 0 receives its first values: [1-9]\d %")
            wait_until(lambda: said.search(caplog.text), timeout_s=20, what="the worker says so")
        finally:
            Halting.release.set()
            worker.join()
        assert len(told_after) == 1
        assert "receives" not in told_after[0]


def test_a_server_that_fills_a_table_is_not_silent_and_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on = threading.Event()

    def slow_fill(values: Array, piece: VariableSlice, initializer: Initializer) -> None:
        may_go_on.wait(0.1)

    monkeypatch.setattr("ps_server.numbers.tables.fill_table", slow_fill)
    monkeypatch.setattr("ps_server.numbers.tables._COUNTED_ELEMENTS", 4000 * 64)
    users = EmbeddingTable((400_000, 64), initializer=worker_client.uniform_initializer(-1.0, 1.0, seed=3))

    def work() -> None:
        with worker_client.connect(chief.address, transport="grpc") as session:
            session.create_or_join({"w": np.zeros(3, np.float32), "users": users}, optimizer=worker_client.sgd(0.5))

    with parameter_server() as server, RunningChief(server.address, total_num_replicas=2) as chief, client_of(chief) as client:
        worker = threading.Thread(target=work)
        worker.start()
        try:
            told = re.compile(r"Ps 0 fills the table 'users': [1-9]\d? %$")
            wait_until(lambda: told.search(client.status().waiting_for), timeout_s=20, what="the status says how far it is")
            said = re.compile(r"creating the model: ps 0 fills the table 'users': [1-9]\d? %")
            wait_until(lambda: said.search(caplog.text), timeout_s=20, what="the worker says so")
            begin = time.monotonic()
            wait_until(lambda: time.monotonic() - begin > FIRST_NOTICE_S, what="time to call a silent server that")
            assert "it may be gone" not in caplog.text
        finally:
            may_go_on.set()
            worker.join()
