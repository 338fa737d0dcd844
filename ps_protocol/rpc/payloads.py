"""Which payloads of a server's streams travel over data sockets, as a caller decides. Knows one RPC and sockets; no tensor."""

import logging
import time

from ps_protocol.errors import DeadlineExceeded, LimitExceeded, PsError, Unavailable, Unimplemented
from ps_protocol.roles.shard import DataSocketRequest
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.client_stream import LongLivedStream
from ps_protocol.sockets.data_socket import DataSocket, connect
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.codec import decode_message

log = logging.getLogger("lockstep.rpc")

_TIMEOUT_S = 5.0
# After a failed attempt, payloads go over gRPC for so long; each attempt may take 3 s, so the pauses double.
_PAUSE_S, _MAX_PAUSE_S = 30.0, 3_600.0


class Payloads:
    """Opens data sockets to one server. Thread-safe.

    `least_bytes`: what is smaller goes over gRPC; None: everything does. `is_required`: raise rather than use gRPC.
    """

    def __init__(self, connection: Connection, *, least_bytes: int | None, is_required: bool) -> None:
        self._connection = connection
        self._least_bytes = None if connection.access.uses_tls(connection.address) and not is_required else least_bytes
        self._is_required = is_required
        self._not_before, self._pause_s = 0.0, _PAUSE_S
        self._has_spoken = False
        # Whether a data socket has carried something.
        self.has_opened = False

    def socket_for(self, use: LongLivedStream, num_bytes: int) -> DataSocket | None:
        """Returns what is to carry a payload of this stream, opened if need be; None: gRPC is. Raises Unavailable, Unimplemented."""
        if self._least_bytes is None or num_bytes < max(self._least_bytes, 1):
            return None
        data_socket = use.data_socket
        if data_socket is not None and data_socket.is_over:
            use.let_go_of_socket()
            data_socket = None
        if data_socket is None and (self._is_required or time.monotonic() >= self._not_before):
            data_socket = self._open()
            if data_socket is not None:
                use.carry_payloads(data_socket)
        return data_socket

    def _open(self) -> DataSocket | None:
        request = DataSocketRequest()
        try:
            # Its answer is one message; but Ctrl-C, which the stream's use listens for, does not end a blocking call of gRPC.
            message = self._connection.stream_down(
                "OpenDataSocket",
                codec.encode(request),
                lambda messages: next(messages, b""),
                timeout_s=_TIMEOUT_S,
                awaited=request.awaited,
            )
            invitation = codec.decode_answer(request, decode_message(codec.answer_message(request), message))
        except Unimplemented:
            if self._is_required:
                raise
            self._least_bytes = None
            return None
        except LimitExceeded:
            if self._is_required:
                raise
            self._wait_longer()
            return None
        except DeadlineExceeded as error:
            # The caller's own time is not up.
            raise Unavailable(error.message, facts=error.facts) from None
        try:
            found = connect(self._connection.address, invitation, peer=self._connection.target)
        except Unavailable as error:
            if self._is_required:
                raise
            self._wait_longer()
            self._say(error)
            return None
        self.has_opened, self._pause_s = True, _PAUSE_S
        return found

    def _wait_longer(self) -> None:
        self._not_before, self._pause_s = time.monotonic() + self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)

    def _say(self, error: PsError) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            log.warning("%s; variables and gradients go over gRPC, which is slower. Is a firewall between?", error.message)


def next_payload(data_socket: DataSocket) -> pb.Payload:
    """Returns the announcement of the next payload for a stream."""
    return pb.Payload(socket=data_socket.nonce, number=data_socket.next_number())
