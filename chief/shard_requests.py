"""What shards are sent for an instruction of the coordinator. Pure: makes requests; sends none."""

from chief.events import ApplyStep, ConfigureShards, PrepareStep
from ps_protocol.shard import ApplyRequest, ShardSettings


def prepare_request(step: PrepareStep, *, chief_incarnation: int) -> ApplyRequest:
    """Returns what every shard is sent to prepare a step."""
    return ApplyRequest(
        epoch=step.epoch, chief_incarnation=chief_incarnation, step=step.step, contributors=step.contributors, weights=step.weights
    )


def apply_requests(step: ApplyStep, *, chief_incarnation: int, num_shards: int) -> tuple[ApplyRequest, ...]:
    """Returns what each shard is sent to apply a step: the same, but for the scales of its own slices."""
    return tuple(
        ApplyRequest(
            epoch=step.epoch,
            chief_incarnation=chief_incarnation,
            step=step.step,
            contributors=step.contributors,
            weights=step.weights,
            scales=step.scales[index] if step.scales else (),
            discards=step.discards,
        )
        for index in range(num_shards)
    )


def settings_of(change: ConfigureShards, *, chief_incarnation: int) -> ShardSettings:
    """Returns what every shard is sent to work otherwise."""
    return ShardSettings(
        epoch=change.epoch,
        chief_incarnation=chief_incarnation,
        version=change.version,
        step=change.step,
        accepts_stale=change.accepts_stale,
        applies_on_arrival=change.applies_on_arrival,
        optimizers=change.optimizers,
    )
