"""A shard's encoded arena as words of 16 bits: which words differ between two copies, their bytes, and the checksum of each slice.

Words know no element type: of a float32 whose low bits change, one word of two is sent. A patch overwrites words, so nothing drifts.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes, encoded_ranges
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.checksums import checksum
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

WORD_BYTES = 2
# Words that are compared, or that one piece of a patch is about, at a time: they stay in a core's cache.
_PIECE_WORDS = 1 << 18
# Beyond it a position does not fit 32 bits.
_MAX_WORDS = 1 << 32


class Selection:
    """Slices of a shard's encoded arena, one after the other as a reader holds them. `of`: their positions in `layout.slices`, ascending
    by where they lie; `starts` and `sizes`: where each lies in the arena, and how long it is, with its padding, in words.
    """

    def __init__(self, layout: Layout, encoding: FloatEncoding, slices: Sequence[int] | None = None) -> None:
        """Selects these slices; None: all. Raises InvalidSpec for one that the layout does not have."""
        wanted = frozenset(range(len(layout.slices)) if slices is None else slices)
        if not wanted <= frozenset(range(len(layout.slices))):
            raise InvalidSpec(f"slices {sorted(wanted)}: the layout has {len(layout.slices)}, numbered from 0")
        places = [*_places(layout, encoding)]
        starts = [*(start for start, _ in places), encoded_nbytes(layout, encoding) // WORD_BYTES]
        chosen = [place for place, index in enumerate(layout.order) if index in wanted]
        self.layout, self.encoding = layout, encoding
        self.is_whole = len(chosen) == len(layout.order)
        self.of = tuple(layout.order[place] for place in chosen)
        self._is_encoded = [places[place][1] for place in chosen]
        self.starts = np.array([starts[place] for place in chosen], np.int64)
        self.sizes = np.array([starts[place + 1] - starts[place] for place in chosen], np.int64)
        ends = np.cumsum(self.sizes)
        # Where each begins in what the reader holds.
        self.local_starts = ends - self.sizes
        self.num_words = int(ends[-1]) if len(ends) else 0
        self._positions = {index: place for place, index in enumerate(self.of)}

    def place(self, index: int) -> int:
        """Returns the place of a slice, by its position in `layout.slices`, among those selected."""
        return self._positions[index]

    def words_of(self, words: Array, place: int) -> Array:
        """Returns the words of the slice at a place, with its padding, out of all that a reader holds."""
        start = int(self.local_starts[place])
        return words[start : start + int(self.sizes[place])]

    def content_of(self, words: Array, place: int) -> tuple[Array, bool]:
        """Returns the bytes of the slice at a place, without its padding, and whether they are encoded."""
        piece = self.layout.slices[self.of[place]]
        is_encoded = self._is_encoded[place]
        nbytes = piece.nbytes // 2 if is_encoded else piece.nbytes
        return self.words_of(words, place).view(np.uint8)[:nbytes], is_encoded

    def taken_from(self, words: Array) -> Array:
        """Returns the selected words of a whole arena's: a view if it is all of them, else a copy."""
        if self.is_whole:
            return words
        parts = [words[start : start + size] for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True)]
        return np.concatenate(parts) if parts else words[:0]

    def of_patch(self, patch: "Patch") -> "Patch":
        """Returns the part of a whole arena's patch that lies in the selection, by positions within it."""
        if self.is_whole:
            return patch
        firsts = np.searchsorted(patch.positions, self.starts).tolist()
        lasts = np.searchsorted(patch.positions, self.starts + self.sizes).tolist()
        shifts = (self.local_starts - self.starts).tolist()
        runs = [slice(first, last) for first, last in zip(firsts, lasts, strict=True)]
        moved = [(patch.positions[run].astype(np.int64) + shift).astype(np.uint32) for run, shift in zip(runs, shifts, strict=True)]
        values = [patch.values[run] for run in runs]
        return Patch(positions=np.concatenate(moved), values=np.concatenate(values)) if runs else NO_PATCH

    def digests(self, words: Array) -> Array:
        """Returns the checksum of each slice, with its padding, out of what a reader holds: uint64, by place."""
        return np.array([checksum([self.words_of(words, place)]) for place in range(len(self.of))], np.uint64)


