"""Boards and input that no client of ours would send."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.board import BoardRequest, Key, PostHeader
from ps_protocol.rpc.board import GrpcBoards
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.security.options import Security
from ps_protocol.v1 import board_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_server.config import ParameterServerConfig
from tests.support.network.certificates import make
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, frame
from tests.support.parameter_servers.shards import open_server

CODE = grpc.StatusCode
INVALID = CODE.INVALID_ARGUMENT
KEY = pb.PostKey(first=1)


@dataclass
class Server:
    """A parameter server."""

    raw: RawShard
    boards: GrpcBoards

    def call(self, method: str, *messages: Any) -> Outcome:
        encoded = [message if isinstance(message, bytes) else message.SerializeToString() for message in messages]
        return self.raw.call("", *encoded, path=f"/ps_protocol.v1.BoardService/{method}")

    def post(self, *frames: tensor_pb2.ArenaFrame, **fields: Any) -> Outcome:
        header = pb.PostHeader(**{"board": "b", "author": 1, "incarnation": 1, "key": KEY, "keeps_from": KEY, "content_bytes": 8, **fields})
        first = pb.PostOnBoardRequest(header=header)
        return self.call("PostOnBoard", first, *(pb.PostOnBoardRequest(frame=each) for each in frames))

    def read(self, **fields: Any) -> Outcome:
        return self.call("ReadBoard", pb.ReadBoardRequest(**{"board": "b", "author": 1, **fields}))

    def newest(self) -> Key | None:
        return self.boards.read(BoardRequest(board="b", author=1, since=None, max_wait_s=0.0)).newest


@pytest.fixture
def server() -> Iterator[Server]:
    with open_server(ParameterServerConfig(index=0, max_memory_bytes=1 << 20)) as running, RawShard(running.address) as raw:
        with contextlib.closing(GrpcBoards(running.address)) as boards:
            yield Server(raw, boards)


LARGE = pb.PostKey(first=1 << 63)
# Case, call, status, reason, what the text contains.
ROWS: list[tuple[str, Callable[[Server], Outcome], grpc.StatusCode, str, str]] = [
    ("no message at all", lambda s: s.call("PostOnBoard"), INVALID, "TRUNCATED_STREAM", "before its first"),
    (
        "frame first",
        lambda s: s.call("PostOnBoard", pb.PostOnBoardRequest(frame=frame(0, b"x"))),
        INVALID,
        "MALFORMED_MESSAGE",
        "no header",
    ),
    ("no protobuf", lambda s: s.call("ReadBoard", b"\xff"), INVALID, "MALFORMED_MESSAGE", "ReadBoardRequest"),
    ("no name", lambda s: s.post(board=""), INVALID, "INVALID_SPEC", "name is empty"),
    ("no name to read", lambda s: s.read(board=""), INVALID, "INVALID_SPEC", "name is empty"),
    ("no key", lambda s: s.post(key=None), INVALID, "MALFORMED_MESSAGE", "key is missing"),
    ("a number beyond all", lambda s: s.post(author=1 << 63), INVALID, "INVALID_SPEC", "want 0 to 2^62"),
    ("a key beyond all", lambda s: s.post(key=LARGE), INVALID, "INVALID_SPEC", "want 0 to 2^62"),
    ("a key beyond all to read", lambda s: s.read(since=LARGE), INVALID, "INVALID_SPEC", "want 0 to 2^62"),
    ("stream too short", lambda s: s.post(frame(0, bytes(4))), INVALID, "TRUNCATED_STREAM", "4 of 8 bytes"),
    ("stream too long", lambda s: s.post(frame(0, bytes(12))), INVALID, "FRAME_OUT_OF_ORDER", "beyond"),
    ("gap between frames", lambda s: s.post(frame(0, bytes(2)), frame(4, bytes(4))), INVALID, "FRAME_OUT_OF_ORDER", "expected 2"),
    (
        "more than the server's memory",
        lambda s: s.post(content_bytes=2 << 20),
        CODE.RESOURCE_EXHAUSTED,
        "LIMIT_EXCEEDED",
        "a post on board",
    ),
    ("more than any memory", lambda s: s.post(content_bytes=1 << 60), CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", "split it"),
]


@pytest.mark.parametrize(("call", "code", "reason", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_bad_input_is_refused_without_effect(
    server: Server, call: Callable[[Server], Outcome], code: grpc.StatusCode, reason: str, text: str
) -> None:
    outcome = call(server)
    assert (outcome.code, outcome.reason) == (code, reason), outcome.text
    assert text in outcome.text
    assert server.newest() is None
    assert server.post(frame(0, bytes(8))).code is CODE.OK
    assert server.newest() == Key(1)


def test_posts_without_content_are_bounded_by_the_servers_memory(server: Server) -> None:
    refused = next(number for number in range(1, 2000) if server.post(author=number, content_bytes=0).code is not CODE.OK)
    assert refused > 500
    assert server.post(author=1, key=pb.PostKey(first=2), content_bytes=0).reason == "LIMIT_EXCEEDED"


def test_strangers_do_nothing_with_a_board_and_who_only_looks_does_not_post(tmp_path_factory: pytest.TempPathFactory) -> None:
    files = make(tmp_path_factory.mktemp("job"))
    security = Security(token_file=files.directory / "tokens")
    header = PostHeader(board="b", author=1, incarnation=1, key=Key(1), content_bytes=0)
    request = BoardRequest(board="b", author=1, since=None, max_wait_s=0.0)
    refused = list[tuple[str, str, str]]()
    with open_server(ParameterServerConfig(index=0, cluster="job", security=security)) as server:
        for role in ("worker", "observer", "chief", "nobody"):
            access = DEFAULT_ACCESS if role == "nobody" else files.caller(role, tls=False)
            with contextlib.closing(GrpcBoards(server.address, access=access)) as boards:
                for what in ("post", "read"):
                    try:
                        if what == "post":
                            boards.post(header, np.zeros(0, np.uint8))
                        else:
                            boards.read(request)
                    except PsError as error:
                        refused.append((role, what, error.reason))
    assert refused == [
        ("observer", "post", "PERMISSION_DENIED"),
        *(("chief", what, "PERMISSION_DENIED") for what in ("post", "read")),
        *(("nobody", what, "UNAUTHENTICATED") for what in ("post", "read")),
    ]
