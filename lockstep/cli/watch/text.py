"""Formats a chief's status as text and JSON: tables, checkpoints and recovery, why a cluster waits. Pure: knows no terminal."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from chief.page.cost import CostCount
from lockstep.cli.formatting import bytes_text, duration_text, plain, printable, printable_lines, table
from ps_protocol.model.spec import PlacedSlice, Placement
from ps_protocol.roles.chief import (
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
    DataStatus,
    LedgerEntry,
    ParticipantKind,
    ParticipantStatus,
    ServerStatus,
)
from ps_protocol.roles.shard import ShardReport

# Checkpoints, rollbacks and training data as text.


_CLAIMS = {
    "none": "only when asked for",
    "interval": "at intervals",
    "step": "with every step",
}


def recovery_lines(status: ClusterStatus) -> Iterator[str]:
    """Yields a line each about checkpoints, rollbacks, the chief's successors and training data, where there are any."""
    if status.checkpoint is not None and status.checkpoint.durability:
        yield checkpoint_text(status.checkpoint)
    if status.num_rollbacks:
        times = "once" if status.num_rollbacks == 1 else f"{status.num_rollbacks} times"
        yield f"rolled back {times}; the latest: {status.last_rollback}" if status.last_rollback else f"rolled back {times}"
    if status.chief_incarnation > 1:
        times = "once" if status.chief_incarnation == 2 else f"{status.chief_incarnation - 1} times"
        yield f"the chief has been replaced {times}: its process ended, and another one took over"
    if status.data is not None:
        yield data_text(status.data)


def checkpoint_text(checkpoint: CheckpointStatus) -> str:
    """Returns when checkpoints are made, and which is the latest."""
    parts = [f"checkpoints: {_CLAIMS.get(checkpoint.durability, checkpoint.durability)}"]
    parts.append(
        f"latest {checkpoint.tag} (step {checkpoint.step}, {checkpoint.age_s:.0f} s ago)"
        if checkpoint.tag
        else "this run has no complete checkpoint yet"
    )
    if checkpoint.saving:
        parts.append(f"{checkpoint.saving} is being written")
    if checkpoint.failure:
        parts.append(f"THE LAST ATTEMPT FAILED: {checkpoint.failure}")
    return "; ".join(parts)


def data_text(data: DataStatus) -> str:
    """Returns the progress through the training data."""
    return f"data {data.name!r}: pass {data.epoch + 1}, {data.num_done} of {data.num_ranges} ranges done, {data.num_leased} leased"


def loss_text(status: ClusterStatus) -> str:
    """Returns what the loss of a parameter server would cost now; empty if there is no model to lose."""
    if status.state not in (ClusterState.TRAINING, ClusterState.RECOVERING):
        return ""
    if status.shards and all(link.standby for link in status.shards):
        return "the loss of a parameter server would cost nothing: each has a standby"
    checkpoint = status.checkpoint
    if checkpoint is None or not checkpoint.durability:
        return "the loss of a parameter server would cost the whole training: there are no checkpoints (--checkpoint-dir)"
    if not checkpoint.tag:
        return "the loss of a parameter server would cost all steps of this run: it has no complete checkpoint yet"
    num_steps = max(0, status.global_step - checkpoint.step)
    cost = f"{num_steps} step{'s' * (num_steps != 1)}, those since" if num_steps else "no step, since all are in"
    return f"the loss of a parameter server would cost {cost} {checkpoint.tag}"


# The status of a cluster as text and as JSON.


_STATES = {
    ClusterState.CONNECTING: "connecting to the parameter servers",
    ClusterState.WAITING_FOR_MODEL: "waiting for a model",
    ClusterState.TRAINING: "training",
    ClusterState.FINISHED: "finished",
    ClusterState.FAILED: "FAILED",
    ClusterState.RECOVERING: "RECOVERING",
}


def as_json(status: ClusterStatus, *, placement: Placement | None = None) -> str:
    """Returns every field by its own name; enums in lower case, durations in seconds; the placement, if given, slice by slice."""
    fields = dataclasses.asdict(status)
    if placement is not None:
        fields["placement"] = [_slice_fields(placed) for placed in placement]
    return json.dumps(plain(fields), indent=2)


def as_text(status: ClusterStatus, *, placement: Placement | None = None) -> str:
    """Returns tables, and what the cluster waits for; with a placement, also where each variable lies."""
    parts = ["\n".join(_headline(status)), _participants(status.participants), _shards(status.shards), _reports(status.shards)]
    parts.append(f"contributions since the start: {status.num_accepted} accepted, {status.num_stale} stale, {status.num_late} late")
    if placement is not None:
        parts.append(_placement(placement))
    if status.ledger:
        parts.append(_ledger(status.ledger))
    return "\n\n".join(part for part in parts if part)


