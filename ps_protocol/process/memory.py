"""How a role's process keeps memory: what the C library and Python's garbage collector do with it. Knows glibc and gc; no role, no message.

A role imports this module before all others, with the garbage collector still on. So it imports few modules, and `ctypes` and `platform`
only in the functions that use them.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# What glibc may keep at the end of each heap, and the largest block that may come from a heap: as high as glibc itself may raise it.
_KEPT_BYTES = 32 << 20
# Set it to 0 to leave the C library alone.
SWITCH = "LOCKSTEP_KEEP_MEMORY"


def keep_freed_memory(*, num_heaps: int | None = None) -> bool:
    """Lets this process keep up to 32 MiB of freed memory in each heap; returns whether it could. Idempotent, for the whole process.

    Without effect if the C library is not glibc, if LOCKSTEP_KEEP_MEMORY is 0, or if malloc has been tuned by the environment. `num_heaps`
    bounds how many heaps there are, for servers; threads of a program that allocates much at once would wait for each other.
    """
    glibc = _glibc()
    if glibc is None or not is_allowed(os.environ):
        return False
    mallopt = glibc.mallopt
    is_done = bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return is_done and (num_heaps is None or bool(mallopt(_M_ARENA_MAX, num_heaps)))


def give_back_freed_memory() -> None:
    """Returns freed memory to the kernel, once, after large work that is done once. Takes milliseconds."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the environment lets this process tune malloc: LOCKSTEP_KEEP_MEMORY is not 0, and malloc has no settings yet."""
    is_tuned = any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return environment.get(SWITCH) != "0" and not is_tuned


def _glibc() -> "ctypes.CDLL | None":
    import ctypes
    import platform

    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


@contextmanager
def importing_for_good() -> Iterator[None]:
    """Turns the garbage collector off for the block, and then excludes all objects that exist from later collections.

    It is for the imports of our own processes. They start and end a quarter faster, and no later collection stops their threads to go
    through some hundred thousand objects of modules. A library must not call it: objects of the user's program may become garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
