"""Protobuf to checked values and back: what a server is told and says when chiefs change, and about checkpoints. Knows no RPC."""

import re

from ps_protocol import codec, codec_shard
from ps_protocol.call_errors import decode_call_error, encode_call_error
from ps_protocol.checkpoint import check_tag
from ps_protocol.chief import MAX_WAIT_SLICE_S
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.shard import (
    MAX_STEP,
    Adoption,
    AppliedPush,
    CheckpointFile,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    WorkerPushes,
)
from ps_protocol.v1 import parameter_service_pb2 as pb

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SAVE_STATES = {state: f"SAVE_STATE_{state.name}" for state in SaveState}


def encode_adoption(adoption: Adoption) -> pb.AdoptShardResponse:
    """Encodes where a shard stands."""
    last = adoption.last_apply
    return pb.AdoptShardResponse(
        step=adoption.step,
        layout_hash=adoption.layout_hash,
        record=adoption.record,
        record_version=adoption.record_version,
        last_apply=None if last is None else codec_shard.encode_apply_request(last),
        pushes=[encode_worker_pushes(pushes) for pushes in adoption.pushes],
    )


def decode_adoption(message: pb.AdoptShardResponse) -> Adoption:
    """Decodes where a shard stands."""
    return Adoption(
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        record=message.record,
        record_version=message.record_version,
        last_apply=codec_shard.decode_apply_request(message.last_apply) if message.HasField("last_apply") else None,
        pushes=codec.decode_each(message.pushes, decode_worker_pushes, field="pushes"),
    )


def encode_worker_pushes(pushes: WorkerPushes) -> pb.WorkerPushes:
    """Encodes what has been applied of one worker lately."""
    applied = [pb.AppliedPush(sequence=push.sequence, step=push.step) for push in pushes.applied]
    return pb.WorkerPushes(worker=pushes.worker, incarnation=pushes.incarnation, applied=applied)


def decode_worker_pushes(message: pb.WorkerPushes) -> WorkerPushes:
    """Decodes what has been applied of one worker lately."""
    applied = tuple(AppliedPush(sequence=push.sequence, step=push.step) for push in message.applied)
    return WorkerPushes(worker=message.worker, incarnation=message.incarnation, applied=applied)


def encode_save_request(request: SaveRequest, *, max_wait_s: float = 0.0) -> pb.SaveShardRequest:
    """Encodes a step to save, and how long to wait for the end."""
    return pb.SaveShardRequest(
        epoch=request.epoch,
        chief_incarnation=request.chief_incarnation,
        step=request.step,
        tag=request.tag,
        max_wait=codec.encode_duration(max_wait_s) if max_wait_s else None,
        num_shards=request.num_shards,
    )


def decode_save_request(message: pb.SaveShardRequest) -> SaveRequest:
    """Decodes and checks a step to save."""
    if not 0 <= message.step <= MAX_STEP:
        raise InvalidSpec(f"step: got {message.step}, want 0 to 2^62")
    return SaveRequest(
        epoch=message.epoch,
        chief_incarnation=message.chief_incarnation,
        step=message.step,
        tag=check_tag(message.tag),
        num_shards=max(1, message.num_shards),
    )


def encode_save_progress(progress: SaveProgress) -> pb.SaveShardResponse:
    """Encodes how far a save is."""
    return pb.SaveShardResponse(
        state=_SAVE_STATES[progress.state],
        file=None if progress.file is None else encode_file(progress.file),
        failure=None if progress.failure is None else encode_call_error(progress.failure),
    )


def decode_save_progress(message: pb.SaveShardResponse) -> SaveProgress:
    """Decodes how far a save is."""
    state = codec.decode_choice(SaveState, message.state, field="state")
    if state is SaveState.DONE:
        codec.require(message, "file")
    if state is SaveState.FAILED:
        codec.require(message, "failure")
    return SaveProgress(
        state=state,
        file=decode_file(message.file) if state is SaveState.DONE else None,
        failure=decode_call_error(message.failure) if state is SaveState.FAILED else None,
    )


def encode_file(file: CheckpointFile) -> pb.CheckpointFile:
    """Encodes one file of a checkpoint."""
    return pb.CheckpointFile(name=file.name, shard=file.shard, num_bytes=file.num_bytes, sha256=file.sha256)


def decode_file(message: pb.CheckpointFile) -> CheckpointFile:
    """Decodes one file of a checkpoint; whether its name is one is for the storage to say."""
    return CheckpointFile(
        name=message.name, shard=message.shard, num_bytes=message.num_bytes, sha256=_decode_sha256(message.sha256, field="sha256")
    )


def encode_restore_request(request: RestoreRequest, *, max_wait_s: float = 0.0) -> pb.RestoreShardRequest:
    """Encodes a checkpoint to bring a shard back to, and how long to wait for the end."""
    return pb.RestoreShardRequest(
        chief_incarnation=request.chief_incarnation,
        spec=codec_shard.encode_shard_spec(request.spec),
        tag=request.tag,
        manifest_sha256=request.manifest_sha256,
        settings=codec_shard.encode_settings(request.settings),
        max_wait=codec.encode_duration(max_wait_s) if max_wait_s else None,
        life=request.life,
    )


def decode_restore_request(message: pb.RestoreShardRequest) -> RestoreRequest:
    """Decodes and checks a checkpoint to bring a shard back to."""
    codec.require(message, "spec")
    codec.require(message, "settings")
    return RestoreRequest(
        chief_incarnation=message.chief_incarnation,
        spec=codec_shard.decode_shard_spec(message.spec),
        tag=check_tag(message.tag),
        manifest_sha256=_decode_sha256(message.manifest_sha256, field="manifest_sha256"),
        settings=codec_shard.decode_settings(message.settings),
        life=message.life,
    )


def encode_restore_progress(progress: RestoreProgress) -> pb.RestoreShardResponse:
    """Encodes how far a restoration is."""
    return pb.RestoreShardResponse(is_done=progress.is_done, num_bytes_read=progress.num_bytes_read, num_bytes=progress.num_bytes)


def decode_restore_progress(message: pb.RestoreShardResponse) -> RestoreProgress:
    """Decodes how far a restoration is."""
    return RestoreProgress(is_done=message.is_done, num_bytes_read=message.num_bytes_read, num_bytes=message.num_bytes)


def decode_checkpoint_wait(message: pb.SaveShardRequest | pb.RestoreShardRequest) -> float:
    """Returns how many seconds the call may wait: none if the field was left out, and never more than 20."""
    return min(max(0.0, codec.decode_duration(message.max_wait)), MAX_WAIT_SLICE_S)


def _decode_sha256(text: str, *, field: str) -> str:
    if not _SHA256.fullmatch(text):
        raise MalformedMessage(f"{field}: got {text[:80]!r}, want 64 hexadecimal digits")
    return text
