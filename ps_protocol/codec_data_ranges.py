"""Protobuf to checked values and back, for ranges of the training data, and checkpoints on demand. Knows messages; no RPC."""

from ps_protocol import codec
from ps_protocol.chief import LeaseReply, LeaseResult, SavedCheckpoint
from ps_protocol.data_ranges import DataProgress, DataRange, DataSpec
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_data(data: DataSpec) -> pb.DataSpec:
    """Encodes the training data as a cluster goes through it."""
    return pb.DataSpec(
        name=data.name,
        num_samples=data.num_samples,
        range_size=data.range_size,
        num_epochs=data.num_epochs,
        shuffle_seed=data.shuffle_seed,
    )


def decode_data(message: pb.DataSpec) -> DataSpec:
    """Decodes and checks the training data; raises InvalidSpec."""
    return DataSpec(
        name=message.name,
        num_samples=message.num_samples,
        range_size=message.range_size,
        num_epochs=message.num_epochs,
        shuffle_seed=message.shuffle_seed if message.HasField("shuffle_seed") else None,
    )


def encode_lease_reply(reply: LeaseReply) -> pb.LeaseRangesResponse:
    """Encodes how a wish for ranges ended."""
    return pb.LeaseRangesResponse(
        result=f"LEASE_RESULT_{reply.result.name}",
        ranges=[pb.DataRange(id=one.id, epoch=one.epoch, start=one.start, stop=one.stop) for one in reply.ranges],
        waiting_for=reply.waiting_for,
    )


def decode_lease_reply(message: pb.LeaseRangesResponse) -> LeaseReply:
    """Decodes how a wish for ranges ended."""
    return LeaseReply(
        result=codec.decode_choice(LeaseResult, message.result, field="result"),
        ranges=tuple(DataRange(id=one.id, epoch=one.epoch, start=one.start, stop=one.stop) for one in message.ranges),
        waiting_for=message.waiting_for,
    )


def encode_progress(progress: DataProgress) -> pb.DataProgress:
    """Encodes how far a cluster is in its training data."""
    return pb.DataProgress(data=encode_data(progress.data), epoch=progress.epoch, done=progress.done)


def decode_progress(message: pb.DataProgress) -> DataProgress:
    """Decodes how far a cluster is in its training data."""
    codec.require(message, "data")
    return DataProgress(data=decode_data(message.data), epoch=message.epoch, done=tuple(message.done))


def encode_saved(saved: SavedCheckpoint) -> pb.SaveCheckpointResponse:
    """Encodes a whole checkpoint, or what is waited for."""
    return pb.SaveCheckpointResponse(tag=saved.tag, step=saved.step, waiting_for=saved.waiting_for)


def decode_saved(message: pb.SaveCheckpointResponse) -> SavedCheckpoint:
    """Decodes a whole checkpoint, or what is waited for."""
    return SavedCheckpoint(tag=message.tag, step=message.step, waiting_for=message.waiting_for)
