"""Ctrl-C during a streaming call. Knows Python's default handler of SIGINT and how to cancel; nothing of what is called.

gRPC's streams wait on locks that are written in Python. A KeyboardInterrupt that Python raises just there can leave such a lock held for
ever, and closing the channel would then hang. So, while the main thread is in a stream, Ctrl-C cancels the call, and the exception is
raised once the call has ended. A handler of the user's own is left alone.
"""

import importlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Protocol

try:
    # What Python wraps to take and give members of enums, at five times the price; a worker's step changes the handler eight times.
    _c_signal: Any = importlib.import_module("_signal")
    _set_handler, _handler_of = _c_signal.signal, _c_signal.getsignal
except (ImportError, AttributeError):
    _set_handler, _handler_of = signal.signal, signal.getsignal
_SIGINT = int(signal.SIGINT)


class Cancellable(Protocol):
    """A call under way."""

    def cancel(self) -> object:
        """Ends it; without effect if it is over."""


class CancellingOnInterrupt:
    """A block whose Ctrl-C cancels the watched call first, and ends the block with KeyboardInterrupt.

    `outlives_block`: the call goes on after a block without Ctrl-C, for the next one.
    """

    def __init__(self, *, outlives_block: bool = False) -> None:
        self._outlives_block = outlives_block
        self._call: Cancellable | None = None
        self._is_interrupted = False
        self._is_active = False

    def __enter__(self) -> "CancellingOnInterrupt":
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _handler_of(_SIGINT) is signal.default_int_handler:
            _set_handler(_SIGINT, self._interrupt)
            self._is_active = True
        return self

    def watch(self, call: Cancellable) -> None:
        """Names the call to cancel, now or when the block ends; it is cancelled at once if Ctrl-C came before."""
        self._call = call
        if self._is_interrupted:
            call.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._call is not None and not self._outlives_block:
            # Without effect once the call is over; otherwise the block failed, and nobody wants the rest.
            self._call.cancel()
        if self._is_active:
            _set_handler(_SIGINT, signal.default_int_handler)
        if self._is_interrupted:
            raise KeyboardInterrupt from None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._call is not None:
            # Runs in the thread that may hold the call's lock, which that thread may take again.
            self._call.cancel()
