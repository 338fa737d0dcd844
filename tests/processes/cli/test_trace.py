"""`lockstep trace` of a cluster that trains, of one that waits, and without one."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.formats.chrome_trace import checked
from tests.support.network.servers import unused_address
from tests.support.processes.commands import Ended, lockstep_here
from tests.support.waiting import wait_until


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[ServedCluster]:
    with ExitStack() as stack:
        yield ServedCluster(Shape(num_ps=2), stack, directory=socket_dir)


def traced(*words: object) -> Ended:
    return lockstep_here("trace", *map(str, words))


def test_trace_shows_the_steps_of_a_cluster_that_trains(cluster: ServedCluster, tmp_path: Path) -> None:
    session, is_over = cluster.session(), threading.Event()
    session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1), timeout_s=20)

    def train() -> None:
        while not is_over.wait(0.005):
            session.step({"w": np.ones(3)}, timeout_s=20)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        ended = traced(cluster.chief_address, "--seconds", 1, "-o", tmp_path / "t.json", "--json")
    finally:
        is_over.set()
        thread.join()
    assert ended.returncode == 0, ended.stderr
    events = checked(json.loads((tmp_path / "t.json").read_text()))
    steps = [one for one in events if one["name"].startswith("step ")]
    assert json.loads(ended.stdout)["num_steps"] == len(steps) > 5
    tracks = {(one["cat"], one["tid"]) for one in events if one["ph"] == "X"}
    assert {("chief", 1), ("workers", 1), ("parameter servers", 1), ("parameter servers", 2)} <= tracks
    computed = sum(one["dur"] for one in events if one["name"].startswith("contribution"))
    assert computed >= 5_000 * (len(steps) - 1), "5 ms pass between two contributions"


def test_trace_of_a_cluster_that_waits_says_what_for(cluster: ServedCluster, tmp_path: Path) -> None:
    is_ready = ("health", "--ready", "--address", cluster.chief_address)
    wait_until(lambda: lockstep_here(*is_ready).returncode == 0, what="the chief has its servers")
    ended = traced("--chief", cluster.chief_address, "--seconds", 0.2, "-o", tmp_path / "t.json")
    assert ended.returncode == 1 and "for the first worker. Start one" in ended.stderr
    checked(json.loads((tmp_path / "t.json").read_text()))


def test_trace_without_a_chief_or_a_place_writes_nothing(cluster: ServedCluster, tmp_path: Path) -> None:
    ended = traced(unused_address(), "-o", tmp_path / "t.json")
    assert ended.returncode == 1 and "No chief answers" in ended.stderr and not (tmp_path / "t.json").exists()
    ended = traced(cluster.chief_address, "-o", tmp_path / "nowhere" / "t.json")
    assert ended.returncode == 2 and "choose another -o FILE" in ended.stderr
    assert traced(cluster.chief_address, "--seconds", 0).returncode == 2
