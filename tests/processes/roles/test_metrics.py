"""`--metrics`: each role, as a process, answers a scraper over HTTP; with a token where the cluster has tokens."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest

import worker_client
from ps_protocol.security.tokens import write_secret
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.network.servers import free_ports, unused_address
from tests.support.processes.processes import speaking
from tests.support.waiting import wait_until

OBSERVER, WORKER, CHIEF = "o" * 40, "w" * 40, "c" * 40


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, directory: Path, *, of_server: str, of_chief: str) -> ProcessCluster:
    """Starts a server and a chief with tokens, which answer scrapers at these addresses."""
    write_secret(directory / "tokens", f"chief {CHIEF}\nworker {WORKER}\nobserver {OBSERVER}\n")
    environment = {
        role: {"LOCKSTEP_TOKEN_FILE": str(directory / "tokens"), "LOCKSTEP_METRICS": address}
        for role, address in (("ps", of_server), ("chief", of_chief))
    }
    plan = Plan(num_workers=1, port=free_ports(2), environment=environment)
    return ProcessCluster(plan, stack, directory=directory).start()


def scraped(address: str, token: str = OBSERVER) -> dict[str, Read]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}/metrics", headers=headers), timeout=20) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return parsed(response.read().decode())


def test_chief_and_parameter_servers_answer_a_scraper_that_has_a_token(stack: ExitStack, tmp_path: Path) -> None:
    of_server, of_chief = unused_address(), unused_address()
    address = start(stack, tmp_path, of_server=of_server, of_chief=of_chief).chief_address
    with worker_client.connect(address, security=worker_client.Security(token=WORKER), timeout_s=20) as session:
        assert "lockstep_server_step" not in scraped(of_server), "there are no variables yet"
        session.create_or_join({"w": np.zeros(3, np.float32)}, optimizer=worker_client.sgd(0.1), timeout_s=20)
        for step in range(3):
            session.step({"w": np.ones(3, np.float32)}, metrics={'loss"}\\': float(step)}, timeout_s=20)
        # A scrape may be told what another one was, half a second ago.
        wait_until(lambda: "lockstep_server_step" in scraped(of_server), what="a new answer")
        cpu = "lockstep_cluster_cpu_seconds_total"
        wait_until(lambda: len(scraped(of_chief)[cpu].samples[cpu]) == 3, timeout_s=20, what="a heartbeat of the worker")
        cluster, shard = scraped(of_chief), scraped(of_server)
        session.finish()
    assert value(cluster, "lockstep_cluster_global_step") == 3 and value(cluster, "lockstep_worker_live", worker="0") == 1
    for role in ("chief", "ps", "worker"):
        assert value(cluster, cpu, role=role, index="0") > 0
    assert value(shard, "lockstep_server_step") == 3 and value(shard, "lockstep_server_pushes_total") == 3
    assert shard["lockstep_server_apply_duration_seconds"].samples["lockstep_server_apply_duration_seconds_count"][()] == 3
    assert [*shard["lockstep_reported_weighted_value"].samples["lockstep_reported_weighted_value"].values()] == [3.0]
    for families in (cluster, shard):
        assert value(families, "process_cpu_seconds_total") > 0


def test_scraper_without_a_token_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    address = unused_address()
    cluster = start(stack, tmp_path, of_server=address, of_chief=unused_address())
    cluster.await_(lambda: "ps 0 ready" in cluster.text_of("ps 0"), what="the server serves")
    for token in ("", "x" * 40):
        with pytest.raises(HTTPError) as refused:
            scraped(address, token)
        assert refused.value.code == 401 and "token" in json.loads(refused.value.read())["error"]
        refused.value.close()


@pytest.mark.parametrize("words", ["ps_server --index 0", "chief --ps 127.0.0.1:1 --workers 1"])
def test_metrics_are_not_served_to_other_machines_in_the_open(words: str) -> None:
    with speaking("-m", *words.split(), "--metrics", "0.0.0.0:0") as process:
        _, text = process.communicate(timeout=30)
    assert process.returncode == 2 and "0.0.0.0:0" in text and "--allow-insecure-network" in text
