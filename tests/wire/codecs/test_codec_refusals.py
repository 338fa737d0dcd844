"""Invalid messages are refused, and the text says where and why."""

import contextlib
import math
import random
from typing import Any

import pytest

from ps_protocol import errors
from ps_protocol.model.data import DataSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import MAX_VARIABLES, VariableSpec
from ps_protocol.roles.chief import HeartbeatRequest, Participant, PushCommit, RegisterRequest
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.identity import HandshakeRequest
from ps_protocol.roles.shard import MAX_METRICS, ApplyRequest, PushHeader, PushReply, ShardSettings, ShardSpec
from ps_protocol.v1 import chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.special import MAX_RANGES_A_CALL
from tests.support.chief.eras import era, fence
from tests.wire.codecs.examples import ADAM, COMMIT, EXAMPLES, ID, MODEL, SLICES, SPEC


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        copy.ClearField(name)
        if value is not None:
            copy.MergeFrom(type(message)(**{name: value}))
    return copy


def spec_with(variable: tensor_pb2.VariableSpec) -> Any:
    return changed(codec.encode(SPEC), slices=[codec.encode(SLICES[0]), tensor_pb2.VariableSlice(variable=variable)])


def push_with(**fields: Any) -> Any:
    return parameter_service_pb2.PushHeader(era=codec.encode(era(1)), push_id=codec.encode(ID), **fields)


def apply_with(**fields: Any) -> Any:
    ids = [tensor_pb2.PushId(worker=worker, incarnation=1, sequence=1) for worker in range(2)]
    return parameter_service_pb2.ApplyRequest(fence=tensor_pb2.Fence(), step=4, contributors=ids, **fields)


def variable_with(**fields: Any) -> Any:
    return tensor_pb2.VariableSpec(name="w", data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=[4], **fields)


def parts(*tables: int) -> list[parameter_service_pb2.SparsePart]:
    return [parameter_service_pb2.SparsePart(table=table, num_rows=1) for table in tables]


REFUSED: list[tuple[type[Any], Any, type[errors.PsError], str]] = [
    (VariableSpec, tensor_pb2.VariableSpec.FromString(b"\x0a\x01w\x10\x63"), errors.InvalidSpec, "dtype 99 unknown"),
    (
        ShardSpec,
        spec_with(tensor_pb2.VariableSpec(data_type="DATA_TYPE_FLOAT32")),
        errors.InvalidSpec,
        r"slices\[1\]: name is empty",
    ),
    (ShardSpec, changed(codec.encode(SPEC), layout_hash="other"), errors.LayoutMismatch, "'other'"),
    (
        ShardSpec,
        changed(codec.encode(SPEC), optimizer=None),
        errors.MalformedMessage,
        "optimizer is missing",
    ),
    (
        ShardSpec,
        changed(codec.encode(SPEC), max_staged_per_worker=0),
        errors.InvalidSpec,
        "max_staged",
    ),
    (
        ShardSpec,
        changed(codec.encode(SPEC), initial_step=-1),
        errors.InvalidSpec,
        "initial_step: got -1",
    ),
    (
        ShardSpec,
        codec.encode(SPEC).__class__(
            slices=[codec.encode(SLICES[0])] * 2,
            optimizer=codec.encode(ADAM),
            layout_hash=Layout([SLICES[0]] * 2).hash,
            max_staged_per_worker=1,
        ),
        errors.InvalidSpec,
        "rows 2 to 10 occur twice",
    ),
    (
        OptimizerSpec,
        tensor_pb2.OptimizerSpec(name="sgd"),
        errors.MalformedMessage,
        "OptimizerSpec: learning_rate is missing",
    ),
    (VariableSlice, tensor_pb2.VariableSlice(), errors.MalformedMessage, "VariableSlice: variable is missing"),
    (PushId, tensor_pb2.PushId(worker=1, sequence=1), errors.MalformedMessage, "incarnation 0"),
    (PushHeader, parameter_service_pb2.PushHeader(push_id=codec.encode(ID)), errors.MalformedMessage, "era is missing"),
    (PushHeader, parameter_service_pb2.PushHeader(era=codec.encode(era(1)), step=1), errors.MalformedMessage, "push_id is missing"),
    (
        PushHeader,
        parameter_service_pb2.PushHeader(era=codec.encode(era(1)), step=-1, push_id=codec.encode(ID)),
        errors.InvalidSpec,
        "local_step: got -1, want 0 to 2",
    ),
    (PushReply, parameter_service_pb2.PushReply(), errors.MalformedMessage, "result: got 0, want one of 1"),
    (
        ApplyRequest,
        parameter_service_pb2.ApplyRequest(fence=tensor_pb2.Fence(), step=4),
        errors.MalformedMessage,
        "step 4: no contributors",
    ),
    (
        ApplyRequest,
        parameter_service_pb2.ApplyRequest(fence=tensor_pb2.Fence(), step=4, contributors=[codec.encode(ID)] * 2),
        errors.MalformedMessage,
        "step 4: a contributor occurs twice",
    ),
    (
        PushHeader,
        push_with(metrics={f"m{index}": parameter_service_pb2.Metric(value=1.0) for index in range(MAX_METRICS + 1)}),
        errors.LimitExceeded,
        "metrics: 1001 in one contribution, 1000 at most",
    ),
    (PushHeader, push_with(sparse=parts(1, 1)), errors.MalformedMessage, "sparse: the tables 1 and 1 do not ascend"),
    (PushHeader, push_with(absent=[0, 3, 2]), errors.MalformedMessage, "absent: the positions 3 and 2 do not ascend"),
    (ApplyRequest, apply_with(weights=[1.0]), errors.MalformedMessage, "1 weights for 2 contributors"),
    (ApplyRequest, apply_with(weights=[1.0, math.inf]), errors.MalformedMessage, "weight inf, want a finite number"),
    (
        ApplyRequest,
        apply_with(discards=[tensor_pb2.PushId(worker=1)]),
        errors.MalformedMessage,
        r"discards\[0\]: push id: got incarnation 0",
    ),
    (
        ShardSettings,
        parameter_service_pb2.ShardSettings(fence=codec.encode(fence(1)), optimizers=[parameter_service_pb2.OptimizerChange()]),
        errors.MalformedMessage,
        r"optimizers\[0\]: OptimizerChange: original is missing",
    ),
    (
        VariableSpec,
        variable_with(constraint=tensor_pb2.Constraint(high=1.0)),
        errors.MalformedMessage,
        "variable 'w': constraint.kind: got 0, want one of 1",
    ),
    (
        VariableSpec,
        variable_with(is_sparse=True, initializer=tensor_pb2.Initializer()),
        errors.MalformedMessage,
        "variable 'w': initializer.kind: got 0, want one of 1",
    ),
    (
        VariableSpec,
        variable_with(partition=tensor_pb2.Partition(axis=1, num_slices=2)),
        errors.InvalidSpec,
        r"variable 'w': shape \(4,\) has no axis 1",
    ),
    (
        VariableSpec,
        variable_with(initializer=tensor_pb2.Initializer(kind=1)),  # type: ignore[arg-type]
        errors.InvalidSpec,
        "only sparse variables are initialised by the server",
    ),
    (
        PolicySpec,
        chief_service_pb2.PolicySpec.FromString(b"\x08\x09"),
        errors.MalformedMessage,
        r"policy.name: got 9, want one of 1 \(SYNC\)",
    ),
    (
        Participant,
        chief_service_pb2.Participant(era=tensor_pb2.Era(), index=1),
        errors.MalformedMessage,
        r"participant.kind: got 0, want one of 1 \(WORKER\), 2 \(OBSERVER\)",
    ),
    (ModelSpec, changed(codec.encode(MODEL), placement=None), errors.MalformedMessage, "placement is missing"),
    (PushCommit, chief_service_pb2.PushCommit(), errors.MalformedMessage, "push_id is missing"),
    (
        PushCommit,
        changed(codec.encode(COMMIT), push_id=tensor_pb2.PushId()),
        errors.MalformedMessage,
        "sequence 0",
    ),
    (DataSpec, chief_service_pb2.DataSpec(name="train", num_samples=5), errors.InvalidSpec, "range_size"),
    (
        RegisterRequest,
        chief_service_pb2.RegisterWorkerRequest(kind=1, held=range(MAX_RANGES_A_CALL + 1)),  # type: ignore[arg-type]
        errors.LimitExceeded,
        "^held_ranges: 10001 in one call, 10000 at most$",
    ),
    (PushCommit, changed(codec.encode(COMMIT), ranges=range(MAX_RANGES_A_CALL + 1)), errors.LimitExceeded, "ranges"),
    (HandshakeRequest, handshake_service_pb2.HandshakeRequest(), errors.MalformedMessage, "version is missing"),
]


