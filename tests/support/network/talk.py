"""The long-lived stream of a worker to its chief, by hand: calls and answers as bytes. Asserts nothing of answers."""

import contextlib
import queue
from typing import Any

import grpc
import pytest

from ps_protocol.v1 import chief_service_pb2 as pb
from tests.support.parameter_servers.raw_shard import Outcome, outcome, refused

SERVICE = "ps_protocol.v1.ChiefService"


class Talk:
    """One stream, with bytes both ways."""

    def __init__(self, channel: grpc.Channel, *, metadata: Any = ()) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Typed as anything: gRPC's types ask for those of the messages, and a call is an iterator, too.
        begin: Any = channel.stream_stream(f"/{SERVICE}/Converse")
        self.call: Any = begin(iter(self._outgoing.get, None), timeout=30, metadata=metadata)

    def send(self, data: bytes) -> None:
        self._outgoing.put(data)

    def ask(self, call: int, **request: Any) -> None:
        self.send(pb.ConverseRequest(call=call, **request).SerializeToString())

    def answer(self) -> pb.ConverseResponse:
        return pb.ConverseResponse.FromString(next(self.call))

    def end(self) -> tuple[grpc.StatusCode, str]:
        """Returns how the stream ended: status and reason; fails if an answer comes instead."""
        with pytest.raises(grpc.RpcError):
            self.answer()
        return self.call.code(), dict(self.call.trailing_metadata()).get("ps-reason", "")

    def close(self) -> None:
        self._outgoing.put(None)


def converse(channel: grpc.Channel, data: bytes, *, metadata: Any = ()) -> Outcome:
    """Makes one call on a stream of its own; an answer that is an error is as a call that ends with it."""
    talk = Talk(channel, metadata=metadata)
    with contextlib.closing(talk):
        talk.send(data)
        try:
            answer = talk.answer()
        except (StopIteration, grpc.RpcError):
            return outcome(talk.call)
    if answer.HasField("error"):
        return refused(answer.error)
    return Outcome(grpc.StatusCode.OK, "", "", (answer.SerializeToString(),))
