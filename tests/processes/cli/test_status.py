"""`lockstep status`, `finish` and `health`: their output for a cluster, and their errors without one."""

import argparse
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.processes.commands import cluster, lockstep, lockstep_here
from tests.support.processes.processes import speaking
from tests.support.sessions.clusters import GrpcTestCluster, Shape
from tests.support.waiting import wait_until


@pytest.mark.parametrize("command", [["status"], ["finish"], ["status", "--watch", "--json"]])
def test_an_absent_chief_is_reported_within_two_seconds(command: list[str], socket_dir: Path) -> None:
    begin = time.monotonic()
    result = lockstep_here(*command, "--chief", f"unix:{socket_dir}/none.sock")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    assert f"no chief answers at unix:{socket_dir}/none.sock" in result.stderr
    assert "this cluster is not running; its last checkpoint, if it had any, is in its --checkpoint-dir" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_that_never_answers_is_reported_within_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        result = lockstep_here("status", "--chief", f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    assert "no chief answers" in result.stderr
    assert "if its training has ended, its last checkpoint" in result.stderr and "start the chief again" in result.stderr


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
def running(socket_dir: Path) -> Iterator[GrpcTestCluster]:
    """Servers and a chief that waits for two workers."""
    with ExitStack() as stack:
        yield GrpcTestCluster(Shape(num_ps=2, total_num_replicas=2, max_steps=7), stack, directory=socket_dir)


def test_a_running_cluster_is_shown_as_text_and_as_json(running: GrpcTestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHIEF", running.chief_address)
    wait_until(lambda: "connecting" not in lockstep_here("status").stdout, what="the chief has its servers")
    text = lockstep_here("status")
    assert text.returncode == 0, text.stderr
    assert "waiting for a model, step 0 of 7" in text.stdout
    assert "no worker has joined yet" in text.stdout
    plain = json.loads(lockstep_here("status", "--json").stdout)
    assert plain["replicas_to_aggregate"] == 2
    assert [shard["is_reachable"] for shard in plain["shards"]] == [True, True]


def test_the_wrong_cluster_and_the_wrong_role_are_distinguished(running: GrpcTestCluster) -> None:
    other = lockstep_here("status", "--chief", running.chief_address, "--cluster", "other")
    assert (other.returncode, "Traceback" in other.stderr) == (1, False)
    assert "'other'" in other.stderr and "'lockstep'" in other.stderr
    wrong = lockstep_here("status", "--chief", running.chief_address.replace("chief", "ps0"))
    assert wrong.returncode == 1
    assert "ps 0" in wrong.stderr


def watched(chief_address: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    return speaking("-m", "lockstep", "status", "--watch", "--chief", chief_address, stdout=subprocess.PIPE)


def test_watching_ends_when_the_chief_does_and_finish_ends_the_chief(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        with watched(running.chief_address) as watching:
            assert watching.stdout is not None and watching.stderr is not None
            assert "cluster" in watching.stdout.readline()
            finished = lockstep_here("finish", "--chief", running.chief_address, "--reason", "enough")
            assert finished.returncode == 0, finished.stderr
            assert f"cluster {running.name!r} at {running.chief_address}: training is finished at step 0" in finished.stdout
            assert watching.wait(10.0) == 1
            assert "the chief has ended" in watching.stderr.read()
        wait_until(lambda: all(role.has_exited() for role in running.roles), what="the roles end by themselves")
        absent = lockstep_here("health", "--address", running.chief_address)
    assert absent.returncode == 1
    assert "does not answer" in absent.stderr


def test_ctrl_c_ends_watching_quietly(running: GrpcTestCluster) -> None:
    with watched(running.chief_address) as watching:
        assert watching.stdout is not None and watching.stderr is not None
        watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(2.0) == 130
        assert watching.stderr.read() == ""


def test_health_tells_alive_and_ready_roles(running: GrpcTestCluster) -> None:
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
        ("up --wokers 2 -- true", "lockstep up: no such argument: --wokers; did you mean '--workers'? (see --help)"),
        ("tpo", "lockstep: argument COMMAND: invalid choice: 'tpo'; did you mean 'top'? (see --help)"),
        ("status --frobnicate", "lockstep status: no such argument: --frobnicate (see --help)"),
        ("chief --wokers 2", "chief: no such argument: --wokers 2; did you mean '--workers'? (see --help)"),
        ("nonsense", "lockstep: argument COMMAND: invalid choice: 'nonsense'"),
    ],
)
def test_a_misspelt_argument_is_named_in_one_line_with_the_nearest_one(words: str, says: str) -> None:
    result = lockstep(*words.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1


def test_every_command_explains_itself() -> None:
    from lockstep.__main__ import COMMANDS

    overview = lockstep("--help")
    assert overview.returncode == 0
    for name, (_, module) in COMMANDS.items():
        assert re.search(rf"^    {name}\s", overview.stdout, re.MULTILINE)
        parser, functions = argparse.ArgumentParser(), import_module(f"lockstep.cli.{module}")
        getattr(functions, f"add_{name}_arguments")(parser)
        assert callable(getattr(functions, f"run_{name}"))
        assert "default" in parser.format_help() or name in ("status", "why", "finish", "health", "audit", "ls", "page", "top")
    assert lockstep_here("--version").stdout.startswith("lockstep-ps")
    assert lockstep_here("nonsense").returncode == 2
    assert lockstep_here().returncode == 2
