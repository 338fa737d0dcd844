"""Where each key of a table lies: an open hash table over NumPy arrays, which grows piece by piece. Knows no rows' values and no lock.

A bucket has eight places. Its tags, one byte of each key's hash, are one word, so that one comparison looks at all eight; a place has a
row number, and the key itself stands in an array by row number. A bucket is filled from its first place on, and what finds none goes to the
next bucket: a bucket with a free place ends the search.

Keys are spread (`ps_protocol.model.keys`): their bits are as good as random, and serve as the hash.
"""

import numpy as np

from ps_protocol.model.variables import Array

# Rows are numbered in 32 bits.
MAX_ROWS = (1 << 32) - 1
_LANES = 8
_MIN_BUCKETS = 1 << 9
# The next, larger places are begun at this load, so that they are there before searches become long.
_LOAD_TO_GROW = 0.5
_LOAD_TO_DOUBLE = 0.35
# What one call does for the next places at least, and for each key that it adds: some milliseconds, and enough to be done in time.
_CLEARED_BYTES, _CLEARED_BYTES_PER_KEY = 2 << 20, 256
_MOVED_ROWS, _MOVED_ROWS_PER_KEY = 1 << 13, 4

_ONES = np.uint64(0x0101010101010101)
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_HIGH_BITS = np.uint64(0x8080808080808080)
_BYTE, _TOP = np.uint64(8), np.uint64(56)
_ONE = np.uint64(1)


