"""CommandedShard against servers that misbehave, answer early, or hold large tensors; tests/contract has real servers."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol import errors
from ps_protocol.model.layout import Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import (
    AdoptRequest,
    MetricCell,
    PushHeader,
    PushReply,
    PushResult,
    ReadMetricsRequest,
    ReadRequest,
    ShardSpec,
    ShardStatusRequest,
    ShutdownRequest,
)
from ps_protocol.rpc.shard import SERVICE
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.frames import encode_frame, encode_stream, parse
from tests.support.chief.eras import era, fence
from tests.support.network.servers import answering, both_ways, serving, unary, upward
from tests.support.parameter_servers.commanded_shard import CommandedShard

MIB = 1 << 20
ID = PushId(worker=0, incarnation=1, sequence=1)
HEADER = PushHeader(era=era(1), push_id=ID, step=4, layout_hash="abc")
STALE = pb.PushReply(result="PUSH_RESULT_STALE", step=9)
STEP = pb.ReadResponse(header=pb.ReadHeader(step=4, num_bytes=2000)).SerializeToString()

Messages = Iterator[bytes]


@contextlib.contextmanager
def client_of(*handlers: grpc.GenericRpcHandler) -> Iterator[CommandedShard]:
    with serving(*handlers) as address, contextlib.closing(CommandedShard(address, index=0)) as shard:
        yield shard


def random_bytes(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read(shard: CommandedShard, into: Array, *, timeout_s: float = 10.0) -> int:
    return shard.read(ReadRequest(epoch=1, step=4, layout_hash="abc"), Segments([into]), timeout_s=timeout_s)


def pushed_to(answer: Callable[[pb.PushHeader, Messages], pb.PushResponse]) -> grpc.GenericRpcHandler:
    """A server that answers each contribution so, from its header and the messages, with the first."""

    def push(messages: Messages, context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            for message in messages:
                header, _ = parse(message, pb.PushRequest)
                if header is not None:  # else of a contribution that has its answer
                    made = answer(header.header, itertools.chain([message], messages))
                    made.push_id.CopyFrom(header.header.push_id)
                    yield made.SerializeToString()

    return both_ways(SERVICE, Push=push)


def read_from(answer: Callable[[pb.ReadRequest], Iterable[bytes]]) -> grpc.GenericRpcHandler:
    """A server that answers each request for variables so."""

    def read(messages: Messages, context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            for message in messages:
                yield from answer(pb.ReadRequest.FromString(message))

    return both_ways(SERVICE, Read=read)


class Memory:
    """The tensor methods of a server that keeps what was pushed and gives it back, one run of bytes for each worker."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.runs = nbytes, {0: aligned_bytes(nbytes)}

    def push(self, header: pb.PushHeader, messages: Messages) -> pb.PushResponse:
        assert header.content_bytes == self.nbytes
        run = self.runs.setdefault(header.push_id.worker, aligned_bytes(self.nbytes))
        writer = Segments([run]).writer()
        while True:
            _, frame = parse(next(messages), pb.PushRequest)
            if frame is not None:
                writer.write(frame.offset, frame.data)
            if writer.num_written == self.nbytes:
                return pb.PushResponse(reply=pb.PushReply(result="PUSH_RESULT_STAGED", step=header.step))

    def read(self, request: pb.ReadRequest) -> Iterator[bytes]:
        header = pb.ReadHeader(step=4, num_bytes=self.nbytes)
        return encode_stream(pb.ReadResponse(header=header), Segments([self.runs[request.epoch]]))


@contextlib.contextmanager
def remembering(nbytes: int) -> Iterator[tuple[CommandedShard, Memory]]:
    memory = Memory(nbytes)
    with client_of(pushed_to(memory.push), read_from(memory.read)) as shard:
        yield shard, memory


