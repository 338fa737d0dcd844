"""The status of a cluster as text and as JSON. Pure: from a ClusterStatus; knows no terminal and no network."""

import dataclasses
import enum
import json
from collections.abc import Iterator, Sequence

from lockstep.recovery_text import recovery_lines
from ps_protocol.chief import ClusterState, ClusterStatus, LedgerEntry, ParticipantKind, ParticipantStatus, ShardLink
from ps_protocol.model import PlacedSlice, Placement

_STATES = {
    ClusterState.CONNECTING: "connecting to the parameter servers",
    ClusterState.WAITING_FOR_MODEL: "waiting for a model",
    ClusterState.TRAINING: "training",
    ClusterState.FINISHED: "finished",
    ClusterState.FAILED: "FAILED",
    ClusterState.RECOVERING: "RECOVERING",
}


def as_json(status: ClusterStatus, *, placement: Placement | None = None) -> str:
    """Returns every field by its own name; enums in lower case, durations in seconds. With a placement also that, slice by slice."""
    fields = dataclasses.asdict(status)
    if placement is not None:
        fields["placement"] = [_slice_fields(placed) for placed in placement]
    return json.dumps(_plain(fields), indent=2)


def as_text(status: ClusterStatus, *, placement: Placement | None = None) -> str:
    """Returns tables for a person, and in words what the cluster waits for; with a placement also where each variable lies."""
    parts = ["\n".join(_headline(status)), _participants(status.participants), _shards(status.shards)]
    parts.append(f"contributions since the start: {status.num_accepted} accepted, {status.num_stale} stale, {status.num_late} late")
    if placement is not None:
        parts.append(_placement(placement))
    if status.ledger:
        parts.append(_ledger(status.ledger))
    return "\n\n".join(part for part in parts if part)


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """Lays out rows, the first of them the heading; columns are aligned right but for those in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def bytes_text(count: int) -> str:
    """Says a number of bytes in the unit that suits it."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def duration_text(seconds: float) -> str:
    """Says a duration in the unit that suits it."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def policy_text(status: ClusterStatus) -> str:
    """Says how the cluster's workers are coordinated, with the numbers."""
    expected = f"{status.total_num_replicas} workers expected" if status.total_num_replicas else "any number of workers"
    needs = f"a step needs {status.replicas_to_aggregate} contribution{'s' * (status.replicas_to_aggregate != 1)}"
    if status.min_replicas and status.min_replicas < status.replicas_to_aggregate:
        needs += f" (when workers are gone as many as are left, {status.min_replicas} at least)"
    return f"policy {status.policy}: {needs if is_sync(status) else 'every contribution is a step'}, {expected}"


def is_sync(status: ClusterStatus) -> bool:
    """Whether a step is the mean of several contributions."""
    return status.policy.startswith("sync")


def _headline(status: ClusterStatus) -> Iterator[str]:
    step = f"step {status.global_step}" + (f" of {status.max_steps}" if status.max_steps is not None else "")
    yield f"cluster {status.cluster!r}: {_STATES[status.state]}, {step}"
    if status.reason:
        yield f"reason: {status.reason}"
    yield f"{policy_text(status)}, epoch {status.epoch}"
    if status.optimizer:
        version = f", version {status.hyperparameters_version}" if status.hyperparameters_version else ""
        yield f"optimizer {printable(status.optimizer)}{version}"
    if status.max_observed_staleness:
        yield f"staleness: a contribution was computed from variables at most {status.max_observed_staleness} steps old"
    if status.state is ClusterState.TRAINING and is_sync(status):
        count = f"{status.num_contributions} of {status.replicas_to_aggregate} contributions"
        yield f"this step: {count} after {duration_text(status.step_age_s)}"
    if status.waiting_for:
        yield f"waiting: {status.waiting_for}"
    yield from (printable(line) for line in recovery_lines(status))


def _participants(participants: Sequence[ParticipantStatus]) -> str:
    if not participants:
        return "no worker has come yet"
    rows = [("worker", "state", "last seen", "accepted", "stale", "late", "process")]
    failures = []
    for one in participants:
        is_worker = one.kind is ParticipantKind.WORKER
        name = str(one.index) if is_worker else f"observer {one.index}"
        state = "waiting" if one.state == "live" and one.is_waiting else one.state
        counts = (str(one.num_accepted), str(one.num_stale), str(one.num_late)) if is_worker else ("", "", "")
        rows.append((name, state, f"{duration_text(one.seen_ago_s)} ago", *counts, f"{one.host} pid {one.pid}"))
        if one.failure:
            failures.append(f"{'worker' if is_worker else 'observer'} {one.index} left with a failure: {printable(one.failure)}")
    return "\n".join([table(rows, left=(0, 1, 6)), *failures])


def _shards(shards: Sequence[ShardLink]) -> str:
    rows = [("ps", "state", "step", "variables", "slices", "address")]
    for link in shards:
        state = "reachable" if link.is_reachable else "UNREACHABLE"
        step = "-" if link.step is None else str(link.step)
        rows.append((str(link.index), state, step, bytes_text(link.arena_bytes), str(link.num_slices), link.address + _standby(link)))
    return table(rows, left=(0, 1, 5))


def _standby(link: ShardLink) -> str:
    if link.standby:
        return f", standby {link.standby}"
    return f", NO STANDBY: {printable(link.standby_missing)}" if link.standby_missing else ""


def _placement(placement: Placement) -> str:
    rows = [("variable", "ps", "type", "shape", "part", "bytes")]
    for placed in placement:
        piece, variable = placed.slice, placed.slice.variable
        part = "" if piece.is_whole else f"{piece.start} to {piece.stop} of axis {piece.axis}"
        shape = "×".join(map(str, variable.shape)) or "scalar"
        rows.append((printable(variable.name), str(placed.shard), variable.data_type.value, shape, part, bytes_text(piece.nbytes)))
    return table(rows, left=(0, 2, 3, 4)) if placement else "no model yet, so no variable lies anywhere"


def _slice_fields(placed: PlacedSlice) -> dict[str, object]:
    piece, variable = placed.slice, placed.slice.variable
    where = {"shard": placed.shard, "axis": piece.axis, "start": piece.start, "stop": piece.stop, "bytes": piece.nbytes}
    return {"variable": variable.name, "data_type": variable.data_type, "shape": variable.shape, **where}


def _ledger(entries: Sequence[LedgerEntry]) -> str:
    rows = [("step", "took", "apply", "stale", "late", "last", "contributors")]
    for entry in entries:
        contributors = " ".join(str(push.worker) for push in entry.contributors)
        times = (duration_text(entry.duration_s), duration_text(entry.apply_duration_s))
        rows.append((str(entry.step), *times, str(entry.num_stale), str(entry.num_late), str(entry.last_worker), contributors))
    return table(rows, left=(6,))


def printable(text: str) -> str:
    """Returns text that came over the network without what could move a terminal's cursor."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
