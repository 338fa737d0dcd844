"""Values that travel: numbers of choices, seconds, defaults, and orders. `test_pairs` sends every value there and back."""

import dataclasses
import enum
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from ps_protocol import errors
from ps_protocol.errors import MalformedMessage
from ps_protocol.model import policy
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import ConstraintKind, DataType, InitializerKind, SparseMean, VariableSpec
from ps_protocol.roles import chief, contribution, identity, shard
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import CommitResult, GetModelRequest, WorkerTraffic
from ps_protocol.roles.shard import ApplyRequest, ShardSpec
from ps_protocol.v1 import chief_service_pb2, handshake_service_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.fields import MAX_DURATION_S, decode_duration, encode_duration
from tests.wire.codecs.examples import ADAM, EXAMPLES, SPEC, STATISTIC


@pytest.mark.parametrize(
    ("choices", "prefix", "numbers"),
    [
        (shard.PushResult, "PUSH_RESULT", parameter_service_pb2.PushResult),
        (chief.ParticipantKind, "PARTICIPANT_KIND", chief_service_pb2.ParticipantKind),
        (chief.ModelState, "MODEL_STATE", chief_service_pb2.ModelState),
        (chief.PushOutcome, "PUSH_OUTCOME", chief_service_pb2.PushOutcome),
        (chief.TokenResult, "TOKEN_RESULT", chief_service_pb2.TokenResult),
        (chief.ClusterState, "CLUSTER_STATE", chief_service_pb2.ClusterState),
        (identity.Role, "ROLE", handshake_service_pb2.Role),
        (policy.PolicyName, "NAME", chief_service_pb2.PolicySpec.Name),
        (policy.TokenMode, "TOKENS", chief_service_pb2.PolicySpec.Tokens),
        (policy.TooStale, "TOO_STALE", chief_service_pb2.PolicySpec.TooStale),
        (SparseMean, "SPARSE_MEAN", tensor_pb2.SparseMean),
        (ConstraintKind, "KIND", tensor_pb2.Constraint.Kind),
        (InitializerKind, "KIND", tensor_pb2.Initializer.Kind),
    ],
)
def test_choices_have_the_names_and_numbers_of_the_protos(choices: type[enum.Enum], prefix: str, numbers: Any) -> None:
    assert {f"{prefix}_{choice.name}": choice.value for choice in choices} | {f"{prefix}_UNSPECIFIED": 0} == dict(numbers.items())


def test_data_types_have_the_names_of_the_proto() -> None:
    assert {f"DATA_TYPE_{data_type.name}" for data_type in DataType} | {"DATA_TYPE_UNSPECIFIED"} == set(tensor_pb2.DataType.keys())


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.1, 1.0, 20.5, 1e6])
def test_seconds_survive_to_the_nanosecond(seconds: float) -> None:
    assert decode_duration(encode_duration(seconds), field="age") == pytest.approx(seconds, abs=1e-9)


def test_negative_seconds_count_as_none() -> None:
    assert decode_duration(encode_duration(-1.0), field="age") == 0


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [((1 << 63) - 1, 0), (MAX_DURATION_S, 0), (-1, 0), (-(1 << 63), 0), (0, -1), (0, 1_000_000_000), (1, -(1 << 31))],
)
def test_seconds_that_could_not_be_passed_on_are_refused(seconds: int, nanos: int) -> None:
    message = chief_service_pb2.WorkerTraffic(reading=Duration(seconds=seconds, nanos=nanos))
    with pytest.raises(MalformedMessage, match=f"^reading: got {seconds} s and {nanos} ns, want 0 to"):
        codec.decode(WorkerTraffic, message)


def test_seconds_that_are_taken_can_be_passed_on() -> None:
    message = chief_service_pb2.WorkerTraffic(reading=Duration(seconds=MAX_DURATION_S - 1, nanos=999_999_999))
    assert codec.encode(codec.decode(WorkerTraffic, message)).reading.seconds >= MAX_DURATION_S - 1


