"""Places where a test can have a process killed, stopped, delayed or fail with an error. Knows names and effects; no role."""

import errno
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Mapping

from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass

log = logging.getLogger("lockstep.rpc")

VARIABLE = "LOCKSTEP_FAILPOINTS"
ENABLING_VARIABLE = "LOCKSTEP_ENABLE_FAILPOINTS"
NAMES = frozenset(
    {
        *("ps.push.staged_before_ack", "ps.apply.before", "ps.apply.mid", "ps.apply.before_publish", "ps.apply.before_ack"),
        *("ps.save.before_write", "ps.save.mid_file", "ps.save.before_fsync", "ps.save.before_ack", "ps.restore.mid"),
        *("chief.apply.before", "chief.apply.after", "chief.tokens.half"),
        *("chief.manifest.before_write", "chief.manifest.before_rename", "chief.manifest.after_rename"),
        *("worker.token.after", "worker.push.mid", "worker.commit.before"),
    }
)
_SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP"}
_DISK_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
_MAX_DELAY_S = 3600.0


@light_dataclass(slots=True, kw_only=True)
class _Point:
    name: str
    action: str
    argument: str
    at: int | None
    num_times: int = 0


_active: dict[str, _Point] = {}
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Has the effect that is set for this place, as a rule none. May kill or stop the process, wait, or raise Unavailable or OSError."""
    if _active:
        _reach(name)


def enable_failpoints(environment: Mapping[str, str], *, is_enabled: bool) -> None:
    """Sets the failpoints of LOCKSTEP_FAILPOINTS, in place of all earlier ones; none if it is empty.

    `is_enabled`: whether the flag, or LOCKSTEP_ENABLE_FAILPOINTS=1, was given. Raises InvalidSpec if failpoints are asked for without it,
    or if the text cannot be understood.
    """
    text = environment.get(VARIABLE, "").strip()
    if text and not is_enabled:
        raise InvalidSpec(f"{VARIABLE} is set, which is for tests; pass --enable-failpoints ({ENABLING_VARIABLE}=1) too, or unset it")
    points = _parse(text)
    _active.clear()
    _active.update(points)
    if points:
        log.warning("failpoints are active: %s", text)


def enable_worker_failpoints(environment: Mapping[str, str]) -> None:
    """As `enable_failpoints`, for a process without flags: asks LOCKSTEP_ENABLE_FAILPOINTS=1. Other programs' variables do no harm."""
    enable_failpoints(environment, is_enabled=environment.get(ENABLING_VARIABLE, "").strip() == "1")


def _parse(text: str) -> dict[str, _Point]:
    points = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = part.partition("=")
        rest, _, at = rest.partition("@")
        action, _, argument = rest.partition(":")
        point = _Point(name=name.strip(), action=action.strip(), argument=argument.strip(), at=_count(part, at))
        _check(part, point)
        points[point.name] = point
    return points


def _count(part: str, text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise InvalidSpec(f"{VARIABLE}: got {part[:80]!r}, want a whole number >= 1 behind the @")
    return int(text)


def _check(part: str, point: _Point) -> None:
    if point.name not in NAMES:
        raise InvalidSpec(f"{VARIABLE}: there is no failpoint {point.name[:80]!r}; there are: {', '.join(sorted(NAMES))}")
    if point.action == "delay":
        is_right = 0 <= _seconds(point.argument) <= _MAX_DELAY_S
    elif point.action == "error":
        is_right = point.argument in ("", *_DISK_ERRORS)
    else:
        is_right = point.action in _SIGNALS and not point.argument
    if not is_right:
        raise InvalidSpec(f"{VARIABLE}: got {part[:80]!r}, want kill, stop, delay:SECONDS, error, error:enospc or error:eio")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _reach(name: str) -> None:
    point = _active.get(name)
    if point is None:
        return
    with _lock:
        point.num_times += 1
        num_times = point.num_times
    if point.at is not None and num_times != point.at:
        return
    log.warning("failpoint %s: %s (reached %d times)", name, point.action, num_times)
    if point.action in _SIGNALS:
        os.kill(os.getpid(), getattr(signal, _SIGNALS[point.action]))
    elif point.action == "delay":
        time.sleep(_seconds(point.argument))  # the delay is what the failpoint does
    elif point.argument:
        number = _DISK_ERRORS[point.argument]
        raise OSError(number, os.strerror(number), name)
    else:
        raise Unavailable(f"failpoint {name}")
