"""Memory that two processes map, and what lies where in it. Knows descriptors, pages and positions; no RPC, no step."""

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
import weakref
from pathlib import Path

import numpy as np

from ps_protocol.model.variables import Array
from ps_protocol.shared_memory.words import (
    ARENA_BYTES_AT,
    FORMAT,
    FORMAT_AT,
    HEADER_BYTES,
    KIND_AT,
    MAGIC,
    MAGIC_AT,
    NONCE_AT,
    NONCE_BYTES,
    SegmentKind,
    Words,
    num_arenas,
    page_aligned,
    segment_bytes,
)

# Memory without a name that two processes map: made by one, found by the other in /proc.
#
# A segment is a memfd. It has no name in any file system, so nothing can be left behind: it is gone with the last process that maps it. Its
# size is sealed, so that nobody can cut it off under another's feet; that of the variables is sealed against writing too, and that of
# gradients once its worker has mapped it. Another process of the same user opens it as /proc/<pid>/fd/<descriptor>. What it finds there, or
# does not, may be anything where process numbers mean something else (containers): it looks at name, size, seals and header before it
# believes, and then proves that it has read the nonce.


NAME_PREFIX = "lockstep-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Linux 5.1; Python 3.11 has no name for it. Mappings that can be written stay, no new ones can be made.
_SEAL_FUTURE_WRITE = 0x0010
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedSegment:
    """One mapped segment. `arenas` are views of the mapping, which lasts as long as any of them; `descriptor` is None once it is closed.

    The descriptor goes with the segment, if not before: while one is open, so is the memory, though no process maps it.
    """

    descriptor: int | None = None

    def __init__(self, whole: Array, *, kind: SegmentKind, arena_bytes: int, descriptor: int | None) -> None:
        starts = range(HEADER_BYTES, len(whole) + 1, page_aligned(arena_bytes) or HEADER_BYTES)[: num_arenas(kind)]
        self.kind = kind
        self.num_bytes = len(whole)
        self.arenas: tuple[Array, ...] = tuple(whole[start : start + arena_bytes] for start in starts)
        if not arena_bytes:
            self.arenas = tuple(whole[:0] for _ in range(num_arenas(kind)))
        self.words: Words = memoryview(whole.data)[:HEADER_BYTES].cast("Q")
        self.descriptor = descriptor

    @property
    def nonce(self) -> bytes:
        """The random bytes in the header."""
        return self.words[NONCE_AT : NONCE_AT + 2].tobytes()

    def hand_over(self) -> None:
        """Ends the way to the segment, which all who need it have mapped. Raises OSError if another process keeps that from being done.

        Sealed, so that a process which has opened it meanwhile cannot write it either: no new mapping can be written, and no file.
        """
        if self.descriptor is not None:
            _seal_against_writers(self.descriptor)
            self.close_descriptor()

    def close_descriptor(self) -> None:
        """Closes the descriptor: no other process can open the segment from now on. Idempotent."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()


class SegmentMaker:
    """Makes segments whose names, which only /proc shows, say whose they are. Raises OSError where there is no memory or no memfd."""

    def __init__(self, *, cluster: str, index: int, process_incarnation: int) -> None:
        plain = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in cluster)[:64]
        self._name = f"{NAME_PREFIX}{plain}-ps{index}-{process_incarnation:x}"

    def variables(self, arena_bytes: int) -> SharedSegment:
        """Returns a segment for the variables: two arenas, all zero."""
        return self._make(SegmentKind.VARIABLES, arena_bytes, "variables")

    def gradients(self, arena_bytes: int, *, worker: int) -> SharedSegment:
        """Returns a buffer for a worker, all zero."""
        return self._make(SegmentKind.GRADIENTS, arena_bytes, f"w{worker}")

    def _make(self, kind: SegmentKind, arena_bytes: int, suffix: str) -> SharedSegment:
        if not can_share():
            raise OSError("no memfd with seals on this system")
        descriptor = os.memfd_create(f"{self._name}-{suffix}", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, segment_bytes(arena_bytes, kind=kind))
            whole = _map(descriptor, segment_bytes(arena_bytes, kind=kind), is_written=True)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            if kind is SegmentKind.VARIABLES:
                _seal_against_writers(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        segment = SharedSegment(whole, kind=kind, arena_bytes=arena_bytes, descriptor=descriptor)
        words, nonce = segment.words, secrets.token_bytes(NONCE_BYTES)
        words[NONCE_AT], words[NONCE_AT + 1] = int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little")
        words[FORMAT_AT], words[KIND_AT], words[ARENA_BYTES_AT] = FORMAT, kind, arena_bytes
        words[MAGIC_AT] = MAGIC
        return segment


def map_segment(*, pid: int, descriptor: int, num_bytes: int, kind: SegmentKind, arena_bytes: int) -> SharedSegment:
    """Maps a segment of another process, that of variables for reading only. Raises OSError if it does not exist or is another."""
    path = f"/proc/{pid}/fd/{descriptor}"
    # Before it is opened: with what else may lie there, opening could block or do something.
    if not (name := os.readlink(path)).startswith(f"/memfd:{NAME_PREFIX}"):
        raise OSError(f"{path} is {name}, no shared memory; the server has another space of process numbers")
    is_written = kind is SegmentKind.GRADIENTS
    # Not blocking: something else may have taken its place since, as a pipe, which would wait for a writer.
    own = os.open(path, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # The seal first: a size that is looked at before could change until it is sealed, and to touch what is not there kills the process.
        if not fcntl.fcntl(own, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{path} is not sealed against being cut off")
        wanted, found = segment_bytes(arena_bytes, kind=kind), os.fstat(own).st_size
        if not num_bytes == wanted == found:
            raise OSError(f"{path} has {found} bytes, {num_bytes} were offered, and the layout needs {wanted}")
        whole = _map(own, num_bytes, is_written=is_written)
    finally:
        os.close(own)
    segment = SharedSegment(whole, kind=kind, arena_bytes=arena_bytes, descriptor=None)
    if tuple(segment.words[:NONCE_AT]) != (MAGIC, FORMAT, kind, arena_bytes):
        raise OSError(f"{path} has another header than expected; install the same version of Lockstep on both sides")
    return segment


def _seal_against_writers(descriptor: int) -> None:
    """Leaves the mappings that there are as the only ones that can be written, and the seals as they are then."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    except OSError as error:
        # An older kernel: that the descriptor is closed, or opened for reading, has to do.
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _map(descriptor: int, num_bytes: int, *, is_written: bool) -> Array:
    """Maps a file, shared, for as long as a view of what is returned is there. Keeps no descriptor, as Python's own mmap does.

    That one would be a way to the memory for any process of the same user, as long as the mapping lasts.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
    address = library.mmap(None, num_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Not when Python ends: threads may still use it then, and the kernel unmaps it anyway.
    weakref.finalize(memory, library.munmap, address, num_bytes).atexit = False
    view = memoryview(memory)
    return np.frombuffer(view if is_written else view.toreadonly(), np.uint8)


def mapping_of(array: Array) -> memoryview | None:
    """Returns the whole mapping in which an array's bytes lie, which lasts as long as its `obj`; None: the array has memory of its own."""
    memory: object = array
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return memory if isinstance(memory, memoryview) and isinstance(memory.obj, ctypes.Array) else None


def boot_id() -> str:
    """Returns what identifies the running kernel of this host; empty if memory cannot be shared here."""
    if not can_share():
        return ""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def can_share() -> bool:
    """Whether this system has what sharing needs: memfd with seals, and whole numbers as the headers have them."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and sys.byteorder == "little" and HEADER_BYTES % mmap.PAGESIZE == 0
