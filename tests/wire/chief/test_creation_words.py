"""A model that takes long to create: the worker that creates it and all that wait for it are told its progress."""

import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import worker_client
from ps_protocol.model.layout import Segments
from tests.support.chief.running_chief import RunningChief, client_of, parameter_server
from tests.support.waiting import wait_until
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
            told = re.compile(rf"ps 0 at {re.escape(server.address)} has received [1-9]\d % of 1.0 MiB$")
            wait_until(lambda: told.search(client.status().waiting_for), timeout_s=20, what="the status says how far it is")
            said = re.compile(r"creating the model: received by ps 0 [1-9]\d % of 1.0 MiB")
            wait_until(lambda: said.search(caplog.text), timeout_s=20, what="the worker says so")
        finally:
            Halting.release.set()
            worker.join()
        assert len(told_after) == 1
        assert "received" not in told_after[0]
