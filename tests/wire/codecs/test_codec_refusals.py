"""Claims about messages that cannot be right: they are refused, and the text says where and why."""

import contextlib
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from ps_protocol import errors
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire import codec
from tests.wire.codecs.examples import ADAM, COMMIT, ID, MODEL, ROUND_TRIPS, SLICES, SPEC


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        copy.ClearField(name)
        if value is not None:
            copy.MergeFrom(type(message)(**{name: value}))
    return copy


def spec_with(variable: tensor_pb2.VariableSpec) -> Any:
    return changed(codec.encode_shard_spec(SPEC), slices=[codec.encode_slice(SLICES[0]), tensor_pb2.VariableSlice(variable=variable)])


def push_with(**fields: Any) -> Any:
    return parameter_service_pb2.PushHeader(push_id=codec.encode_push_id(ID), **fields)


def apply_with(**fields: Any) -> Any:
    ids = [tensor_pb2.PushId(worker=worker, incarnation=1, sequence=1) for worker in range(2)]
    return parameter_service_pb2.ApplyStepRequest(step=4, contributors=ids, **fields)


def variable_with(**fields: Any) -> Any:
    return tensor_pb2.VariableSpec(name="w", data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[4], **fields)


def parts(*tables: int) -> list[parameter_service_pb2.SparsePart]:
    return [parameter_service_pb2.SparsePart(table=table, num_rows=1) for table in tables]


