"""How an uncaught typed error is shown: the program's own lines and the error's text, without the SDK's lines between them.

Changes nothing about an error that is caught, and nothing at all under `python -X dev`. Knows frames; no session.
"""

import sys
import sysconfig
import threading
from types import TracebackType

from ps_protocol.errors import InternalError, PsError

# Lines of these are not the program's: ours, and what ours call.
_INSIDE = frozenset({"worker_client", "ps_protocol", "ps_server", "chief", "lockstep", "grpc", "google", "numpy"})


def trim(error: BaseException) -> None:
    """Ends the traceback of a typed error at the last line that is the program's, and drops what it was made of inside."""
    if not isinstance(error, PsError) or isinstance(error, InternalError):
        return
    last = None
    entry = error.__traceback__
    while entry is not None:
        if not _is_inside(entry):
            last = entry
        entry = entry.tb_next
    if last is None:
        return  # a program of ours
    last.tb_next = None
    for cause in (error.__cause__, error.__context__):
        if cause is not None and cause.__traceback__ is not None and not _is_inside(cause.__traceback__):
            return trim(cause)  # the error came while the program dealt with another one
    error.__cause__, error.__suppress_context__ = None, True


def install() -> None:
    """Has uncaught errors trimmed before they are shown, by whatever shows them."""
    show, show_of_thread = sys.excepthook, threading.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trim(error)
        show(kind, error, trace)

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None:
            trim(arguments.exc_value)
        show_of_thread(arguments)

    if not sys.flags.dev_mode:
        sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def _is_inside(entry: TracebackType) -> bool:
    """Whether a line is of our packages, of what they call, or of Python's own library."""
    code, module = entry.tb_frame.f_code, entry.tb_frame.f_globals.get("__name__", "")
    if module.partition(".")[0] in _INSIDE:
        return True
    return code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith(_PACKAGES)


_LIBRARY = (sysconfig.get_path("stdlib") + "/", "<frozen ")
_PACKAGES = tuple(sysconfig.get_path(name) + "/" for name in ("purelib", "platlib"))
