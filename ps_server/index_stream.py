"""The indices of rows as they come in frames, and the rows as they go out."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ps_protocol.errors import FrameOutOfOrder, MalformedMessage, TruncatedStream
from ps_protocol.framing import FRAME_BYTES, Frame, encode_frame, parse
from ps_protocol.segments import Segments
from ps_protocol.tensors import Array
from ps_protocol.v1 import parameter_service_pb2 as pb

_INDEX = np.dtype("<i8")


class Rows(Protocol):
    """Rows of one table, of one step."""

    @property
    def step(self) -> int:
        """The step that they belong to."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""

    def take(self, indices: Array) -> Array:
        """Returns these rows, one after the other. Raises IndexOutOfRange, StepGone."""


def index_blocks(frame: Frame | None, messages: Iterator[bytes], *, num_rows: int) -> Iterator[Array]:
    """Yields `num_rows` indices in blocks, as their frames come: `frame` is that of the first message, the rest are in `messages`.

    Holds one frame at a time, so that a caller cannot make the server allocate more by asking for more. Raises FrameOutOfOrder,
    TruncatedStream, MalformedMessage.
    """
    num_bytes, received, rest = num_rows * _INDEX.itemsize, 0, b""
    while True:
        if frame is not None:
            _check_place(frame, received=received, num_bytes=num_bytes)
            received += len(frame.data)
            # A frame may end in the middle of an index.
            data = rest + bytes(frame.data)
            whole = len(data) // _INDEX.itemsize * _INDEX.itemsize
            rest = data[whole:]
            yield np.frombuffer(data, _INDEX, count=whole // _INDEX.itemsize)
        message = next(messages, None)
        if message is None:
            break
        header, frame = parse(message, pb.ReadRowsRequest)
        if header is not None:
            raise MalformedMessage("ReadRowsRequest: a header came again in the middle of the stream; send it first only")
    if received != num_bytes:
        raise TruncatedStream(
            f"{received} of {num_bytes} bytes of indices received; send {_INDEX.itemsize} for each of the {num_rows} rows"
        )


def row_messages(rows: Rows, blocks: Iterator[Array]) -> Iterator[bytes]:
    """Yields the messages that answer ReadRows, in the order of the indices; without rows there is one, the header alone."""
    first, offset = pb.ReadRowsResponse(step=rows.step).SerializeToString(), 0
    rows_at_once = max(1, FRAME_BYTES // max(1, rows.row_bytes))
    for indices in blocks:
        for start in range(0, len(indices), rows_at_once):
            taken = rows.take(indices[start : start + rows_at_once]).reshape(-1).view(np.uint8)
            for begin, data in Segments([taken]).chunks(FRAME_BYTES):
                yield encode_frame(first, offset=offset + begin, data=data)
                first = b""
            offset += taken.nbytes
    if first:
        yield first


def _check_place(frame: Frame, *, received: int, num_bytes: int) -> None:
    if frame.offset != received:
        raise FrameOutOfOrder(f"frame at offset {frame.offset}, expected {received}; send frames in order, with no gap or overlap")
    if received + len(frame.data) > num_bytes:
        raise FrameOutOfOrder(f"frame at offset {received} has {len(frame.data)} bytes and ends beyond the indices' {num_bytes}")
