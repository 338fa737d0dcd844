"""A cluster in a terminal: `status`, `why` and `top` say the same first, fit what they are given, and let no text move the cursor."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from chief.page.cost import CostCount
from chief.page.look import Look
from lockstep.cli.formatting import bytes_text, duration_text, printable
from lockstep.cli.watch.view import fields_of, frame, loss_text, sparkline, status_lines, why_lines
from ps_protocol.roles.chief import (
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
    Condition,
    DataStatus,
    LedgerEntry,
    Level,
    ParticipantKind,
    WorkerTraffic,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status

CHECKPOINT = CheckpointStatus(durability="interval", tag="step-000000030", step=30, age_s=12.4)
SILENT = Condition(
    name="worker silent", level=Level.AMBER, line="Waiting 6 s for worker 1 (silent)", advice="See pid 101.", commands=("kill -CONT 101",)
)
FULL = Condition(name="checkpoints fail", level=Level.AMBER, line="Checkpoints fail: the disk is full", advice="Free some space.")
POINTS = [(float(number), number, number / 7) for number in range(300)]
STATUS = cluster_status(
    worker_status(0, num_accepted=42, num_late=3, is_waiting=True, doing="waits for the step"),
    worker_status(1, state="left", seen_ago_s=13.0, doing="failed", failure="ValueError: \x1b[2Jbad data"),
    conditions=(SILENT, FULL),
    shards=(server_status(0, address="unix:/tmp/ps0.sock", arena_bytes=18_944, num_slices=4), server_status(1)),
    checkpoint=CHECKPOINT,
    num_accepted=83,
    num_stale=1,
    num_late=3,
)


def steps(number: int) -> tuple[LedgerEntry, ...]:
    who = (PushId(worker=0, incarnation=1, sequence=1), PushId(worker=1, incarnation=2, sequence=9))
    return tuple(
        LedgerEntry(
            step=step, contributors=who, num_stale=0, num_late=1, duration_s=0.1, apply_duration_s=0.02, last_worker=0, wait_duration_s=0.03
        )
        for step in range(number)
    )


def look(status: ClusterStatus, **changes: Any) -> Look:
    known = {"number": 1, "at": 0.0, "wall": 0.0, "steps_per_s": 12.5, "contributions_per_s": {0: 12.5}, "read_s": {}, "num_last": {0: 5}}
    return Look(status=status, **{**known, "cost": CostCount().add(status, at=0.0), **changes})


def shown(
    status: ClusterStatus, *, width: int = 160, height: int = 50, metrics: Mapping[str, Sequence[Any]] | None = None, **options: Any
) -> list[str]:
    return frame(look(status), speed=POINTS, metrics=metrics or {"loss": POINTS}, width=width, height=height, **options)


def all_of(status: ClusterStatus, **options: Any) -> str:
    return "\n".join(status_lines(look(status), **options))


def test_status_why_and_top_begin_with_the_same_lines() -> None:
    head = [
        "Waiting 6 s for worker 1 (silent)",
        "See pid 101.",
        "    kill -CONT 101",
        "also: Checkpoints fail: the disk is full. Free some space.",
    ]
    assert why_lines(STATUS)[:4] == head
    assert status_lines(look(STATUS))[:4] == head
    assert shown(STATUS)[:4] == head


def test_why_names_workers_by_their_silence_and_servers_that_do_not_answer() -> None:
    gone = dataclasses.replace(STATUS, shards=(server_status(0), server_status(1, is_reachable=False)))
    lines = why_lines(gone)
    assert lines[5] == "cluster 'digits': training, step 41 of 600, epoch 1; 1 of 2 contributions after 3.2 s"
    assert lines[6] == "  worker 1: failed (heard 13.0 s ago, here pid 101)"
    assert lines[7] == "  worker 0: waits for the step (heard 100 ms ago, here pid 100)"
    assert lines[8] == "  ps 1: does not answer, step 41"


def test_parameter_servers_at_different_steps_are_shown() -> None:
    status = dataclasses.replace(STATUS, shards=(server_status(0), server_status(1, step=42)))
    assert "  ps 1: answers, step 42" in why_lines(status)


@pytest.mark.parametrize("state", list(ClusterState))
def test_every_state_has_its_words(state: ClusterState) -> None:
    assert f"cluster 'digits': {state.name.lower().replace('_', ' ')}, step 41" in "\n".join(
        why_lines(dataclasses.replace(STATUS, state=state))
    )


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (CheckpointStatus(durability="interval"), "would cost all steps of this run"),
        (CHECKPOINT, "would cost 11 steps, those since step-000000030"),
        (dataclasses.replace(CHECKPOINT, step=40), "would cost 1 step, those since"),
        (dataclasses.replace(CHECKPOINT, step=41, tag="step-000000041"), "would cost no step, since all are in step-000000041"),
    ],
)
def test_why_says_what_the_loss_of_a_parameter_server_would_cost(checkpoint: CheckpointStatus, words: str) -> None:
    assert words in loss_text(dataclasses.replace(STATUS, checkpoint=checkpoint))


def test_the_status_tells_of_checkpoints_rollbacks_successors_and_data() -> None:
    text = all_of(
        dataclasses.replace(
            STATUS,
            checkpoint=dataclasses.replace(CHECKPOINT, saving="step-000000040", failure="no space left"),
            num_rollbacks=2,
            last_rollback="epoch 2: back to step 30, since ps 1 was restarted",
            chief_incarnation=3,
            min_replicas=1,
            data=DataStatus(name="train", epoch=1, num_done=5, num_leased=2, num_ranges=10),
        )
    )
    assert "checkpoints: at intervals; latest step-000000030 (step 30, 12.4 s ago); step-000000040 is being written" in text
    assert text.count("THE LAST ATTEMPT FAILED") == 1 and "no space left" not in text, "the conditions say why"
    assert "rolled back 2 times; the latest: epoch 2: back to step 30, since ps 1 was restarted" in text
    assert "the chief has been replaced 2 times: its process ended, and another one took over" in text
    assert "data 'train': pass 2, 5 of 10 ranges done, 2 leased" in text
    assert "(when workers are gone as many as are left, 1 at least)" in text


def test_the_status_has_a_line_for_every_worker_server_and_step() -> None:
    lines = [re.split(r" {2,}", line.strip()) for line in all_of(dataclasses.replace(STATUS, ledger=steps(1)), num_ledger=1).splitlines()]
    assert ["worker 0", "waits for the step", "12.5", "500 %", "42", "0", "3", "100 ms ago", "–", "–", "here pid 100"] in lines
    assert ["ps 0", "answers", "41", "18.5 KiB", "–", "–", "–", "–", "none", "unix:/tmp/ps0.sock"] in lines
    assert ["0", "100 ms", "20 ms", "0", "1", "0", "0 1"] in lines


def test_a_step_of_the_status_shows_weights_that_differ() -> None:
    weighted = tuple(dataclasses.replace(one, weights=(100.0, 62.5)) for one in steps(1))
    assert "0×100 1×62.5" in all_of(dataclasses.replace(STATUS, ledger=weighted), num_ledger=1)


def test_the_status_has_all_that_a_parameter_server_reports_in_the_unit_that_suits_it() -> None:
    report = ShardReport(
        allocated_bytes=18_944,
        limit_bytes=1 << 20,
        variables_bytes=2_048,
        num_pushes=7,
        num_nonfinite=3,
        last_apply_s=0.0008,
        cpu_s=61.25,
        num_rows=5,
    )
    text = all_of(dataclasses.replace(STATUS, shards=(server_status(0), server_status(1, report=report))))
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["18.5 KiB", "61.2 s", "0.8 ms", "0"] in [line[4:8] for line in lines]
    assert ["ps", "limit", "variables", "pushes", "nonfinite", "rows"] in lines, "what some have"
    assert ["1", "1.0 MiB", "2.0 KiB", "7", "3", "5"] in lines
    assert "nonfinite" not in all_of(STATUS), "nobody has been looked at yet"


def test_all_show_the_processor_time_of_all_roles() -> None:
    both = worker_status(0, traffic=WorkerTraffic(cpu_s=30.0)), worker_status(1, pid=100, traffic=WorkerTraffic(cpu_s=30.0))
    servers = tuple(server_status(index, report=ShardReport(cpu_s=5.0)) for index in range(2))
    status = dataclasses.replace(STATUS, participants=both, shards=servers, chief_cpu_s=2.5)
    words = "CPU so far: workers 30.0 s, servers 10.0 s, chief 2.5 s"
    assert words in all_of(status), "two workers in one process report the same"
    assert words in "\n".join(shown(status))
    watcher = worker_status(0, pid=200, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=3.0))
    assert ", observers 3.0 s" in all_of(dataclasses.replace(STATUS, participants=(watcher,)))


def test_bytes_through_shared_memory_are_called_shared_and_not_none() -> None:
    for transport, sent, words in (
        ("shared_memory", 0, "sent shared, received shared"),
        ("grpc, shared_memory", 2_048, "sent 2.0 KiB and shared, received shared"),
        ("grpc", 0, "sent 0 B, received 0 B"),
    ):
        worker = worker_status(0, transport=transport, traffic=WorkerTraffic(sent_bytes=sent))
        status = dataclasses.replace(STATUS, participants=(worker,))
        assert words in all_of(status) and words in "\n".join(shown(status))


def test_a_cluster_without_workers_says_so() -> None:
    empty = dataclasses.replace(STATUS, state=ClusterState.WAITING_FOR_MODEL, participants=(), max_steps=None, total_num_replicas=0)
    assert "no worker has joined yet" in all_of(empty) and "any number of workers" in all_of(empty)


def test_json_has_every_field_of_the_status() -> None:
    plain = json.loads(json.dumps(fields_of(dataclasses.replace(STATUS, ledger=steps(3)), num_ledger=1)))
    assert len(plain["ledger"]) == 1
    assert plain.keys() == {field.name for field in dataclasses.fields(ClusterStatus)}
    assert plain["state"] == "training"
    assert plain["conditions"][0] == {**dataclasses.asdict(SILENT), "level": "amber", "commands": ["kill -CONT 101"]}
    assert plain["ledger"][0]["contributors"][1] == {"worker": 1, "incarnation": 2, "sequence": 9}


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 24, 100])
def test_top_fits_the_terminal(width: int, height: int) -> None:
    workers = [worker_status(index, num_accepted=10**9) for index in range(100)]
    long = dataclasses.replace(SILENT, line="step 4 " * 200, advice="x" * 500, commands=("y" * 500,))
    status = cluster_status(*workers, ledger=steps(200), shards=tuple(server_status(index) for index in range(3)), conditions=(long, FULL))
    lines = shown(status, width=width, height=height, has_colours=True)
    assert len(lines) <= height
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines) < max(width, 21)


def test_a_narrow_terminal_leaves_whole_columns_out_and_says_which() -> None:
    narrow = shown(STATUS, width=80)
    heading = next(line for line in narrow if line.startswith("worker "))
    (left_out,) = [line for line in narrow[narrow.index(heading) :] if line.startswith("(no room for: ")][:1]
    columns = ["worker", "doing", "contr/s", "last in", "counted", "stale", "late", "heard", "CPU", "by", "where"]
    named = left_out.removeprefix("(no room for: ").removesuffix(")").split(", ")
    assert re.split(r" {2,}", heading) + named == columns
    assert "(no room for" not in "\n".join(shown(STATUS, width=200))


def test_workers_with_problems_come_first_where_there_is_not_room_for_all() -> None:
    workers = [worker_status(index) for index in range(50)] + [worker_status(50, state="lapsed", doing="lease ended")]
    text = "\n".join(shown(cluster_status(*workers), height=30))
    assert "worker 50" in text and "… and" in text


def test_dropped_contributions_of_backup_workers_are_explained() -> None:
    status = cluster_status(worker_status(0), total_num_replicas=3, num_stale=365, num_accepted=800)
    assert "800 counted, 365 dropped (as it should be: a step takes the first 2)" in "\n".join(shown(status))


def test_a_lost_chief_is_told_from_a_finished_training() -> None:
    assert shown(STATUS, gone_since="12:00:00")[0] == "THE CHIEF HAS NOT ANSWERED since 12:00:00"
    assert shown(dataclasses.replace(STATUS, state=ClusterState.FINISHED), gone_since="12:00:00")[0] == "the chief has ended"


def test_no_text_moves_the_cursor() -> None:
    evil = "\x1b[2J\rbad\n"
    bad = dataclasses.replace(SILENT, line=evil, advice=evil, commands=(evil,))
    status = dataclasses.replace(
        STATUS,
        cluster=evil,
        conditions=(bad, bad),
        participants=(worker_status(0, host=evil, doing=evil, failure=evil, transport=evil),),
        shards=(server_status(0, address=evil, standby=evil),),
        last_rollback=evil,
        num_rollbacks=1,
        optimizer=evil,
        checkpoint=dataclasses.replace(CHECKPOINT, failure=evil, tag=evil),
    )
    for lines in (why_lines(status), status_lines(look(status)), shown(status, metrics={evil: POINTS}, gone_since="12:00:00")):
        assert not re.search(r"[\x00-\x1f\x7f]", "".join(lines))
    assert printable("a\nb\x07") == "a\\nb\\x07"


def test_a_higher_value_has_a_taller_bar_in_the_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"


@pytest.mark.parametrize(("seconds", "text"), [(0.0008, "0.8 ms"), (0.026, "26 ms"), (3.21, "3.2 s"), (150, "2 min"), (9000, "2.5 h")])
def test_durations_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (512, "512 B"), (18_944, "18.5 KiB"), (3 << 30, "3.0 GiB")])
def test_bytes_have_the_unit_that_suits_them(count: int, text: str) -> None:
    assert bytes_text(count) == text
