"""Traces of a cluster's steps: the content of each track, gaps, and the effect of a rollback. Knows reports only."""

import json
from typing import Any

from lockstep.timeline import CHIEF, MAX_TRACKS, SERVERS, WORKERS, Timeline
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import ClusterStatus, LedgerEntry
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status
from tests.support.formats.chrome_trace import Event, checked


def entry(step: int, arrivals_us: dict[int, int], *, duration_s: float = 0.1, wait_s: float = 0.03, apply_s: float = 0.02) -> LedgerEntry:
    return LedgerEntry(
        step=step,
        contributors=tuple(PushId(worker=worker, incarnation=1, sequence=step + 1) for worker in sorted(arrivals_us)),
        num_stale=0,
        num_late=1,
        duration_s=duration_s,
        wait_duration_s=wait_s,
        apply_duration_s=apply_s,
        last_worker=max(arrivals_us, key=lambda worker: arrivals_us[worker]),
        arrivals_us=tuple(arrivals_us[worker] for worker in sorted(arrivals_us)),
    )


def status(step: int, *entries: LedgerEntry, **changes: Any) -> ClusterStatus:
    servers = (server_status(0, report=ShardReport(allocated_bytes=64)), server_status(1))
    fields = {"global_step": step, "step_age_s": 0.0, "ledger": tuple(reversed(entries)), "shards": servers, **changes}
    return cluster_status(worker_status(0), worker_status(1), **fields)


def traced(*reports: tuple[ClusterStatus, float]) -> list[Event]:
    timeline = Timeline()
    for report, at_s in reports:
        timeline.add(report, at_s=at_s)
    return checked(json.loads(json.dumps(timeline.trace(cluster="digits"))))


def spans(events: list[Event], pid: int, tid: int) -> list[tuple[str, int, int]]:
    return [
        (one["name"], one["ts"], one["ts"] + one["dur"]) for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (pid, tid)
    ]


FIRST, SECOND = entry(10, {0: 50_000, 1: 80_000}), entry(11, {0: 80_000, 1: 50_000})


def test_tracks_show_the_parts_of_steps_and_the_last_contributor() -> None:
    events = traced((status(10), 100.0), (status(12, FIRST, SECOND), 100.2))
    assert spans(events, CHIEF, 1)[:4] == [
        ("step 10", 0, 100_000),
        ("reading and computing", 0, 50_000),
        ("waiting for worker 1", 50_000, 80_000),
        ("apply", 80_000, 100_000),
    ]
    assert spans(events, WORKERS, 1) == [
        ("contribution to 10", 0, 50_000),
        ("waiting for the step", 50_000, 100_000),
        ("contribution to 11", 100_000, 180_000),
        ("waiting for the step", 180_000, 200_000),
    ]
    assert spans(events, SERVERS, 2) == [("apply 10", 80_000, 100_000), ("apply 11", 180_000, 200_000)]
    assert [one["args"]["bytes"] for one in events if one["ph"] == "C"] == [64]


def test_reports_that_overlap_show_each_step_once_without_a_gap() -> None:
    late = status(12, FIRST, SECOND), 100.25  # the report took its time
    events = traced((status(10), 100.0), (status(11, FIRST), 100.1), late)
    steps = [one for one in spans(events, CHIEF, 1) if one[0].startswith("step")]
    assert steps == [("step 10", 0, 100_000), ("step 11", 100_000, 200_000)]


def test_steps_that_were_too_fast_are_counted() -> None:
    timeline = Timeline()
    timeline.add(status(5), at_s=100.0)
    timeline.add(status(12, FIRST, SECOND), at_s=101.0)
    assert (timeline.num_steps, timeline.num_missed) == (2, 5)


def test_worker_that_gives_several_contributions_to_a_step_computes_them_one_after_the_other() -> None:
    pushes = tuple(PushId(worker=0, incarnation=1, sequence=sequence) for sequence in (7, 8))
    twice = LedgerEntry(
        step=10,
        contributors=pushes,
        num_stale=0,
        num_late=0,
        duration_s=0.1,
        apply_duration_s=0.0,
        last_worker=0,
        arrivals_us=(40_000, 90_000),
    )
    events = traced((status(10), 100.0), (status(11, twice), 100.1))
    assert [one[1:] for one in spans(events, WORKERS, 1)] == [(0, 40_000), (40_000, 90_000), (90_000, 100_000)]


def test_without_common_steps_a_worker_computes_from_one_contribution_to_its_next() -> None:
    entries = [entry(step, {step % 2: 9_000}, duration_s=0.01, wait_s=0.0, apply_s=0.001) for step in (10, 11, 12, 13)]
    policy = PolicySpec(name=PolicyName.ASYNC)
    events = traced((status(10, policy=policy), 100.0), (status(14, *entries, policy=policy), 100.04))
    assert [one[1:] for one in spans(events, WORKERS, 1)] == [(0, 9_000), (9_000, 29_000)]


def test_changes_of_the_cluster_are_marked_in_a_trace_and_a_rollback_starts_new_steps() -> None:
    back = status(8, epoch=2, last_rollback="rolled back to step 8")
    gone = cluster_status(worker_status(0, state="lapsed"), worker_status(1, incarnation=2), global_step=8, epoch=2, step_age_s=0.0)
    events = traced((status(10), 100.0), (status(12, FIRST, SECOND), 100.2), (back, 101.0), (gone, 101.5))
    marks = [one["name"] for one in events if one["ph"] == "i"]
    assert marks == ["epoch 2: rolled back to step 8", "worker 0: lapsed", "worker 1 joined"]


def test_tracks_are_bounded_in_number() -> None:
    crowd = entry(10, dict.fromkeys(range(3000), 50000))
    events = traced((status(10), 100.0), (status(11, crowd), 100.1))
    assert len({one["tid"] for one in events if one["pid"] == WORKERS}) == MAX_TRACKS
