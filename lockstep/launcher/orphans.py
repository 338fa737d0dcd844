"""Finds, reaps and ends orphans: processes whose parents have ended, and that are this process's children now. Knows Linux's /proc only.

A process that is started in a new session with an empty environment is in no watched group and carries no token. But when its parent ends,
it becomes a child of its nearest ancestor that is a child subreaper. Only Linux has these; elsewhere no orphan is found.
"""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Self

from lockstep.launcher.guardian import children_of

_PR_SET_CHILD_SUBREAPER = 36
_PERIOD_S = 0.5
_END_S = 2.0
_PAUSE_S = 0.005


class Orphans:
    """Makes this process adopt orphans within a `with` block. `tell` sends a line to the guardian, which ends them if this process dies."""

    def __init__(self, *, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: set[int] = set()
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        _adopt(is_wanted=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _adopt(is_wanted=False)

    def look(self, own: Collection[int]) -> None:
        """Finds new orphans and reaps those that have ended, twice a second at most. `own`: the children that are not orphans."""
        if time.monotonic() >= self._looked_at + _PERIOD_S:
            self._find(own)

    def end(self, own: Collection[int], *, until: float = math.inf) -> None:
        """Kills all orphans, repeatedly until none is left: when one ends, its children become orphans. Takes 2 s at most."""
        deadline = min(until, time.monotonic() + _END_S)
        while self._find(own) and time.monotonic() < deadline:
            for pid in self._known:
                with suppress(ProcessLookupError, PermissionError):  # gone, or another user's
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_PAUSE_S)  # polls: no call waits for the end of a process that is not a child

    def _find(self, own: Collection[int]) -> set[int]:
        self._looked_at = time.monotonic()
        found = set(children_of(os.getpid())).difference(own)
        for pid in found - self._known:
            self._tell(f"adopt {pid}")
        self._known = found
        for pid in [*found]:
            self._reap_if_ended(pid)
        return self._known

    def _reap_if_ended(self, pid: int) -> None:
        with suppress(ChildProcessError):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            self._tell(f"disown {pid}")  # while its pid cannot be reused yet
            os.waitpid(pid, 0)
        self._known.discard(pid)


def _adopt(*, is_wanted: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)  # an old kernel refuses this; then no orphan is found
