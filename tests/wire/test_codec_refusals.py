"""Claims about messages that cannot be right: they are refused, and the text says where and why."""

from collections.abc import Callable
from typing import Any

import pytest

from ps_protocol import codec, codec_chief, codec_handshake, codec_shard, errors
from ps_protocol.layout import Layout
from ps_protocol.v1 import chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from tests.wire.test_codec import ADAM, COMMIT, ID, MODEL, SLICES, SPEC


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        copy.ClearField(name)
        if value is not None:
            copy.MergeFrom(type(message)(**{name: value}))
    return copy


def spec_with(variable: tensor_pb2.VariableSpec) -> Any:
    return changed(codec_shard.encode_shard_spec(SPEC), slices=[codec.encode_slice(SLICES[0]), tensor_pb2.VariableSlice(variable=variable)])


REFUSED: list[tuple[Callable[[Any], Any], Any, type[errors.PsError], str]] = [
    (
        codec.decode_variable,
        tensor_pb2.VariableSpec(name="w", shape=[3]),
        errors.InvalidSpec,
        "'w': dtype 0 unknown; want one of float32, float64",
    ),
    (codec.decode_variable, tensor_pb2.VariableSpec.FromString(b"\x0a\x01w\x10\x63"), errors.InvalidSpec, "dtype 99 unknown"),
    (
        codec_shard.decode_shard_spec,
        spec_with(tensor_pb2.VariableSpec(data_type="DATA_TYPE_FLOAT32")),
        errors.InvalidSpec,
        r"slices\[1\]: name is empty",
    ),
    (
        codec_shard.decode_shard_spec,
        spec_with(tensor_pb2.VariableSpec(name="x", data_type="DATA_TYPE_FLOAT32", shape=[2, -3])),
        errors.InvalidSpec,
        r"slices\[1\]: variable 'x': shape\[1\] = -3",
    ),
    (codec_shard.decode_shard_spec, changed(codec_shard.encode_shard_spec(SPEC), layout_hash="other"), errors.LayoutMismatch, "'other'"),
    (
        codec_shard.decode_shard_spec,
        changed(codec_shard.encode_shard_spec(SPEC), optimizer=None),
        errors.MalformedMessage,
        "optimizer is missing",
    ),
    (
        codec_shard.decode_shard_spec,
        changed(codec_shard.encode_shard_spec(SPEC), max_staged_per_worker=0),
        errors.InvalidSpec,
        "max_staged",
    ),
    (
        codec_shard.decode_shard_spec,
        changed(codec_shard.encode_shard_spec(SPEC), initial_step=-1),
        errors.InvalidSpec,
        "initial_step: got -1",
    ),
    (
        codec_shard.decode_shard_spec,
        codec_shard.encode_shard_spec(SPEC).__class__(
            slices=[codec.encode_slice(SLICES[0])] * 2,
            optimizer=codec.encode_optimizer(ADAM),
            layout_hash=Layout([SLICES[0]] * 2).hash,
            max_staged_per_worker=1,
        ),
        errors.InvalidSpec,
        "rows 2 to 10 occur twice",
    ),
    (codec.decode_optimizer, tensor_pb2.OptimizerSpec(name="sgd"), errors.MalformedMessage, "OptimizerSpec: learning_rate is missing"),
    (codec.decode_slice, tensor_pb2.VariableSlice(), errors.MalformedMessage, "VariableSlice: variable is missing"),
    (codec.decode_push_id, tensor_pb2.PushId(worker=1, sequence=1), errors.MalformedMessage, "incarnation 0"),
    (codec_shard.decode_push_header, parameter_service_pb2.PushHeader(step=1), errors.MalformedMessage, "push_id is missing"),
    (
        codec_shard.decode_push_header,
        parameter_service_pb2.PushHeader(step=-1, push_id=codec.encode_push_id(ID)),
        errors.InvalidSpec,
        "local_step: got -1, want 0 to 2",
    ),
    (codec_shard.decode_push_reply, parameter_service_pb2.PushGradientsResponse(), errors.MalformedMessage, "result: got 0, want one of 1"),
    (codec_shard.decode_apply_request, parameter_service_pb2.ApplyStepRequest(step=4), errors.MalformedMessage, "step 4: no contributors"),
    (
        codec_shard.decode_apply_request,
        parameter_service_pb2.ApplyStepRequest(step=4, contributors=[codec.encode_push_id(ID)] * 2),
        errors.MalformedMessage,
        "step 4: a contributor occurs twice",
    ),
    (
        codec_chief.decode_participant,
        chief_service_pb2.HeartbeatRequest(),
        errors.MalformedMessage,
        "HeartbeatRequest: participant is missing",
    ),
    (
        codec_chief.decode_participant,
        chief_service_pb2.HeartbeatRequest(participant=chief_service_pb2.Participant(index=1)),
        errors.MalformedMessage,
        r"participant.kind: got 0, want one of 1 \(WORKER\), 2 \(OBSERVER\)",
    ),
    (codec_chief.decode_model, changed(codec_chief.encode_model(MODEL), placement=None), errors.MalformedMessage, "placement is missing"),
    (codec_chief.decode_model, changed(codec_chief.encode_model(MODEL), variables=None), errors.InvalidSpec, "no variables"),
    (codec_chief.decode_commit, chief_service_pb2.PushCommit(), errors.MalformedMessage, "push_id is missing"),
    (
        codec_chief.decode_commit,
        changed(codec_chief.encode_commit(COMMIT), push_id=tensor_pb2.PushId()),
        errors.MalformedMessage,
        "sequence 0",
    ),
    (codec.decode_optimizer, tensor_pb2.OptimizerSpec(name="adamm"), errors.InvalidSpec, "optimizer 'adamm'; want .* did you mean 'adam'"),
    (codec_handshake.decode_handshake_request, handshake_service_pb2.HandshakeRequest(), errors.MalformedMessage, "version is missing"),
]


@pytest.mark.parametrize(("decode", "message", "error", "words"), REFUSED, ids=[words for _, _, _, words in REFUSED])
def test_what_cannot_be_right_is_refused(decode: Callable[[Any], Any], message: Any, error: type[errors.PsError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(message)
