"""What a shard reports of itself."""

from ps_protocol import shared_memory as at
from ps_protocol.shard import ShardStatus
from ps_server.fences import Fences
from ps_server.shard_model import ShardModel


def shard_status(
    model: ShardModel | None,
    fences: Fences,
    *,
    shard: int,
    process_incarnation: int,
    allocated_bytes: int,
    last_apply_s: float,
    num_sharing: int = 0,
    chief_address: str = "",
    chief_heard_ago_s: float | None = None,
    is_alone: bool = False,
) -> ShardStatus:
    """Returns step, memory and counters; zeros for what there is not before the variables stand."""
    accumulator = model.accumulator if model else None
    layout = model.spec.layout if model else None
    return ShardStatus(
        shard=shard,
        process_incarnation=process_incarnation,
        epoch=fences.epoch,
        chief_incarnation=fences.chief_incarnation,
        step=model.step if model else None,
        num_slices=len(layout.slices) + len(layout.tables) if layout else 0,
        arena_bytes=layout.nbytes + sum(table.nbytes for table in layout.tables) if layout else 0,
        allocated_bytes=allocated_bytes,
        num_staged=accumulator.num_staged if accumulator else 0,
        num_pushes=accumulator.num_pushes + model.shared.total(at.NUM_PUSHES) if model and accumulator else 0,
        num_stale=accumulator.num_stale + model.shared.total(at.NUM_STALE) if model and accumulator else 0,
        num_duplicates=accumulator.num_duplicates + model.shared.total(at.NUM_DUPLICATES) if model and accumulator else 0,
        num_nonfinite=model.num_nonfinite if model else 0,
        last_apply_s=last_apply_s,
        settings_version=model.settings.current.version if model else 0,
        num_sharing=num_sharing,
        chief_address=chief_address,
        chief_heard_ago_s=chief_heard_ago_s,
        is_alone=is_alone,
        life=fences.life,
    )
