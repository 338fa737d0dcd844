"""The boards of another process behind gRPC. Knows methods and messages; no retries, one attempt a call."""

from collections.abc import Iterator

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import MAX_WAIT_S, BoardRequest, Found, FoundHeader, Post, PostHeader
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.rpc.accumulators import CONTROL_TIMEOUT_S, TENSOR_TIMEOUT_S
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection
from ps_protocol.v1 import board_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.frames import encode_stream, parse, write_frames

SERVICE = "ps_protocol.v1.BoardService"


class GrpcBoards:
    """The boards of the parameter server at `address`, whose `index` is checked by `handshake` (None: any). Implements Boards."""

    def __init__(self, address: str, *, index: int | None = None, access: Access = DEFAULT_ACCESS) -> None:
        self._index = index
        self._connection = Connection(address, name=name_of(Role.PARAMETER_SERVER, index), service=SERVICE, access=access)

    def handshake(self, timeout_s: float = CONTROL_TIMEOUT_S) -> HandshakeReply:
        """Returns the server's identity; raises WrongRole or ProtocolMismatch if it is not this parameter server."""
        return self._connection.handshake(Role.PARAMETER_SERVER, index=self._index, cluster="", timeout_s=timeout_s)

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. Idempotent."""
        self._connection.close()

    def post(self, header: PostHeader, content: Array) -> int:
        """Sends a post."""
        first = pb.PostOnBoardRequest(header=codec.encode(header))
        answer = self._connection.stream_up(
            "PostOnBoard",
            encode_stream(first, Segments([content])),
            pb.PostOnBoardResponse,
            timeout_s=TENSOR_TIMEOUT_S,
            awaited=f"the receipt of a post by board {header.board!r}",
        )
        return answer.process_incarnation

    def read(self, request: BoardRequest) -> Found:
        """Waits for a post."""
        return self._connection.stream_down(
            "ReadBoard",
            codec.encode(request),
            _receive,
            timeout_s=min(request.max_wait_s, MAX_WAIT_S) + TENSOR_TIMEOUT_S,
            awaited=f"a post of board {request.board!r}",
        )


def _receive(messages: Iterator[bytes]) -> Found:
    first, frame = parse(next(messages, b""), pb.ReadBoardResponse)
    if first is None:
        raise MalformedMessage("its stream does not begin with what was found")
    header = codec.decode(FoundHeader, first.header)
    if header.key is None:
        return Found(process_incarnation=header.process_incarnation, newest=header.newest)
    content = aligned_bytes(header.content_bytes)
    write_frames(frame, messages, pb.ReadBoardResponse, Segments([content]).writer())
    post = Post(key=header.key, incarnation=header.incarnation, content=content)
    return Found(process_incarnation=header.process_incarnation, newest=header.newest, post=post)
