"""Files for rows of tables without a size, on a local disk. Knows pages and room on the disk; no rows."""

import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.shown import format_bytes
from ps_protocol.model.variables import Array

# A file gets room on its disk in such pieces, if there is as much.
_ROOM_BYTES = 16 << 20


class TableFile:
    """Implements BytesInFile. The file has no name: nothing stays behind.

    `reserve` matters: the system ends a process that writes to a page for which the disk has no room.
    """

    def __init__(self, nbytes: int, *, directory: Path, owner: str) -> None:
        """Raises LimitExceeded, which names the owner."""
        self._where, self._descriptor = f"{owner}: --table-dir {directory}", -1
        self._size, self._num_reserved = max(1, nbytes), 0
        try:
            self._descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
            os.truncate(self._descriptor, self._size)
            self._mapping = mmap.mmap(self._descriptor, self._size)
        except OSError as error:
            self.close()
            raise LimitExceeded(
                f"{self._where}: no file for rows of tables ({error.strerror}); give a directory on a local disk that can be written to"
            ) from None
        # Rows lie anywhere: what is beside them is not read, too.
        self._mapping.madvise(mmap.MADV_RANDOM)
        self.memory: Array = np.frombuffer(self._mapping, np.uint8)[:nbytes]

    def reserve(self, nbytes: int) -> None:
        """Makes sure that the disk has room for the first bytes, before they are written. Raises LimitExceeded."""
        for stop in (min(self._size, nbytes + _ROOM_BYTES), nbytes):
            if nbytes <= self._num_reserved:
                return
            try:
                os.posix_fallocate(self._descriptor, self._num_reserved, stop - self._num_reserved)
                self._num_reserved = stop
            except OSError as error:
                reason = error.strerror
        if nbytes > self._num_reserved:
            raise LimitExceeded(
                f"{self._where}: its disk has no room for {format_bytes(nbytes - self._num_reserved)} more of tables"
                f" ({reason}); make room there, or add parameter servers"
            )

    def prefetch(self, starts: Array, nbytes: int) -> None:
        """Has the system read so many bytes from each of some places, without waiting for them."""
        if not starts.size or not nbytes:
            return
        # Of each, a byte on every page.
        offsets = np.append(np.arange(0, nbytes, mmap.PAGESIZE), nbytes - 1)
        pages = np.unique((starts[:, None] + offsets) // mmap.PAGESIZE)
        firsts = np.flatnonzero(np.concatenate(([True], pages[1:] > pages[:-1] + 1)))
        counts = np.diff(firsts, append=pages.size)
        for page, count in zip(pages[firsts].tolist(), counts.tolist(), strict=True):
            self._mapping.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, count * mmap.PAGESIZE)

    def close(self) -> None:
        """Reserves no more. The bytes are there as long as `memory` is."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
