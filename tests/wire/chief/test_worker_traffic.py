"""A worker's own figures: bytes and reads to the chief with its heartbeats, and its own `/metrics`."""

import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import WorkerTraffic
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import OPEN, Security
from ps_protocol.security.tokens import new_token_lines, token_of
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.network.servers import unused_address
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

NUM_BYTES, NUM_STEPS = 4_000, 5


@contextlib.contextmanager
def worker(transport: str, *, security: Security = OPEN, metrics: str = "") -> Iterator[worker_client.Session]:
    """A worker of a cluster, whose heartbeats come three times a second."""
    with (
        open_server(ParameterServerConfig(index=0, security=security)) as server,
        RunningChief(server.address, total_num_replicas=1, lease_s=1.0, security=security) as chief,
        worker_client.connect(chief.address, transport=transport, security=security, metrics=metrics) as session,
    ):
        session.create_or_join({"w": np.zeros(NUM_BYTES // 4, np.float32)}, optimizer=worker_client.sgd(0.5))
        for _ in range(NUM_STEPS):
            session.read()
            session.step({"w": np.ones(NUM_BYTES // 4, np.float32)}, metrics={"loss": 1.0})
        yield session


def traffic(session: worker_client.Session) -> WorkerTraffic:
    """What the chief has heard of the worker by the time that it knows of all its reads."""

    def heard() -> WorkerTraffic | None:
        (status,) = session.status().participants
        return status.traffic if status.traffic is not None and status.traffic.num_reads >= NUM_STEPS else None

    wait_until(lambda: heard() is not None, timeout_s=20, what="a heartbeat tells of all reads")
    found = heard()
    assert found is not None
    return found


@pytest.mark.parametrize("transport", ["grpc", "sockets"])
def test_the_chief_hears_how_much_a_worker_moves_and_how_long_it_reads(transport: str) -> None:
    with worker(transport) as session:
        found = traffic(session)
    # The memory of a shard is rounded up.
    assert NUM_STEPS * NUM_BYTES <= found.sent_bytes <= NUM_STEPS * NUM_BYTES * 1.05
    assert NUM_STEPS * NUM_BYTES <= found.received_bytes <= (NUM_STEPS + 2) * NUM_BYTES * 1.05
    assert found.reading_s > 0.0


def test_the_chief_has_the_processor_time_of_every_role() -> None:
    with worker("grpc") as session:
        found = traffic(session)
        wait_until(lambda: bool((report := session.status().shards[0].report) and report.cpu_s), timeout_s=20, what="the server's")
        status = session.status()
    assert 0.0 < found.cpu_s <= time.process_time()
    assert status.chief_cpu_s > 0.0


def test_a_worker_with_shared_memory_reports_no_bytes_moved() -> None:
    with worker("shared_memory") as session:
        found = traffic(session)
    assert (found.sent_bytes, found.received_bytes) == (0, 0)
    assert found.reading_s > 0.0


def scraped(url: str, *, token: str = "") -> dict[str, Read]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=20) as response:
        return parsed(response.read().decode())


def test_a_worker_answers_a_scraper_until_its_session_ends() -> None:
    with worker("grpc", metrics="127.0.0.1:0") as session:
        url = session.metrics_url
        found = scraped(url)
    assert value(found, "lockstep_session_pushes_total") == NUM_STEPS
    assert value(found, "lockstep_session_step") == NUM_STEPS
    assert value(found, "lockstep_session_sent_bytes_total") >= NUM_STEPS * NUM_BYTES
    assert value(found, "lockstep_build_info", role="worker 0", version=found_version(found)) == 1
    with pytest.raises(urllib.error.URLError):
        scraped(url)


def found_version(found: dict[str, Read]) -> str:
    (labels,) = found["lockstep_build_info"].samples["lockstep_build_info"]
    return dict(labels)["version"]


def test_a_workers_token_file_decides_which_callers_may_scrape(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(new_token_lines())
    file.chmod(0o600)
    with worker("grpc", security=Security(token_file=file), metrics="127.0.0.1:0") as session:
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            scraped(session.metrics_url)
        refused.value.close()
        assert "lockstep_session_step" in scraped(session.metrics_url, token=token_of(file, CallerRole.OBSERVER))


@pytest.mark.parametrize("address", ["nowhere", "0.0.0.0:0", "unix:/tmp/metrics"])
def test_an_impossible_address_for_metrics_is_refused(address: str) -> None:
    with pytest.raises(InvalidSpec, match=r"^metrics: "), worker("grpc", metrics=address):
        pass


def test_a_port_that_is_taken_keeps_no_worker_from_training(caplog: pytest.LogCaptureFixture) -> None:
    with worker("grpc", metrics="127.0.0.1:0") as first:
        taken = first.metrics_url.removeprefix("http://").removesuffix("/metrics")
        with worker("grpc", metrics=taken) as second:
            assert second.metrics_url == ""
            assert second.global_step == NUM_STEPS
    assert f"there are no metrics of this worker cause=cannot listen at {taken}" in caplog.text


def test_the_environment_asks_for_metrics_too(monkeypatch: pytest.MonkeyPatch) -> None:
    address = unused_address()
    monkeypatch.setenv("LOCKSTEP_METRICS", address)
    with (
        open_server(ParameterServerConfig(index=0)) as server,
        RunningChief(server.address, total_num_replicas=1) as chief,
        worker_client.connect(chief.address) as session,
    ):
        assert session.metrics_url == f"http://{address}/metrics"
