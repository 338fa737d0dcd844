"""`lockstep top`: shows the cluster live in a terminal, until q, Ctrl-C or the chief's end. Knows terminal and chief; decides nothing."""

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from chief.page.look import Look
from chief.page.recorder import FirstServer, Recorder
from lockstep.cli.access import ChiefAbsent, chief_of
from lockstep.cli.access import add_arguments as add_access_arguments
from lockstep.cli.watch.view import frame
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterState

_PERIOD_S = 1.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_KEYS_TO_LEAVE = b"qQ\x03\x04"


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `top`."""
    add_access_arguments(parser)
    parser.add_argument(
        "--once", action="store_true", help="print the screen once, after two readings, and exit; the default without a terminal"
    )


def run_top(arguments: argparse.Namespace) -> int:
    """Shows the cluster until the user leaves or the chief ends, and returns the exit code."""
    with chief_of(arguments) as chief:
        metrics = FirstServer(chief.access, cluster="")
        recorder = Recorder(chief, read_metrics=metrics.read_metrics)
        threading.Thread(target=recorder.keep_reading_metrics, name="top-metrics", daemon=True).start()
        try:
            if arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
                return _print_once(recorder)
            return _show(recorder)
        finally:
            recorder.stop()


def _print_once(recorder: Recorder) -> int:
    for _ in range(2):  # a curve needs two readings
        recorder.look()
        with suppress(PsError):  # the rest is still worth showing
            recorder.read_metrics_now()
        threading.Event().wait(_PERIOD_S / 2)
    size = shutil.get_terminal_size((100, 50))
    print("\n".join(_frame(recorder, recorder.look(), width=size.columns, height=10_000, has_colours=False)))
    return 0


def _show(recorder: Recorder) -> int:
    last: Look | None = None
    gone_since: str = ""
    has_colours = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    with _screen() as wants_to_leave:
        while True:
            try:
                last, gone_since = recorder.look(), ""
            except PsError as error:
                if last is None:
                    raise ChiefAbsent(f"the chief does not answer: {error.message}") from error
                gone_since = gone_since or time.strftime("%H:%M:%S")
            size = shutil.get_terminal_size()
            has_ended = bool(gone_since) and last.status.state in (ClusterState.FINISHED, ClusterState.FAILED)
            lines = _frame(recorder, last, width=size.columns, height=size.lines, has_colours=has_colours, gone_since=gone_since)
            sys.stdout.write(_HOME + "".join(f"{line}{_REST_OF_LINE}\r\n" for line in lines[:-1]) + lines[-1] + _REST_OF_LINE + _REST)
            sys.stdout.flush()
            if wants_to_leave(_PERIOD_S) or has_ended:
                break
    # The last frame stays in the terminal.
    print("\n".join(_frame(recorder, last, width=size.columns, height=size.lines, has_colours=has_colours, gone_since=gone_since)))
    return 0


def _frame(recorder: Recorder, look: Look, *, width: int, height: int, has_colours: bool, gone_since: str = "") -> Sequence[str]:
    metrics, _ = recorder.metrics(after=0.0)
    return frame(
        look,
        speed=recorder.speed(after=0.0),
        metrics=metrics,
        width=width,
        height=height,
        has_colours=has_colours,
        gone_since=gone_since,
    )


@contextmanager
def _screen() -> Iterator[Callable[[float], bool]]:
    """Shows the terminal's alternate screen within the block.

    Yields a function that waits for some seconds and returns whether a key to leave was pressed.
    """
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def wants_to_leave(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([keys], [], [], left)
            if not ready:
                return False
            pressed = os.read(keys, 64)
            if not pressed or set(pressed) & set(_KEYS_TO_LEAVE):
                return True
        return False

    # Restores the terminal also after SIGTERM: with these settings it would be unusable.
    old = signal.signal(signal.SIGTERM, end)
    try:
        tty.setcbreak(keys)
        sys.stdout.write(_ENTER)
        yield wants_to_leave
    finally:
        signal.signal(signal.SIGTERM, old)
        with suppress(OSError):
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
