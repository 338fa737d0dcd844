"""`lockstep status`, `finish` and `health`: what they print of a cluster, and what they say where there is none."""

import argparse
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from lockstep.cluster import ClusterSpec, LocalCluster
from lockstep.status_text import as_json, as_text, bytes_text, duration_text, printable
from lockstep.supervision import Supervisor
from ps_protocol.chief import ClusterState, ClusterStatus, LedgerEntry, ParticipantKind, ParticipantStatus, ShardLink
from ps_protocol.shard import PushId
from tests.waiting import wait_until

STATUS = ClusterStatus(
    cluster="digits",
    epoch=1,
    state=ClusterState.TRAINING,
    reason="",
    global_step=41,
    max_steps=600,
    policy="sync",
    replicas_to_aggregate=2,
    total_num_replicas=2,
    num_contributions=1,
    waiting_for="step 41 has 1 of 2 contributions; worker 1 is missing, last seen 3.0 s ago",
    step_age_s=3.25,
    participants=(
        ParticipantStatus(
            kind=ParticipantKind.WORKER,
            index=0,
            incarnation=1,
            host="here",
            pid=101,
            state="live",
            seen_ago_s=0.1,
            num_accepted=42,
            num_stale=0,
            num_late=3,
            is_waiting=True,
            failure="",
        ),
        ParticipantStatus(
            kind=ParticipantKind.WORKER,
            index=1,
            incarnation=2,
            host="there",
            pid=202,
            state="left",
            seen_ago_s=3.0,
            num_accepted=41,
            num_stale=1,
            num_late=0,
            is_waiting=False,
            failure="ValueError: \x1b[2Jbad data",
        ),
    ),
    shards=(ShardLink(index=0, address="unix:/tmp/ps0.sock", is_reachable=True, step=41, arena_bytes=18_944, num_slices=4),),
    ledger=(
        LedgerEntry(
            step=40,
            contributors=(PushId(worker=0, incarnation=1, sequence=41), PushId(worker=1, incarnation=2, sequence=9)),
            num_stale=0,
            num_late=1,
            duration_s=0.026,
            apply_duration_s=0.0008,
            last_worker=1,
        ),
    ),
    num_accepted=83,
    num_stale=1,
    num_late=3,
)


def lockstep(*arguments: str, timeout_s: float = 20.0, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environment})


@contextmanager
def cluster(tmp_path: Path, *, max_steps: int | None = None) -> Iterator[LocalCluster]:
    with Supervisor(log_directory=tmp_path / "logs", show_line=lambda name, line: None) as supervisor:
        started = LocalCluster(ClusterSpec(num_ps=2, num_workers=2, max_steps=max_steps), supervisor=supervisor, note=lambda text: None)
        started.start_roles()
        yield started
        # What they have said would fill their pipes one day.
        supervisor.poll(timeout_s=0.0)


def test_the_text_says_why_a_step_waits() -> None:
    text = as_text(STATUS)
    assert "cluster 'digits': training, step 41 of 600" in text
    assert "this step: 1 of 2 contributions after 3.2 s" in text or "this step: 1 of 2 contributions after 3.3 s" in text
    assert "waiting: step 41 has 1 of 2 contributions; worker 1 is missing, last seen 3.0 s ago" in text


def test_the_text_has_a_line_for_every_worker_and_parameter_server() -> None:
    lines = [line.split() for line in as_text(STATUS).splitlines()]
    assert ["0", "waiting", "100", "ms", "ago", "42", "0", "3", "here", "pid", "101"] in lines
    assert ["1", "left", "3.0", "s", "ago", "41", "1", "0", "there", "pid", "202"] in lines
    assert ["0", "reachable", "41", "18.5", "KiB", "4", "unix:/tmp/ps0.sock"] in lines
    assert ["40", "26", "ms", "0.8", "ms", "0", "1", "1", "0", "1"] in lines


def test_a_failure_that_a_worker_reports_cannot_move_the_terminals_cursor() -> None:
    assert "worker 1 left with a failure: ValueError: \\x1b[2Jbad data" in as_text(STATUS)
    assert printable("a\nb\x07") == "a\\nb\\x07"


def test_the_text_of_a_cluster_without_workers_says_so() -> None:
    empty = dataclasses.replace(
        STATUS, state=ClusterState.WAITING_FOR_MODEL, participants=(), ledger=(), max_steps=None, total_num_replicas=0
    )
    assert "no worker has come yet" in as_text(empty)
    assert "any number of workers" in as_text(empty)
    assert "step 41\n" in as_text(empty)


def test_the_reason_of_a_failed_cluster_is_shown() -> None:
    failed = dataclasses.replace(STATUS, state=ClusterState.FAILED, reason="ps 0 was restarted and its variables are gone")
    assert "FAILED" in as_text(failed)
    assert "reason: ps 0 was restarted and its variables are gone" in as_text(failed)


def test_json_has_every_field_of_the_status() -> None:
    plain = json.loads(as_json(STATUS))
    assert plain.keys() == {field.name for field in dataclasses.fields(ClusterStatus)}
    assert plain["state"] == "training"
    assert plain["participants"][0]["kind"] == "worker"
    assert plain["ledger"][0]["contributors"][1] == {"worker": 1, "incarnation": 2, "sequence": 9}


