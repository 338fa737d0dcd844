"""Families of each role for Prometheus: the reference names all of them, and the number of their series is bounded."""

import math
import re
from collections.abc import Mapping

import pytest

from ps_protocol.metrics.exposition import exposition
from ps_protocol.metrics.families import MAX_INDEXED, MAX_NAMES, cluster_families, session_families, shard_families
from ps_protocol.roles.chief import (
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
    DataStatus,
    FollowerReport,
    InnerSteps,
    ParticipantKind,
    StepTotals,
    WorkerTraffic,
)
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import MetricCell, ShardReport, ShardStatus
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.repository import ROOT

TOTALS = StepTotals(num_steps=40, duration_s=10.0, apply_s=2.0)


def cluster_exported(status: ClusterStatus) -> dict[str, Read]:
    return parsed(exposition(cluster_families(status, TOTALS)).decode())


def shard_exported(*cells: MetricCell, step: int | None = 3) -> dict[str, Read]:
    report = ShardReport(allocated_bytes=4096, num_pushes=9, num_stale=1, last_apply_s=0.25)
    status = ShardStatus(shard=2, process_incarnation=1, fence=NOBODY, step=step, report=report, chief_heard_ago_s=0.5)
    return parsed(exposition(shard_families(status, num_applied=3, apply_s=0.75, cells=cells)).decode())


def cell(name: str, worker: int, total: float) -> MetricCell:
    return MetricCell(name=name, worker=worker, total=total, weight=2.0, count=1, last=total)


def session_exported() -> dict[str, Read]:
    return parsed(exposition(session_families(WorkerTraffic(), worker=1, step=2, num_pushes=3, num_rollbacks=4)).decode())


FULL = cluster_status(
    worker_status(0, traffic=WorkerTraffic(sent_bytes=7), inner=InnerSteps(num=9, duration_s=4.0)),
    shards=(server_status(0, report=ShardReport(), standby="unix:/standby"),),
    checkpoint=CheckpointStatus(durability="interval", tag="step-40", step=40),
    data=DataStatus(name="digits", epoch=0, num_done=0, num_leased=0, num_ranges=1),
)


@pytest.mark.parametrize(
    ("prefixes", "exported"),
    [
        ("cluster|worker|shard", cluster_exported(FULL)),
        ("server|reported", shard_exported(cell("loss", 0, 1.0))),
        ("session", session_exported()),
    ],
)
def test_reference_names_what_is_exported_and_nothing_else(prefixes: str, exported: Mapping[str, Read]) -> None:
    text = (ROOT / "docs" / "how-to" / "monitor.md").read_text(encoding="utf-8").partition("## Names of metrics")[2]
    assert {*re.findall(rf"`(lockstep_(?:{prefixes})_[a-z_]+)`", text)} == {*exported}


def test_status_of_a_cluster_is_cluster_exported() -> None:
    workers = worker_status(0, num_accepted=7, is_waiting=True), worker_status(1, state="lapsed", num_stale=2, seen_ago_s=3.0)
    found = cluster_exported(
        cluster_status(
            *workers,
            shards=(
                server_status(0, report=ShardReport(allocated_bytes=1024, last_apply_s=0.5)),
                server_status(1, is_reachable=False, step=None),
            ),
            num_accepted=7,
            num_stale=2,
            num_rollbacks=1,
            checkpoint=CheckpointStatus(durability="interval", tag="step-40", step=40, age_s=12.0),
            data=DataStatus(name="digits", epoch=2, num_done=5, num_leased=1, num_ranges=9),
        )
    )
    assert value(found, "lockstep_cluster_global_step") == 41
    assert value(found, "lockstep_cluster_state", state="training") == 1 and value(found, "lockstep_cluster_state", state="failed") == 0
    assert value(found, "lockstep_cluster_level") == 1 and value(found, "lockstep_cluster_condition", condition="training") == 1
    assert value(found, "lockstep_cluster_contributions_total", outcome="stale") == 2
    assert value(found, "lockstep_cluster_rollbacks_total") == 1
    assert value(found, "lockstep_cluster_workers", state="lapsed") == 1
    assert value(found, "lockstep_worker_contributions_total", worker="0", outcome="accepted") == 7
    assert value(found, "lockstep_worker_silence_seconds", worker="1") == 3.0
    assert value(found, "lockstep_shard_reachable", ps="1") == 0 and value(found, "lockstep_shard_allocated_bytes", ps="0") == 1024
    assert list(found["lockstep_shard_step"].samples["lockstep_shard_step"]) == [(("ps", "0"),)]
    assert value(found, "lockstep_cluster_checkpoint_age_seconds") == 12.0
    assert value(found, "lockstep_cluster_data_ranges", state="done") == 5
    durations = found["lockstep_cluster_step_duration_seconds"].samples
    assert durations["lockstep_cluster_step_duration_seconds_sum"][()] == 10.0
    assert durations["lockstep_cluster_step_duration_seconds_count"][()] == 40


