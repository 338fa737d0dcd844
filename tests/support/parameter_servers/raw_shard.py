"""A parameter server with right calls through a client, and wrong calls as raw bytes. Asserts nothing of answers."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from ps_protocol.model.layout import Layout
from ps_protocol.roles.shard import PushHeader, PushReply, ShardSpec, ShardStatusRequest
from ps_protocol.rpc.status import status_of
from ps_protocol.v1 import error_pb2, handshake_service_pb2, tensor_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_server.config import ParameterServerConfig
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import MIXED, Trainer, open_server

# A parameter server called with bytes: nothing is checked or repaired on the way out. Knows methods and messages; asserts nothing.


SERVICE = "ps_protocol.v1.ParameterService"
HANDSHAKE = "/ps_protocol.v1.HandshakeService/Handshake"
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended: `reason` is the trailing metadata's, empty if there is none; `messages` is what came before the end."""

    code: grpc.StatusCode
    reason: str
    text: str
    messages: tuple[bytes, ...]


class RawShard:
    """One channel with no limits and no checks of its own."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        # Typed as anything: its methods are as generic as their messages.
        self._channel: Any = grpc.insecure_channel(address, options=options)

    def __enter__(self) -> "RawShard":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()

    def call(self, method: str, *messages: bytes, path: str = "", timeout_s: float = TIMEOUT_S, **options: Any) -> Outcome:
        """Calls a method with these messages; one message travels as any other stream of one. `options`: gRPC's of a call."""
        return outcome(self._channel.stream_stream(path or f"/{SERVICE}/{method}")(iter(messages), timeout=timeout_s, **options))

    def push(self, *messages: bytes) -> Outcome:
        """Sends one contribution; see `answered`."""
        return answered(self.call("Push", *messages), lambda data: pb.PushResponse.FromString(data))

    def read(self, message: bytes) -> Outcome:
        """Reads variables once; see `answered`."""
        return answered(self.call("Read", message), lambda data: pb.ReadResponse.FromString(data).header)

    def command(self, **command: Any) -> Outcome:
        """Gives one command; see `answered`."""
        message = pb.CommandRequest(**command).SerializeToString()
        return answered(self.call("Command", message), lambda data: pb.CommandResponse.FromString(data))

    def begin_push(self, messages: Iterable[bytes]) -> Any:
        """Begins a push and returns the call, to be cancelled or awaited."""
        return self._channel.stream_stream(f"/{SERVICE}/Push")(iter(messages), timeout=TIMEOUT_S)

    def begin_read(self, message: bytes) -> Any:
        """Begins to read variables and returns the call."""
        return self._channel.unary_stream(f"/{SERVICE}/Read")(message, timeout=TIMEOUT_S)

    def begin_rows(self, messages: Iterable[bytes]) -> Any:
        """Begins to read rows and returns the call."""
        return self._channel.stream_stream(f"/{SERVICE}/ReadRows")(iter(messages), timeout=TIMEOUT_S)

    def handshake(self, **changes: Any) -> Outcome:
        """Shakes hands as a client of this version would, but for `changes`."""
        fields = {"version": handshake_service_pb2.ProtocolVersion(major=4, minor=0), **changes}
        return self.call("", handshake_service_pb2.HandshakeRequest(**fields).SerializeToString(), path=HANDSHAKE)


def outcome(call: Any) -> Outcome:
    """Waits for the end of a call that answers with a stream."""
    messages: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        messages.extend(call)
    metadata: dict[str, Any] = dict(call.trailing_metadata() or ())
    return Outcome(call.code(), str(metadata.get("ps-reason", "")), call.details() or "", tuple(messages))


def answered(ended: Outcome, answer_of: Callable[[bytes], Any]) -> Outcome:
    """A stream for one call: what was answered with an error, as a call that ended with it."""
    for message in ended.messages:
        answer = answer_of(message)
        if answer.HasField("error"):
            return refused(answer.error)
    return ended


def refused(error: error_pb2.CallError) -> Outcome:
    """A call that a long-lived stream answered with an error, as a call that ended with it."""
    return Outcome(status_of(decode_call_error(error)), error.reason, error.message, ())


def frame(offset: int, data: bytes) -> tensor_pb2.ArenaFrame:
    """A frame."""
    return tensor_pb2.ArenaFrame(offset=offset, data=data)