def _places(layout: Layout, encoding: FloatEncoding) -> Iterator[tuple[int, bool]]:
    """Yields where each slice begins in the encoded arena, in words, and whether it is encoded, in the order in which they lie there."""
    ranges = [*encoded_ranges(layout, encoding)]
    at = 0
    for index in layout.order:
        offset = layout.offsets[index]
        while at + 1 < len(ranges) and offset >= ranges[at].arena.stop:
            at += 1
        if not ranges:
            yield 0, False  # nothing but slices without elements
            continue
        one = ranges[at]
        within = offset - one.arena.start
        yield (one.start + (within // 2 if one.is_encoded else within)) // WORD_BYTES, one.is_encoded


# What differs between two copies.


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """Words to overwrite: ascending positions (uint32) and the new words (uint16)."""

    positions: Array
    values: Array

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.positions.nbytes + self.values.nbytes


NO_PATCH = Patch(positions=np.empty(0, np.uint32), values=np.empty(0, np.uint16))


def difference(before: Array, after: Array, *, max_changed: int) -> Patch | None:
    """Returns what makes `after` of `before`, arrays of as many words; None if more words than `max_changed` differ, or there are too many.

    Then looks no further, so that a model that changes everywhere costs little.
    """
    if after.size > _MAX_WORDS:
        return None
    found: list[Array] = []
    num_changed = 0
    for start in range(0, after.size, _PIECE_WORDS):
        differs = before[start : start + _PIECE_WORDS] != after[start : start + _PIECE_WORDS]
        count = int(np.count_nonzero(differs))
        num_changed += count
        if num_changed > max_changed:
            return None
        if count:
            found.append((np.flatnonzero(differs) + start).astype(np.uint32))
    if not found:
        return NO_PATCH
    positions = np.concatenate(found)
    return Patch(positions=positions, values=after[positions])


def merged(patches: Sequence[Patch]) -> Patch:
    """Returns one patch for several that follow each other: of a word that several change, the newest value."""
    if len(patches) == 1:
        return patches[0]
    newest_first = patches[::-1]
    positions, first = np.unique(np.concatenate([patch.positions for patch in newest_first]), return_index=True)
    return Patch(positions=positions, values=np.concatenate([patch.values for patch in newest_first])[first])


# A patch as bytes: for each piece of the arena how many words change, how many bytes their gaps take, the gaps, the values. A gap is the
# number of words that stay before one that changes; 255 stands for as many, and the gap goes on. So one word of fifty takes three bytes in
# all. Of a piece of which most changes, all words are sent, without gaps.


_HEAD = np.dtype("<u4")
_ALL = 0xFFFFFFFF
_LONG = 255


def encode_patch(patch: Patch, *, num_words: int, words: Array | None = None) -> bytes:
    """Returns the bytes of a patch for a reader of so many words. `words`: all words after it, where they are at hand."""
    starts = np.arange(0, num_words, _PIECE_WORDS, dtype=np.int64)
    bounds = np.append(np.searchsorted(patch.positions, starts), patch.positions.size).tolist()
    parts: list[bytes] = []
    for piece, start in enumerate(starts.tolist()):
        first, last = bounds[piece], bounds[piece + 1]
        gaps = _gaps(patch.positions[first:last].astype(np.int64) - start)
        size = min(_PIECE_WORDS, num_words - start)
        if words is not None and gaps.size + WORD_BYTES * (last - first) > WORD_BYTES * size:
            parts += [np.array([_ALL, 0], _HEAD).tobytes(), words[start : start + size].tobytes()]
        else:
            parts += [np.array([last - first, gaps.size], _HEAD).tobytes(), gaps.tobytes(), patch.values[first:last].tobytes()]
    return b"".join(parts)


def decode_patch(content: bytes | memoryview, *, num_words: int) -> Patch:
    """Returns the patch that has these bytes, for a reader of so many words. Raises MalformedMessage."""
    data, at = np.frombuffer(content, np.uint8), 0
    positions: list[Array] = []
    values: list[Array] = []
    for start in range(0, num_words, _PIECE_WORDS):
        size = min(_PIECE_WORDS, num_words - start)
        count, gap_bytes = (int(number) for number in _cut(data, at, 2 * _HEAD.itemsize).view(_HEAD))
        at += 2 * _HEAD.itemsize
        if count == _ALL:
            count, found = size, np.arange(size)
        else:
            found = _positions(_cut(data, at, gap_bytes))
            at += gap_bytes
            if found.size != count or (count and found[-1] >= size):
                raise MalformedMessage(f"a patch: {found.size} words up to {found[-1:]} for a piece with {count} changes of {size} words")
        positions.append((found + start).astype(np.uint32))
        values.append(_cut(data, at, WORD_BYTES * count).view(np.uint16))
        at += WORD_BYTES * count
    if at != data.size:
        raise MalformedMessage(f"a patch: {data.size} bytes, its pieces have {at}")
    return Patch(positions=np.concatenate(positions), values=np.concatenate(values)) if positions else NO_PATCH


def _cut(data: Array, start: int, nbytes: int) -> Array:
    part = data[start : start + nbytes]
    if part.size != nbytes:
        raise MalformedMessage(f"a patch: it ends after {data.size} bytes, in the middle of a piece")
    return part.copy()  # aligned, whatever came before it


def _gaps(positions: Array) -> Array:
    between = np.diff(positions, prepend=-1) - 1
    num_long = between // _LONG
    ends = np.cumsum(num_long + 1)
    gaps = np.full(int(ends[-1]) if ends.size else 0, _LONG, np.uint8)
    gaps[ends - 1] = between - num_long * _LONG
    return gaps


def _positions(gaps: Array) -> Array:
    """Returns the positions of words with these gaps between them."""
    is_end = gaps != _LONG
    if gaps.size and not is_end[-1]:
        raise MalformedMessage("a patch: its last gap does not end")
    # Each end stands for a word, too, and so counts one more.
    positions: Array = np.cumsum(gaps.astype(np.int64) + is_end)[is_end] - 1
    return positions
