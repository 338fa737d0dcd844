"""Has the C library keep memory that was freed, for messages that come and go. Knows glibc; nothing of messages."""

import ctypes
import os
import platform
from collections.abc import Mapping

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# What glibc may keep at the end of each heap, and the largest block that may come from a heap: as high as glibc itself may raise it.
_KEPT_BYTES = 32 << 20
# Set it to 0 to leave the C library alone.
SWITCH = "LOCKSTEP_KEEP_MEMORY"


def keep_freed_memory(*, num_heaps: int | None = None) -> bool:
    """Lets this process keep up to 32 MiB of freed memory a heap; True if that could be done. Idempotent, for the whole process.

    Without effect if the C library is not glibc, if LOCKSTEP_KEEP_MEMORY is 0, or if malloc has been tuned by the environment. `num_heaps`
    bounds how many heaps there are, for servers; threads of a program that allocates much at once would wait for each other.
    """
    if platform.libc_ver()[0] != "glibc" or not is_allowed(os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    is_done = bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return is_done and (num_heaps is None or bool(mallopt(_M_ARENA_MAX, num_heaps)))


def give_back_freed_memory() -> None:
    """Returns what has been freed to the kernel, once, for the end of work that does not come again; takes milliseconds."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the environment leaves this on."""
    is_tuned = any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return environment.get(SWITCH) != "0" and not is_tuned
