"""How often keys without rows occurred lately, estimated in memory that does not grow: a count-min sketch for each bucket of keys.

A key has one of 64 counters in each of four rows, and has occurred at most as often as the least of the four says (Cormode, Muthukrishnan:
An improved data stream summary, 2005). An occurrence raises only counters that are below the new estimate (Estan, Varghese: New directions
in traffic measurement and accounting, 2002). A bucket halves its counters after 64 occurrences (Einziger, Friedman, Manes: TinyLFU, 2017),
so that errors do not add up, and what is long ago is forgotten. All of a step's keys count at once, so their order has no effect.

Errors: of keys that occur once, about 4 in 100 are taken for ones that have occurred before, and fewer than 1 in 10,000 for ones that have
twice.
"""

import numpy as np

from ps_protocol.model.keys import buckets_of
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.variables import Array

_NUM_ROWS, _COLUMN_BITS = 4, 6
_NUM_COUNTERS = _NUM_ROWS << _COLUMN_BITS
# The counters of a bucket, and the number of occurrences since they were halved.
BUCKET_BYTES = _NUM_COUNTERS + 1
_OCCURRENCES = 1 << _COLUMN_BITS
_FIRST_OF_ROW = np.arange(_NUM_ROWS) << _COLUMN_BITS


class Occurrences:
    """The counters of a slice's buckets, in `memory`: zeroed bytes, BUCKET_BYTES for each. None counts higher than `most`."""

    def __init__(self, piece: VariableSlice, memory: Array, *, most: int) -> None:
        self._piece, self._most = piece, most
        self._counters = memory
        self._buckets = memory.reshape(-1, BUCKET_BYTES)

    def estimates(self, keys: Array) -> Array:
        """Returns about how often spread keys have occurred, or too high a number; not too low a one, but for what was halved."""
        least: Array = self._counters[self._places(keys, self._buckets_of(keys))].min(axis=1, initial=255)
        return least

    def count(self, keys: Array) -> None:
        """Counts one more occurrence of each key, all different and ascending."""
        buckets = self._buckets_of(keys)
        places = self._places(keys, buckets)
        before = self._counters[places]
        raised = np.minimum(before.min(axis=1, initial=255), self._most - 1) + np.uint8(1)
        # Of several keys with one counter the highest is written last, and so stays.
        order = np.argsort(raised, kind="stable")
        self._counters[places[order]] = np.maximum(before, raised[:, None])[order]
        where, counts = np.unique(buckets, return_counts=True)
        since = self._buckets[where, -1] + counts
        full = since >= _OCCURRENCES
        self._buckets[where, -1] = np.where(full, 0, since)
        self._buckets[where[full], :-1] >>= 1

    def take_over(self, piece: VariableSlice, memory: Array) -> None:
        """Takes over the counters of those buckets that another slice of the table has, too."""
        start, stop = max(piece.start, self._piece.start), min(piece.stop, self._piece.stop)
        if start < stop:
            theirs = memory.reshape(-1, BUCKET_BYTES)
            self._buckets[start - self._piece.start : stop - self._piece.start] = theirs[start - piece.start : stop - piece.start]

    def _buckets_of(self, keys: Array) -> Array:
        return buckets_of(keys, num_buckets=self._piece.extent) - self._piece.start

    def _places(self, keys: Array, buckets: Array) -> Array:
        # The lowest bits: the highest are the bucket's.
        columns = (keys[:, None] >> np.arange(0, _NUM_ROWS * _COLUMN_BITS, _COLUMN_BITS)) & ((1 << _COLUMN_BITS) - 1)
        places: Array = (buckets * BUCKET_BYTES)[:, None] + columns + _FIRST_OF_ROW
        return places