@pytest.mark.parametrize(("value_type", "message", "error", "words"), REFUSED, ids=[words for _, _, _, words in REFUSED])
def test_messages_with_impossible_values_are_refused(value_type: type[Any], message: Any, error: type[errors.PsError], words: str) -> None:
    with pytest.raises(error, match=words):
        codec.decode(value_type, message)


def test_bytes_that_are_no_record_are_refused() -> None:
    with pytest.raises(errors.MalformedMessage):
        codec.unpack_record(b"\xff\xff\xff")


def test_call_without_its_caller_is_refused() -> None:
    with pytest.raises(errors.MalformedMessage, match="HeartbeatRequest: participant is missing"):
        codec.decode(HeartbeatRequest, chief_service_pb2.HeartbeatRequest())


@pytest.mark.parametrize("value_type", EXAMPLES, ids=lambda value_type: str(value_type.__name__))
def test_message_with_any_bytes_changed_decodes_or_is_refused_with_a_reason(value_type: type[Any]) -> None:
    """Anything else than a PsError would be a defect of the server in the eyes of the caller."""
    rng = random.Random(0)
    messages = [codec.encode(value) for value in EXAMPLES[value_type]]
    for message in messages * (1 + 100 // len(messages)):
        original = message.SerializeToString()
        content = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(original) + 1)
            content[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
        with contextlib.suppress(errors.PsError):
            codec.decode(value_type, codec.decode_message(type(message), bytes(content)))


@pytest.mark.parametrize("what", ["variables", "loads", "pins"])
def test_a_model_of_too_many_parts_is_refused_before_any_is_decoded(what: str) -> None:
    """Each takes a tenth of a millisecond, and a message has room for a million."""
    message = codec.encode(MODEL)
    if what == "variables":
        message.variables.extend([tensor_pb2.VariableSpec()] * MAX_VARIABLES)  # none of which would do
    else:
        getattr(message.placement, what).update((f"v{number}", 1) for number in range(MAX_VARIABLES + 1))
    with pytest.raises(errors.LimitExceeded, match=rf"the model has \d+ {what}, {MAX_VARIABLES} at most"):
        codec.decode(ModelSpec, message)