@pytest.mark.parametrize(("max_wait_s", "expected"), [(0.0, 0.0), (2.5, 2.5), (20.0, 20.0), (1e9, 20.0), (-1.0, 0.0)])
def test_wait_is_bounded_by_20_s(max_wait_s: float, expected: float) -> None:
    request = chief_service_pb2.GetModelRequest(max_wait=encode_duration(max_wait_s))
    assert codec.decode(GetModelRequest, request).max_wait_s == expected
    assert codec.decode(GetModelRequest, codec.encode(GetModelRequest(max_wait_s=max_wait_s))).max_wait_s == expected


def test_wait_that_is_left_out_is_20_s() -> None:
    assert codec.decode(GetModelRequest, chief_service_pb2.GetModelRequest()).max_wait_s == 20.0


def test_index_that_no_worker_can_have_is_refused_before_it_is_sent() -> None:
    with pytest.raises(errors.InvalidSpec, match="worker index: got -1, want 0 to"):
        chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=-1, host="h", pid=1, request_id=2)


def test_contributors_are_sorted_whatever_their_order_on_the_wire() -> None:
    ids = [contribution.PushId(worker=worker, incarnation=1, sequence=1) for worker in (2, 0, 1)]
    message = parameter_service_pb2.ApplyRequest(fence=tensor_pb2.Fence(), contributors=[codec.encode(each) for each in ids])
    assert [each.worker for each in codec.decode(ApplyRequest, message).contributors] == [0, 1, 2]


def test_weights_stay_with_their_contributors() -> None:
    ids = [contribution.PushId(worker=worker, incarnation=1, sequence=1) for worker in (2, 0, 1)]
    contributors = [codec.encode(each) for each in ids]
    message = parameter_service_pb2.ApplyRequest(fence=tensor_pb2.Fence(), contributors=contributors, weights=[0.2, 0.0, 0.1])
    assert codec.decode(ApplyRequest, message).weights == (0.0, 0.1, 0.2)


def test_fields_that_an_older_client_omits_have_their_defaults() -> None:
    assert codec.decode(PolicySpec, chief_service_pb2.PolicySpec()) == policy.PolicySpec()
    dense = tensor_pb2.VariableSpec(name="w", data_type=tensor_pb2.DATA_TYPE_FLOAT32)
    assert codec.decode(VariableSpec, dense).sparse_mean is SparseMean.PER_INDEX
    assert codec.decode(CommitResult, chief_service_pb2.CommitResult(outcome=1)).factor == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("record", EXAMPLES[ChiefRecord])
def test_packed_record_comes_back_as_it_was_and_in_the_same_bytes(record: ChiefRecord) -> None:
    packed = codec.RecordPacker().pack(record)
    assert codec.unpack_record(packed) == record
    assert codec.RecordPacker().pack(dataclasses.replace(record)) == packed


def test_the_model_of_a_record_is_encoded_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = [one for one in EXAMPLES[ChiefRecord] if one.model is not None][:1]
    encoded: list[object] = []
    encode = codec.encode

    def counted(value: ChiefRecord) -> object:
        encoded.append(value.model)
        return encode(value)

    monkeypatch.setattr(codec, "encode", counted)
    packer = codec.RecordPacker()
    for step in range(5, 9):
        of_step = dataclasses.replace(record, step=step, oldest_kept=step)
        assert codec.unpack_record(packer.pack(of_step)) == of_step
    assert len([model for model in encoded if model is not None]) == 1


def test_a_shard_computes_the_senders_layout_however_tables_and_dense_variables_alternate() -> None:
    optimizers = (ADAM, STATISTIC, None)
    pieces = []
    for number, optimizer in enumerate((*optimizers, *reversed(optimizers), *optimizers)):
        is_sparse = number % 2 == 0 and optimizer is not STATISTIC
        spec = VariableSpec(name=f"v{number}", data_type=DataType.FLOAT32, shape=(2,), optimizer=optimizer, is_sparse=is_sparse)
        pieces.append(VariableSlice(variable=spec, start=0, stop=2))
    sent = dataclasses.replace(SPEC, layout=Layout(pieces))
    received = codec.decode(ShardSpec, codec.encode(sent)).layout
    assert (received.offsets, received.tables, received.rules) == (sent.layout.offsets, sent.layout.tables, sent.layout.rules)