class KeyIndex:
    """Numbers keys in the order in which they are added, and gives numbers of former keys to others. One thread at a time changes it.

    Any number of threads find meanwhile. `keys`: by row number, in memory of the owner with room for all that will ever be added; int64.
    The place of a key that has lost its row stays until larger places, or new ones of the same size, take over: its row has another key.
    """

    def __init__(self, keys: Array) -> None:
        self.keys = keys
        self.num_rows = 0
        self._places = _Places(_MIN_BUCKETS)
        self._places.clear(self._places.nbytes)
        # Those that take over when they have all rows, and how many they have.
        self._next: _Places | None = None
        self._num_moved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the places, without the keys."""
        return self._places.nbytes + (self._next.nbytes if self._next is not None else 0)

    @property
    def load(self) -> float:
        """The share of the places that are taken."""
        return self._places.num_taken / self._places.num_places

    def find(self, keys: Array) -> Array:
        """Returns the row number of each key, int64; -1 for those that are not there, or are being added."""
        return self._places.find(keys, self.keys) if self.num_rows else np.full(keys.size, -1)

    def add(self, keys: Array) -> None:
        """Gives the next row numbers to keys that are not there, each different, in order."""
        self.replace(np.arange(self.num_rows, self.num_rows + keys.size), keys)

    def replace(self, rows: Array, keys: Array) -> None:
        """Gives these row numbers, which are taken or the next ones, to keys that are not there, each different."""
        start = 0
        while start < keys.size:
            # Not more at once than the places that are being made can keep up with.
            stop = start + self._places.num_places // 8
            part, numbers = keys[start:stop], rows[start:stop]
            self.keys[numbers] = part
            self._places.put(part, numbers)
            self.num_rows = max(self.num_rows, int(numbers.max()) + 1)
            if self._next is not None:
                passed = numbers < self._num_moved
                self._next.put(part[passed], numbers[passed])
            self._grow(part.size)
            start = stop

    def _grow(self, num_added: int) -> None:
        if self._next is None:
            if self.load < _LOAD_TO_GROW:
                return
            # Where most places are those of former keys, as many are enough.
            is_full = self.num_rows > _LOAD_TO_DOUBLE * self._places.num_places
            self._next, self._num_moved = _Places(self._places.num_buckets * (2 if is_full else 1)), 0
        if not self._next.is_clear:
            self._next.clear(max(_CLEARED_BYTES, _CLEARED_BYTES_PER_KEY * num_added))
            return
        first = self._num_moved
        self._num_moved = min(self.num_rows, first + max(_MOVED_ROWS, _MOVED_ROWS_PER_KEY * num_added))
        self._next.put(self.keys[first : self._num_moved], np.arange(first, self._num_moved))
        if self._num_moved == self.num_rows:
            self._places, self._next = self._next, None


class _Places:
    """A hash table of one size. It must be cleared first. `num_taken`: of its places."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.num_places = num_buckets * _LANES
        self.num_taken = 0
        # Not zeroed at once: a large one would stop a step while the machine gives the pages.
        self._words = np.empty(num_buckets, np.uint64)
        self._tags = self._words.view(np.uint8)
        self._rows = np.empty(self.num_places, np.uint32)
        self._uncleared = [self._words.view(np.uint8), self._rows.view(np.uint8)]
        self.nbytes = self._words.nbytes + self._rows.nbytes

    @property
    def is_clear(self) -> bool:
        """Whether all of it has been cleared."""
        return not self._uncleared

    def clear(self, nbytes: int) -> None:
        """Clears so many bytes more."""
        while nbytes > 0 and self._uncleared:
            memory = self._uncleared[0]
            memory[:nbytes] = 0
            rest = memory[nbytes:]
            self._uncleared[:1] = [rest] if rest.size else []
            nbytes -= memory.size

    def put(self, keys: Array, rows: Array) -> None:
        """Enters keys that are not there with their row numbers."""
        buckets, tags = self._hashes(keys)
        self.num_taken += keys.size
        while rows.size:
            order = np.argsort(buckets, kind="stable")
            buckets, tags, rows = buckets[order], tags[order], rows[order]
            # The places after those taken go to the keys of a bucket, one after the other.
            starts = np.flatnonzero(np.concatenate(([True], buckets[1:] != buckets[:-1])))
            counts = np.diff(starts, append=buckets.size)
            rank = np.arange(buckets.size) - np.repeat(starts, counts)
            lanes = rank + np.repeat(_num_taken(self._words[buckets[starts]]), counts)
            fits = lanes < _LANES
            places = buckets[fits] * _LANES + lanes[fits]
            self._rows[places] = rows[fits]
            # Last: who finds a tag finds the row.
            self._tags[places] = tags[fits]
            left = ~fits
            buckets, tags, rows = (buckets[left] + 1) & (self.num_buckets - 1), tags[left], rows[left]

    def find(self, keys: Array, keys_by_row: Array) -> Array:
        """Returns the row numbers; -1 where there is none."""
        buckets, tags = self._hashes(keys)
        wanted = tags.astype(np.uint64) * _ONES
        words = np.take(self._words, buckets, mode="clip")
        matches = _equal_bytes(words ^ wanted)
        found, is_same = self._first_matches(matches, buckets, keys, keys_by_row)
        # Most are there. Others have another key with the same tag before them, or their bucket was full.
        at = np.flatnonzero(~is_same)
        found[at] = -1
        keys, buckets, wanted, words, matches = keys[at], buckets[at], wanted[at], words[at], matches[at]
        while at.size:
            # Another place of the same bucket, or the first one of the next.
            matches &= matches - _ONE
            goes_on = matches == 0
            rest = np.flatnonzero(~goes_on | (words >> _TOP != 0))
            at, keys, goes_on = at[rest], keys[rest], goes_on[rest]
            buckets, wanted = (buckets[rest] + goes_on) & (self.num_buckets - 1), wanted[rest]
            words = np.take(self._words, buckets, mode="clip")
            matches = np.where(goes_on, _equal_bytes(words ^ wanted), matches[rest])
            rows, is_same = self._first_matches(matches, buckets, keys, keys_by_row)
            found[at[is_same]] = rows[is_same]
            left = np.flatnonzero(~is_same)
            at, keys, buckets, wanted, words, matches = at[left], keys[left], buckets[left], wanted[left], words[left], matches[left]
        return found

    def _first_matches(self, matches: Array, buckets: Array, keys: Array, keys_by_row: Array) -> tuple[Array, Array]:
        """Returns the row in the first place whose tag matches, and whether it has the key."""
        # The lowest bit that is set is that of the first place; without any, the row is some other, perhaps by chance that of the key.
        lanes = _ones_of((matches & -matches) - _ONE >> np.uint64(7))
        rows = np.take(self._rows, buckets * _LANES + lanes, mode="clip")
        return rows.astype(np.int64), np.take(keys_by_row, rows, mode="clip") == keys

    def _hashes(self, keys: Array) -> tuple[Array, Array]:
        """Returns each key's first bucket, and its tag, which is not 0."""
        words = keys.view(np.uint64)
        # Not the highest bits: those of all keys of a server have much in common.
        tags = (words >> np.uint64(40)).astype(np.uint8)
        np.maximum(tags, 1, out=tags)
        return keys & (self.num_buckets - 1), tags


def _equal_bytes(difference: Array) -> Array:
    """Returns words whose high bits mark the bytes that are 0; above the first such byte, others may be marked."""
    return (difference - _ONES) & ~difference & _HIGH_BITS


def _num_taken(words: Array) -> Array:
    """Returns how many bytes are not 0."""
    return _ones_of((((words & _LOW_BITS) + _LOW_BITS) | words) >> np.uint64(7))


def _ones_of(words: Array) -> Array:
    """Returns how many of the bytes have their lowest bit set."""
    return ((words & _ONES) * _ONES >> _TOP).astype(np.int64)