@pytest.mark.parametrize("nbytes", [0, 1, 1000, MIB, MIB + 1, 5 * MIB + 3])
def test_bytes_travel_both_ways(nbytes: int) -> None:
    content, back = random_bytes(nbytes), np.zeros(nbytes, np.uint8)
    with remembering(nbytes) as (shard, memory):
        pieces = Segments([content[: nbytes // 3], content[nbytes // 3 :]])
        assert shard.push_gradients(HEADER, pieces) == PushReply(result=PushResult.STAGED, step=4)
        assert np.array_equal(memory.runs[0], content)
        assert shard.read(ReadRequest(epoch=0, step=4, layout_hash="abc"), Segments([back])) == 4
    assert np.array_equal(back, content)


def test_threads_may_share_one_shard() -> None:
    outcome: list[bool] = []
    with remembering(3 * MIB) as (shard, _):

        def work(worker: int) -> None:
            content, back = random_bytes(3 * MIB, seed=worker), np.zeros(3 * MIB, np.uint8)
            for sequence in range(1, 4):  # the same contribution again would go on where it broke off, which this server does not
                push_id = PushId(worker=worker, incarnation=1, sequence=sequence)
                shard.push_gradients(PushHeader(era=era(1), push_id=push_id, step=4, layout_hash="abc"), Segments([content]))
                shard.read(ReadRequest(epoch=worker, step=4, layout_hash="abc"), Segments([back]))
                outcome.append(np.array_equal(back, content))

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert outcome == [True] * 12


@pytest.mark.parametrize("nbytes", [1000, 64 * MIB], ids=["one message", "many"])
def test_stale_answer_may_come_before_the_gradients_are_sent(nbytes: int) -> None:
    gradients = Segments([np.zeros(nbytes, np.uint8)])
    with client_of(pushed_to(lambda header, messages: pb.PushResponse(reply=STALE))) as shard:
        for _ in range(3):
            assert shard.push_gradients(HEADER, gradients, timeout_s=10) == PushReply(result=PushResult.STALE, step=9)


@pytest.mark.parametrize("nbytes", [1000, 64 * MIB], ids=["one message", "many"])
def test_refusal_may_come_before_the_gradients_are_sent(nbytes: int) -> None:
    refused = encode_call_error(errors.LayoutMismatch("other layout"))
    with client_of(pushed_to(lambda header, messages: pb.PushResponse(error=refused))) as shard:
        with pytest.raises(errors.LayoutMismatch, match="other layout"):
            shard.push_gradients(HEADER, Segments([np.zeros(nbytes, np.uint8)]), timeout_s=10)


def test_no_thread_is_left_after_an_early_answer() -> None:
    with client_of(pushed_to(lambda header, messages: pb.PushResponse(reply=STALE))) as shard:
        gradients = Segments([np.zeros(16 * MIB, np.uint8)])
        shard.push_gradients(HEADER, gradients)
        before = threading.active_count()
        for _ in range(10):
            shard.push_gradients(HEADER, gradients)
        # The feeding thread of the last call, and one of the server's four that had not started before, may still be there.
        assert threading.active_count() <= before + 4


def stuck(messages: Messages, context: grpc.ServicerContext) -> Iterator[bytes]:
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(30)
    return iter(())


def test_push_to_a_server_that_does_not_listen_ends_with_its_deadline() -> None:
    with client_of(both_ways(SERVICE, Push=stuck)) as shard:
        with pytest.raises(
            errors.DeadlineExceeded, match=r"waited for the receipt of gradients for step 4, which did not come within 0\.3 s"
        ):
            shard.push_gradients(HEADER, Segments([np.zeros(64 * MIB, np.uint8)]), timeout_s=0.3)


FULL = [encode_frame(STEP, offset=0, data=bytes(1000)), encode_frame(b"", offset=1000, data=bytes(1000))]
FEW = pb.ReadResponse(header=pb.ReadHeader(step=4, num_bytes=1000)).SerializeToString()
BAD_READS: list[tuple[str, list[bytes], type[errors.PsError], str]] = [
    (
        "no header",
        [encode_frame(b"", offset=0, data=bytes(2000))],
        errors.MalformedMessage,
        "ps 0 at .*: an answer does not begin with a header",
    ),
    ("cut off", FULL[:1], errors.Unavailable, "ended the stream Read"),
    ("gap", [FULL[0], encode_frame(b"", offset=1500, data=bytes(500))], errors.FrameOutOfOrder, "offset 1500, expected 1000"),
    ("too long", [FULL[0], encode_frame(b"", offset=1000, data=bytes(1001))], errors.FrameOutOfOrder, "beyond the arena's 2000"),
    ("too few", [encode_frame(FEW, offset=0, data=bytes(1000))], errors.MalformedMessage, "1000 bytes of variables, and 2000 are wanted"),
    ("garbage", [FULL[0], b"\xff\xff"], errors.MalformedMessage, "2 bytes are not a ReadResponse"),
    ("second header", [FULL[0], encode_frame(STEP, offset=1000, data=bytes(1000))], errors.MalformedMessage, "a header came again"),
]


@pytest.mark.parametrize(("messages", "error", "words"), [row[1:] for row in BAD_READS], ids=[row[0] for row in BAD_READS])
def test_answer_that_cannot_be_right_is_refused_by_the_reader(messages: list[bytes], error: type[errors.PsError], words: str) -> None:
    answers = iter([messages, FULL])

    def read_once(requests: Messages, context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield from next(answers)

    with client_of(both_ways(SERVICE, Read=read_once)) as shard:
        memory = np.ones(2000, np.uint8)
        with pytest.raises(error, match=words):
            read(shard, memory)
        assert read(shard, memory) == 4, "the next read must work"
        assert not memory.any()


def test_error_in_the_middle_of_a_read_arrives_and_the_stream_continues() -> None:
    overwritten = pb.ReadHeader(error=encode_call_error(errors.StepGone("step 4 was overwritten")))
    answers = iter([[FULL[0], pb.ReadResponse(header=overwritten).SerializeToString()], FULL])
    with client_of(read_from(lambda request: next(answers))) as shard:
        with pytest.raises(errors.StepGone, match="step 4 was overwritten"):
            read(shard, np.zeros(2000, np.uint8))
        assert read(shard, np.zeros(2000, np.uint8)) == 4


def test_the_server_learns_when_a_reader_gives_up() -> None:
    gone = threading.Event()

    def endless(requests: Messages, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(gone.set)
        yield b"\xff"
        while not gone.is_set():
            yield bytes(1000)

    with client_of(both_ways(SERVICE, Read=endless)) as shard:
        with pytest.raises(errors.MalformedMessage):
            read(shard, np.zeros(2000, np.uint8))
        assert gone.wait(10)


def test_specification_and_initial_values_travel_together() -> None:
    received: list[Any] = []

    def create(messages: Messages, context: grpc.ServicerContext) -> bytes:
        parsed = [parse(message, pb.CreateVariablesRequest) for message in messages]
        assert parsed[0][0] is not None
        received.append(codec.decode(ShardSpec, parsed[0][0].spec))
        received.append(b"".join(bytes(frame.data) for _, frame in parsed if frame))
        return pb.CreateVariablesResponse(created=True).SerializeToString()

    variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(3, 5))
    layout = Layout([VariableSlice(variable=variable, start=0, stop=3)])
    spec = ShardSpec(epoch=1, shard=0, layout=layout, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)))
    values = random_bytes(layout.nbytes)
    with client_of(upward(SERVICE, CreateVariables=create)) as shard:
        assert shard.create_variables(spec, Segments([values]))
    assert received == [spec, values.tobytes()]


REPORT = pb.ShardReport(num_pushes=1)
FENCE = codec.encode(fence(1, 2))
CONTROL: list[tuple[str, Callable[[CommandedShard], object], bytes, object]] = [
    (
        "ReadMetrics",
        lambda shard: shard.call(ReadMetricsRequest(epoch=1)),
        pb.ReadMetricsResponse(cells=[pb.MetricCell(name="loss", worker=1, total=3.0, weight=2.0, count=2, last=1.0)]).SerializeToString(),
        (MetricCell(name="loss", worker=1, total=3.0, weight=2.0, count=2, last=1.0),),
    ),
    (
        "GetShardStatus",
        lambda shard: shard.call(ShardStatusRequest()).step,
        pb.GetShardStatusResponse(step=0, fence=FENCE, report=REPORT).SerializeToString(),
        0,
    ),
    (
        "GetShardStatus",
        lambda shard: shard.call(ShardStatusRequest()).slots,
        pb.GetShardStatusResponse(slots=["m", "v"], fence=FENCE, report=REPORT).SerializeToString(),
        ("m", "v"),
    ),
    ("AdoptShard", lambda shard: shard.call(AdoptRequest(fence=fence(1, 2))).step, pb.AdoptShardResponse().SerializeToString(), None),
    ("ShutdownShard", lambda shard: shard.call(ShutdownRequest(fence=fence(1, 2), reason="done")), b"", None),
]


@pytest.mark.parametrize(("method", "call", "answer", "expected"), CONTROL, ids=[row[0] for row in CONTROL])
def test_control_calls_have_a_deadline_and_return_values(
    method: str, call: Callable[[CommandedShard], object], answer: bytes, expected: object
) -> None:
    remaining: list[float | None] = []

    def serve(request: bytes, context: grpc.ServicerContext) -> bytes:
        remaining.append(context.time_remaining())
        return answer

    with client_of(unary(SERVICE, **{method: serve})) as shard:
        assert call(shard) == expected
    assert remaining[0] is not None
    # gRPC sends deadlines rounded up to whole seconds.
    assert 0 < remaining[0] <= 121