def policy_text(status: ClusterStatus) -> str:
    """Returns how the cluster's workers are coordinated, with the numbers."""
    expected = f"{status.total_num_replicas} workers expected" if status.total_num_replicas else "any number of workers"
    needs = f"a step needs {status.replicas_to_aggregate} contribution{'s' * (status.replicas_to_aggregate != 1)}"
    if status.min_replicas and status.min_replicas < status.replicas_to_aggregate:
        needs += f" (when workers are gone as many as are left, {status.min_replicas} at least)"
    return f"policy {status.policy.text}: {needs if status.policy.has_common_steps else 'every contribution is a step'}, {expected}"


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
    if status.state is ClusterState.TRAINING and status.policy.has_common_steps:
        count = f"{status.num_contributions} of {status.replicas_to_aggregate} contributions"
        yield f"this step: {count} after {duration_text(status.step_age_s)}"
    if status.waiting_for:
        yield f"waiting: {status.waiting_for}"
    yield from (printable(line) for line in recovery_lines(status))
    yield _cpu_text(status)


def _cpu_text(status: ClusterStatus) -> str:
    used = ", ".join(f"{role} {duration_text(seconds)}" for role, seconds in CostCount().add(status, at=0.0).cpu_s.items())
    return f"processor time of the processes, since each began: {used}"


def _participants(participants: Sequence[ParticipantStatus]) -> str:
    if not participants:
        return "no worker has joined yet"
    rows = [("worker", "state", "last seen", "accepted", "stale", "late", "cpu", "process")]
    failures = []
    for one in participants:
        is_worker = one.kind is ParticipantKind.WORKER
        name = str(one.index) if is_worker else f"observer {one.index}"
        state = "waiting" if one.state == "live" and one.is_waiting else one.state
        counts = (str(one.num_accepted), str(one.num_stale), str(one.num_late)) if is_worker else ("", "", "")
        cpu = duration_text(one.traffic.cpu_s) if one.traffic is not None else "-"
        rows.append((name, state, f"{duration_text(one.seen_ago_s)} ago", *counts, cpu, f"{one.host} pid {one.pid}"))
        if one.failure:
            failures.append(f"{'worker' if is_worker else 'observer'} {one.index} left with a failure: {printable(one.failure)}")
    return "\n".join([table(rows, left=(0, 1, 7)), *failures])


def _shards(shards: Sequence[ServerStatus]) -> str:
    rows = [("ps", "state", "step", "variables", "slices", "address")]
    for link in shards:
        state = "reachable" if link.is_reachable else "UNREACHABLE"
        step = "-" if link.step is None else str(link.step)
        rows.append((str(link.index), state, step, bytes_text(link.arena_bytes), str(link.num_slices), link.address + _standby(link)))
    return table(rows, left=(0, 1, 5))


def _reports(shards: Sequence[ServerStatus]) -> str:
    """Returns a table of all fields of each parameter server's latest report to the chief."""
    names = [field.name for field in dataclasses.fields(ShardReport)]
    rows = [("ps", *(_heading(name) for name in names))]
    rows += [
        (str(link.index), *(_amount(name, getattr(link.report, name)) for name in names)) for link in shards if link.report is not None
    ]
    return f"{table(rows, left=(0,))}\n{_COPIES}" if len(rows) > 1 else ""


_COPIES = "(variables of a report: two copies, the next step's beside the present one's; of tables one)"


def _heading(name: str) -> str:
    return name.removeprefix("num_").removesuffix("_bytes").removesuffix("_s").replace("_", " ")


