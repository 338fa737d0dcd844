"""Participants that send numbers at the limits of their types: the chief's reports about them can always be encoded."""

import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ps_protocol.roles.chief import ClusterState, ParticipantKind
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from tests.support.chief.running_chief import RunningChief, Worker, client_of, parameter_server
from tests.support.network.talk import converse
from tests.support.parameter_servers.raw_shard import Outcome, outcome

SERVICE = "/ps_protocol.v1.ChiefService/"
_INTEGERS = (0, 1, -1, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_FLOATS = (-1.0, float("nan"), float("inf"), -float("inf"), 1.7e308)
_WORDS = ("x\0\n\x1b[31m", "\u202e" * 10_000, "a" * 1_000_000)
_DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def requests(participant: pb.Participant) -> Iterator[tuple[str, Message]]:
    """One of each kind in whose answer, or in whose effect, numbers and words of the sender are."""
    yield "RegisterWorker", pb.RegisterWorkerRequest(kind=2, host="h", pid=1, request_id=5)  # type: ignore[arg-type]
    traffic = pb.WorkerTraffic(sent_bytes=1, received_bytes=1, num_reads=1, reading=Duration(seconds=1, nanos=1))
    yield "Heartbeat", pb.HeartbeatRequest(participant=participant, transports=["grpc"], traffic=traffic)
    data = pb.DataSpec(name="d", num_samples=100, range_size=10, num_epochs=1, shuffle_seed=1)
    lease = pb.LeaseRangesRequest(participant=participant, data=data, max_ranges=1, request_id=1, max_wait=Duration(seconds=1), held=[1])
    yield "LeaseRanges", lease
    policy = pb.PolicySpec(name=1, tokens=2, num_tokens=2, replicas_to_aggregate=1, total_num_replicas=1)  # type: ignore[arg-type]
    yield "ChangeSettings", pb.ChangeSettingsRequest(request_id=1, max_wait=Duration(), policy=policy)
    change = pb.HyperparameterChange(hyperparameters={"momentum": 0.5})
    change.learning_rate.name = "piecewise_constant"
    change.learning_rate.boundaries.append(1.0)
    change.learning_rate.values.extend([0.1, 0.1])
    yield "ChangeSettings", pb.ChangeSettingsRequest(request_id=2, max_wait=Duration(), hyperparameters=change)
    token = pb.DequeueTokenRequest(participant=participant, request_id=1, max_wait=Duration(nanos=1))
    commit = pb.PushCommit(push_id={"worker": participant.index, "incarnation": 1, "sequence": 1}, staged=True, ranges=[1])
    yield "Converse", pb.ConverseRequest(call=1, token=token)
    yield "Converse", pb.ConverseRequest(call=1, commit=pb.CommitPushRequest(participant=participant, commit=commit))


def changed(message: Message) -> Iterator[bytes]:
    """Yields the message once for each of its fields and each value at the limit of that field's type."""
    for parent, field in list(_leaves(message)):
        before, is_set = getattr(parent, field.name), not field.has_presence or parent.HasField(field.name)
        for value in _values_of(field):
            try:
                setattr(parent, field.name, value)
            except (ValueError, OverflowError):
                continue
            yield message.SerializeToString()
        if is_set:
            setattr(parent, field.name, before)
        else:
            parent.ClearField(field.name)


def _leaves(message: Any) -> Iterator[tuple[Any, FieldDescriptor]]:
    for field in message.DESCRIPTOR.fields:
        # Who calls stays right: else each would be refused for that.
        if field.name in ("participant", "kind") or field.is_repeated:
            continue
        if field.message_type is None:
            yield message, field
        elif message.HasField(field.name):
            yield from _leaves(getattr(message, field.name))


def _values_of(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _WORDS
    return () if field.cpp_type in (FieldDescriptor.CPPTYPE_BOOL, FieldDescriptor.CPPTYPE_ENUM) else _INTEGERS


def sent(channel: grpc.Channel, method: str, data: bytes) -> Outcome:
    if method == "Converse":
        return converse(channel, data)
    call: Any = channel.unary_stream(SERVICE + method)
    return outcome(call(data, timeout=20))


@pytest.mark.parametrize("kind", [ParticipantKind.WORKER, ParticipantKind.OBSERVER])
def test_text_from_a_participant_can_always_be_sent_to_others(kind: ParticipantKind, caplog: pytest.LogCaptureFixture) -> None:
    with (
        parameter_server() as server,
        RunningChief(server.address, total_num_replicas=2, page="127.0.0.1:0", lease_s=600.0) as chief,
        client_of(chief) as client,
        Worker(client) as trainer,
        Worker(client, kind=kind) as sender,
        DEFAULT_ACCESS.open_channel(chief.address) as channel,
    ):
        trainer.join_model()
        num_sent = 0
        for method, request in requests(codec.encode(sender.participant)):
            for data in changed(request):
                ended = sent(channel, method, data)
                assert ended.code not in _DEFECTS, (method, data[:200], ended)
                assert client.status(max_ledger_entries=10).state is ClusterState.TRAINING, (method, data[:200])
                num_sent += 1
            for path in ("api/cluster", "metrics"):
                with urllib.request.urlopen(chief.page_url + path, timeout=20) as page:
                    assert page.status == 200
        assert num_sent > 100
    # Ours alone: gRPC also reports the end of calls to servers of earlier tests, whenever those are collected.
    ours = [record for record in caplog.records if record.name.startswith("lockstep")]
    assert not [record.getMessage() for record in ours if record.exc_info or "internal error" in record.getMessage()]
