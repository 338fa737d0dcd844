"""The page's data as JSON: the cluster at a moment, and what is new since the last request. Knows looks and values; no port, no thread."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chief.page.curves import Point
from chief.page.event_log import Entry
from chief.page.look import Look, eta_s
from ps_protocol.roles.chief import (
    CheckpointStatus,
    ClusterStatus,
    Condition,
    LedgerEntry,
    ParticipantKind,
    ParticipantStatus,
    ServerStatus,
)

WORKER_COLUMNS = (
    "kind",
    "index",
    "host",
    "pid",
    "state",
    "phase",
    "per_s",
    "share_last",
    "accepted",
    "stale",
    "late",
    "seen_ago_s",
    "failure",
    "transport",
    "sent_bytes",
    "received_bytes",
    "cpu_s",
)
STEP_COLUMNS = ("step", "read_s", "compute_s", "wait_s", "apply_s", "last", "contributions", "stale", "late")
_MAX_ROWS = 2_000
_MAX_TEXT = 600


def snapshot(look: Look) -> dict[str, Any]:
    """Returns the cluster at a moment."""
    status = look.status
    participants = status.participants[:_MAX_ROWS]
    return {
        "number": look.number,
        "wall": look.wall,
        "cluster": status.cluster,
        "chief_incarnation": status.chief_incarnation,
        "state": status.state.name.lower(),
        "conditions": [_condition(one) for one in status.conditions],
        "step": status.global_step,
        "max_steps": status.max_steps,
        "step_age_s": _number(status.step_age_s),
        "steps_per_s": _number(look.steps_per_s),
        "eta_s": _number(eta_s(look)),
        "is_held_up": look.is_held_up,
        "cost": _cost(look),
        "epoch": status.epoch,
        "policy": status.policy.text,
        "needs": status.replicas_to_aggregate if status.policy.has_common_steps else 1,
        "has_common_steps": status.policy.has_common_steps,
        "contributions": status.num_contributions,
        "optimizer": status.optimizer,
        "accepted": status.counts.accepted,
        "stale": status.counts.stale,
        "late": status.counts.late,
        "num_backups": _num_backups(status),
        "rollbacks": status.num_rollbacks,
        "last_rollback": status.last_rollback[:_MAX_TEXT],
        "checkpoint": _checkpoint(status.checkpoint),
        "data": None
        if status.data is None
        else {"name": status.data.name, "pass": status.data.epoch, "done": status.data.num_done, "ranges": status.data.num_ranges},
        "workers": {"columns": WORKER_COLUMNS, "rows": [_worker(one, look) for one in participants]},
        "num_participants": len(status.participants),
        "servers": [_server(one) for one in status.shards],
        "steps": {"columns": STEP_COLUMNS, "rows": [_step(entry, look) for entry in reversed(status.ledger)]},
    }


def _condition(one: Condition) -> dict[str, Any]:
    return {
        "name": one.name,
        "level": one.level.name.lower(),
        "line": one.line,
        "advice": one.advice[:_MAX_TEXT],
        "commands": [command[:_MAX_TEXT] for command in one.commands],
    }


def additions(
    *, speed: Sequence[Point], metrics: Mapping[str, Sequence[Point]], num_left_out: int, entries: Sequence[Entry]
) -> dict[str, Any]:
    """Returns the new points of the curves and the new events."""
    return {
        "speed": speed,
        "metrics": metrics,
        "metrics_left_out": num_left_out,
        "events": [[entry.number, entry.at, entry.step, entry.kind.value, entry.text[:_MAX_TEXT], entry.is_warning] for entry in entries],
    }


def _num_backups(status: ClusterStatus) -> int:
    if not status.policy.has_common_steps:
        return 0
    return max(0, status.total_num_replicas - status.replicas_to_aggregate)


def _worker(one: ParticipantStatus, look: Look) -> list[Any]:
    is_worker, num_steps = one.kind is ParticipantKind.WORKER, len(look.status.ledger)
    share = look.num_last.get(one.index, 0) / num_steps if is_worker and num_steps else None
    return [
        one.kind.name.lower(),
        one.index,
        one.host,
        one.pid,
        one.state,
        one.doing,
        _number(look.contributions_per_s.get(one.index)) if is_worker else None,
        _number(share),
        one.num_accepted,
        one.num_stale,
        one.num_late,
        _number(one.seen_ago_s),
        one.failure[:_MAX_TEXT],
        one.transport,
        one.traffic.sent_bytes if one.traffic else None,
        one.traffic.received_bytes if one.traffic else None,
        _number(one.traffic.cpu_s) if one.traffic else None,
    ]


def _server(one: ServerStatus) -> dict[str, Any]:
    report = one.report
    return {
        "index": one.index,
        "address": one.address,
        "is_reachable": one.is_reachable,
        "step": one.step,
        "variables_bytes": report.variables_bytes if report else None,
        "slots_bytes": report.slots_bytes if report else None,
        "other_bytes": max(0, report.allocated_bytes - report.variables_bytes - report.slots_bytes) if report else None,
        "num_slices": one.num_slices,
        "standby": one.standby,
        "standby_missing": one.standby_missing[:_MAX_TEXT],
        "allocated_bytes": report.allocated_bytes if report else None,
        "apply_s": _number(report.last_apply_s) if report else None,
        "staged": report.num_staged if report else None,
        "pushes": report.num_pushes if report else None,
        "nonfinite": report.num_nonfinite if report else None,
        "rows": report.num_rows if report else None,
        "keys": {name: getattr(report, f"num_{name}") for name in ("made", "evicted", "refused", "unadmitted")} if report else {},
        "cpu_s": _number(report.cpu_s) if report else None,
    }


def _cost(look: Look) -> dict[str, Any]:
    cost = look.cost
    return {
        "is_of_last_hour": cost.is_of_last_hour,
        "cpu_s": {role: _number(seconds) for role, seconds in cost.cpu_s.items()},
        "sent_bytes": cost.sent_bytes,
        "received_bytes": cost.received_bytes,
        "is_shared": cost.is_shared,
    }


def _step(entry: LedgerEntry, look: Look) -> list[Any]:
    before_first_s = max(0.0, entry.duration_s - entry.wait_duration_s - entry.apply_duration_s)
    # The chief sees no reads. The worker whose contribution came first says how long they take it in the mean.
    read_s = min(before_first_s, look.read_s.get(_first(entry), 0.0))
    return [
        entry.step,
        _number(read_s),
        _number(before_first_s - read_s),
        _number(entry.wait_duration_s),
        _number(entry.apply_duration_s),
        entry.last_worker,
        len(entry.contributors),
        entry.num_stale,
        entry.num_late,
    ]


def _first(entry: LedgerEntry) -> int:
    """Returns the worker whose contribution came first; the last one where no arrivals are known."""
    arrivals = zip(entry.arrivals_us, entry.contributors, strict=False)
    return min(((at, push.worker) for at, push in arrivals), default=(0, entry.last_worker))[1]


def _checkpoint(one: CheckpointStatus | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "durability": one.durability,
        "tag": one.tag,
        "step": one.step,
        "age_s": _number(one.age_s),
        "saving": one.saving,
        "failure": one.failure[:_MAX_TEXT],
    }


def _number(value: float | None) -> float | None:
    """JSON has no infinity, and a page needs no more digits."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