def _amount(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return bytes_text(int(value))
    return duration_text(value) if name.endswith("_s") else str(value)


def _standby(link: ServerStatus) -> str:
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


# Why a cluster waits: the step, what is missing, when each worker was last seen, what happens next.


_DOING = {
    ClusterState.CONNECTING: "the chief looks for its parameter servers",
    ClusterState.WAITING_FOR_MODEL: "there is no model yet",
    ClusterState.RECOVERING: "the cluster is being brought back to a checkpoint",
    ClusterState.FINISHED: "training is finished",
    ClusterState.FAILED: "training has FAILED",
}
_NEXT = {
    ClusterState.CONNECTING: "training begins, or continues, once all parameter servers answer",
    ClusterState.WAITING_FOR_MODEL: "training begins as soon as one worker has initialised the model",
    ClusterState.RECOVERING: "once all parameter servers hold the checkpoint, the workers continue by themselves at its step",
    ClusterState.FINISHED: "the processes end once the last worker has left, or its lease has ended",
    ClusterState.FAILED: "the workers raise the error, and the processes end; fix what is named above and start the cluster again",
}


def why_text(status: ClusterStatus) -> str:
    """Returns a few lines: the step, what the cluster waits for, which workers and servers that concerns, and what happens next."""
    lines = [_situation(status), *_wait(status), *_workers(status), *_unreachable(status.shards), *_nonfinite(status.shards)]
    lines += recovery_lines(status)
    lines += [f"next: {_next(status)}"]
    loss = loss_text(status)
    return printable_lines([*lines, loss] if loss else lines)


def _situation(status: ClusterStatus) -> str:
    step = f"step {status.global_step}" + (f" of {status.max_steps}" if status.max_steps is not None else "")
    if status.state is not ClusterState.TRAINING:
        return f"cluster {status.cluster!r}, {step}, epoch {status.epoch}: {_DOING[status.state]}"
    needs = f", with {status.num_contributions} of {status.replicas_to_aggregate} contributions" if status.policy.has_common_steps else ""
    return f"cluster {status.cluster!r}, {step}, epoch {status.epoch}: open for {duration_text(status.step_age_s)}{needs}"


def _wait(status: ClusterStatus) -> Iterator[str]:
    if status.reason:
        yield f"reason: {status.reason}"
    if status.waiting_for and status.waiting_for != status.reason:
        yield f"waits for: {status.waiting_for}"
    elif status.state is ClusterState.TRAINING:
        yield "waits for nothing: a step is under way"


def _workers(status: ClusterStatus) -> Iterator[str]:
    """Yields a line for each worker, the longest silent first: it is most likely the one that the cluster waits for."""
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    for one in sorted(workers, key=lambda one: -one.seen_ago_s):
        yield f"  worker {one.index}: {_state_text(one, status)}, last seen {duration_text(one.seen_ago_s)} ago ({one.host} pid {one.pid})"
    places = status.total_num_replicas
    yield from (f"  worker {index}: has never joined" for index in range(places) if index not in {one.index for one in workers})


def _state_text(one: ParticipantStatus, status: ClusterStatus) -> str:
    if one.state == "lapsed":
        return "silent: its lease has ended"
    if one.state == "left":
        return f"left with a failure: {one.failure}" if one.failure else "left"
    if one.is_waiting:
        return "waits for the step"
    if one.is_silent:
        return "silent"
    return "at work" if status.state is ClusterState.TRAINING else "here"


def _unreachable(shards: tuple[ServerStatus, ...]) -> Iterator[str]:
    for link in shards:
        if not link.is_reachable:
            yield f"  ps {link.index} at {link.address}: DOES NOT ANSWER"
        if link.standby_missing:
            yield f"  ps {link.index} at {link.address} HAS NO STANDBY: {printable(link.standby_missing)}"
    steps = {link.step for link in shards if link.is_reachable and link.step is not None}
    if len(steps) > 1:
        yield "  steps of the parameter servers: " + ", ".join(
            f"ps {link.index} at {link.step}" for link in shards if link.step is not None
        )


def _nonfinite(shards: tuple[ServerStatus, ...]) -> Iterator[str]:
    for link in shards:
        if link.report is not None and link.report.num_nonfinite:
            what = f"{link.report.num_nonfinite} elements that are NaN or infinite"
            yield f"  ps {link.index}: the gradient of the last step had {what}; --reject-nonfinite at the chief would refuse it"


def _next(status: ClusterStatus) -> str:
    if status.state is not ClusterState.TRAINING:
        return _NEXT[status.state]
    if any(not link.is_reachable for link in status.shards):
        if status.checkpoint is not None and status.checkpoint.tag:
            back = f"the cluster goes back to {status.checkpoint.tag}"
            return f"if the parameter server comes back with its model the step continues; if it was started anew, {back}"
        return "if the parameter server comes back with its model the step continues; if its model is lost, so is the training"
    if not status.waiting_for:
        return "the step is applied when its contributions have arrived, and every waiting worker continues at once"
    if status.policy.has_common_steps and status.min_replicas:
        return f"when a lease ends, the step needs a contribution less, {status.min_replicas} at least"
    return "as soon as what is missing has come, the step is applied and every waiting worker continues"