@pytest.mark.parametrize(("seconds", "text"), [(0.0008, "0.8 ms"), (0.026, "26 ms"), (3.21, "3.2 s"), (150, "2 min"), (9000, "2.5 h")])
def test_durations_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (512, "512 B"), (18_944, "18.5 KiB"), (3 << 30, "3.0 GiB")])
def test_bytes_have_the_unit_that_suits_them(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize("command", [["status"], ["finish"], ["status", "--watch", "--json"]])
def test_an_absent_chief_is_told_within_two_seconds(command: list[str], socket_dir: Path) -> None:
    begin = time.monotonic()
    result = lockstep(*command, "--chief", f"unix:{socket_dir}/none.sock")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    assert f"no chief answers at unix:{socket_dir}/none.sock" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_where_nobody_ever_answers_is_told_within_two_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        result = lockstep("status", "--chief", f"127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 1
    assert "no chief answers" in result.stderr


@pytest.mark.parametrize("command", ["status", "finish"])
def test_without_an_address_the_command_says_how_to_give_one(command: str) -> None:
    result = lockstep(command)
    assert result.returncode == 2
    assert "--chief ADDRESS or set LOCKSTEP_CHIEF" in result.stderr


@pytest.mark.parametrize("command", [["status", "--chief"], ["finish", "--chief"], ["health", "--address"]])
@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:notaport", "127.0.0.1:99999", "unix:relative"])
def test_an_address_that_is_none_is_told_in_one_line(command: list[str], address: str) -> None:
    result = lockstep(*command, address)
    assert result.returncode == 2
    assert address in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_running_cluster_is_shown_as_text_and_as_json(tmp_path: Path) -> None:
    with cluster(tmp_path, max_steps=7) as running:
        text = lockstep("status", LOCKSTEP_CHIEF=running.chief_address)
        assert text.returncode == 0, text.stderr
        assert "waiting for a model, step 0 of 7" in text.stdout
        assert "no worker has come yet" in text.stdout
        plain = json.loads(lockstep("status", "--json", "--chief", running.chief_address).stdout)
        assert plain["replicas_to_aggregate"] == 2
        assert [shard["is_reachable"] for shard in plain["shards"]] == [True, True]


def test_the_wrong_cluster_and_the_wrong_role_are_told_apart(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        other = lockstep("status", "--chief", running.chief_address, "--cluster", "other")
        assert (other.returncode, "Traceback" in other.stderr) == (1, False)
        assert "'other'" in other.stderr and running.name in other.stderr
        wrong = lockstep("status", "--chief", running.chief_address.replace("chief", "ps0"))
        assert wrong.returncode == 1
        assert "ps 0" in wrong.stderr


def test_watching_ends_when_the_chief_does_and_finish_ends_the_chief(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        command = [sys.executable, "-m", "lockstep", "status", "--watch", "--chief", running.chief_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None and watching.stderr is not None
            assert "cluster" in watching.stdout.readline()
            finished = lockstep("finish", "--chief", running.chief_address, "--reason", "enough")
            assert finished.returncode == 0, finished.stderr
            assert "training is finished at step 0" in finished.stdout
            assert watching.wait(10.0) == 1
            assert "the chief has ended" in watching.stderr.read()
        wait_until(lambda: all(role.has_exited() for role in running.roles), what="the roles end by themselves")


def test_ctrl_c_ends_watching_quietly(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        command = [sys.executable, "-m", "lockstep", "status", "--watch", "--chief", running.chief_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None and watching.stderr is not None
            watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(2.0) == 130
            assert watching.stderr.read() == ""


def test_health_tells_alive_and_ready_from_absent(tmp_path: Path) -> None:
    with cluster(tmp_path) as running:
        chief, ps = running.chief_address, running.chief_address.replace("chief", "ps1")
        for address in (chief, ps):
            assert lockstep("health", "--address", address).returncode == 0
            wait_until(lambda address=address: lockstep("health", "--ready", "--address", address).returncode == 0)  # type: ignore[misc]
    absent = lockstep("health", "--address", chief)
    assert absent.returncode == 1
    assert "does not answer" in absent.stderr
    assert lockstep("health").returncode == 2


@pytest.mark.parametrize("role", [["ps", "--index", "0"], ["chief", "--ps", "127.0.0.1:1"]])
def test_a_role_whose_port_is_taken_says_so_within_two_seconds(role: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        result = lockstep(*role, "--address", address)
        assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert result.returncode == 2
    assert f"cannot listen at {address}: another process listens there" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_signal_to_the_command_reaches_the_role(tmp_path: Path) -> None:
    announce = tmp_path / "address"
    command = [sys.executable, "-m", "lockstep", "ps", "--index", "0", "--announce", str(announce)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(announce.exists, what="it serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(5.0) == 0


def test_every_command_explains_itself() -> None:
    from lockstep.__main__ import _COMMANDS

    overview = lockstep("--help")
    assert overview.returncode == 0
    for name, (_, module, add_arguments, run) in _COMMANDS.items():
        assert re.search(rf"^    {name}\s", overview.stdout, re.MULTILINE)
        parser, functions = argparse.ArgumentParser(), import_module(f"lockstep.{module}")
        getattr(functions, add_arguments)(parser)
        assert callable(getattr(functions, run))
        assert "default" in parser.format_help() or name in ("status", "why", "finish", "health", "verify")
    assert lockstep("--version").stdout.startswith("lockstep-ps")
    assert lockstep("nonsense").returncode == 2
    assert lockstep().returncode == 2