REFUSED: list[tuple[Callable[[Any], Any], Any, type[errors.PsError], str]] = [
    (
        codec.decode_variable,
        tensor_pb2.VariableSpec(name="w", shape=[3]),
        errors.InvalidSpec,
        "'w': dtype 0 unknown; want one of float32, float64, float16, bfloat16",
    ),
    (codec.decode_variable, tensor_pb2.VariableSpec.FromString(b"\x0a\x01w\x10\x63"), errors.InvalidSpec, "dtype 99 unknown"),
    (
        codec.decode_shard_spec,
        spec_with(tensor_pb2.VariableSpec(data_type="DATA_TYPE_FLOAT32")),
        errors.InvalidSpec,
        r"slices\[1\]: name is empty",
    ),
    (
        codec.decode_shard_spec,
        spec_with(tensor_pb2.VariableSpec(name="x", data_type="DATA_TYPE_FLOAT32", shape=[2, -3])),
        errors.InvalidSpec,
        r"slices\[1\]: variable 'x': shape\[1\] = -3",
    ),
    (codec.decode_shard_spec, changed(codec.encode_shard_spec(SPEC), layout_hash="other"), errors.LayoutMismatch, "'other'"),
    (
        codec.decode_shard_spec,
        changed(codec.encode_shard_spec(SPEC), optimizer=None),
        errors.MalformedMessage,
        "optimizer is missing",
    ),
    (
        codec.decode_shard_spec,
        changed(codec.encode_shard_spec(SPEC), max_staged_per_worker=0),
        errors.InvalidSpec,
        "max_staged",
    ),
    (
        codec.decode_shard_spec,
        changed(codec.encode_shard_spec(SPEC), initial_step=-1),
        errors.InvalidSpec,
        "initial_step: got -1",
    ),
    (
        codec.decode_shard_spec,
        codec.encode_shard_spec(SPEC).__class__(
            slices=[codec.encode_slice(SLICES[0])] * 2,
            optimizer=codec.encode_optimizer(ADAM),
            layout_hash=Layout([SLICES[0]] * 2).hash,
            max_staged_per_worker=1,
        ),
        errors.InvalidSpec,
        "rows 2 to 10 occur twice",
    ),
    (
        codec.decode_optimizer,
        tensor_pb2.OptimizerSpec(name="sgd"),
        errors.MalformedMessage,
        "OptimizerSpec: learning_rate is missing",
    ),
    (codec.decode_slice, tensor_pb2.VariableSlice(), errors.MalformedMessage, "VariableSlice: variable is missing"),
    (codec.decode_push_id, tensor_pb2.PushId(worker=1, sequence=1), errors.MalformedMessage, "incarnation 0"),
    (codec.decode_push_header, parameter_service_pb2.PushHeader(step=1), errors.MalformedMessage, "push_id is missing"),
    (
        codec.decode_push_header,
        parameter_service_pb2.PushHeader(step=-1, push_id=codec.encode_push_id(ID)),
        errors.InvalidSpec,
        "local_step: got -1, want 0 to 2",
    ),
    (codec.decode_push_reply, parameter_service_pb2.PushGradientsResponse(), errors.MalformedMessage, "result: got 0, want one of 1"),
    (codec.decode_apply_request, parameter_service_pb2.ApplyStepRequest(step=4), errors.MalformedMessage, "step 4: no contributors"),
    (
        codec.decode_apply_request,
        parameter_service_pb2.ApplyStepRequest(step=4, contributors=[codec.encode_push_id(ID)] * 2),
        errors.MalformedMessage,
        "step 4: a contributor occurs twice",
    ),
    (codec.decode_push_header, push_with(sparse=parts(1, 1)), errors.MalformedMessage, "sparse: the tables 1 and 1 do not ascend"),
    (codec.decode_push_header, push_with(absent=[0, 3, 2]), errors.MalformedMessage, "absent: the positions 3 and 2 do not ascend"),
    (
        codec.decode_push_header,
        push_with(metrics={"": parameter_service_pb2.Metric()}),
        errors.InvalidSpec,
        "metrics: name is empty",
    ),
    (
        codec.decode_push_header,
        push_with(metrics={"loss": parameter_service_pb2.Metric(weight=math.nan)}),
        errors.InvalidSpec,
        "metric 'loss': weight = nan, want a finite number >= 0",
    ),
    (
        codec.decode_push_header,
        push_with(metrics={str(number): parameter_service_pb2.Metric() for number in range(1001)}),
        errors.LimitExceeded,
        "1001 in one contribution, 1000 at most",
    ),
    (codec.decode_apply_request, apply_with(weights=[1.0]), errors.MalformedMessage, "1 weights for 2 contributors"),
    (codec.decode_apply_request, apply_with(weights=[1.0, math.inf]), errors.MalformedMessage, "weight inf, want a finite number"),
    (
        codec.decode_apply_request,
        apply_with(discards=[tensor_pb2.PushId(worker=1)]),
        errors.MalformedMessage,
        r"discards\[0\]: push id: got incarnation 0",
    ),
    (
        codec.decode_settings,
        parameter_service_pb2.ConfigureShardRequest(optimizers=[parameter_service_pb2.OptimizerChange()]),
        errors.MalformedMessage,
        r"optimizers\[0\]: OptimizerChange: original is missing",
    ),
    (
        codec.decode_settings,
        parameter_service_pb2.ConfigureShardRequest(step=-1),
        errors.InvalidSpec,
        "step: got -1, want 0 to 2",
    ),
    (
        codec.decode_variable,
        variable_with(constraint=tensor_pb2.Constraint(high=1.0)),
        errors.MalformedMessage,
        "variable 'w': constraint.kind: got 0, want one of 1",
    ),
    (
        codec.decode_variable,
        variable_with(is_sparse=True, initializer=tensor_pb2.Initializer()),
        errors.MalformedMessage,
        "variable 'w': initializer.kind: got 0, want one of 1",
    ),
    (
        codec.decode_variable,
        variable_with(partition=tensor_pb2.Partition(axis=1, num_slices=2)),
        errors.InvalidSpec,
        r"variable 'w': shape \(4,\) has no axis 1",
    ),
    (
        codec.decode_variable,
        variable_with(initializer=tensor_pb2.Initializer(kind=1)),  # type: ignore[arg-type]
        errors.InvalidSpec,
        "only sparse variables are initialised by the server",
    ),
    (
        codec.decode_model,
        changed(codec.encode_model(MODEL), averages=tensor_pb2.AverageSpec(decay=math.nan)),
        errors.InvalidSpec,
        "averages: decay = nan, want 0 to 1",
    ),
    (
        codec.decode_model,
        changed(codec.encode_model(MODEL), clip=tensor_pb2.ClipSpec(norm=-1.0)),
        errors.InvalidSpec,
        "clip: norm = -1.0",
    ),
    (
        codec.decode_policy,
        chief_service_pb2.PolicySpec.FromString(b"\x08\x09"),
        errors.MalformedMessage,
        r"policy.name: got 9, want one of 1 \(SYNC\)",
    ),
    (
        codec.decode_policy,
        chief_service_pb2.PolicySpec(is_unlocked=True),
        errors.InvalidSpec,
        "only the policy async has updates without a lock",
    ),
    (
        codec.decode_hyperparameter_change,
        chief_service_pb2.SetHyperparametersRequest(learning_rate=tensor_pb2.LearningRateSchedule(name="constnt")),
        errors.InvalidSpec,
        "did you mean 'constant'",
    ),
    (
        codec.decode_participant,
        chief_service_pb2.HeartbeatRequest(),
        errors.MalformedMessage,
        "HeartbeatRequest: participant is missing",
    ),
    (
        codec.decode_participant,
        chief_service_pb2.HeartbeatRequest(participant=chief_service_pb2.Participant(index=1)),
        errors.MalformedMessage,
        r"participant.kind: got 0, want one of 1 \(WORKER\), 2 \(OBSERVER\)",
    ),
    (codec.decode_model, changed(codec.encode_model(MODEL), placement=None), errors.MalformedMessage, "placement is missing"),
    (codec.decode_model, changed(codec.encode_model(MODEL), variables=None), errors.InvalidSpec, "no variables"),
    (codec.decode_commit, chief_service_pb2.PushCommit(), errors.MalformedMessage, "push_id is missing"),
    (
        codec.decode_commit,
        changed(codec.encode_commit(COMMIT), push_id=tensor_pb2.PushId()),
        errors.MalformedMessage,
        "sequence 0",
    ),
    (
        codec.decode_optimizer,
        tensor_pb2.OptimizerSpec(name="adamm"),
        errors.InvalidSpec,
        "optimizer 'adamm'; want .* did you mean 'adam'",
    ),
    (codec.decode_handshake_request, handshake_service_pb2.HandshakeRequest(), errors.MalformedMessage, "version is missing"),
]


@pytest.mark.parametrize(("decode", "message", "error", "words"), REFUSED, ids=[words for _, _, _, words in REFUSED])
def test_what_cannot_be_right_is_refused(decode: Callable[[Any], Any], message: Any, error: type[errors.PsError], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(message)


@pytest.mark.parametrize(("value", "encode", "decode"), ROUND_TRIPS, ids=[type(value).__name__ for value, _, _ in ROUND_TRIPS])
def test_message_with_any_bytes_changed_decodes_or_is_refused_with_a_reason(
    value: Any, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
) -> None:
    """Anything else than a PsError would be a defect of the server in the eyes of the caller."""
    message, rng = encode(value), random.Random(0)
    original = message.SerializeToString()
    for _ in range(100):
        content = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(content) + 1)
            content[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        with contextlib.suppress(errors.PsError):
            decode(codec.decode_message(type(message), bytes(content)))
