"""An arena as frames of its encoded bytes, and back. Knows layouts and bytes; no message, no RPC."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.encodings.formats import INT8_BLOCK, SCALE_BYTES, FloatEncoding, encoded_nbytes, encoded_ranges
from ps_protocol.encodings.halves import narrow, widen
from ps_protocol.encodings.int8 import decode_int8
from ps_protocol.errors import FrameOutOfOrder, InvalidSpec, TruncatedStream
from ps_protocol.model.layout import Layout, Segments, SegmentWriter
from ps_protocol.model.variables import Array


def encoded_frames(layout: Layout, memory: Array, encoding: FloatEncoding, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, bytes) of the encoded arena in order, each of at most `max_bytes`. For FloatEncoding.AS_IS and the halves.

    `memory`: the arena, a one-dimensional uint8 array; each frame's part of it is read when that frame is asked for. What is yielded is
    valid until the next is asked for.
    """
    if encoding is not FloatEncoding.AS_IS and not encoding.is_half:
        raise InvalidSpec(f"encoding {encoding.name}: for gradients only; read variables as they are, or as halves")
    scratch = np.empty(min(max_bytes // 2, encoded_nbytes(layout, encoding)), np.uint16)
    for one in encoded_ranges(layout, encoding):
        content = memory[one.arena.start : one.arena.stop]
        if not one.is_encoded:
            for offset in range(0, content.nbytes, max_bytes):
                yield one.start + offset, content[offset : offset + max_bytes].data
            continue
        values = content.view(np.float32)
        for start in range(0, values.size, scratch.size):
            part = values[start : start + scratch.size]
            bits = scratch[: part.size]
            narrow(part, bits, encoding)
            yield one.start + 2 * start, bits.view(np.uint8).data


def decoding_writer(
    layout: Layout, encoding: FloatEncoding, into: Segments, *, followed_by: Sequence[Array] = ()
) -> "SegmentWriter | DecodingWriter":
    """Returns a writer for an encoded arena that fills `into`, the arena itself.

    `followed_by` is filled with the bytes after it, as they are. Not for the top k, whose values come after all their positions. For int8
    `into` must be one piece.
    """
    if encoding is FloatEncoding.AS_IS:
        return into.followed_by(followed_by).writer()
    spans = [*_spans(layout, encoding, into)]
    end = spans[-1].stop if spans else 0
    for piece in followed_by:
        end += piece.nbytes
        spans.append(_Span(end, piece, is_encoded=False))
    return DecodingWriter(spans, encoding)


@dataclass(frozen=True, slots=True)
class _Span:
    """Encoded bytes up to `stop` that stand for `target`: bytes as they are, or float32."""

    stop: int
    target: Array
    is_encoded: bool


class DecodingWriter:
    """Decodes frames that come in order. Not thread-safe. `num_written` is in encoded bytes."""

    def __init__(self, spans: Sequence[_Span], encoding: FloatEncoding) -> None:
        self._spans = spans
        self._encoding = encoding
        self._nbytes = spans[-1].stop if spans else 0
        self._unit_bytes, self._unit_size = (2, 1) if encoding.is_half else (INT8_BLOCK + SCALE_BYTES, INT8_BLOCK)
        self._index = 0
        self._filled = 0  # elements, or bytes, of the span's target
        self._carried = b""  # the beginning of a unit, whose rest comes with the next frame
        self.num_written = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in all."""
        return self._nbytes

    @property
    def is_full(self) -> bool:
        """Whether every byte has been written."""
        return self.num_written == self._nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Takes the next encoded bytes; raises FrameOutOfOrder on a gap, an overlap, or bytes beyond the end, and then has done nothing."""
        length = len(data)
        if offset != self.num_written:
            raise FrameOutOfOrder(f"frame at offset {offset}, expected {self.num_written}; send frames in order, with no gap or overlap")
        if offset + length > self._nbytes:
            raise FrameOutOfOrder(f"frame at offset {offset} has {length} bytes and ends beyond the encoded arena's {self._nbytes}")
        source = np.frombuffer(data, np.uint8) if length else np.empty(0, np.uint8)
        while source.size:
            span = self._spans[self._index]
            part = source[: span.stop - self.num_written]
            self.num_written += part.size
            if span.is_encoded:
                self._decode(span, part)
            else:
                span.target[self._filled : self._filled + part.size] = part
                self._filled += part.size
            if self.num_written == span.stop:
                self._index, self._filled = self._index + 1, 0
            source = source[part.size :]

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""
        if self.num_written != self._nbytes:
            raise TruncatedStream(f"{self.num_written} of {self._nbytes} bytes received; nothing was changed; send it again")

    def _decode(self, span: _Span, part: Array) -> None:
        """Decodes the whole units among what was carried and `part`; at the end of the span the last unit may be shorter."""
        is_end = self.num_written == span.stop
        if self._carried:
            # Only as much of the part as completes the unit.
            missing = min(self._unit_bytes - len(self._carried), part.size)
            joined = self._carried + part[:missing].tobytes()
            part = part[missing:]
            if len(joined) < self._unit_bytes and not (is_end and not part.size):
                self._carried = joined
                return
            self._carried = b""
            self._decode_units(span, np.frombuffer(joined, np.uint8))
        whole = part.size if is_end else part.size - part.size % self._unit_bytes
        if whole:
            self._decode_units(span, part[:whole])
        self._carried = part[whole:].tobytes()

    def _decode_units(self, span: _Span, encoded: Array) -> None:
        num_units = -(-encoded.size // self._unit_bytes)
        out = span.target[self._filled : self._filled + num_units * self._unit_size]
        if self._encoding.is_half:
            widen(encoded.view(np.uint16), out, self._encoding)
        else:
            decode_int8(encoded, out)
        self._filled += out.size


def _spans(layout: Layout, encoding: FloatEncoding, into: Segments) -> Iterator[_Span]:
    pieces = [(start, np.frombuffer(view, np.uint8)) for start, view in into.chunks(max(1, into.nbytes))]
    position = 0
    for one in encoded_ranges(layout, encoding):
        stop = one.start
        while position < len(pieces) and pieces[position][0] < one.arena.stop:
            start, piece = pieces[position]
            # Pieces end where variables do, but a piece may go on into the next range.
            first, last = max(one.arena.start - start, 0), min(one.arena.stop - start, piece.size)
            target = piece[first:last]
            if one.is_encoded:
                target = target.view(np.float32)
                stop += 2 * target.size if encoding.is_half else one.stop - one.start
            else:
                stop += target.size
            yield _Span(stop, target, is_encoded=one.is_encoded)
            if start + piece.size > one.arena.stop:
                break
            position += 1