def test_processor_time_of_all_roles_is_one_family() -> None:
    workers = worker_status(0, traffic=WorkerTraffic(cpu_s=8.0)), worker_status(1)
    servers = server_status(0, report=ShardReport(cpu_s=4.0)), server_status(1)
    watcher = worker_status(0, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=16.0))
    found = cluster_exported(cluster_status(*workers, watcher, shards=servers, chief_cpu_s=2.0))
    samples = found["lockstep_cluster_cpu_seconds_total"].samples["lockstep_cluster_cpu_seconds_total"]
    assert {(dict(where)["role"], dict(where)["index"]): seconds for where, seconds in samples.items()} == {
        ("chief", "0"): 2.0,
        ("ps", "0"): 4.0,
        ("worker", "0"): 8.0,
        ("observer", "0"): 16.0,
    }


def test_a_table_with_keys_has_its_rows_and_what_became_of_keys() -> None:
    report = ShardReport(num_rows=5, num_found=3, num_made=9, num_evicted=4, num_refused=2, num_unadmitted=7, files_bytes=1 << 20)
    found = cluster_exported(cluster_status(shards=(server_status(0, report=report), server_status(1))))
    assert value(found, "lockstep_shard_rows", ps="0") == 5
    assert value(found, "lockstep_shard_files_bytes", ps="0") == 1 << 20
    keys = found["lockstep_shard_keys_total"].samples["lockstep_shard_keys_total"]
    assert {(dict(where)["ps"], dict(where)["outcome"]): count for where, count in keys.items()} == {
        ("0", "found"): 3,
        ("0", "made"): 9,
        ("0", "evicted"): 4,
        ("0", "refused"): 2,
        ("0", "unadmitted"): 7,
    }


def test_a_follower_has_its_step_its_lag_and_what_it_was_sent() -> None:
    report = FollowerReport(step=7, lag=2, behind_s=0.5, num_patches=30, num_wholes=1, whole_bytes=1000)
    watcher = worker_status(3, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(received_bytes=1900, follower=report))
    found = cluster_exported(cluster_status(watcher, worker_status(0, kind=ParticipantKind.OBSERVER)))
    where = (("observer", "3"),)
    expected = {"step": 7, "lag_steps": 2, "behind_seconds": 0.5, "received_bytes_total": 1900, "whole_bytes": 1000}
    assert {name: found[f"lockstep_follower_{name}"].samples[f"lockstep_follower_{name}"] for name in expected} == {
        name: {where: value} for name, value in expected.items()
    }
    answers = found["lockstep_follower_answers_total"].samples["lockstep_follower_answers_total"]
    assert {dict(labels)["kind"]: count for labels, count in answers.items()} == {"patch": 30, "whole": 1}


def test_every_state_of_a_cluster_has_its_series() -> None:
    for state in ClusterState:
        found = cluster_exported(cluster_status(state=state))["lockstep_cluster_state"].samples["lockstep_cluster_state"]
        assert {labels[0][1] for labels, is_it in found.items() if is_it} == {state.name.lower()} and len(found) == len(ClusterState)


def test_series_of_a_cluster_are_bounded_however_many_workers_and_servers_there_are() -> None:
    crowd = cluster_status(*(worker_status(index) for index in range(5_000)), shards=tuple(server_status(index) for index in range(5_000)))
    found = cluster_exported(crowd)
    assert max(len(series) for read in found.values() for series in read.samples.values()) == 3 * MAX_INDEXED
    assert value(found, "lockstep_cluster_workers", state="live") == 5_000


def test_report_of_a_server_is_shard_exported() -> None:
    found = shard_exported()
    assert value(found, "lockstep_server_index") == 2 and value(found, "lockstep_server_step") == 3
    assert value(found, "lockstep_server_allocated_bytes") == 4096
    assert value(found, "lockstep_server_pushes_total") == 9 and value(found, "lockstep_server_stale_pushes_total") == 1
    applied = found["lockstep_server_apply_duration_seconds"].samples
    assert applied["lockstep_server_apply_duration_seconds_sum"][()] == 0.75
    assert "lockstep_server_step" not in shard_exported(step=None)


def test_metrics_of_all_workers_are_added_up() -> None:
    found = shard_exported(cell("loss", 0, 1.5), cell("loss", 1, 2.5), cell("accuracy", 0, math.nan))
    assert value(found, "lockstep_reported_weighted_value", metric="loss") == 4.0
    assert value(found, "lockstep_reported_weight", metric="loss") == 4.0
    assert value(found, "lockstep_reported_reports", metric="loss") == 2
    assert math.isnan(value(found, "lockstep_reported_weighted_value", metric="accuracy"))


def test_names_of_metrics_are_bounded_in_number_and_length() -> None:
    names = [f"name {number}" for number in range(1_000)]
    found = shard_exported(cell("x" * 200, 0, 1.0), cell('"} 1\nforged', 0, 1.0), *(cell(name, 0, 1.0) for name in names))
    assert len(found["lockstep_reported_weighted_value"].samples["lockstep_reported_weighted_value"]) == MAX_NAMES
    assert all(len(labels[0][1]) <= 130 for labels in found["lockstep_reported_weighted_value"].samples["lockstep_reported_weighted_value"])
