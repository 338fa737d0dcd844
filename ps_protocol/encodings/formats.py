"""Every encoding of float32 as one entry, and how long an arena is in each. Knows offsets; no message.

What reads the table: `arena` and `gradients` here, the servers' staging, the user's names of formats, and a test of the documentation.
"""

import enum
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ps_protocol.encodings import halves, integers, top_k
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.layout import ArenaRange, Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array, DataType


class FloatEncoding(enum.Enum):
    """The encoding of an arena's float32 elements; those of other types are never encoded. Numbers are those of the protocol."""

    AS_IS = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8_BLOCKS = 3
    TOP_K = 4
    INT4_BLOCKS = 5

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """An encoding of fixed length: `size` elements travel together, in `element_bits` each and `extra_bytes` for all of them.

    The last unit of a range may have fewer elements. `encode(values, encoded)` and `decode(encoded, values)` take float32 and uint8 arrays
    of any number of units. `kept`: servers keep a gradient as it came, in elements of this type, and the apply widens them (`widen_into` in
    `halves`); None: it is decoded as it arrives.
    """

    encode: Callable[[Array, Array], None]
    decode: Callable[[Array, Array], None]
    element_bits: int
    size: int = 1
    extra_bytes: int = 0
    kept: type[np.generic] | None = None

    @property
    def unit_bytes(self) -> int:
        """Bytes of a whole unit."""
        return self.nbytes(self.size)

    def nbytes(self, num_elements: int) -> int:
        """Returns the bytes of so many elements."""
        return -(-num_elements * self.element_bits // 8) + self.extra_bytes * -(-num_elements // self.size)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An encoding that sends some elements of each chunk: how many is up to each contribution, and decoded when all of it is there.

    `nbytes(size, count)`: bytes of a range of so many elements, of which `count` of each `chunk` are sent. `begin(count, encoded)`: writes
    what a range begins with, in `head_bytes`; what it returns encodes the range, some chunks at a time. `decode(encoded, values)` fills a
    whole range from what begins with it, and returns how many bytes those were. `words`: its name in errors.
    """

    words: str
    chunk: int
    head_bytes: int
    nbytes: Callable[[int, int], int]
    begin: Callable[[int, Array], top_k.TopKChunks]
    decode: Callable[[Array, Array], int]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One encoding. `name`: what a user calls it. `coding` None: elements travel as they are.

    `feeds_errors_back`: what it lost of a gradient is added to the next one, unless the user says otherwise. `is_for_variables`: variables
    can travel so too, not gradients alone.
    """

    encoding: FloatEncoding
    name: str
    coding: Units | Packed | None
    is_for_variables: bool = False
    feeds_errors_back: bool = False

    @property
    def is_decoded_on_arrival(self) -> bool:
        """Whether the receiver has work to do on each frame of a gradient."""
        return isinstance(self.coding, Units) and self.coding.kept is None


def _units(one: integers.ScaledIntegers) -> Units:
    return Units(encode=one.encode, decode=one.decode, element_bits=one.bits, size=one.size, extra_bytes=integers.SCALE_BYTES)


_TABLE = (
    Format(encoding=FloatEncoding.AS_IS, name="float32", coding=None, is_for_variables=True),
    Format(
        encoding=FloatEncoding.BFLOAT16,
        name="bfloat16",
        coding=Units(encode=halves.narrow_bfloat16, decode=halves.widen_bfloat16, element_bits=16, kept=np.uint16),
        is_for_variables=True,
    ),
    Format(
        encoding=FloatEncoding.FLOAT16,
        name="float16",
        coding=Units(encode=halves.narrow_float16, decode=halves.widen_float16, element_bits=16, kept=np.float16),
        is_for_variables=True,
    ),
    Format(encoding=FloatEncoding.INT8_BLOCKS, name="int8", coding=_units(integers.INT8), feeds_errors_back=True),
    Format(
        encoding=FloatEncoding.TOP_K,
        name="top_k",
        coding=Packed(
            words="top k",
            chunk=top_k.CHUNK,
            head_bytes=top_k.COUNT_BYTES,
            nbytes=top_k.top_k_nbytes,
            begin=top_k.begin_top_k,
            decode=top_k.decode_top_k,
        ),
        feeds_errors_back=True,
    ),
    Format(encoding=FloatEncoding.INT4_BLOCKS, name="int4", coding=_units(integers.INT4), feeds_errors_back=True),
)
FORMATS: Mapping[FloatEncoding, Format] = {one.encoding: one for one in _TABLE}


def units_of(encoding: FloatEncoding) -> Units:
    """Returns how elements travel in an encoding of fixed length. Raises InvalidSpec for others."""
    coding = FORMATS[encoding].coding
    if not isinstance(coding, Units):
        raise InvalidSpec(f"encoding {encoding.name}: its length is that of each contribution; ask its header")
    return coding


@light_dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRange:
    """The bytes `start` to `stop` of an encoded arena, and the range that they stand for. `is_encoded` False: its bytes as they are."""

    arena: ArenaRange
    start: int
    stop: int
    is_encoded: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.arena.stop - self.arena.start) // self.arena.data_type.itemsize


