"""`lockstep doctor` as a user runs it: without a peer, with another doctor, and with the roles of a cluster."""

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import worker_client
from tests.support.network.servers import unused_address
from tests.support.processes.commands import lockstep, lockstep_here
from tests.support.processes.processes import talking
from tests.support.sessions.clusters import GrpcTestCluster, Shape


def found_by(*words: str) -> tuple[int, list[dict[str, Any]]]:
    ended = lockstep_here("doctor", "--json", *words)
    return ended.returncode, json.loads(ended.stdout)["findings"]


def test_report_of_a_machine_ends_with_a_sum_and_zero() -> None:
    ended = lockstep("doctor", timeout_s=50.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    *_, last = ended.stdout.splitlines()
    assert re.fullmatch(r"\d+ ok, \d+ warn, 0 fail", last)
    assert "\x1b" not in ended.stdout


def test_absent_peer_fails_and_says_what_to_do() -> None:
    code, findings = found_by(unused_address())
    assert code == 1
    assert findings[-1]["verdict"] == "fail" and "refused" in findings[-1]["text"] and "firewall" in findings[-1]["advice"]


def test_an_invalid_address_is_refused() -> None:
    assert lockstep_here("doctor", "somewhere").returncode == 2
    assert lockstep_here("doctor", "--serve", "unix:/tmp/x").returncode == 2


def test_two_doctors_measure_the_link_between_them() -> None:
    with ExitStack() as stack:
        server = talking(stack, sys.executable, "-m", "lockstep", "doctor", "--serve", "127.0.0.1:0")
        assert server.stdout is not None
        match = re.search(r"answering at (\S+), until", server.stdout.readline().decode())
        assert match
        code, findings = found_by(match[1])
        assert "measured" in server.stdout.readline().decode()
    assert code == 0
    assert {"latency", "bandwidth", "clocks"} <= {one["check"] for one in findings}


def test_the_doctor_checks_all_roles_of_a_cluster(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = GrpcTestCluster(Shape(num_ps=2), stack, directory=socket_dir)
        session = cluster.session()
        session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1), timeout_s=20)
        code, findings = found_by(cluster.chief_address)
        only_one, of_server = found_by(cluster.ps_addresses[0])
    assert code == only_one == 0, findings
    roles = [one["text"].partition(" of cluster")[0] for one in findings if one["check"] == "role"]
    assert roles == ["the chief", "ps 0", "ps 1"]
    assert "1 workers live" in next(one["text"] for one in findings if one["check"] == "cluster")
    assert [one["check"] for one in of_server].count("role") == 1
