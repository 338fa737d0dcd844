"""Protobuf to values and back, for what a parameter server reports: status, and workers' metrics. Knows messages; no RPC."""

from collections.abc import Sequence

from ps_protocol import codec
from ps_protocol.shard import MetricCell, ShardStatus
from ps_protocol.v1 import parameter_service_pb2 as pb


def encode_shard_status(status: ShardStatus) -> pb.GetShardStatusResponse:
    """Encodes a shard's step, memory and counters."""
    return pb.GetShardStatusResponse(
        shard=status.shard,
        process_incarnation=status.process_incarnation,
        epoch=status.epoch,
        chief_incarnation=status.chief_incarnation,
        step=status.step,
        num_slices=status.num_slices,
        arena_bytes=status.arena_bytes,
        allocated_bytes=status.allocated_bytes,
        num_staged=status.num_staged,
        num_pushes=status.num_pushes,
        num_stale=status.num_stale,
        num_duplicates=status.num_duplicates,
        num_nonfinite=status.num_nonfinite,
        last_apply=codec.encode_duration(status.last_apply_s),
        settings_version=status.settings_version,
        num_sharing=status.num_sharing,
        chief_address=status.chief_address,
        chief_heard_ago=None if status.chief_heard_ago_s is None else codec.encode_duration(status.chief_heard_ago_s),
        alone=status.is_alone,
        life=status.life,
    )


def decode_shard_status(message: pb.GetShardStatusResponse) -> ShardStatus:
    """Decodes a shard's step, memory and counters."""
    return ShardStatus(
        shard=message.shard,
        process_incarnation=message.process_incarnation,
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        step=message.step if message.HasField("step") else None,
        num_slices=message.num_slices,
        arena_bytes=message.arena_bytes,
        allocated_bytes=message.allocated_bytes,
        num_staged=message.num_staged,
        num_pushes=message.num_pushes,
        num_stale=message.num_stale,
        num_duplicates=message.num_duplicates,
        num_nonfinite=message.num_nonfinite,
        last_apply_s=codec.decode_duration(message.last_apply),
        settings_version=message.settings_version,
        num_sharing=message.num_sharing,
        chief_address=message.chief_address,
        chief_heard_ago_s=codec.decode_duration(message.chief_heard_ago) if message.HasField("chief_heard_ago") else None,
        is_alone=message.alone,
        life=message.life,
    )


def encode_metric_cells(cells: Sequence[MetricCell]) -> pb.ReadMetricsResponse:
    """Encodes what workers have reported."""
    return pb.ReadMetricsResponse(
        cells=[
            pb.MetricCell(name=cell.name, worker=cell.worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)
            for cell in cells
        ]
    )


def decode_metric_cells(message: pb.ReadMetricsResponse) -> tuple[MetricCell, ...]:
    """Decodes what workers have reported."""
    return tuple(
        MetricCell(name=cell.name, worker=cell.worker, total=cell.total, weight=cell.weight, count=cell.count, last=cell.last)
        for cell in message.cells
    )
