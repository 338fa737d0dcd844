"""A shard's encoded arena as words of 16 bits: what changes of them from step to step, as bytes, and the checksum of each slice.

Words know no element type: of a float32 whose low bits change, one word of two is sent. A patch has the difference of each word that
changes, as an integer modulo 2^16: adding it gives the later word and subtracting it the earlier one, bit by bit, so nothing drifts.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from ps_protocol.encodings.formats import FORMATS, FloatEncoding, has_encoded_elements
from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.checksums import checksum
from ps_protocol.model.layout import ALIGNMENT, Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

WORD_BYTES = 2
# Beyond it a position does not fit 32 bits.
MAX_WORDS = 1 << 32


class Selection:
    """Slices of a shard as a reader holds them: encoded, one after the other, those of the arena as they lie there, then those of tables.

    `of`: their positions in `layout.pieces`. `starts` and `sizes`: where each begins, and how long
    it is, with its padding, in words; `is_encoded`: whether its elements are.
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
        self.is_encoded = [is_encoded for _, _, is_encoded in found]
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
        is_encoded = self.is_encoded[place]
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
        changes = [patch.changes[run] for run in runs]
        return Patch(positions=np.concatenate(moved), changes=np.concatenate(changes)) if runs else NO_PATCH

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


# What changes from one step to a later one.


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patch:
    """Words that change: ascending positions (uint32), and what is added to each of them (uint16)."""

    positions: Array
    changes: Array

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.positions.nbytes + self.changes.nbytes

    def apply(self, words: Array) -> None:
        """Makes the later words of the earlier ones."""
        words[self.positions.astype(np.intp)] += self.changes  # else reading and writing would convert them, each for itself

    def undo(self, words: Array) -> None:
        """Makes the earlier words of the later ones."""
        words[self.positions.astype(np.intp)] -= self.changes


NO_PATCH = Patch(positions=np.empty(0, np.uint32), changes=np.empty(0, np.uint16))


def overwrite(words: Array, block: Array, start: int) -> Patch:
    """Makes the words from `start` on those of a block, and returns what has changed of them."""
    held = words[start : start + block.size]
    positions = np.flatnonzero(held != block)
    changes = block[positions] - held[positions]
    held[positions] += changes
    return Patch(positions=(positions + start).astype(np.uint32), changes=changes)


def joined(parts: Sequence[Patch]) -> Patch:
    """Returns one patch for several of which each is of later words than the one before it."""
    if not parts:
        return NO_PATCH
    return Patch(positions=np.concatenate([one.positions for one in parts]), changes=np.concatenate([one.changes for one in parts]))


def merged(patches: Sequence[Patch]) -> Patch:
    """Returns one patch for several that follow each other in time."""
    if len(patches) <= 1:
        return patches[0] if patches else NO_PATCH
    every = joined(patches)
    positions, place = np.unique(every.positions, return_inverse=True)
    changes = np.zeros(positions.size, np.uint16)
    np.add.at(changes, place, every.changes)
    return Patch(positions=positions, changes=changes)


# A patch as bytes: how many words change, how many bytes their gaps take, and then, compressed, the gaps, the low bytes of the changes and
# the high ones. A gap is the number of words that stay before one that changes; 255 stands for as many, and the gap goes on. A change of
# either sign that is small is a small number, as most are: an update that shows at all at half precision moves a word to the next one or
# two. So one word of seventy takes nine bits, of which seven are its gap's.


_HEAD = np.dtype("<u4")
_LONG = 255


def encode_patch(patch: Patch) -> bytes:
    """Returns the bytes of a patch."""
    gaps = _gaps(patch.positions)
    folded = (patch.changes << np.uint16(1)) ^ (np.uint16(0) - (patch.changes >> np.uint16(15)))
    # Codes for single bytes and runs: to look for anything longer takes ten times as long, and there is nothing.
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    parts = [np.array([patch.positions.size, gaps.size], _HEAD).tobytes()]
    for part in (gaps, folded.astype(np.uint8), (folded >> np.uint16(8)).astype(np.uint8)):
        parts += [packer.compress(part.data), packer.flush(zlib.Z_SYNC_FLUSH)]  # each with codes of its own
    return b"".join([*parts, packer.flush()])


def decode_patch(content: bytes | memoryview, *, num_words: int) -> Patch:
    """Returns the patch that has these bytes, for a reader of so many words. Raises MalformedMessage."""
    start = 2 * _HEAD.itemsize
    if len(content) < start:
        raise MalformedMessage(f"a patch: it has {len(content)} bytes, and begins with {start}")
    count, gap_bytes = (int(number) for number in np.frombuffer(content[:start], _HEAD))
    if count > num_words or gap_bytes > count + num_words // _LONG:
        raise MalformedMessage(f"a patch: {count} changes, with gaps of {gap_bytes} bytes, for {num_words} words")
    num_bytes, unpacker = gap_bytes + WORD_BYTES * count, zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = np.frombuffer(unpacker.decompress(content[start:], num_bytes + 1), np.uint8)
    except zlib.error as error:
        raise MalformedMessage(f"a patch: {error}") from None
    if found.size != num_bytes or not unpacker.eof or unpacker.unused_data:
        raise MalformedMessage(f"a patch: its {len(content)} bytes stand for {found.size} or more, or end too early; want {num_bytes}")
    positions = _positions(found[:gap_bytes])
    if positions.size != count or (count and positions[-1] >= num_words):
        raise MalformedMessage(f"a patch: {positions.size} words up to {positions[-1:]}; want {count} of {num_words}")
    folded = found[gap_bytes : gap_bytes + count] | (found[gap_bytes + count :].astype(np.uint16) << np.uint16(8))
    changes = (folded >> np.uint16(1)) ^ (np.uint16(0) - (folded & np.uint16(1)))
    return Patch(positions=positions.astype(np.uint32), changes=changes)


def _gaps(positions: Array) -> Array:
    before = np.uint32(0xFFFFFFFF)  # the word before the first one, modulo 2^32
    between = np.diff(positions, prepend=before) - np.uint32(1)
    is_long = np.flatnonzero(between >= _LONG)
    times, rest = np.divmod(between[is_long], np.uint32(_LONG))
    ends = between.astype(np.uint8)
    ends[is_long] = rest
    return np.insert(ends, np.repeat(is_long, times), _LONG)


def _positions(gaps: Array) -> Array:
    """Returns the positions of words with these gaps between them."""
    is_end = gaps != _LONG
    if gaps.size and not is_end[-1]:
        raise MalformedMessage("a patch: its last gap does not end")
    # Each end stands for a word, too, and so counts one more.
    positions: Array = np.cumsum(gaps.astype(np.int64) + is_end)[is_end] - 1
    return positions