def encoded_ranges(layout: Layout, encoding: FloatEncoding) -> Iterator[EncodedRange]:
    """Yields where each range of the arena lies when it travels, in order. Raises InvalidSpec if that varies."""
    if encoding is FloatEncoding.AS_IS:
        return ranges_with(layout, None)
    return ranges_with(layout, units_of(encoding).nbytes)


def ranges_with(layout: Layout, nbytes_of: Callable[[int], int] | None) -> Iterator[EncodedRange]:
    """Yields where each range lies if so many encoded elements have so many bytes; None: all are as they are."""
    start = 0
    for arena in layout.arenas:
        is_encoded = nbytes_of is not None and is_encodable(layout, arena)
        nbytes = arena.stop - arena.start
        stop = start + (nbytes_of(nbytes // 4) if nbytes_of is not None and is_encoded else nbytes)
        yield EncodedRange(arena=arena, start=start, stop=stop, is_encoded=is_encoded)
        start = stop


def is_encodable(layout: Layout, arena: ArenaRange) -> bool:
    """Whether a range is of variables whose elements travel encoded."""
    return has_encoded_elements(arena.data_type, layout.rules[arena.rule])


def has_encoded_elements(data_type: DataType, rule: OptimizerSpec | None) -> bool:
    """Whether a variable's elements travel encoded, in encodings that do so: float32 that takes gradients. `rule`: None is the model's."""
    return data_type is DataType.FLOAT32 and (rule is None or not rule.is_update_rule)


def encoded_nbytes(layout: Layout, encoding: FloatEncoding) -> int:
    """Returns the bytes of an arena as it travels. Raises InvalidSpec if that varies."""
    return max((one.stop for one in encoded_ranges(layout, encoding)), default=0)


def stretch(layout: Layout, memory: Array, encoding: FloatEncoding, arena: ArenaRange, start: int, stop: int) -> Array:
    """Returns the elements that bytes `start` to `stop` of the arena, all in the range `arena`, have in an encoded `memory`, sharing it.

    `encoding`: as they are, or one that servers keep. The elements are of the range's type, or of a float32 range that of `Units.kept`.
    """
    if encoding is FloatEncoding.AS_IS:
        return memory[start:stop].view(arena.data_type.dtype)
    one = next(one for one in encoded_ranges(layout, encoding) if one.arena.start == arena.start)
    if not one.is_encoded:
        return memory[one.start + start - arena.start : one.start + stop - arena.start].view(arena.data_type.dtype)
    units = units_of(encoding)
    if units.kept is None:
        raise InvalidSpec(f"encoding {encoding.name}: is not for gradients")
    first, last = ((offset - arena.start) // 4 * units.element_bits // 8 for offset in (start, stop))
    return memory[one.start + first : one.start + last].view(units.kept)
