"""Named accumulators and input that no client of ours would send, and callers that go away."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from ps_protocol.errors import Cancelled, ShuttingDown, Unavailable
from ps_protocol.model.variables import MAX_EXTENTS, DataType
from ps_protocol.roles.accumulators import AccumulatorSpec, SetAccumulatorStepRequest, TakeRequest
from ps_protocol.rpc.accumulators import GrpcAccumulators
from ps_protocol.rpc.channel import DEFAULT_ACCESS, MAX_CALLS_A_CONNECTION
from ps_protocol.v1 import accumulator_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_server.accumulators.registry import MAX_TAKERS
from ps_server.config import ParameterServerConfig
from tests.support.parameter_servers.accumulators import create, status_of
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, frame
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

PATH = "/ps_protocol.v1.AccumulatorService/"
CODE = grpc.StatusCode
INVALID = CODE.INVALID_ARGUMENT


@dataclass
class Server:
    """A parameter server with a dense accumulator "d" of shape (2,) and a sparse one "s" of shape (4, 1), both float32.

    Gradients of "e", of shape (?, 0), have no elements.
    """

    raw: RawShard
    client: GrpcAccumulators
    address: str

    def call(self, method: str, *messages: Any) -> Outcome:
        encoded = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
        return self.raw.call("", *encoded, path=PATH + method)

    def apply(self, *frames: tensor_pb2.ArenaFrame, **fields: Any) -> Outcome:
        header = pb.GradientHeader(**{"name": "d", "client": 1, "sequence": 1, "shape": [2], **fields})
        return self.call("ApplyGradient", pb.ApplyGradientRequest(header=header), *(pb.ApplyGradientRequest(frame=each) for each in frames))

    def create(self, **fields: Any) -> Outcome:
        spec = {"name": "new", "data_type": tensor_pb2.DATA_TYPE_FLOAT32, "reduction": pb.REDUCTION_MEAN, **fields}
        return self.call("CreateAccumulator", pb.CreateAccumulatorRequest(spec=pb.AccumulatorSpec(**spec)))

    def take(self, **fields: Any) -> Outcome:
        return self.call("TakeGradient", pb.TakeGradientRequest(**{"name": "d", "client": 1, "sequence": 1, "num_required": 1, **fields}))

    def count(self, name: str = "d") -> int:
        return status_of(self.client, name).num_accumulated


@contextlib.contextmanager
def serving_accumulators(address: str, raw: RawShard) -> Iterator[Server]:
    with contextlib.closing(GrpcAccumulators(address)) as client:
        create(client, AccumulatorSpec(name="d", data_type=DataType.FLOAT32, shape=(2,)))
        create(client, AccumulatorSpec(name="e", data_type=DataType.FLOAT64, shape=(-1, 0)))
        create(client, AccumulatorSpec(name="s", data_type=DataType.FLOAT32, shape=(4, 1), is_sparse=True))
        yield Server(raw, client, address)


@pytest.fixture
def server() -> Iterator[Server]:
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with serving_accumulators(running.address, raw) as server:
            yield server


WHOLE = frame(0, bytes(8))

# Case, call, status, reason, what the text contains.
ROWS: list[tuple[str, Callable[[Server], Outcome], grpc.StatusCode, str, str]] = [
    ("no message at all", lambda s: s.call("ApplyGradient"), INVALID, "TRUNCATED_STREAM", "before its first"),
    ("frame first", lambda s: s.call("ApplyGradient", pb.ApplyGradientRequest(frame=WHOLE)), INVALID, "MALFORMED_MESSAGE", "no header"),
    ("no protobuf", lambda s: s.call("CreateAccumulator", b"\xff"), INVALID, "MALFORMED_MESSAGE", "CreateAccumulatorRequest"),
    ("no specification", lambda s: s.call("CreateAccumulator", b""), INVALID, "MALFORMED_MESSAGE", "spec is missing"),
    ("unknown element type", lambda s: s.create(data_type=99), INVALID, "INVALID_SPEC", "dtype 99 unknown"),
    ("unknown reduction", lambda s: s.create(reduction=0), INVALID, "MALFORMED_MESSAGE", "reduction: got 0"),
    ("stream too short", lambda s: s.apply(frame(0, bytes(4))), INVALID, "TRUNCATED_STREAM", "4 of 8 bytes"),
    ("stream too long", lambda s: s.apply(frame(0, bytes(12))), INVALID, "FRAME_OUT_OF_ORDER", "beyond"),
    ("gap between frames", lambda s: s.apply(frame(0, bytes(2)), frame(4, bytes(4))), INVALID, "FRAME_OUT_OF_ORDER", "expected 2"),
    ("wrong shape", lambda s: s.apply(frame(0, bytes(12)), shape=[3]), INVALID, "SHAPE_MISMATCH", "want (2,)"),
    ("no array has this shape", lambda s: s.apply(name="e", shape=[1 << 62, 0]), INVALID, "INVALID_SPEC", "is too large"),
    ("negative step", lambda s: s.apply(WHOLE, local_step=-1), INVALID, "INVALID_SPEC", "local_step"),
    ("nameless client", lambda s: s.apply(WHOLE, client=0), INVALID, "INVALID_SPEC", "client 0"),
    ("rows for a dense one", lambda s: s.apply(frame(0, bytes(24)), num_indices=2), INVALID, "INVALID_SPEC", "takes dense gradients"),
    ("no rows for a sparse one", lambda s: s.apply(WHOLE, name="s"), INVALID, "SHAPE_MISMATCH", "0 indices, 2 rows"),
    ("absurd number of indices", lambda s: s.apply(name="s", num_indices=1 << 62, shape=[1 << 58, 1]), INVALID, "SHAPE_MISMATCH", ""),
    (
        "more than any memory",
        lambda s: s.apply(name="s", num_indices=1 << 40, shape=[1 << 40, 1]),
        CODE.RESOURCE_EXHAUSTED,
        "LIMIT_EXCEEDED",
        "bytes",
    ),
    (
        "index out of range",
        lambda s: s.apply(frame(0, b"\xff" * 8 + bytes(4)), name="s", num_indices=1, shape=[1, 1]),
        INVALID,
        "INDEX_OUT_OF_RANGE",
        "indices[0] = -1, want 0 to 3",
    ),
    ("taking nothing", lambda s: s.take(num_required=0), INVALID, "INVALID_SPEC", "num_required"),
    ("unknown accumulator", lambda s: s.take(name="nobody"), CODE.NOT_FOUND, "ACCUMULATOR_NOT_FOUND", "'nobody'"),
    (
        "other specification",
        lambda s: s.create(name="d"),
        CODE.ALREADY_EXISTS,
        "ACCUMULATOR_EXISTS",
        "shape is None, the accumulator's is (2,)",
    ),
]


def test_rows_without_elements_may_not_become_more_than_an_array_can_have(server: Server) -> None:
    create(server.client, AccumulatorSpec(name="w", data_type=DataType.FLOAT64, is_sparse=True))
    largest = [MAX_EXTENTS, 0]

    def one_row(index: int, sequence: int) -> Outcome:
        content = frame(0, index.to_bytes(8, "little"))
        return server.apply(content, name="w", sequence=sequence, num_indices=1, shape=[1, *largest], local_step=1)

    assert one_row(0, 1).code is CODE.OK
    refused = one_row(1, 2)
    assert (refused.code, refused.reason) == (CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert server.count("w") == 1
    taken = server.client.take_gradient(TakeRequest(name="w", client=1, sequence=1, num_required=1, max_wait_s=0.0))
    assert taken.values is not None
    assert taken.values.shape == (1, *largest)


@pytest.mark.parametrize(("call", "code", "reason", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_is_refused_without_effect(
    server: Server, call: Callable[[Server], Outcome], code: grpc.StatusCode, reason: str, text: str
) -> None:
    outcome = call(server)
    assert (outcome.code, outcome.reason) == (code, reason), outcome.text
    assert text in outcome.text
    assert (server.count(), server.count("s")) == (0, 0)
    assert server.apply(WHOLE, sequence=9).code is CODE.OK
    assert server.count() == 1


def test_header_in_the_middle_is_refused(server: Server) -> None:
    header = pb.ApplyGradientRequest(header=pb.GradientHeader(name="d", client=1, sequence=1, shape=[2]))
    outcome = server.call("ApplyGradient", header, header)
    assert (outcome.code, outcome.reason) == (INVALID, "MALFORMED_MESSAGE")
    assert server.count() == 0


def test_stale_gradient_is_answered_before_its_content_comes(server: Server) -> None:
    server.client.call(SetAccumulatorStepRequest(name="d", step=5))
    outcome = server.apply(local_step=4, shape=[1 << 30])
    assert outcome.code is CODE.OK
    assert pb.ApplyGradientResponse.FromString(outcome.messages[0]) == pb.ApplyGradientResponse(accepted=False, step=5)


def test_taker_that_goes_away_is_forgotten_and_its_gradients_are_kept(server: Server) -> None:
    gone = GrpcAccumulators(server.address)
    failures: list[BaseException] = []

    def take() -> None:
        try:
            gone.take_gradient(TakeRequest(name="d", client=7, sequence=1, num_required=1, max_wait_s=20))
        except (Cancelled, Unavailable) as error:
            failures.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: status_of(server.client, "d").num_waiting == 1)
    gone.close()
    thread.join(20)
    assert failures
    wait_until(lambda: status_of(server.client, "d").num_waiting == 0)
    server.apply(WHOLE)
    assert server.count() == 1


def test_takers_beyond_the_limit_are_refused_and_others_still_served(server: Server) -> None:
    calls = []
    with contextlib.ExitStack() as stack:
        for client in range(1, MAX_TAKERS + 1):
            if client % MAX_CALLS_A_CONNECTION == 1:
                channel = stack.enter_context(DEFAULT_ACCESS.open_channel(server.address))
            begin: Any = channel.unary_stream(PATH + "TakeGradient", request_serializer=pb.TakeGradientRequest.SerializeToString)
            request = pb.TakeGradientRequest(name="d", client=client, sequence=1, num_required=1, max_wait=Duration(seconds=20))
            calls.append(begin(request, timeout=30))
        wait_until(lambda: status_of(server.client, "d").num_waiting == MAX_TAKERS)
        refused = server.take(client=1000, max_wait=Duration(seconds=20))
    assert (refused.code, refused.reason) == (CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert len(calls) == MAX_TAKERS
    wait_until(lambda: status_of(server.client, "d").num_waiting == 0)
    server.apply(WHOLE)
    assert server.count() == 1


def test_shutdown_ends_waiting_calls() -> None:
    failures: list[BaseException] = []
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(open_server(ParameterServerConfig(index=0)))
        client = stack.enter_context(contextlib.closing(GrpcAccumulators(running.address)))
        create(client, AccumulatorSpec(name="d", data_type=DataType.FLOAT32))

        def take() -> None:
            try:
                client.take_gradient(TakeRequest(name="d", client=7, sequence=1, num_required=1, max_wait_s=20))
            except (ShuttingDown, Unavailable, Cancelled) as error:
                failures.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: status_of(client, "d").num_waiting == 1)
        running.stop(5.0)
        thread.join(20)
        assert [type(failure) for failure in failures] == [ShuttingDown]
