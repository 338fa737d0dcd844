"""What the chief exports for Prometheus: all of its status, in series that are bounded in number."""

import re

from ps_protocol.metrics.cluster import MAX_INDEXED, cluster_families
from ps_protocol.metrics.exposition import exposition
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, ClusterStatus, DataStatus, StepTotals, WorkerTraffic
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.repository import ROOT

TOTALS = StepTotals(num_steps=40, duration_s=10.0, apply_s=2.0)


def exported(status: ClusterStatus) -> dict[str, Read]:
    return parsed(exposition(cluster_families(status, TOTALS)).decode())


FULL = cluster_status(
    worker_status(0, traffic=WorkerTraffic(sent_bytes=7)),
    shards=(server_status(0, report=ShardReport(), standby="unix:/standby"),),
    checkpoint=CheckpointStatus(durability="interval", tag="step-40", step=40),
    data=DataStatus(name="digits", epoch=0, num_done=0, num_leased=0, num_ranges=1),
)


def test_reference_names_what_is_exported_and_nothing_else() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(lockstep_(?:cluster|worker|shard)_[a-z_]+)`", text))
    assert documented == {*exported(FULL)}


def test_status_is_exported() -> None:
    workers = worker_status(0, num_accepted=7, is_waiting=True), worker_status(1, state="lapsed", num_stale=2, seen_ago_s=3.0)
    found = exported(
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
    assert value(found, "lockstep_cluster_waiting") == 1
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


def test_every_state_of_a_cluster_has_its_series() -> None:
    for state in ClusterState:
        found = exported(cluster_status(state=state))["lockstep_cluster_state"].samples["lockstep_cluster_state"]
        assert {labels[0][1] for labels, is_it in found.items() if is_it} == {state.name.lower()} and len(found) == len(ClusterState)


def test_series_are_bounded_however_many_workers_and_servers_there_are() -> None:
    crowd = cluster_status(*(worker_status(index) for index in range(5_000)), shards=tuple(server_status(index) for index in range(5_000)))
    found = exported(crowd)
    assert max(len(series) for read in found.values() for series in read.samples.values()) == 3 * MAX_INDEXED
    assert value(found, "lockstep_cluster_workers", state="live") == 5_000
