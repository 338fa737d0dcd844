"""Rows on the wire: any number of them in constant memory, in the requested order; and input that no client of ours would send."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest

from ps_protocol import errors
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import RowsRequest
from ps_protocol.rpc.shard import SERVICE
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire.frames import FRAME_BYTES, parse
from ps_server.serving.streams import index_blocks, row_messages
from tests.support.network.servers import answering, serving
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import RawShard, frame

REQUEST = RowsRequest(epoch=1, layout_hash="abc", table=2, step=None)
INDICES_PER_FRAME = FRAME_BYTES // 8


class Table:
    """Rows of `width` numbers: row i is i, i + 0.5, i + 1 and so on. Remembers how much was asked for at once."""

    step = 4

    def __init__(self, *, num_rows: int, width: int = 2) -> None:
        self._num_rows, self._width, self.row_bytes = num_rows, width, 4 * width
        self.blocks: list[int] = []

    def take(self, indices: Array) -> Array:
        self.blocks.append(len(indices))
        if len(indices) and not 0 <= indices.min() <= indices.max() < self._num_rows:
            raise errors.IndexOutOfRange(f"rows 0 to {self._num_rows}")
        return self.rows(indices)

    def rows(self, indices: Array) -> Array:
        rows: Array = (indices[:, None] + np.arange(self._width) / 2).astype("<f4")
        return rows


def handler_of(table: Table) -> grpc.GenericRpcHandler:
    def serve(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            header, first = parse(next(messages), pb.ReadRowsRequest)
            assert header is not None
            yield from row_messages(cast(Any, table), index_blocks(first, messages, num_rows=header.header.num_rows))

    return grpc.method_handlers_generic_handler(SERVICE, {"ReadRows": grpc.stream_stream_rpc_method_handler(serve)})


@contextlib.contextmanager
def client_of(table: Table) -> Iterator[CommandedShard]:
    with serving(handler_of(table)) as address, contextlib.closing(CommandedShard(address, index=0)) as shard:
        yield shard


@pytest.mark.parametrize("width", [0, 1, 2, FRAME_BYTES // 4 + 3], ids=["no bytes", "narrow", "ordinary", "wider than a frame"])
@pytest.mark.parametrize("wanted", [[], [3], [4, 0, 0, 2]], ids=["none", "one", "repeated, unsorted"])
def test_rows_come_in_the_order_asked_for(wanted: list[int], width: int) -> None:
    table = Table(num_rows=5, width=width)
    indices, back = np.array(wanted, np.int64), np.zeros((len(wanted), width), "<f4")
    with client_of(table) as shard:
        assert shard.read_rows(REQUEST, indices, Segments([back.reshape(-1).view(np.uint8)])) == 4
    assert np.array_equal(back, table.rows(indices))


def test_a_million_rows_travel_both_ways_at_once_and_never_lie_in_the_server() -> None:
    table = Table(num_rows=1 << 20, width=4)
    indices = np.random.default_rng(0).permutation(1 << 20)
    back = np.zeros((len(indices), 4), "<f4")
    with client_of(table) as shard:
        assert shard.read_rows(REQUEST, indices, Segments([back.reshape(-1).view(np.uint8)])) == 4
    assert np.array_equal(back, table.rows(indices))
    assert max(table.blocks) * table.row_bytes <= FRAME_BYTES


@pytest.mark.parametrize("count", [1, 3 * INDICES_PER_FRAME], ids=["one message", "many"])
def test_refusal_may_come_before_the_indices_are_sent(count: int) -> None:
    with client_of(Table(num_rows=5)) as shard, pytest.raises(errors.IndexOutOfRange, match="rows 0 to 5"):
        shard.read_rows(REQUEST, np.full(count, 5), Segments([np.zeros(8 * count, np.uint8)]), timeout_s=10)


def messages(num_rows: int, *frames: tensor_pb2.ArenaFrame) -> list[bytes]:
    header = pb.RowsHeader(epoch=1, layout_hash="abc", table=2, num_rows=num_rows)
    return [
        pb.ReadRowsRequest(header=header).SerializeToString(),
        *(pb.ReadRowsRequest(frame=each).SerializeToString() for each in frames),
    ]


TWO = np.array([1, 2], "<i8").tobytes()
BAD: list[tuple[str, Callable[[], list[bytes]], str, str]] = [
    ("too few", lambda: messages(3, frame(0, TWO)), "TRUNCATED_STREAM", "16 of 24 bytes of indices received"),
    ("none at all", lambda: messages(1 << 60), "TRUNCATED_STREAM", "0 of 9223372036854775808 bytes"),
    ("too many", lambda: messages(1, frame(0, TWO)), "FRAME_OUT_OF_ORDER", "ends beyond the indices' 8"),
    ("a gap", lambda: messages(2, frame(0, TWO[:8]), frame(9, TWO[8:])), "FRAME_OUT_OF_ORDER", "frame at offset 9, expected 8"),
    ("second header", lambda: [*messages(0), *messages(0)], "MALFORMED_MESSAGE", "a header came again"),
    ("negative index", lambda: messages(1, frame(0, np.array([-1], "<i8").tobytes())), "INDEX_OUT_OF_RANGE", "rows 0 to 5"),
    ("garbage", lambda: [*messages(1), b"\xff"], "MALFORMED_MESSAGE", "are not a ReadRowsRequest"),
]


@pytest.fixture(scope="module")
def raw() -> Iterator[RawShard]:
    with serving(handler_of(Table(num_rows=5))) as address, RawShard(address) as shard:
        yield shard


@pytest.mark.parametrize(("sent", "reason", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_indices_that_cannot_be_right_are_refused(raw: RawShard, sent: Callable[[], list[bytes]], reason: str, words: str) -> None:
    ended = raw.call("ReadRows", *sent())
    assert (ended.code, ended.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason), ended.text
    assert words in ended.text


def test_a_frame_may_end_in_the_middle_of_an_index(raw: RawShard) -> None:
    ended = raw.call("ReadRows", *messages(2, *(frame(offset, TWO[offset : offset + 1]) for offset in range(16))))
    assert ended.code is grpc.StatusCode.OK
    rows = b"".join(pb.ReadRowsResponse.FromString(message).frame.data for message in ended.messages)
    assert np.frombuffer(rows, "<f4").tolist() == [1.0, 1.5, 2.0, 2.5]
