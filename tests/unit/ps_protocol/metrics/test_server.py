"""What a parameter server exports for Prometheus: its report, and metrics of workers under a bounded number of names."""

import math
import re

from ps_protocol.metrics.exposition import exposition
from ps_protocol.metrics.server import MAX_NAMES, shard_families
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import MetricCell, ShardReport, ShardStatus
from tests.support.formats.prometheus import Read, parsed, value
from tests.support.repository import ROOT


def exported(*cells: MetricCell, step: int | None = 3) -> dict[str, Read]:
    report = ShardReport(allocated_bytes=4096, num_pushes=9, num_stale=1, last_apply_s=0.25)
    status = ShardStatus(shard=2, process_incarnation=1, fence=NOBODY, step=step, report=report, chief_heard_ago_s=0.5)
    return parsed(exposition(shard_families(status, num_applied=3, apply_s=0.75, cells=cells)).decode())


def cell(name: str, worker: int, total: float) -> MetricCell:
    return MetricCell(name=name, worker=worker, total=total, weight=2.0, count=1, last=total)


def test_reference_names_what_is_exported_and_nothing_else() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(lockstep_(?:server|reported)_[a-z_]+)`", text))
    assert documented == {*exported(cell("loss", 0, 1.0))}


def test_report_is_exported() -> None:
    found = exported()
    assert value(found, "lockstep_server_index") == 2 and value(found, "lockstep_server_step") == 3
    assert value(found, "lockstep_server_allocated_bytes") == 4096
    assert value(found, "lockstep_server_pushes_total") == 9 and value(found, "lockstep_server_stale_pushes_total") == 1
    applied = found["lockstep_server_apply_duration_seconds"].samples
    assert applied["lockstep_server_apply_duration_seconds_sum"][()] == 0.75
    assert "lockstep_server_step" not in exported(step=None)


def test_metrics_of_all_workers_are_added_up() -> None:
    found = exported(cell("loss", 0, 1.5), cell("loss", 1, 2.5), cell("accuracy", 0, math.nan))
    assert value(found, "lockstep_reported_weighted_value", metric="loss") == 4.0
    assert value(found, "lockstep_reported_weight", metric="loss") == 4.0
    assert value(found, "lockstep_reported_reports", metric="loss") == 2
    assert math.isnan(value(found, "lockstep_reported_weighted_value", metric="accuracy"))


def test_names_of_metrics_are_bounded_in_number_and_length() -> None:
    names = [f"name {number}" for number in range(1_000)]
    found = exported(cell("x" * 200, 0, 1.0), cell('"} 1\nforged', 0, 1.0), *(cell(name, 0, 1.0) for name in names))
    assert len(found["lockstep_reported_weighted_value"].samples["lockstep_reported_weighted_value"]) == MAX_NAMES
    assert all(len(labels[0][1]) <= 130 for labels in found["lockstep_reported_weighted_value"].samples["lockstep_reported_weighted_value"])
