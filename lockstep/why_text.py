"""Why a cluster stands where it stands, for a person: the step, what is missing, who was seen when, what happens next. Pure."""

from collections.abc import Iterator

from lockstep.recovery_text import loss_text, recovery_lines
from lockstep.status_text import duration_text, is_sync, printable
from ps_protocol.chief import ClusterState, ClusterStatus, ParticipantKind, ParticipantStatus, ShardLink

_DOING = {
    ClusterState.CONNECTING: "the chief looks for its parameter servers",
    ClusterState.WAITING_FOR_MODEL: "there is no model yet",
    ClusterState.RECOVERING: "the cluster is being brought back to a checkpoint",
    ClusterState.FINISHED: "training is finished",
    ClusterState.FAILED: "training has FAILED",
}
_NEXT = {
    ClusterState.CONNECTING: "training begins, or goes on, once all parameter servers answer",
    ClusterState.WAITING_FOR_MODEL: "training begins as soon as one worker has initialised the model",
    ClusterState.RECOVERING: "once all parameter servers hold the checkpoint, the workers go on by themselves at its step",
    ClusterState.FINISHED: "the processes end once the last worker has left, or its lease has ended",
    ClusterState.FAILED: "the workers are told, and the processes end; mend what is said above and start the cluster again",
}


def why_text(status: ClusterStatus) -> str:
    """Returns a few lines: what the cluster is at, what it waits for, who and which server that concerns, and what happens next."""
    lines = [_headline(status), *_wait(status), *_workers(status), *_shards(status.shards)]
    lines += recovery_lines(status)
    lines += [f"next: {_next(status)}"]
    loss = loss_text(status)
    return printable_lines([*lines, loss] if loss else lines)


def printable_lines(lines: list[str]) -> str:
    """Returns the lines without what could move a terminal's cursor."""
    return "\n".join(printable(line) for line in lines)


def _headline(status: ClusterStatus) -> str:
    step = f"step {status.global_step}" + (f" of {status.max_steps}" if status.max_steps is not None else "")
    if status.state is not ClusterState.TRAINING:
        return f"cluster {status.cluster!r}, {step}, epoch {status.epoch}: {_DOING[status.state]}"
    needs = f", with {status.num_contributions} of {status.replicas_to_aggregate} contributions" if is_sync(status) else ""
    return f"cluster {status.cluster!r}, {step}, epoch {status.epoch}: open for {duration_text(status.step_age_s)}{needs}"


def _wait(status: ClusterStatus) -> Iterator[str]:
    if status.reason:
        yield f"reason: {status.reason}"
    if status.waiting_for and status.waiting_for != status.reason:
        yield f"waits for: {status.waiting_for}"
    elif status.state is ClusterState.TRAINING:
        yield "waits for nothing: it is at work"


def _workers(status: ClusterStatus) -> Iterator[str]:
    """The most silent first: it is most likely the one that is waited for."""
    workers = [one for one in status.participants if one.kind is ParticipantKind.WORKER]
    for one in sorted(workers, key=lambda one: -one.seen_ago_s):
        yield f"  worker {one.index}: {_standing(one, status)}, last seen {duration_text(one.seen_ago_s)} ago ({one.host} pid {one.pid})"
    places = status.total_num_replicas
    yield from (f"  worker {index}: has never joined" for index in range(places) if index not in {one.index for one in workers})


def _standing(one: ParticipantStatus, status: ClusterStatus) -> str:
    if one.state == "lapsed":
        return "gone: its lease has ended"
    if one.state == "left":
        return f"left with a failure: {one.failure}" if one.failure else "left"
    if one.is_waiting:
        return "waits for the step"
    return "at work" if status.state is ClusterState.TRAINING else "here"


def _shards(shards: tuple[ShardLink, ...]) -> Iterator[str]:
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


def _next(status: ClusterStatus) -> str:
    if status.state is not ClusterState.TRAINING:
        return _NEXT[status.state]
    if any(not link.is_reachable for link in status.shards):
        if status.checkpoint is not None and status.checkpoint.tag:
            back = f"the cluster goes back to {status.checkpoint.tag}"
            return f"if the parameter server comes back with its model the step goes on; if it was started anew, {back}"
        return "if the parameter server comes back with its model the step goes on; if its model is lost, so is the training"
    if not status.waiting_for:
        return "the step is applied when its contributions are there, and every waiting worker is told at once"
    if is_sync(status) and status.min_replicas:
        return f"when a lease ends, the step needs a contribution less, {status.min_replicas} at least"
    return "as soon as what is missing has come, the step is applied and every waiting worker goes on"
