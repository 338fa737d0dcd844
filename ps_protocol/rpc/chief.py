"""The chief behind gRPC: the `Chief` of another process. Knows its methods and messages; no retries, no state of a session."""

import itertools

from ps_protocol.errors import PsError
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.chief import Chief
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.request import RPCS, Answer, Request
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, not_understood
from ps_protocol.rpc.client_stream import LongLivedStream, Streams
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message

SERVICE = "ps_protocol.v1.ChiefService"
TIMEOUT_S = 10.0


class GrpcChief(Chief):
    """The chief at `address`. Implements Chief: thread-safe, one attempt a call, nothing is sent before the first call.

    A call that waits is given 10 s more than it may wait. `cluster` is what `handshake` insists on; "" accepts any. What is called with
    every step travels on a long-lived stream (Converse).
    """

    def __init__(self, address: str, *, cluster: str = "", access: Access = DEFAULT_ACCESS) -> None:
        self.address, self.access = address, access
        self._cluster = cluster
        self._connection = Connection(address, name=name_of(Role.CHIEF, None), service=SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._streams = Streams(self._connection, "Converse", deadlines=self._deadlines)
        self._numbers = itertools.count(1)

    def handshake(self, timeout_s: float = TIMEOUT_S) -> HandshakeReply:
        """Returns the server's identity; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this cluster's chief."""
        return self._connection.handshake(Role.CHIEF, index=None, cluster=self._cluster, timeout_s=timeout_s)

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer."""
        own_s = min(getattr(request, "max_wait_s", 0.0), MAX_WAIT_SLICE_S) + TIMEOUT_S
        limit_s = own_s if timeout_s is None else min(own_s, max(0.0, timeout_s))
        kind = RPCS[type(request)].field
        if not kind:
            return self._connection.call(request, timeout_s=limit_s)
        response = self._converse(kind, request, timeout_s=limit_s, awaited=request.awaited)
        try:
            return codec.decode_answer(request, getattr(response, kind))
        except PsError as error:
            raise not_understood(self._connection.target, error) from None

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. The chief continues. Idempotent."""
        self._streams.close()
        self._deadlines.close()
        self._connection.close()

    def _converse(self, kind: str, request: Request[Answer], *, timeout_s: float, awaited: str) -> pb.ConverseResponse:
        """Returns the answer to a call on a long-lived stream."""
        message = pb.ConverseRequest(call=next(self._numbers))
        codec.write(request, getattr(message, kind))
        number, data = message.call, message.SerializeToString()

        def exchange(use: LongLivedStream) -> pb.ConverseResponse:
            stream = use.stream
            stream.request(data)
            answer = decode_message(pb.ConverseResponse, stream.answer())
            while answer.call != number:
                answer = decode_message(pb.ConverseResponse, stream.receive())
            return answer

        answer = self._streams.use(exchange, timeout_s=timeout_s, awaited=awaited)
        if answer.HasField("error"):
            raise decode_call_error(answer.error)
        return answer
