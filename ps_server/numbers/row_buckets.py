"""Which rows of a bounded table make room for new keys. Knows buckets and when rows were used; nothing of their values, and no lock.

Each bucket of keys has a number of rows that it may have, and a full one gives a new key the row that was used longest ago; of several,
the one of the spread key with the greatest lower 32 bits. So what is kept follows from the keys and the steps that used them alone: not
from the order of rows, nor from what else lies on a server. (Caches of processors do likewise: they are set-associative.)
"""

from collections.abc import Callable

import numpy as np

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.keys import buckets_of
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

_AGE_SHIFT, _KEY_BITS = np.uint64(32), np.uint64((1 << 32) - 1)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """For new keys, by their positions: those that get rows of their own, and those that get `evicted` rows, in order. Others get none."""

    added: Array
    replacing: Array
    evicted: Array


class RowBuckets:
    """The rows of each bucket of a slice. `allocate(what, row_bytes, num_rows)` gives zeroed memory that takes none until it is used."""

    def __init__(self, piece: VariableSlice, max_rows: int, allocate: Callable[[str, int, int], Array]) -> None:
        self._piece, self._max_rows = piece, max_rows
        num_buckets = piece.stop - piece.start
        # Buckets of the whole table before the first of `_num_larger` may have a row more than others.
        self._capacity, self._num_larger = divmod(max_rows, max(1, piece.extent))
        stride = self._capacity + 1
        self._members = allocate("rows of buckets", 4 * stride, num_buckets).view(np.uint32).reshape(num_buckets, stride)
        self._counts = allocate("rows of buckets", 4, num_buckets).view(np.int32)
        self._is_needed = allocate("use of rows", 1, max_rows + 1).view(np.bool_)

    def add(self, keys: Array, rows: Array) -> None:
        """Enters rows that keys have got for the first time. Raises LimitExceeded if a bucket has no room for them."""
        buckets = self._buckets(keys)
        order = np.argsort(buckets, kind="stable")
        buckets, rows = buckets[order], rows[order]
        where, starts, counts = np.unique(buckets, return_index=True, return_counts=True)
        totals = self._counts[where] + counts
        if (totals > self._limits(where)).any():
            raise LimitExceeded(
                f"variable {self._piece.variable.name!r}: more rows than max_rows = {self._max_rows} lets be there;"
                " give the max_rows that the table was made with"
            )
        self._members[buckets, np.repeat(self._counts[where] - starts, counts) + np.arange(rows.size)] = rows
        self._counts[where] = totals

    def places(self, keys: Array, *, needed: Array, ages: Callable[[Array], Array] | None, keys_of: Array) -> NewRows:
        """Returns where new keys, ascending, are to lie. Nothing changes.

        `needed`: rows that must stay. `ages(rows)`: steps since rows were used, at least 1; None: none makes room. `keys_of`: by row.
        """
        where, starts, counts = np.unique(self._buckets(keys), return_index=True, return_counts=True)
        room = np.maximum(self._limits(where) - self._counts[where], 0)
        # Of the keys of a bucket, the first ones are added, and the next ones replace others.
        rank = np.arange(keys.size) - np.repeat(starts, counts)
        added = rank < np.repeat(room, counts)
        short = np.flatnonzero(counts > room)
        if ages is None or not short.size:
            return NewRows(added=np.flatnonzero(added), replacing=np.empty(0, np.int64), evicted=np.empty(0, np.int64))
        self._is_needed[needed] = True
        members = self._members[where[short]]
        is_member = np.arange(members.shape[1]) < self._counts[where[short], None]
        worth = (ages(members).astype(np.uint64) << _AGE_SHIFT) | (keys_of[members].view(np.uint64) & _KEY_BITS)
        worth[~is_member | self._is_needed[members]] = 0
        self._is_needed[needed] = False
        wanted = (counts - room)[short]
        most = min(int(wanted.max()), members.shape[1])
        order = np.argmax(worth, axis=1)[:, None] if most == 1 else np.argsort(~worth, axis=1)[:, :most]
        is_given = (np.arange(most) < wanted[:, None]) & (np.take_along_axis(worth, order, axis=1) > 0)
        evicted = np.take_along_axis(members, order, axis=1)[is_given].astype(np.int64)
        num_given = np.zeros(where.size, np.int64)
        num_given[short] = is_given.sum(axis=1)
        replacing = ~added & (rank < np.repeat(room + num_given, counts))
        return NewRows(added=np.flatnonzero(added), replacing=np.flatnonzero(replacing), evicted=evicted)

    def _buckets(self, keys: Array) -> Array:
        return buckets_of(keys, num_buckets=self._piece.extent) - self._piece.start

    def _limits(self, buckets: Array) -> Array:
        limits: Array = self._capacity + (buckets + self._piece.start < self._num_larger)
        return limits
