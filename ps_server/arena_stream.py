"""An arena as it goes out, message by message."""

from collections.abc import Generator

from ps_protocol.encodings import FloatEncoding
from ps_protocol.framing import FRAME_BYTES, encode_frame
from ps_server.transactions import Reading


def content_messages(first: bytes, reading: Reading, encoding: FloatEncoding = FloatEncoding.AS_IS) -> Generator[bytes, None, None]:
    """Yields a reading's messages; `first`, serialised, is joined with the first frame, or goes alone. Raises StepGone."""
    for offset, data in reading.chunks(FRAME_BYTES, encoding):
        message = encode_frame(first, offset=offset, data=data)
        # After the copy and before anybody sees it.
        reading.check()
        yield message
        first = b""
    if first:
        yield first
