"""`lockstep status`: its output as text and as JSON."""

import dataclasses
import json

import pytest

from lockstep.cli.formatting import bytes_text, duration_text, printable
from lockstep.cli.watch.text import as_json, as_text
from ps_protocol.roles.chief import ClusterState, ClusterStatus, LedgerEntry, ParticipantKind, WorkerTraffic
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status

FAILED = worker_status(
    1,
    incarnation=2,
    host="there",
    pid=202,
    state="left",
    seen_ago_s=3.0,
    num_accepted=41,
    num_stale=1,
    failure="ValueError: \x1b[2Jbad data",
)
STATUS = cluster_status(
    worker_status(0, pid=101, num_accepted=42, num_late=3, is_waiting=True),
    FAILED,
    shards=(server_status(0, address="unix:/tmp/ps0.sock", arena_bytes=18_944, num_slices=4),),
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


def test_the_text_says_why_a_step_waits() -> None:
    text = as_text(STATUS)
    assert "cluster 'digits': training, step 41 of 600" in text
    assert "this step: 1 of 2 contributions after 3.2 s" in text or "this step: 1 of 2 contributions after 3.3 s" in text
    assert "waiting: step 41 has 1 of 2 contributions; worker 1 is missing, last seen 3.0 s ago" in text


def test_the_text_has_a_line_for_every_worker_and_parameter_server() -> None:
    lines = [line.split() for line in as_text(STATUS).splitlines()]
    assert ["0", "waiting", "100", "ms", "ago", "42", "0", "3", "-", "here", "pid", "101"] in lines
    assert ["1", "left", "3.0", "s", "ago", "41", "1", "0", "-", "there", "pid", "202"] in lines
    assert ["0", "reachable", "41", "18.5", "KiB", "4", "unix:/tmp/ps0.sock"] in lines
    assert ["40", "26", "ms", "0.8", "ms", "0", "1", "1", "0", "1"] in lines


def test_the_text_has_all_that_a_parameter_server_reports_in_the_unit_that_suits_it() -> None:
    report = ShardReport(allocated_bytes=18_944, variables_bytes=2_048, num_pushes=7, num_nonfinite=3, last_apply_s=0.0008, cpu_s=61.25)
    shards = (server_status(0), server_status(1, report=report))
    lines = [line.split("  ") for line in as_text(dataclasses.replace(STATUS, shards=shards)).splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in lines]
    assert [
        "ps",
        "allocated",
        "variables",
        "slots",
        "staged",
        "pushes",
        "stale",
        "duplicates",
        "nonfinite",
        "sharing",
        "last apply",
        "created",
        "cpu",
    ] in cells
    assert ["1", "18.5 KiB", "2.0 KiB", "0 B", "0", "7", "0", "0", "3", "0", "0.8 ms", "0 B", "61.2 s"] in cells
    assert "allocated" not in as_text(STATUS), "nobody has been looked at yet"


def test_the_text_has_the_processor_time_of_all_roles() -> None:
    both = worker_status(0, traffic=WorkerTraffic(cpu_s=30.0)), worker_status(1, pid=100, traffic=WorkerTraffic(cpu_s=30.0))
    servers = tuple(server_status(index, report=ShardReport(cpu_s=5.0)) for index in range(2))
    text = as_text(dataclasses.replace(STATUS, participants=both, shards=servers, chief_cpu_s=2.5))
    words = "processor time of the processes, since each began: workers 30.0 s, servers 10.0 s, chief 2.5 s"
    assert words in text, "two workers in one process report the same"
    watcher = worker_status(0, pid=200, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=3.0))
    assert ", observers 3.0 s" in as_text(dataclasses.replace(STATUS, participants=(watcher,)))
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "live", "100", "ms", "ago", "0", "0", "0", "30.0", "s", "here", "pid", "100"] in lines


def test_a_failure_that_a_worker_reports_cannot_move_the_terminals_cursor() -> None:
    assert "worker 1 left with a failure: ValueError: \\x1b[2Jbad data" in as_text(STATUS)
    assert printable("a\nb\x07") == "a\\nb\\x07"


def test_the_status_text_of_a_cluster_without_workers_reports_that() -> None:
    empty = dataclasses.replace(
        STATUS, state=ClusterState.WAITING_FOR_MODEL, participants=(), ledger=(), max_steps=None, total_num_replicas=0
    )
    assert "no worker has joined yet" in as_text(empty)
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
