"""Exports the errors that a program may catch: `except lockstep.errors.DeadlineExceeded`. Defines none itself.

All are `PsError`, with `reason` (stable, UPPER_SNAKE), `message` (what, which, what to do) and `facts`.
"""

from typing import TYPE_CHECKING, Any

from ps_protocol import errors as _all
from ps_protocol.errors import *  # noqa: F403 (its __all__ says what)
from ps_protocol.rpc.memory import MemoryNotShared

__all__ = ["MemoryNotShared", *_all.__all__]


if not TYPE_CHECKING:  # or no type checker would find a name that is misspelled

    def __getattr__(name: str) -> Any:
        """Returns an error that hardly any program catches: tracebacks and pickles name each by this module."""
        found = getattr(_all, name, None)
        if isinstance(found, type) and issubclass(found, _all.PsError):
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
