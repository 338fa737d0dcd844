"""Numbered messages of arrays and rows, as a few vectors of floats, which accumulators can carry, and back. Knows no accumulator."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, MalformedMessage
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices

# Element types by their number in a head; those that are no floats travel as float64.
_TYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64", "int32", "int64", "uint8", "bool"))
_LARGEST_EXACT = 1 << 53
# The vectors of a message by name: the head, which is read first, and those of each type of float. A message and the one that takes its
# place have their `turn`, 0 or 1, so that a participant that still reads the one takes nothing of the other.
HEAD = "head"
VECTORS = {HEAD: np.dtype(np.float64)} | {
    f"{carrier} {turn}": np.dtype(carrier) for turn in range(2) for carrier in ("float16", "float32", "float64")
}
# A run and a number travel as bytes, which every type of float has exactly, after a 1 that says that this is one message.
_SERIAL_BYTES = 6
RUN_BITS = 8 * _SERIAL_BYTES
_MARK_SIZE = 1 + 2 * _SERIAL_BYTES


@light_dataclass(frozen=True, slots=True)
class Serial:
    """Which message it is: the run of the program that sent it, a random number, and how many it had sent with it."""

    run: int
    number: int


@light_dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Arrays and IndexedSlices under a serial. A repeated message has the same serial."""

    serial: Serial
    values: Sequence[Any]


class Sender:
    """Numbers the messages of one run of a program. `run` is random, and so differs when the program is started again."""

    def __init__(self, run: int) -> None:
        self.run = run
        self._numbers = itertools.count(1)

    def message(self, values: Sequence[Any]) -> Message:
        """Returns the run's next message."""
        return Message(Serial(self.run, next(self._numbers)), values)


def pack(message: Message, *, turn: int = 0) -> dict[str, Array]:
    """Returns the vectors of a message: by element type, after a head that describes them. Each begins with the serial.

    Raises InvalidSpec for element types that cannot travel, and for integers beyond 2^53.
    """
    serial, values = _marked(message.serial), message.values
    head: list[float] = [turn, len(values)]
    parts: dict[str, list[Array]] = {}

    def put(array: Array) -> None:
        _check(array)
        head.extend((_TYPES.index(array.dtype), array.ndim, *array.shape))
        if array.size:
            carrier = array.dtype if array.dtype.kind == "f" else np.dtype(np.float64)
            parts.setdefault(f"{carrier.name} {turn}", []).append(array.astype(carrier, copy=False).reshape(-1))

    for value in values:
        if isinstance(value, IndexedSlices):
            whole = value.dense_shape
            head.extend((1, -1 if whole is None else len(whole), *(whole or ())))
            put(np.asarray(value.indices, np.int64))
            put(np.asarray(value.values))
        else:
            head.append(0)
            put(np.asarray(value))
    parts = {HEAD: [np.array(head, np.float64)], **parts}
    return {name: np.concatenate([serial.astype(arrays[0].dtype), *arrays]) for name, arrays in parts.items()}


def check(value: Any) -> None:
    """Raises InvalidSpec for an array or IndexedSlices that `pack` refuses."""
    if isinstance(value, IndexedSlices):
        indices = np.asarray(value.indices)
        if indices.size and indices.dtype.kind not in "iu":
            raise InvalidSpec(f"indices of {indices.dtype} are no rows; want integers")
        _check(indices.astype(np.int64))
        value = value.values
    _check(np.asarray(value))


def _check(array: Array) -> None:
    if array.dtype not in _TYPES:
        raise InvalidSpec(f"an array of {array.dtype} cannot travel between processes; want one of {', '.join(map(str, _TYPES))}")
    if array.dtype.kind in "iu" and array.size and max(abs(int(array.min())), abs(int(array.max()))) > _LARGEST_EXACT:
        raise InvalidSpec(f"an array of {array.dtype} beyond 2^53 cannot travel between processes")


def unpack(receive: Callable[[str], Array]) -> Message:
    """Returns the message whose vectors `receive(name)` gives; it is asked for the head, and then for each that has something.

    Raises MalformedMessage for a head that cannot be read, and for vectors of different messages.
    """
    head = receive(HEAD)
    mark, numbers = head[:_MARK_SIZE], iter(head[_MARK_SIZE:].tolist())
    try:
        serial, turn = _serial_in(mark.tolist()), (0, 1).index(int(next(numbers)))
        plans = [_planned(numbers) for _ in range(int(next(numbers)))]
    except (IndexError, StopIteration, ValueError, OverflowError):
        raise MalformedMessage("the head of a message cannot be read") from None
    contents: dict[str, Array] = {}
    taken: dict[str, int] = {}

    def get(plan: tuple[np.dtype[Any], tuple[int, ...]]) -> Array:
        dtype, shape = plan
        size = math.prod(shape)
        if not size:
            return np.zeros(shape, dtype)
        name = f"{dtype.name if dtype.kind == 'f' else 'float64'} {turn}"
        if name not in contents:
            part = receive(name)
            if not np.array_equal(part[:_MARK_SIZE], mark):
                raise MalformedMessage(f"a message's head and its {name} part are of different messages")
            contents[name] = part[_MARK_SIZE:]
        begin = taken.get(name, 0)
        taken[name] = begin + size
        if size < 0 or begin + size > contents[name].size:
            raise MalformedMessage("a message has less than its head says")
        return contents[name][begin : begin + size].astype(dtype).reshape(shape)

    def value(is_rows: bool, whole: tuple[int, ...] | None, arrays: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> Any:
        return IndexedSlices(get(arrays[0]), get(arrays[1]), whole) if is_rows else get(arrays[0])

    return Message(serial, [value(*plan) for plan in plans])


def _marked(serial: Serial) -> Array:
    """Returns a serial as bytes, after a 1: the sum of two messages has a 2 there, and is refused."""
    return np.frombuffer(b"\1" + b"".join(one.to_bytes(_SERIAL_BYTES, "big") for one in (serial.run, serial.number)), np.uint8)


def _serial_in(mark: Sequence[float]) -> Serial:
    if len(mark) < _MARK_SIZE or mark[0] != 1:
        raise ValueError("two messages in one")
    content = bytes(int(one) for one in mark[1:])
    return Serial(int.from_bytes(content[:_SERIAL_BYTES], "big"), int.from_bytes(content[_SERIAL_BYTES:], "big"))


def _planned(numbers: Iterator[float]) -> tuple[bool, tuple[int, ...] | None, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
    def whole_number() -> int:
        return int(next(numbers, math.nan))

    def array() -> tuple[np.dtype[Any], tuple[int, ...]]:
        dtype = _TYPES[whole_number()]
        shape = tuple(whole_number() for _ in range(whole_number()))
        # Takes no memory, and fails if an array of that shape cannot exist.
        np.broadcast_to(dtype.type(), shape)
        return dtype, shape

    if not whole_number():
        return False, None, [array()]
    num_extents = whole_number()
    whole = None if num_extents < 0 else tuple(whole_number() for _ in range(num_extents))
    return True, whole, [array(), array()]
