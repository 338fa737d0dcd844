"""A parameter server called with bytes: nothing is checked or repaired on the way out. Knows methods and messages; asserts nothing."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from ps_protocol.roles.shard import PushHeader, ShardSpec
from ps_protocol.v1 import handshake_service_pb2, tensor_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec

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

    def call(self, method: str, *messages: bytes, path: str = "", compression: grpc.Compression | None = None) -> Outcome:
        """Calls a method with these messages; one message travels as any other stream of one."""
        call = self._channel.stream_stream(path or f"/{SERVICE}/{method}")(iter(messages), timeout=TIMEOUT_S, compression=compression)
        return outcome(call)

    def begin_push(self, messages: Iterable[bytes]) -> Any:
        """Begins a push and returns the call, to be cancelled or awaited."""
        return self._channel.stream_unary(f"/{SERVICE}/PushGradients").future(iter(messages), timeout=TIMEOUT_S)

    def begin_read(self, message: bytes) -> Any:
        """Begins to read variables and returns the call."""
        return self._channel.unary_stream(f"/{SERVICE}/ReadVariables")(message, timeout=TIMEOUT_S)

    def begin_rows(self, messages: Iterable[bytes]) -> Any:
        """Begins to read rows and returns the call."""
        return self._channel.stream_stream(f"/{SERVICE}/ReadRows")(iter(messages), timeout=TIMEOUT_S)

    def handshake(self, **changes: Any) -> Outcome:
        """Shakes hands as a client of this version would, but for `changes`."""
        fields = {"version": handshake_service_pb2.ProtocolVersion(major=2, minor=0), **changes}
        return self.call("", handshake_service_pb2.HandshakeRequest(**fields).SerializeToString(), path=HANDSHAKE)


def outcome(call: Any) -> Outcome:
    """Waits for the end of a call that answers with a stream."""
    messages: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        messages.extend(call)
    metadata: dict[str, Any] = dict(call.trailing_metadata() or ())
    return Outcome(call.code(), str(metadata.get("ps-reason", "")), call.details() or "", tuple(messages))


def frame(offset: int, data: bytes) -> tensor_pb2.ArenaFrame:
    """A frame."""
    return tensor_pb2.ArenaFrame(offset=offset, data=data)


def push_stream(header: PushHeader | pb.PushHeader, *frames: tensor_pb2.ArenaFrame) -> list[bytes]:
    """The messages of a push: the header alone, then each frame alone."""
    message = header if isinstance(header, pb.PushHeader) else codec.encode_push_header(header)
    return [
        pb.PushGradientsRequest(header=message).SerializeToString(),
        *(pb.PushGradientsRequest(frame=each).SerializeToString() for each in frames),
    ]


def create_stream(spec: ShardSpec | pb.ShardSpec, *frames: tensor_pb2.ArenaFrame) -> list[bytes]:
    """The messages of a creation."""
    message = spec if isinstance(spec, pb.ShardSpec) else codec.encode_shard_spec(spec)
    return [
        pb.CreateVariablesRequest(spec=message).SerializeToString(),
        *(pb.CreateVariablesRequest(frame=each).SerializeToString() for each in frames),
    ]
