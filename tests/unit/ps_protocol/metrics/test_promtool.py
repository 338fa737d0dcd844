"""The exports of all roles in Prometheus' own checker: syntax, names, units, words."""

import shutil
import subprocess

import pytest

from ps_protocol.metrics.exposition import Family, exposition, process_families
from ps_protocol.metrics.families import cluster_families, session_families, shard_families
from ps_protocol.roles.chief import CheckpointStatus, DataStatus, StepTotals, WorkerTraffic
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import MetricCell, ShardReport, ShardStatus
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status

PROGRAM = shutil.which("promtool")
CLUSTER = cluster_status(
    worker_status(0, traffic=WorkerTraffic(sent_bytes=7)),
    shards=(server_status(0, report=ShardReport(), standby="unix:/standby"),),
    checkpoint=CheckpointStatus(durability="interval", tag="step-40", step=40),
    data=DataStatus(name="digits", epoch=0, num_done=0, num_leased=0, num_ranges=1),
)
SHARD = ShardStatus(shard=2, process_incarnation=1, fence=NOBODY, step=3, report=ShardReport(), chief_heard_ago_s=0.5)
CELL = MetricCell(name='loss "of"\n\\all', worker=0, total=1.0, weight=2.0, count=1, last=1.0)
ROLES: dict[str, list[Family]] = {
    "chief": [*cluster_families(CLUSTER, StepTotals(num_steps=4, duration_s=2.0, apply_s=1.0))],
    "ps": [*shard_families(SHARD, num_applied=3, apply_s=0.75, cells=[CELL])],
    "worker": [*session_families(WorkerTraffic(), worker=0, step=1, num_pushes=1, num_rollbacks=0)],
}


@pytest.mark.skipif(PROGRAM is None, reason="no promtool in PATH; Debian's package prometheus has it")
@pytest.mark.parametrize("role", sorted(ROLES))
def test_promtool_accepts_the_metrics_of_every_role_without_a_warning(role: str) -> None:
    text = exposition([*process_families(role=role, version="1.2"), *ROLES[role]])
    done = subprocess.run([str(PROGRAM), "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
