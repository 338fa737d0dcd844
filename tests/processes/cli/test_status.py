"""`lockstep status`, `finish` and `health`: their output for a cluster, and their errors without one."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.roles.chief import ClusterState
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import lockstep, lockstep_here
from tests.support.processes.processes import speaking
from tests.support.waiting import wait_until


@pytest.mark.parametrize("command", [["status"], ["finish"], ["why", "--json"], ["top"], ["policy", "async"], ["set", "learning_rate=1"]])
def test_an_absent_chief_is_reported_within_two_seconds(command: list[str], socket_dir: Path) -> None:
    begin = time.monotonic()
    result = lockstep_here(*command, "--chief", f"unix:{socket_dir}/none.sock")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.endswith(f"No chief answers at unix:{socket_dir}/none.sock (no such socket)")
    assert second.startswith("Start the cluster again, or give its address with --chief.")


def test_an_address_that_never_answers_is_reported_within_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        result = lockstep_here("status", "--chief", f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert re.search(r"No chief answers at 127.0.0.1:\d+ \(no answer\)$", first)
    assert second.startswith("Start it again, or give its address with --chief.")


@pytest.mark.parametrize("command", ["status", "finish"])
def test_without_an_address_the_command_says_how_to_give_one(command: str) -> None:
    result = lockstep_here(command)
    assert result.returncode == 2
    assert "--chief ADDRESS or set LOCKSTEP_CHIEF" in result.stderr


@pytest.mark.parametrize("command", [["status", "--chief"], ["finish", "--chief"], ["health", "--address"]])
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:notaport", "127.0.0.1:99999", "unix:relative"])
def test_an_invalid_address_is_reported_in_one_line(command: list[str], address: str) -> None:
    result = lockstep_here(*command, address)
    assert result.returncode == 2
    assert address in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def running(socket_dir: Path) -> Iterator[ServedCluster]:
    """Servers and a chief that waits for two workers."""
    with ExitStack() as stack:
        yield ServedCluster(Shape(num_ps=2, num_workers=2, max_steps=7), stack, directory=socket_dir)


def test_a_running_cluster_is_shown_as_text_and_as_json(running: ServedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHIEF", running.chief_address)
    wait_until(lambda: "connecting" not in lockstep_here("status").stdout, what="the chief has its servers")
    text = lockstep_here("status")
    assert text.returncode == 0, text.stderr
    lines = text.stdout.splitlines()
    assert lines[0].startswith("Waiting ") and lines[0].endswith(" s for the first worker")
    assert lines[1] == "Start one." and lines[2].endswith(" PROGRAM")
    assert "waiting for model, step 0 of 7" in text.stdout
    assert [line.split("s for")[1:] for line in lockstep_here("why").stdout.splitlines()[:1]] == [[" the first worker"]]
    plain = json.loads(lockstep_here("status", "--json").stdout)
    assert plain["replicas_to_aggregate"] == 2
    assert [shard["is_reachable"] for shard in plain["shards"]] == [True, True]


def test_the_wrong_cluster_and_the_wrong_role_are_distinguished(running: ServedCluster) -> None:
    other = lockstep_here("status", "--chief", running.chief_address, "--cluster", "other")
    assert (other.returncode, "Traceback" in other.stderr) == (1, False)
    assert "'other'" in other.stderr and "'lockstep'" in other.stderr
    wrong = lockstep_here("status", "--chief", running.chief_address.replace("chief", "ps0"))
    assert wrong.returncode == 1
    assert "ps 0" in wrong.stderr


def test_finish_ends_the_roles(socket_dir: Path) -> None:
    with ExitStack() as stack:
        running = ProcessCluster(Plan(num_ps=2, num_workers=2), stack, directory=socket_dir).start()
        running.await_status(lambda status: status.state is ClusterState.WAITING_FOR_MODEL, what="the chief has its servers")
        finished = lockstep_here("finish", "--chief", running.chief_address, "--reason", "enough")
        assert finished.returncode == 0, finished.stderr
        assert f"cluster 'lockstep' at {running.chief_address}: training is finished at step 0" in finished.stdout
        running.await_end()
        absent = lockstep_here("health", "--address", running.chief_address)
    assert absent.returncode == 1
    assert "does not answer" in absent.stderr


def test_health_tells_alive_and_ready_roles(running: ServedCluster) -> None:
    chief, ps = running.chief_address, running.chief_address.replace("chief", "ps1")
    for address in (chief, ps):
        assert lockstep_here("health", "--address", address).returncode == 0
        wait_until(lambda address=address: lockstep_here("health", "--ready", "--address", address).returncode == 0)  # type: ignore[misc]
    assert lockstep("health", "--address", chief).returncode == 0
    assert lockstep_here("health").returncode == 2


@pytest.mark.parametrize("role", [["server", "--index", "0"], ["chief", "--ps", "127.0.0.1:1", "--workers", "1"]])
def test_a_role_with_a_taken_port_reports_it_and_ends_at_once(role: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        result = lockstep(*role, "--address", address)
        assert time.monotonic() - begin < 10.0  # 0.5 s where nothing else runs, as do many tests here
    assert result.returncode == 2
    assert f"cannot listen at {address}: another process listens there" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_signal_to_the_command_reaches_the_role(tmp_path: Path) -> None:
    announce = tmp_path / "address"
    with speaking("-m", "lockstep", "server", "--index", "0", "--announce", announce) as process:
        wait_until(announce.exists, what="it serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(5.0) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("up --wokers 2 -- true", "lockstep up: no such argument: --wokers; did you mean '--workers'? (see lockstep up --help)"),
        ("tpo", "lockstep: there is no command 'tpo'; did you mean 'top'? (see lockstep --help)"),
        ("checkpoint sve", "lockstep checkpoint: there is no `lockstep checkpoint sve`; did you mean 'save'?"),
        ("policy snyc", "lockstep policy: argument policy: invalid choice: 'snyc'; did you mean 'sync'? (see lockstep policy --help)"),
        (
            "up --table-dir x -- true",
            "lockstep up: no such argument: --table-dir; the server takes it, also from the variable LOCKSTEP_TABLE_DIR"
            " (see lockstep up --help)",
        ),
        ("status --frobnicate", "lockstep status: no such argument: --frobnicate (see lockstep status --help)"),
        ("chief --wokers 2", "lockstep chief: no such argument: --wokers 2; did you mean '--workers'? (see lockstep chief --help)"),
        ("nonsense", "lockstep: there is no command 'nonsense' (see lockstep --help)"),
    ],
)
def test_a_misspelt_argument_is_named_in_one_line_with_the_nearest_one(words: str, says: str) -> None:
    result = lockstep(*words.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1
