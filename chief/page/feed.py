"""The page's data as JSON: the cluster at a moment, and what is new since the last request. Knows looks and values; no port, no thread."""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chief.page.curves import Point
from chief.page.event_log import Entry
from chief.page.look import Look, eta_s
from ps_protocol.roles.chief import ClusterStatus, LedgerEntry, ParticipantKind, ParticipantStatus

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
        "conditions": _plain(status.conditions),
        "step": status.global_step,
        "max_steps": status.max_steps,
        "step_age_s": _number(status.step_age_s),
        "steps_per_s": _number(look.steps_per_s),
        "eta_s": _number(eta_s(look)),
        "is_held_up": bool(status.waiting_for),
        "cost": _plain(look.cost),
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
        "checkpoint": _plain(status.checkpoint),
        "data": _plain(status.data),
        "workers": {"columns": (*_WORKER_COLUMNS,), "rows": [[get(one, look) for get in _WORKER_COLUMNS.values()] for one in participants]},
        "num_participants": len(status.participants),
        "servers": _plain(status.shards),
        "steps": {"columns": STEP_COLUMNS, "rows": [_step(entry, look) for entry in reversed(status.ledger)]},
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


def _rate(one: ParticipantStatus, look: Look) -> float | None:
    return look.contributions_per_s.get(one.index) if one.kind is ParticipantKind.WORKER else None


def _share_last(one: ParticipantStatus, look: Look) -> float | None:
    """Returns in which part of the latest steps a worker was the last."""
    num_steps = len(look.status.ledger)
    return look.num_last.get(one.index, 0) / num_steps if one.kind is ParticipantKind.WORKER and num_steps else None


_WORKER_COLUMNS: Mapping[str, Callable[[ParticipantStatus, Look], Any]] = {
    "kind": lambda one, look: one.kind.name.lower(),
    "index": lambda one, look: one.index,
    "host": lambda one, look: one.host,
    "pid": lambda one, look: one.pid,
    "state": lambda one, look: one.state,
    "phase": lambda one, look: one.doing,
    "per_s": lambda one, look: _number(_rate(one, look)),
    "share_last": lambda one, look: _number(_share_last(one, look)),
    "accepted": lambda one, look: one.num_accepted,
    "stale": lambda one, look: one.num_stale,
    "late": lambda one, look: one.num_late,
    "seen_ago_s": lambda one, look: _number(one.seen_ago_s),
    "failure": lambda one, look: one.failure[:_MAX_TEXT],
    "transport": lambda one, look: one.transport,
    "sent_bytes": lambda one, look: one.traffic and one.traffic.sent_bytes,
    "received_bytes": lambda one, look: one.traffic and one.traffic.received_bytes,
    "cpu_s": lambda one, look: one.traffic and _number(one.traffic.cpu_s),
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


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: all fields of a dataclass by their names; no more text and digits than a page needs."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    return _number(value) if isinstance(value, float) else value


def _number(value: float | None) -> float | None:
    """JSON has no infinity, and a page needs no more digits."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
