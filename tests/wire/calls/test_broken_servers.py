"""Clients of servers that break the protocol: each call ends at once, in a typed error that names the server."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.errors import FrameOutOfOrder, MalformedMessage
from ps_protocol.model.layout import Segments
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType
from ps_protocol.roles.accumulators import AccumulatorSpec, GradientHeader, Reduction
from ps_protocol.roles.chief import CommitPushRequest, DequeueTokenRequest, Participant, ParticipantKind, PushCommit, RegisterRequest
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era
from ps_protocol.roles.shard import PushHeader, ReadMetricsRequest, ReadRequest, RowsRequest, ShardSpec, ShardStatusRequest
from ps_protocol.rpc.accumulators import GrpcAccumulators
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire.frames import encode_frame
from tests.support.network.servers import serving
from tests.support.parameter_servers.accumulators import create, status_of
from tests.support.parameter_servers.shards import MIXED

Messages = Iterator[bytes]


class Answering(grpc.GenericRpcHandler):
    """Answers each call of every method with what `answer` makes of its requests."""

    def __init__(self, answer: Callable[[Messages], Iterator[bytes]]) -> None:
        self._answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(lambda requests, _: self._answer(requests))


@contextlib.contextmanager
def shard_that(answer: Callable[[Messages], Iterator[bytes]]) -> Iterator[GrpcShard]:
    with serving(Answering(answer)) as address, contextlib.closing(GrpcShard(address, index=0)) as shard:
        yield shard


def silent(requests: Messages) -> Iterator[bytes]:
    """Ends every call in order, and says nothing."""
    return iter(())


def each_with(*messages: bytes) -> Callable[[Messages], Iterator[bytes]]:
    """Answers each request with these messages."""
    return lambda requests: itertools.chain.from_iterable(messages for _ in requests)


def read(shard: GrpcShard, *, step: int | None, nbytes: int = 8) -> int:
    return shard.read(ReadRequest(epoch=1, step=step, layout_hash="abc"), Segments([np.zeros(nbytes, np.uint8)]), timeout_s=10.0)


def read_row(shard: GrpcShard, *, step: int | None) -> int:
    request = RowsRequest(epoch=1, layout_hash="abc", table=0, step=step)
    return shard.read_rows(request, np.zeros(1, np.int64), Segments([np.zeros(8, np.uint8)]), timeout_s=10.0)


def headed(step: int, num_bytes: int = 8) -> bytes:
    return pb.ReadResponse(header=pb.ReadHeader(step=step, num_bytes=num_bytes)).SerializeToString()


SPEC = ShardSpec(epoch=1, shard=0, layout=MIXED, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)))
HEADER = PushHeader(era=Era(1, 1), push_id=PushId(0, 1, 1), step=0, layout_hash="abc")
STREAMED_CALLS: dict[str, Callable[[GrpcShard], object]] = {
    "variables": lambda shard: read(shard, step=4),
    "rows": lambda shard: read_row(shard, step=4),
    "contribution": lambda shard: shard.push_gradients(HEADER, Segments([np.zeros(8, np.uint8)]), timeout_s=10.0),
}
PARTICIPANT = Participant(kind=ParticipantKind.WORKER, index=0, incarnation=1, era=Era(1, 1))
REGISTER = RegisterRequest(kind=ParticipantKind.WORKER, index=0, host="h", pid=1, request_id=1)
COMMIT = PushCommit(push_id=HEADER.push_id, step=0, staged=True)
CHIEF_CALLS: dict[str, Callable[[GrpcChief], object]] = {
    "handshake": lambda chief: chief.handshake(),
    "status": lambda chief: chief.status(),
    "registration": lambda chief: chief.call(REGISTER),
    "token": lambda chief: chief.call(DequeueTokenRequest(participant=PARTICIPANT, local_step=0, request_id=1, max_wait_s=0.0)),
    "commit": lambda chief: chief.call(CommitPushRequest(participant=PARTICIPANT, commit=COMMIT)),
}
SHARD_CALLS: dict[str, Callable[[GrpcShard], object]] = {
    "handshake": lambda shard: shard.handshake(),
    "status": lambda shard: shard.call(ShardStatusRequest()),
    "metrics": lambda shard: shard.call(ReadMetricsRequest(epoch=1)),
    "creation in one message": lambda shard: shard.create_variables(SPEC, Segments([np.zeros(8, np.uint8)])),
    "creation in several messages": lambda shard: shard.create_variables(SPEC, Segments([np.zeros(3 << 20, np.uint8)])),
}


@pytest.mark.parametrize("call", SHARD_CALLS)
def test_a_server_that_ends_a_call_without_an_answer_is_reported_by_name(call: str) -> None:
    with shard_that(silent) as shard, pytest.raises(MalformedMessage, match=r"ps 0 at 127.0.0.1:\d+: it ended the call without an answer"):
        SHARD_CALLS[call](shard)


def test_a_chief_that_ends_a_call_without_an_answer_is_reported_by_name() -> None:
    with serving(Answering(silent)) as address, contextlib.closing(GrpcChief(address)) as chief:
        for call in (chief.handshake, chief.status, lambda: chief.call(REGISTER)):
            with pytest.raises(MalformedMessage, match=r"the chief at .*: it ended the call without an answer"):
                call()


NO_MESSAGE = r"bytes are not a \w+; use the same \.proto on both sides"


@pytest.mark.parametrize("call", [*SHARD_CALLS, *STREAMED_CALLS])
def test_a_server_whose_answer_is_no_message_is_reported_by_name(call: str) -> None:
    with shard_that(lambda requests: iter([b"\xff\xff"])) as shard:
        with pytest.raises(MalformedMessage, match=rf"cannot understand ps 0 at 127.0.0.1:\d+: 2 {NO_MESSAGE}"):
            (SHARD_CALLS | STREAMED_CALLS)[call](shard)


@pytest.mark.parametrize("call", CHIEF_CALLS)
def test_a_chief_whose_answer_is_no_message_is_reported_by_name(call: str) -> None:
    with serving(Answering(each_with(b"\xff\xff"))) as address, contextlib.closing(GrpcChief(address)) as chief:
        with pytest.raises(MalformedMessage, match=rf"cannot understand the chief at 127.0.0.1:\d+: 2 {NO_MESSAGE}"):
            CHIEF_CALLS[call](chief)


def test_a_chief_whose_answer_has_values_that_cannot_be_is_reported_by_name() -> None:
    with serving(Answering(each_with(b""))) as address, contextlib.closing(GrpcChief(address)) as chief:
        for call, words in (
            (chief.handshake, "identity is missing"),
            (chief.status, "state: got 0"),
            (lambda: chief.call(REGISTER), "a lease"),
        ):
            with pytest.raises(MalformedMessage, match=rf"cannot understand the chief at 127.0.0.1:\d+: .*{words}"):
                call()


def test_a_server_of_accumulators_that_ends_a_call_without_an_answer_is_reported_by_name() -> None:
    accumulator = AccumulatorSpec(name="a", data_type=DataType.FLOAT32, shape=(2,), reduction=Reduction.MEAN)
    header = GradientHeader(name="a", client=1, sequence=1, local_step=0, shape=(2,))
    with serving(Answering(silent)) as address, contextlib.closing(GrpcAccumulators(address)) as accumulators:
        for call in (
            lambda: create(accumulators, accumulator),
            lambda: accumulators.apply_gradient(header, np.zeros(2, np.float32)),
            lambda: status_of(accumulators, "a"),
        ):
            with pytest.raises(MalformedMessage, match="it ended the call without an answer"):
                call()


@pytest.mark.parametrize(("wanted", "found"), [(4, 5), (4, 3), (4, -1), (None, -1), (None, (1 << 63) - 1)])
def test_variables_of_another_step_than_requested_are_refused(wanted: int | None, found: int) -> None:
    rows = pb.ReadRowsResponse(step=found).SerializeToString()
    with shard_that(each_with(encode_frame(headed(found), offset=0, data=bytes(8)))) as shard:
        with pytest.raises(MalformedMessage, match=rf"it answers with step {found}"):
            read(shard, step=wanted)
    with shard_that(each_with(encode_frame(rows, offset=0, data=bytes(8)))) as shard:
        with pytest.raises(MalformedMessage, match=rf"it answers with step {found}"):
            read_row(shard, step=wanted)


def without_end(message: bytes) -> Callable[[Messages], Iterator[bytes]]:
    """Begins right, and continues with this message."""
    return lambda requests: itertools.chain([headed(4)], itertools.repeat(message))


@pytest.mark.parametrize(
    "message",
    [b"", pb.ReadResponse(frame=pb.ReadResponse().frame).SerializeToString(), encode_frame(b"", offset=0, data=b""), headed(4)],
)
def test_an_endless_answer_without_content_is_broken_off(message: bytes) -> None:
    with shard_that(without_end(message)) as shard, pytest.raises(MalformedMessage, match="in the middle of an answer"):
        read(shard, step=4)


@pytest.mark.parametrize("num_bytes", [0, 7, 9, 1 << 63, (1 << 64) - 1])
def test_another_number_of_bytes_than_requested_is_refused(num_bytes: int) -> None:
    with shard_that(each_with(headed(4, num_bytes))) as shard:
        with pytest.raises(MalformedMessage, match=f"answers with {num_bytes} bytes of variables, and 8 are wanted"):
            read(shard, step=4)


def test_more_bytes_than_an_answer_has_are_refused() -> None:
    with shard_that(each_with(encode_frame(headed(4), offset=0, data=bytes(9)))) as shard, pytest.raises(FrameOutOfOrder, match="beyond"):
        read(shard, step=4)