def push_stream(header: PushHeader | pb.PushHeader, *frames: tensor_pb2.ArenaFrame) -> list[bytes]:
    """The messages of a push: the header alone, then each frame alone."""
    message = header if isinstance(header, pb.PushHeader) else codec.encode(header)
    return [
        pb.PushRequest(header=message).SerializeToString(),
        *(pb.PushRequest(frame=each).SerializeToString() for each in frames),
    ]


def create_stream(spec: ShardSpec | pb.ShardSpec, *frames: tensor_pb2.ArenaFrame) -> list[bytes]:
    """The messages of a creation."""
    message = spec if isinstance(spec, pb.ShardSpec) else codec.encode(spec)
    return [
        pb.CreateVariablesRequest(spec=message).SerializeToString(),
        *(pb.CreateVariablesRequest(frame=each).SerializeToString() for each in frames),
    ]


# A parameter server in this process, called rightly through a client and wrongly through a raw channel. Asserts nothing of answers.


HALF = MIXED.nbytes // 2
WHOLE = frame(0, bytes(MIXED.nbytes))


@dataclass
class Server:
    """A parameter server with a model, called rightly by `trainer` and wrongly by `raw`."""

    raw: RawShard
    trainer: Trainer

    @property
    def step(self) -> int:
        step = self.trainer.shard.call(ShardStatusRequest()).step
        assert step is not None
        return step

    def apply_one(self) -> None:
        assert self.trainer.train(self.step).repeated_request is False

    def push(self, *frames: tensor_pb2.ArenaFrame, **changes: Any) -> Outcome:
        header = self.trainer.header(**{"step": self.step, **changes})
        return self.raw.push(*push_stream(header, *frames))

    def push_header(self, **changes: object) -> Outcome:
        header = codec.encode(self.trainer.header(step=self.step))
        header.MergeFrom(pb.PushHeader(**changes))  # type: ignore[arg-type]
        return self.raw.push(*push_stream(header, frame(0, bytes(MIXED.nbytes))))

    def create(self, spec: pb.ShardSpec, *frames: tensor_pb2.ArenaFrame) -> Outcome:
        return self.raw.call("CreateVariables", *create_stream(spec, *frames))

    def create_variable(self, **changes: object) -> Outcome:
        fields = {"name": "w", "data_type": tensor_pb2.DATA_TYPE_FLOAT32, "shape": [5, 7], **changes}
        spec = self.encoded_spec()
        del spec.slices[1:]
        spec.slices[0].variable.CopyFrom(tensor_pb2.VariableSpec(**fields))  # type: ignore[arg-type]
        return self.create(spec)

    def create_optimizer(self, **changes: object) -> Outcome:
        rate = tensor_pb2.LearningRateSchedule(name="constant", arguments={"value": 0.1})
        spec = self.encoded_spec()
        spec.optimizer.CopyFrom(tensor_pb2.OptimizerSpec(**{"name": "sgd", "learning_rate": rate, **changes}))  # type: ignore[arg-type]
        return self.create(spec)

    def encoded_spec(self, **changes: int) -> pb.ShardSpec:
        spec: pb.ShardSpec = codec.encode(self.trainer.spec(**changes))
        return spec


@contextlib.contextmanager
def trained_shard() -> Iterator[Server]:
    """A server with a model that has made a step."""
    with open_server(ParameterServerConfig(index=0, cluster="job-a")) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            server = Server(raw, Trainer(shard))
            server.trainer.create()
            server.trainer.train(0)
            yield server


def push_reply(ended: Outcome) -> PushReply:
    """What a push that ended well was answered."""
    assert ended.code is grpc.StatusCode.OK, ended.text
    return codec.decode(PushReply, pb.PushResponse.FromString(ended.messages[0]).reply)


def cut_push_off(server: Server, messages: list[bytes]) -> None:
    """Sends the messages, waits until the server has them all and more, and cancels."""
    are_sent, may_end = threading.Event(), threading.Event()

    def stream() -> Iterator[bytes]:
        yield from messages
        are_sent.set()
        may_end.wait(20)

    call = server.raw.begin_push(stream())
    assert are_sent.wait(20)
    call.cancel()
    may_end.set()
    assert call.code() is grpc.StatusCode.CANCELLED


def assert_moved(server: Server, before: object, *, by: float) -> None:
    """Every value is `by` more than before."""
    layout: Layout = server.trainer.layout
    after = server.trainer.read()[1]
    for index in range(len(layout.slices)):
        np.testing.assert_array_equal(layout.view(after, index), layout.view(np.asarray(before), index) + by)
