"""The page's data as JSON: the cluster at a moment, and what is new since the last request. Knows looks and values; no port, no thread."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chief.page.cost import Cost
from chief.page.curves import Point
from chief.page.event_log import Entry
from chief.page.recorder import Look
from ps_protocol.roles.chief import (
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
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
# A worker that completes so many of the latest steps is the one that the others wait for.
_SLOW_SHARE, _LEAST_STEPS = 0.6, 20
_MAX_ROWS = 2_000
_MAX_TEXT = 600
_DOING = {
    ClusterState.CONNECTING: "The chief is looking for its parameter servers",
    ClusterState.WAITING_FOR_MODEL: "Waiting for the model",
    ClusterState.TRAINING: "Training",
    ClusterState.FINISHED: "Training is finished",
    ClusterState.FAILED: "Training has failed",
    ClusterState.RECOVERING: "Recovering",
}


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
        "headline": headline(look),
        "is_waiting": bool(status.waiting_for) or status.state is ClusterState.FAILED,
        "hint": hint(look),
        "step": status.global_step,
        "max_steps": status.max_steps,
        "step_age_s": _number(status.step_age_s),
        "steps_per_s": _number(look.steps_per_s),
        "eta_s": _number(eta_s(look)),
        "is_held_up": look.is_held_up,
        "cost": _cost(look.cost),
        "epoch": status.epoch,
        "policy": status.policy.text,
        "needs": status.replicas_to_aggregate if status.policy.has_common_steps else 1,
        "has_common_steps": status.policy.has_common_steps,
        "contributions": status.num_contributions,
        "optimizer": status.optimizer,
        "accepted": status.num_accepted,
        "stale": status.num_stale,
        "late": status.num_late,
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


def headline(look: Look) -> str:
    """Says in one sentence how the cluster is, and what it waits for."""
    status, doing = look.status, _DOING[look.status.state]
    if status.state in (ClusterState.FINISHED, ClusterState.FAILED):
        return f"{doing}: {status.waiting_for or status.reason}"
    if status.waiting_for:
        # It says by itself that it recovers.
        return status.waiting_for[:1].upper() + status.waiting_for[1:]
    return f"{doing}. Nothing is waited for." if status.state is ClusterState.TRAINING else f"{doing}."


def hint(look: Look) -> str:
    """Names the worker that the others wait for, or one too slow for steps to wait for it; empty: there is none."""
    status, num_steps = look.status, len(look.status.ledger)
    if status.state is not ClusterState.TRAINING or not status.policy.has_common_steps or num_steps < _LEAST_STEPS:
        return ""
    live = [one for one in status.participants if one.kind is ParticipantKind.WORKER and one.state == "live"]
    if len(live) < 2:
        return ""
    # First these: what is dropped is never the last of a step.
    if words := _in_vain(live, look) or _mostly_dropped(live, look):
        return words
    worker, number = max(look.num_last.items(), key=lambda item: item[1])
    if number < _SLOW_SHARE * num_steps:
        return ""
    waited_s = sum(entry.wait_duration_s for entry in status.ledger)
    all_s = sum(entry.duration_s for entry in status.ledger)
    part = f", and workers waited for the last one during {100 * waited_s / all_s:.0f} % of the time" if all_s > 0 else ""
    return f"Worker {worker} was the last in {100 * number / num_steps:.0f} % of the latest {num_steps} steps{part}."


def _in_vain(live: Sequence[ParticipantStatus], look: Look) -> str:
    """Names workers whose contributions all come too late."""
    found = [
        one
        for one in live
        if look.steps_per_s and look.contributions_per_s.get(one.index) == 0.0 and one.num_stale + one.num_late >= _LEAST_STEPS
    ]
    if not found:
        return ""
    names = ", ".join(f"worker {one.index}" for one in found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return f"None of the latest contributions of {names} counted: each came after its step was over. The others are faster."


def _mostly_dropped(live: Sequence[ParticipantStatus], look: Look) -> str:
    """Names the worker of which the most is dropped, if less than half as much of it counts as of the others."""
    rates = {one.index: look.contributions_per_s.get(one.index, 0.0) for one in live}
    one = max(live, key=_dropped_share)
    usual = sorted(rate for index, rate in rates.items() if index != one.index)[(len(rates) - 1) // 2]
    share, rate = _dropped_share(one), rates[one.index]
    if one.num_stale + one.num_late < _LEAST_STEPS or share < _SLOW_SHARE or rate >= usual / 2:
        return ""
    dropped = f"{100 * share:.0f} % of its contributions came after their step was over, and were dropped"
    return f"Worker {one.index} is slow: {rate:.2g} contributions/s count, of the others {usual:.2g}; {dropped}."


def _dropped_share(one: ParticipantStatus) -> float:
    num_dropped = one.num_stale + one.num_late
    return num_dropped / (num_dropped + one.num_accepted) if num_dropped else 0.0


def eta_s(look: Look) -> float | None:
    """Returns how long training takes at the present speed; None: that is not known, for example while training waits."""
    status, speed = look.status, look.steps_per_s
    if status.state is not ClusterState.TRAINING or look.is_held_up or status.max_steps is None or not speed or speed <= 0.0:
        return None
    return max(0, status.max_steps - status.global_step) / speed


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
        _phase(one, look.status),
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


def _phase(one: ParticipantStatus, status: ClusterStatus) -> str:
    if one.state == "lapsed":
        return "silent: its lease has ended"
    if one.state != "live":
        return one.state
    if one.kind is ParticipantKind.OBSERVER:
        return "looking on"
    if one.is_waiting:
        return "waiting for the step"
    if one.is_silent:
        return f"silent for {one.seen_ago_s:.0f} s"
    return "computing" if status.state is ClusterState.TRAINING else "here"


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
        "cpu_s": _number(report.cpu_s) if report else None,
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "is_of_last_hour": cost.is_of_last_hour,
        "cpu_s": {role: _number(seconds) for role, seconds in cost.cpu_s.items()},
        "sent_bytes": cost.sent_bytes,
        "received_bytes": cost.received_bytes,
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
