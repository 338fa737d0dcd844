"""A shard's encoded arena as words of 16 bits: which words differ between two copies, their bytes, and the checksum of each slice.

Words know no element type: of a float32 whose low bits change, one word of two is sent. A patch overwrites words, so nothing drifts.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ps_protocol.encodings.formats import FORMATS, FloatEncoding, has_encoded_elements
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.checksums import checksum
from ps_protocol.model.layout import ALIGNMENT, Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

WORD_BYTES = 2
# Words that are compared, or that one piece of a patch is about, at a time: they stay in a core's cache.
_PIECE_WORDS = 1 << 18
# Beyond it a position does not fit 32 bits.
_MAX_WORDS = 1 << 32


class Selection:
    """Slices of a shard as a reader holds them: encoded, one after the other, those of the arena as they lie there, then those of tables.

    `of`: their positions in `layout.pieces`. `starts` and `sizes`: where each begins, and how long it is, with its padding, in words.
    """

    def __init__(self, layout: Layout, encoding: FloatEncoding, slices: Sequence[int] | None = None) -> None:
        """Selects these pieces of the layout; None: all of its arena. Raises InvalidSpec for one that the layout does not have."""
        self.layout, self.encoding = layout, encoding
        wanted = frozenset(layout.order if slices is None else slices)
        if not wanted <= frozenset(range(len(layout.pieces))):
            raise InvalidSpec(f"slices {sorted(wanted)}: the layout has {len(layout.pieces)}, numbered from 0")
        if not FORMATS[encoding].is_for_variables:
            raise InvalidSpec(f"encoding {encoding.name}: for gradients only; follow variables as they are, or as halves")
        found = [one for one in _sizes(layout, encoding) if one[0] in wanted]
        self.of = tuple(index for index, _, _ in found)
        self.sizes = np.array([size for _, size, _ in found], np.int64)
        self._is_encoded = [is_encoded for _, _, is_encoded in found]
        ends = np.cumsum(self.sizes)
        self.starts = ends - self.sizes
        self.num_words = int(ends[-1]) if len(ends) else 0
        self._positions = {index: place for place, index in enumerate(self.of)}

    @property
    def is_arena(self) -> bool:
        """Whether this is all of the arena, and nothing else."""
        return self.of == self.layout.order

    @property
    def tables(self) -> tuple[int, ...]:
        """Which of `layout.tables` are selected."""
        return tuple(index - len(self.layout.slices) for index in self.of if index >= len(self.layout.slices))

    def place(self, index: int) -> int:
        """Returns the place of a slice, by its position in `layout.pieces`, among those selected."""
        return self._positions[index]

    def words_of(self, words: Array, place: int) -> Array:
        """Returns the words of the slice at a place, with its padding, out of all that a reader holds."""
        start = int(self.starts[place])
        return words[start : start + int(self.sizes[place])]

    def content_of(self, words: Array, place: int) -> tuple[Array, bool]:
        """Returns the bytes of the slice at a place, without its padding, and whether they are encoded."""
        piece = self.layout.pieces[self.of[place]]
        is_encoded = self._is_encoded[place]
        nbytes = piece.nbytes // 2 if is_encoded else piece.nbytes
        return self.words_of(words, place).view(np.uint8)[:nbytes], is_encoded

    def taken_from(self, words: Array, whole: "Selection") -> Array:
        """Returns the selected words of those of a larger selection: a view if it is all of them, else a copy."""
        if self.of == whole.of:
            return words
        parts = [whole.words_of(words, whole.place(index)) for index in self.of]
        return np.concatenate(parts) if parts else words[:0]

    def of_patch(self, patch: "Patch", whole: "Selection") -> "Patch":
        """Returns the part of a larger selection's patch that lies in this one, by positions within it."""
        if self.of == whole.of:
            return patch
        starts = whole.starts[[whole.place(index) for index in self.of]]
        firsts = np.searchsorted(patch.positions, starts).tolist()
        lasts = np.searchsorted(patch.positions, starts + self.sizes).tolist()
        shifts = (self.starts - starts).tolist()
        runs = [slice(first, last) for first, last in zip(firsts, lasts, strict=True)]
        moved = [(patch.positions[run].astype(np.int64) + shift).astype(np.uint32) for run, shift in zip(runs, shifts, strict=True)]
        values = [patch.values[run] for run in runs]
        return Patch(positions=np.concatenate(moved), values=np.concatenate(values)) if runs else NO_PATCH

    def digests(self, words: Array) -> Array:
        """Returns the checksum of each slice, with its padding, out of what a reader holds: uint64, by place."""
        return np.array([checksum([self.words_of(words, place)]) for place in range(len(self.of))], np.uint64)


def _sizes(layout: Layout, encoding: FloatEncoding) -> Iterator[tuple[int, int, bool]]:
    """Yields each piece's position, how many words it takes with its padding, and whether it is encoded, in the order of selections."""
    for index in (*layout.order, *range(len(layout.slices), len(layout.pieces))):
        piece = layout.pieces[index]
        is_encoded = encoding is not FloatEncoding.AS_IS and has_encoded_elements(piece.variable.data_type, piece.variable.optimizer)
        num_bytes = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
        yield index, num_bytes // (2 * WORD_BYTES if is_encoded else WORD_BYTES), is_encoded


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
