"""An arena as frames of its encoded bytes, and back. Knows layouts and bytes; no message, no RPC."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ps_protocol.encodings.formats import (
    FORMATS,
    FloatEncoding,
    Packed,
    Units,
    encoded_nbytes,
    encoded_ranges,
    is_encodable,
    ranges_with,
    units_of,
)
from ps_protocol.errors import FrameOutOfOrder, InvalidSpec, MalformedMessage, TruncatedStream
from ps_protocol.model.layout import Layout, Segments, SegmentWriter
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array


def encoded_frames(
    layout: Layout, memory: Array, encoding: FloatEncoding, max_bytes: int, *, into: Array | None = None
) -> Iterator[tuple[int, memoryview]]:
    """Yields (offset, bytes) of the encoded arena in order, each of at most `max_bytes`. For encodings of variables.

    `memory`: the arena, a one-dimensional uint8 array; each frame's part of it is read when that frame is asked for. `into`: memory for
    all encoded bytes, where frames stay valid; None: each frame is valid until the next is asked for.
    """
    entry = FORMATS[encoding]
    if not entry.is_for_variables:
        raise InvalidSpec(f"encoding {encoding.name}: for gradients only; read variables as they are, or as halves")
    if isinstance(entry.coding, Units):
        units = entry.coding
        num_at_once = units.size * max(1, max_bytes // units.unit_bytes)
        if into is None:
            scratch = np.empty(min(units.nbytes(num_at_once), encoded_nbytes(layout, encoding)), np.uint8)
    for one in encoded_ranges(layout, encoding):
        content = memory[one.arena.start : one.arena.stop]
        if not one.is_encoded:
            for offset in range(0, content.nbytes, max_bytes):
                yield one.start + offset, content[offset : offset + max_bytes].data
            continue
        values = content.view(np.float32)
        for start in range(0, values.size, num_at_once):
            part = values[start : start + num_at_once]
            offset, nbytes = one.start + units.nbytes(start), units.nbytes(part.size)
            encoded = scratch[:nbytes] if into is None else into[offset : offset + nbytes]
            units.encode(part, encoded)
            yield offset, encoded.data


def decoding_writer(
    layout: Layout, encoding: FloatEncoding, into: Segments, *, followed_by: Sequence[Array] = ()
) -> "SegmentWriter | DecodingWriter":
    """Returns a writer for an encoded arena that fills `into`, the arena itself.

    `followed_by` is filled with the bytes after it, as they are. Where units have several elements, `into` must be one piece. Raises
    InvalidSpec for an encoding whose length varies: see `unpack`.
    """
    if encoding is FloatEncoding.AS_IS:
        return into.followed_by(followed_by).writer()
    units = units_of(encoding)
    spans = [*_spans(layout, encoding, into)]
    end = spans[-1].stop if spans else 0
    for piece in followed_by:
        end += piece.nbytes
        spans.append(_Span(end, piece, is_encoded=False))
    return DecodingWriter(spans, units)


def check_packed_nbytes(layout: Layout, encoding: FloatEncoding, packed: Packed, nbytes: int) -> None:
    """Raises MalformedMessage unless an arena can have this length in an encoding whose length varies."""

    def nbytes_with(count: int) -> int:
        return max((one.stop for one in ranges_with(layout, lambda size: packed.nbytes(size, count))), default=0)

    least, most = nbytes_with(0), nbytes_with(packed.chunk)
    if not least <= nbytes <= most or (nbytes - least) % 2:
        raise MalformedMessage(f"encoded_bytes: {nbytes} for {encoding.name}; this shard's arena takes {least} to {most}, in steps of 2")


def unpack(layout: Layout, packed: Packed, encoded: Array, out: Array) -> None:
    """Fills the arena `out` from its encoded bytes. Raises MalformedMessage or IndexOutOfRange; `out` is then undefined."""
    begin = 0
    for arena in layout.arenas:
        target = out[arena.start : arena.stop]
        if is_encodable(layout, arena):
            begin += packed.decode(encoded[begin:], target.view(np.float32))
        elif begin + target.size > encoded.size:
            raise MalformedMessage(
                f"{packed.words}: {encoded.size} bytes, {begin + target.size} at least by what they say; they do not fit"
            )
        else:
            target[:] = encoded[begin : begin + target.size]
            begin += target.size
    if begin != encoded.size:
        raise MalformedMessage(
            f"{packed.words}: {encoded.size} bytes, its ranges have {begin}; the numbers of elements do not fit encoded_bytes"
        )


@light_dataclass(frozen=True, slots=True)
class _Span:
    """Encoded bytes up to `stop` that stand for `target`: bytes as they are, or float32."""

    stop: int
    target: Array
    is_encoded: bool


# Encoded bytes that are received at once, before they are decoded.
_SCRATCH_BYTES = 1 << 18


class DecodingWriter:
    """Decodes frames that come in order. Not thread-safe. `num_written` is in encoded bytes."""

    def __init__(self, spans: Sequence[_Span], units: Units) -> None:
        self._spans = spans
        self._units = units
        self.nbytes = spans[-1].stop if spans else 0
        self._unit_bytes = units.unit_bytes
        self._index = 0
        self._filled = 0  # elements, or bytes, of the span's target
        self._carried = b""  # the beginning of a unit, whose rest comes with the next frame
        self._scratch: Array | None = None
        self.num_written = 0

    @property
    def is_full(self) -> bool:
        """Whether every byte has been written."""
        return self.num_written == self.nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Takes the next encoded bytes; raises FrameOutOfOrder on a gap, an overlap, or bytes beyond the end, and then has done nothing."""
        length = len(data)
        if offset != self.num_written:
            raise FrameOutOfOrder(f"frame at offset {offset}, expected {self.num_written}; send frames in order, with no gap or overlap")
        if offset + length > self.nbytes:
            raise FrameOutOfOrder(f"frame at offset {offset} has {length} bytes and ends beyond the encoded arena's {self.nbytes}")
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

    def fill(self, receive: Callable[[memoryview], int]) -> None:
        """Decodes the next bytes, which `receive` writes into the memory that it is given; it returns how many these are."""
        if self._scratch is None:
            self._scratch = np.empty(min(_SCRATCH_BYTES, self.nbytes), np.uint8)
        count = receive(self._scratch.data[: self.nbytes - self.num_written])
        if count:
            self.write(self.num_written, self._scratch.data[:count])

    def finish(self) -> None:
        """Raises TruncatedStream unless every byte has been written."""
        if self.num_written != self.nbytes:
            raise TruncatedStream(f"{self.num_written} of {self.nbytes} bytes received; nothing was changed; send it again")

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
        out = span.target[self._filled : self._filled + num_units * self._units.size]
        self._units.decode(encoded, out)
        self._filled += out.size


def _spans(layout: Layout, encoding: FloatEncoding, into: Segments) -> Iterator[_Span]:
    pieces = [(start, np.frombuffer(view, np.uint8)) for start, view in into.chunks(max(1, into.nbytes))]
    position = 0
    for one in encoded_ranges(layout, encoding):
        stop = one.start
        while position < len(pieces) and pieces[position][0] < one.arena.stop:
            start, piece = pieces[position]
            # Pieces end where variables do, but a piece may continue into the next range.
            first, last = max(one.arena.start - start, 0), min(one.arena.stop - start, piece.size)
            target = piece[first:last]
            if one.is_encoded:
                target = target.view(np.float32)
                stop += units_of(encoding).nbytes(target.size)
            else:
                stop += target.size
            yield _Span(stop, target, is_encoded=one.is_encoded)
            if start + piece.size > one.arena.stop:
                break
            position += 1
