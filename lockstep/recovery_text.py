"""What a cluster keeps, and what it was brought back to, in words. Pure: from a ClusterStatus; knows no terminal and no network."""

from collections.abc import Iterator

from ps_protocol.chief import CheckpointStatus, ClusterState, ClusterStatus, DataStatus

_CLAIMS = {
    "none": "only when asked for",
    "interval": "now and then",
    "step": "with every step",
}


def recovery_lines(status: ClusterStatus) -> Iterator[str]:
    """Yields a line for each thing there is: checkpoints, rollbacks, the chief's successors, training data."""
    if status.checkpoint is not None and status.checkpoint.durability:
        yield checkpoint_text(status.checkpoint)
    if status.num_rollbacks:
        times = "once" if status.num_rollbacks == 1 else f"{status.num_rollbacks} times"
        yield f"rolled back {times}; the latest: {status.last_rollback}" if status.last_rollback else f"rolled back {times}"
    if status.chief_incarnation > 1:
        yield f"this is chief {status.chief_incarnation} of the cluster"
    if status.data is not None:
        yield data_text(status.data)


def checkpoint_text(checkpoint: CheckpointStatus) -> str:
    """Says when checkpoints are made, and which is the latest."""
    parts = [f"checkpoints: {_CLAIMS.get(checkpoint.durability, checkpoint.durability)}"]
    parts.append(
        f"latest {checkpoint.tag} (step {checkpoint.step}, {checkpoint.age_s:.0f} s ago)"
        if checkpoint.tag
        else "none of this run is whole yet"
    )
    if checkpoint.saving:
        parts.append(f"{checkpoint.saving} is being written")
    if checkpoint.failure:
        parts.append(f"THE LAST ATTEMPT FAILED: {checkpoint.failure}")
    return "; ".join(parts)


def data_text(data: DataStatus) -> str:
    """Says how far the training data is."""
    return f"data {data.name!r}: pass {data.epoch + 1}, {data.num_done} of {data.num_ranges} ranges done, {data.num_leased} leased"


def loss_text(status: ClusterStatus) -> str:
    """Says what the loss of a parameter server would cost now; empty where there is no model that could be lost."""
    if status.state not in (ClusterState.TRAINING, ClusterState.RECOVERING):
        return ""
    if status.shards and all(link.standby for link in status.shards):
        return "the loss of a parameter server would cost nothing: each has a standby"
    checkpoint = status.checkpoint
    if checkpoint is None or not checkpoint.durability:
        return "the loss of a parameter server would cost the whole training: there are no checkpoints (--checkpoint-dir)"
    if not checkpoint.tag:
        return "the loss of a parameter server would cost all steps of this run: no checkpoint of it is whole yet"
    num_steps = max(0, status.global_step - checkpoint.step)
    cost = f"{num_steps} step{'s' * (num_steps != 1)}, those since" if num_steps else "no step, since all are in"
    return f"the loss of a parameter server would cost {cost} {checkpoint.tag}"
