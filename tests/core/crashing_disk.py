"""A disk on which a process can die at any call: what it had not made last is torn then. Knows files; no checkpoint."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# All that changes a disk, or makes a change last.
_CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")


class Crash(BaseException):
    """The process is dead: nothing that it does from here on has an effect."""


class Disk:
    """The real disk, until the crash: then what no fsync has made last is torn."""

    def __init__(self, root: Path, *, crash_at: int) -> None:
        self._root, self._crash_at = root, crash_at
        self._real = {name: getattr(os, name) for name in _CALLS}
        self._synced: dict[int, int] = {}
        self.num_calls = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._wrapped(name))
            yield

    def note_synced(self) -> None:
        """What is here now lasts."""
        self._synced = {path.stat().st_ino: path.stat().st_size for path in self._root.rglob("*") if path.is_file()}

    def tear(self) -> None:
        """Leaves half of every file whose last bytes were not on stable storage."""
        for path in self._root.rglob("*"):
            status = path.stat()
            if path.is_file() and self._synced.get(status.st_ino) != status.st_size:
                os.truncate(path, status.st_size // 2)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.num_calls += 1
            if self.num_calls >= self._crash_at:
                if name == "write" and self.num_calls == self._crash_at:
                    self._real[name](args[0], bytes(args[1])[: len(args[1]) // 2])
                raise Crash
            result = self._real[name](*args, **keywords)
            if name == "fsync":
                status = os.fstat(args[0])
                self._synced[status.st_ino] = status.st_size
            return result

        return call
