"""A shard's part of a checkpoint, saved and restored beside the steps. Knows files, threads and the model's state; no wire.

A save copies the state, for which steps wait, and writes it, for which they do not. A restoration reads what the shard needs, however
many shards saved it, and which had what.
"""

import contextlib
import logging
import math
import mmap
import os
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from ps_protocol.checkpoint.catalog import max_tensors_of
from ps_protocol.checkpoint.manifest import read_checkpoint
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, TensorEntry, TensorFileReader, open_file, tensor_name, write_file
from ps_protocol.errors import (
    Cancelled,
    CheckpointMismatch,
    CheckpointStorageMissing,
    DataLoss,
    InternalError,
    PsError,
    Unavailable,
    WrongRole,
)
from ps_protocol.model.keys import KEYS_PART, OCCURRENCES_PART, ROWS_PART, gathered, spread
from ps_protocol.model.layout import ALIGNMENT, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import format_bytes
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.shard import (
    CheckpointFile,
    HiddenState,
    OptimizerPowers,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    ShardSpec,
)
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.model.snapshot import (
    Snapshot,
    StateMemory,
    StateTensor,
    memory_like,
    rule_keys,
)
from ps_server.numbers.apply import ONE_THREAD, StripeRunner, share
from ps_server.numbers.memory import BytesInFile, MemoryBudget
from ps_server.numbers.tables import Table, rows_of
from ps_server.shard.gate import TURN_WAIT_S, Gate

if TYPE_CHECKING:
    from ps_server.shard.shard import ServedShard

log = logging.getLogger("lockstep.server")

# The name of a shard's numbers in its file's header, a message in base64: JSON of it took ten times as long, beside the steps.
_HIDDEN_STATE = "shard"

# How work beside the steps is begun: in a thread of its own, unless the owner has another way.


# Begins to call the function some time, and returns at once.
RunInBackground = Callable[[Callable[[], None]], object]

# A little: a file gives way to steps by itself, and on a busy machine it should be whole before the next one is due.
_NICENESS = 2


def run_in_thread(work: Callable[[], None]) -> None:
    """Runs the work in a thread of its own, which does not keep the process from ending."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


def run_quietly_in_thread(work: Callable[[], None]) -> None:
    """Does the same for background work: the system prefers all other threads to its own, also for reading and writing."""

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not every system has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    run_in_thread(run)


# How the writing of a checkpoint gives way to steps: between two of its pieces.


# So many seconds of steps may be waited for with each second of writing: a file takes three times as long at most.
_WAITS_PER_WORK = 2.0


class SavePace:
    """The pace of one file; `give_way` is called between its pieces, by the thread that writes it."""

    def __init__(self, turns: Gate, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turns, self._clock = turns, clock
        self._left_s = 0.0
        self._since_s = clock()

    def give_way(self) -> None:
        """Waits for the step under way, if there is one, but no longer than the writing has earned."""
        now = self._clock()
        self._left_s += _WAITS_PER_WORK * (now - self._since_s)
        if not self._turns.is_idle:
            self._turns.wait_until_idle(self._left_s)
            waited_until = self._clock()
            self._left_s -= waited_until - now
            now = waited_until
        self._since_s = now


# The memory that a step is copied into before it is written: when it is kept, how it is filled.


_PART_BYTES = 4 << 20
_PART_ROWS = 1 << 15


class CopyMemory:
    """Memory for one copy of a model's state, in one piece; it goes back to the system with its last user."""

    def __init__(self, like: StateMemory, *, make_file: Callable[[int], BytesInFile] | None = None) -> None:
        """`make_file` gives so many bytes in a file; None: in memory. Raises LimitExceeded, OSError."""
        num_bytes = like.nbytes + ALIGNMENT * len(like.arrays)
        self.is_in_file, self.num_counted = make_file is not None, like.nbytes
        if make_file is not None:
            with contextlib.closing(make_file(num_bytes)) as file:
                file.reserve(num_bytes)
                self._rest = file.memory
        else:
            self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._advise("MADV_HUGEPAGE")
            self._rest = np.frombuffer(self._mapping, np.uint8)
            # Else the machine gives the pages one by one while steps wait for the copy, which then takes several times as long.
            self._rest[:: mmap.PAGESIZE] = 0
        self.state = memory_like(like, self._cut)

    def offer(self) -> None:
        """Lets the system take the pages if it needs them before they are written again: their content is not needed any more."""
        self._advise("MADV_FREE")

    def _advise(self, name: str) -> None:
        with suppress(AttributeError, OSError):  # not every system knows it
            self._mapping.madvise(getattr(mmap, name))

    def _cut(self, nbytes: int) -> Array:
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes + -nbytes % ALIGNMENT :]
        return piece


class CopyMemories:
    """Lends memory for one copy at a time, counted in the budget, and keeps it for the next. Thread-safe.

    Kept memory is freed as soon as the budget is short, and the system may take its pages for other processes.
    As long as neither happens, steps wait for the next copy itself, and for no page of it.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: CopyMemory | None = None
        budget.on_shortage(self.release)

    def lend(self, like: StateMemory, *, purpose: str) -> CopyMemory:
        """Returns memory of the same sizes, with undefined contents; takes long if it is new. Raises LimitExceeded."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if _sizes(kept.state) == _sizes(like):
                return kept
            self._budget.release(kept.num_counted)
            del kept
        make_file = self._budget.make_file
        return self._budget.allocate_by(lambda: CopyMemory(like, make_file=make_file), 0 if make_file else like.nbytes, purpose=purpose)

    def take_back(self, memory: CopyMemory) -> None:
        """Takes the lent memory back; no other holder may be left. A file is not kept: rows may need its room on the disk."""
        if memory.is_in_file:
            return
        memory.offer()
        with self._lock:
            self._kept = memory

    def release(self) -> None:
        """Frees the kept memory."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            self._budget.release(kept.num_counted)


def copy_memory(source: StateMemory, like: StateMemory, into: StateMemory, *, stripes: StripeRunner) -> None:
    """Copies all bytes, or of a table the rows that `like` has the numbers of, in all threads there are. Takes as long as that takes."""
    # What is read, which rows of it (None: all), what is written, and from where on.
    parts: list[tuple[Array, Array | None, Array, int]] = []
    whole = [*zip(replace(source, tables=()).arrays, replace(into, tables=()).arrays, strict=True)]
    for table, wanted, copies in zip(source.tables, like.tables, into.tables, strict=True):
        rows = wanted.get(ROWS_PART)
        for name, copied in copies.items():
            if rows is None or name in (ROWS_PART, OCCURRENCES_PART):
                whole.append((wanted[name] if name == ROWS_PART else table[name], copied))
            else:
                parts += [(table[name], rows, copied, start) for start in range(0, rows.size, _PART_ROWS)]
    for one, other in whole:
        num_at_once = max(1, _PART_BYTES // (one[:1].nbytes or 1))
        parts += [(one[start : start + num_at_once], None, other, start) for start in range(0, len(one), num_at_once)]

    def copy(part: tuple[Array, Array | None, Array, int], thread: int) -> int:
        one, rows, other, start = part
        if rows is None:
            other[start : start + len(one)] = one
        else:
            other[start : start + _PART_ROWS] = rows_of(one, rows[start : start + _PART_ROWS])
        return 0

    share(stripes, parts, copy, num_threads=min(stripes.num_threads, len(parts)) or 1, within=np.errstate)


def _sizes(state: StateMemory) -> list[tuple[tuple[int, ...], str]]:
    return [(memory.shape, memory.dtype.str) for memory in state.arrays]


# Where slices of one variable overlap, and a slice that comes as a stream of bytes put into others.


# As much as is read at once on the way into another arrangement.
BLOCK_BYTES = 4 << 20


@light_dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A slice, and the memory of its shape that its values are to be copied into."""

    piece: VariableSlice
    memory: Array


def overlap(one: VariableSlice, other: VariableSlice) -> int:
    """Returns how many elements two slices of one variable have in common."""
    return math.prod(len(range(*both)) for both in _common(one, other))


def fill(source: VariableSlice, targets: Sequence[Target], read_into: Callable[[Array], None]) -> None:
    """Reads the values of `source`, whose bytes come one after the other, and copies what they have in common with `targets`.

    `read_into` fills a contiguous array with the next bytes.
    """
    if len(targets) == 1 and targets[0].piece == source:
        read_into(targets[0].memory)
        return
    if not math.prod(source.shape):
        return
    itemsize = source.variable.data_type.itemsize
    dtype = source.variable.data_type.dtype
    scratch = np.empty(0, dtype)
    for block in _blocks(source.shape, max(1, BLOCK_BYTES // itemsize)):
        shape = tuple(stop - start for start, stop in block)
        if scratch.size < math.prod(shape):
            scratch = np.empty(math.prod(shape), dtype)
        values = scratch[: math.prod(shape)].reshape(shape)
        read_into(values)
        at = [(start + origin, stop + origin) for (start, stop), origin in zip(block, _origin(source), strict=True)]
        for target in targets:
            _copy(values, at, target)


def _copy(values: Array, at: Sequence[tuple[int, int]], target: Target) -> None:
    """Copies the elements that lie in both; `at` is the position of the values in the variable."""
    to = [(start, start + extent) for start, extent in zip(_origin(target.piece), target.piece.shape, strict=True)]
    both = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(at, to, strict=True)]
    if any(start >= stop for start, stop in both):
        return
    source = tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(both, at, strict=True))
    into = tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(both, to, strict=True))
    target.memory[into] = values[source]


def _origin(piece: VariableSlice) -> tuple[int, ...]:
    """The place in the variable of a slice's first element."""
    return tuple(piece.start if axis == piece.axis else 0 for axis in range(len(piece.variable.shape)))


def _common(one: VariableSlice, other: VariableSlice) -> list[tuple[int, int]]:
    boxes = [list(zip(_origin(piece), piece.shape, strict=True)) for piece in (one, other)]
    return [(max(a, b), max(a, b, min(a + m, b + n))) for (a, m), (b, n) in zip(*boxes, strict=True)]


def _blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields boxes that are runs of elements in C order, one after the other, of at most `max_elements` each."""
    axis = 0
    while axis < len(shape) and math.prod(shape[axis + 1 :]) > max_elements:
        axis += 1
    if axis >= len(shape):
        yield tuple((0, extent) for extent in shape)
        return
    inner = tuple((0, extent) for extent in shape[axis + 1 :])
    size = max(1, max_elements // math.prod(shape[axis + 1 :]))
    for outer in np.ndindex(shape[:axis]):
        for start in range(0, shape[axis], size):
            yield (*((index, index + 1) for index in outer), (start, min(start + size, shape[axis])), *inner)


class SavedRows:
    """The rows of one saved slice of a table, on their way into the tables that now have some of them.

    `newer`: of a keyed table, what the deltas say that are read later: the numbers of rows (None: all from the first on) and their keys.
    """

    def __init__(self, piece: VariableSlice, tables: Sequence[Table], newer: Sequence[tuple[Array | None, Array]] = ()) -> None:
        self._piece, self._tables, self._newer = piece, tables, newer
        # For each table: its first row of these, and which of the saved rows come from there on.
        self._places: list[tuple[Table, int, Array | range]] | None = None
        self._num_rows = self._num_in_file = 0
        self._numbers: Array | None = None
        if piece.variable.keys is None:
            self._num_rows, self._places = piece.stop - piece.start, []
            for table in tables:
                start, stop = max(piece.start, table.piece.start), min(piece.stop, table.piece.stop)
                self._places.append((table, start - table.piece.start, range(start - piece.start, stop - piece.start)))

    @property
    def parts(self) -> list[str]:
        """The parts that each file has, but for the numbers of rows, which a delta has."""
        return [*self._tables[0].parts]

    def begin_file(self) -> None:
        """Another file is read, which has all rows unless it begins with numbers."""
        self._numbers, self._num_in_file = None, self._num_rows

    def take(self, entry: TensorEntry, part: str, read_into: Callable[[Array], None], *, where: str) -> None:
        """Reads a part: numbers of rows first, then keys. Raises DataLoss if parts do not fit each other, LimitExceeded."""
        if part == ROWS_PART:
            self._numbers = read_integers(entry, read_into)
            self._num_in_file = self._numbers.size
            if not self._newer:
                check_numbers(self._numbers, self._num_rows, where=where)
            return
        if part == KEYS_PART:
            keys = read_integers(entry, read_into)
            self._num_in_file = keys.size
            if self._places is None:
                keys = newest_keys(keys, self._newer, where=where)
                self._num_rows, self._places = keys.size, [(table, *table.extend(spread(keys))) for table in self._tables]
            return
        if part == OCCURRENCES_PART:
            counters = np.empty(entry.num_bytes, np.uint8)
            read_into(counters)
            for table in self._tables:
                table.take_counters(self._piece, counters, where=where)
            return
        numbers, num_rows = self._numbers, self._num_in_file
        memory = self._tables[0].memory_of(part)
        row_shape, dtype = self._tables[0].piece.variable.shape[1:] if memory.ndim > 1 else (), memory.dtype
        if self._places is None or entry.shape != (num_rows, *row_shape) or num_rows > self._num_rows or entry.dtype != dtype:
            raise DataLoss(f"{where}: tensor {entry.name!r} is {entry.shape} {entry.dtype}, its keys and the manifest say otherwise")
        is_one_run = len(self._places) == 1 and len(self._places[0][2]) == self._num_rows
        if numbers is None and is_one_run and memory.flags.c_contiguous:
            first = self._places[0][1]
            read_into(memory[first : first + num_rows])
            return
        num_at_once = max(1, BLOCK_BYTES // (math.prod(row_shape) * dtype.itemsize or 1))
        scratch = np.empty((min(num_at_once, num_rows), *memory.shape[1:]), dtype)
        for start in range(0, num_rows, num_at_once):
            rows = scratch[: num_rows - start]
            read_into(rows)
            block = np.arange(start, start + len(rows)) if numbers is None else numbers[start : start + len(rows)]
            for table, first, chosen in self._places:
                at, ranks = _ranks(chosen, block)
                table.memory_of(part)[first + ranks] = rows[at]


def read_integers(entry: TensorEntry, read_into: Callable[[Array], None]) -> Array:
    """Reads numbers or keys of rows, as int64."""
    numbers = np.empty(entry.num_bytes // 8, np.int64)
    read_into(numbers)
    return numbers


def check_numbers(numbers: Array, num_rows: int, *, where: str) -> None:
    """Raises DataLoss unless the numbers of rows ascend and are below `num_rows`."""
    if numbers.size and (numbers[0] < 0 or numbers[-1] >= num_rows or not bool(np.all(numbers[1:] > numbers[:-1]))):
        raise DataLoss(f"{where}: its numbers of rows do not ascend from 0 to below {num_rows}; it belongs to another checkpoint")


def newest_keys(keys: Array, newer: Sequence[tuple[Array | None, Array]], *, where: str) -> Array:
    """Returns the keys of rows after some deltas. Raises DataLoss if a delta does not fit."""
    for numbers, given in newer:
        numbers = np.arange(given.size) if numbers is None else numbers
        # A delta has all rows that have been made since.
        check_numbers(numbers, keys.size + given.size, where=where)
        if numbers.size != given.size:
            raise DataLoss(f"{where}: a later delta has {numbers.size} numbers of rows and {given.size} keys")
        keys = np.concatenate([keys, np.zeros(max(0, int(numbers.max(initial=-1)) + 1 - keys.size), np.int64)])
        keys[numbers] = given
    return keys


def _ranks(chosen: Array | range, numbers: Array) -> tuple[Array, Array]:
    """Returns which of the numbers are among the chosen, ascending ones, and at which places there."""
    if isinstance(chosen, range):
        ranks = numbers - chosen.start
        at = np.flatnonzero((ranks >= 0) & (ranks < len(chosen)))
    else:
        ranks = np.searchsorted(chosen, numbers)
        at = np.flatnonzero(np.take(chosen, ranks, mode="clip") == numbers) if chosen.size else ranks[:0]
    return at, ranks[at]


# A shard's part of a checkpoint read into a model, however many shards saved it, and which had what.


class CheckpointPlan:
    """The files of a checkpoint that a shard needs. Raises CheckpointMismatch if the checkpoint is of another model."""

    def __init__(self, checkpoint: Checkpoint, spec: ShardSpec) -> None:
        if checkpoint.step != spec.initial_step:
            raise CheckpointMismatch(f"checkpoint {checkpoint.tag} is of step {checkpoint.step}, not of step {spec.initial_step}")
        self._checkpoint = checkpoint
        self._spec = spec
        # The slices of each variable, with the shard that saved them.
        self._saved: dict[str, list[tuple[VariableSlice, int]]] = {}
        for placed in checkpoint.placement:
            self._saved.setdefault(placed.slice.variable.name, []).append((placed.slice, placed.shard))
        shards: set[int] = set()
        for piece in (*spec.layout.slices, *spec.layout.tables):
            shards |= self._sources(piece)
        # Its own file first, if it is needed: in doubt its numbers are this shard's.
        self._shards = sorted(shards, key=lambda shard: (shard != spec.shard, shard))

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """The files to read, in order. The metrics of a cluster are its first shard's."""
        shards = self._shards if self._spec.shard or 0 in self._shards else [*self._shards, 0]
        return tuple(file for shard in shards for file in self._checkpoint.files_of(shard))

    @property
    def num_bytes(self) -> int:
        """Bytes of the files to read."""
        return sum(file.num_bytes for file in self.files)

    def read(
        self,
        storage: CheckpointStorage,
        tensors: Iterable[StateTensor],
        tables: Iterable[Table] = (),
        *,
        on_progress: Callable[[int], None],
    ) -> HiddenState:
        """Reads all files, fills the tables, and the tensors that are none of a table, and returns the rest of the state.

        `on_progress` is called with the bytes read so far. Raises DataLoss if a file is not what was written, CheckpointMismatch if it
        lacks something, LimitExceeded, what the storage raises, and what `on_progress` raises.
        """
        by_name: dict[str, list[Table]] = {}
        for table in tables:
            by_name.setdefault(table.piece.variable.name, []).append(table)
        wanted: dict[tuple[str, str], list[Target]] = {}
        for tensor in tensors:
            if tensor.piece.variable.name not in by_name:
                wanted.setdefault((tensor.piece.variable.name, tensor.part), []).append(Target(tensor.piece, tensor.memory))
        states: dict[int, HiddenState] = {}
        rows: dict[int, dict[str, SavedRows]] = {}
        num_before = 0
        for file in self.files:
            if file.shard not in rows:
                rows[file.shard] = self._rows_of(storage, file.shard, by_name)
            with self._open(storage, file) as reader:

                def on_read(num_bytes: int, before: int = num_before) -> None:
                    on_progress(before + num_bytes)

                self._read_file(reader, file, wanted, rows[file.shard], on_read)
                # The last one of a shard is of the step; dense variables of those before are overwritten.
                states[file.shard] = decode_hidden_state(reader.metadata, where=self._where(file))
            num_before += file.num_bytes
        self._check_steps(states)
        return self._joined([states[shard] for shard in self._shards], states)

    def _open(self, storage: CheckpointStorage, file: CheckpointFile) -> contextlib.AbstractContextManager[TensorFileReader]:
        return open_file(storage, self._checkpoint.tag, file, max_tensors=max_tensors_of(self._checkpoint, file.shard))

    def _read_file(
        self,
        reader: TensorFileReader,
        file: CheckpointFile,
        wanted: Mapping[tuple[str, str], Sequence[Target]],
        rows: Mapping[str, SavedRows],
        on_progress: Callable[[int], None],
    ) -> None:
        expected = {
            tensor_name(piece, part): (piece, targets)
            for (name, part), targets in wanted.items()
            for piece, owner in self._saved[name]
            if owner == file.shard and any(overlap(piece, target.piece) for target in targets)
        }
        takers = {f"{name}@{part}" if part else name: (one, part) for name, one in rows.items() for part in [ROWS_PART, *one.parts]}
        for one in rows.values():
            one.begin_file()
        for entry in reader:
            found, taker = expected.pop(entry.name, None), takers.pop(entry.name, None)
            if found is not None:
                piece, targets = found
                if entry.shape != piece.shape or entry.dtype != piece.variable.data_type.dtype:
                    raise DataLoss(
                        f"{self._where(file)}: tensor {entry.name!r} is {entry.shape} {entry.dtype}, the manifest says otherwise"
                    )
                fill(piece, targets, reader.read_into)
            if taker is not None:
                taker[0].take(entry, taker[1], reader.read_into, where=self._where(file))
            on_progress(reader.num_bytes_read)
        lacking = [*expected, *(name for name, (_, part) in takers.items() if part != ROWS_PART)]
        if lacking:
            missing = ", ".join(repr(name) for name in lacking[:5])
            raise CheckpointMismatch(f"{self._where(file)}: has no tensor {missing}; it is the checkpoint of another model")

    def _rows_of(self, storage: CheckpointStorage, shard: int, tables: Mapping[str, Sequence[Table]]) -> dict[str, SavedRows]:
        """Returns who takes the rows of each slice of a table that a shard saved, by the slice's name in a file."""
        found = {
            tensor_name(piece): (piece, [table for table in those if overlap(piece, table.piece)])
            for name, those in tables.items()
            for piece, owner in self._saved[name]
            if owner == shard
        }
        # Which keys rows have in the end decides where rows of the first file go: what deltas say of that is read before.
        keyed = {name for name, (piece, those) in found.items() if those and piece.variable.keys is not None}
        newer: dict[str, list[tuple[Array | None, Array]]] = {name: [] for name in found}
        for file in self._checkpoint.files_of(shard)[1:] if keyed else ():
            with self._open(storage, file) as reader:
                numbers: dict[str, Array] = {}
                for entry in reader:
                    name, _, part = entry.name.rpartition("@")
                    if name in keyed and part == ROWS_PART:
                        numbers[name] = read_integers(entry, reader.read_into)
                    elif name in keyed and part == KEYS_PART:
                        newer[name].append((numbers.get(name), read_integers(entry, reader.read_into)))
        return {name: SavedRows(piece, those, newer[name]) for name, (piece, those) in found.items() if those}

    def _sources(self, piece: VariableSlice) -> set[int]:
        """The shards that saved parts of a slice; all of it must be somewhere."""
        name, num_found, shards = piece.variable.name, 0, set()
        for saved, shard in self._saved.get(name, ()):
            if (saved.variable.shape, saved.variable.data_type) != (piece.variable.shape, piece.variable.data_type):
                has = f"{saved.variable.shape} {saved.variable.data_type.value}"
                raise CheckpointMismatch(
                    f"checkpoint {self._checkpoint.tag}: variable {name!r} has shape {has}, the model's has {piece.variable.shape}"
                    f" {piece.variable.data_type.value}"
                )
            if saved.variable.num_rows != piece.variable.num_rows:  # of one shape, so these are the buckets of keys
                has = f"has {saved.variable.keys}, the model's {piece.variable.keys}"
                raise CheckpointMismatch(f"checkpoint {self._checkpoint.tag}: table {name!r} {has}; give the max_rows that it has")
            num_common = overlap(saved, piece)
            if num_common:
                num_found += num_common
                shards.add(shard)
        # The slices of a manifest are disjoint, so what is found is found once.
        if num_found != overlap(piece, piece) or name not in self._saved:
            raise CheckpointMismatch(f"checkpoint {self._checkpoint.tag}: has not all of variable {name!r}; it is of another model")
        return shards

    def _check_steps(self, states: Mapping[int, HiddenState]) -> None:
        for shard, state in states.items():
            if state.step != self._checkpoint.step:
                where = self._where(self._checkpoint.files[shard])
                raise DataLoss(f"{where}: is of step {state.step}, the manifest says {self._checkpoint.step}")

    def _joined(self, sources: Sequence[HiddenState], states: Mapping[int, HiddenState]) -> HiddenState:
        """Joins several states: their counters are equal, unless contributions were applied as they arrived."""
        powers: dict[str, tuple[float, ...]] = {}
        for state in sources:
            for key, values in state.powers_by_key.items():
                powers.setdefault(key, values)
        missing = [key for key in rule_keys(self._spec.layout) if key not in powers]
        if missing:
            raise CheckpointMismatch(
                f"checkpoint {self._checkpoint.tag}: has no state of optimizer {missing[0] or 'of the model'!r}; it is of another model"
            )
        first = sources[0] if sources else HiddenState(step=self._checkpoint.step)
        return replace(
            first,
            powers=tuple(OptimizerPowers(key=key, powers=values) for key, values in powers.items()),
            metrics=states[0].metrics if self._spec.shard == 0 and 0 in states else (),
            pushes=self._checkpoint.pushes or first.pushes,
        )

    def _where(self, file: CheckpointFile) -> str:
        return f"{file.tag or self._checkpoint.tag}/{file.name}"


# Saving and restoring.


@light_dataclass(slots=True, eq=False)
class Attempt:
    """One save or restoration, beside the calls that ask how far it is. `unwanted`: why it is to end before it is done.

    `is_copied`: steps may continue beside a save; `file` is what it wrote; `is_fetched`: the chief knows of it. The numbers
    are a restoration's.
    """

    key: tuple[object, ...]
    tag: str
    is_copied: bool = False
    is_done: bool = False
    is_fetched: bool = False
    failure: PsError | None = None
    unwanted: PsError | None = None
    file: CheckpointFile | None = None
    num_bytes: int = 0
    num_bytes_read: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the work has an outcome."""
        return self.is_done or self.failure is not None

    def check_wanted(self) -> None:
        """Raises `unwanted`."""
        if self.unwanted is not None:
            raise self.unwanted

    @property
    def save_progress(self) -> SaveProgress:
        """How far a save is."""
        if self.failure is not None:
            return SaveProgress(state=SaveState.FAILED, failure=self.failure)
        return SaveProgress(state=SaveState.DONE, file=self.file) if self.is_done else SaveProgress(state=SaveState.WRITING)

    @property
    def restore_progress(self) -> RestoreProgress:
        """How far a restoration is."""
        return RestoreProgress(is_done=self.is_done, num_bytes_read=self.num_bytes_read, num_bytes=self.num_bytes)

    def restore_words(self) -> str:
        """Describes how far a restoration is."""
        share = f"{format_bytes(self.num_bytes_read)} of {format_bytes(self.num_bytes)} read" if self.num_bytes else "its manifest is read"
        return f"being restored from checkpoint {self.tag}: {share}"


class Checkpoints:
    """The saves of one shard, one at a time, and its restorations likewise. Thread-safe.

    May be called in a block of the shard's gate where a method says so. `on_restored` is called when a restoration is over.
    """

    def __init__(
        self,
        shard: "ServedShard",
        turns: Gate,
        *,
        storage: CheckpointStorage | None,
        run_in_background: RunInBackground | None,
        on_restored: Callable[[], object],
        stripes: StripeRunner = ONE_THREAD,
    ) -> None:
        self._shard, self._turns = shard, turns
        self._index, self._name = shard.index, f"ps {shard.index}"
        self._storage = storage
        self._memories = CopyMemories(shard.budget)
        self._stripes = stripes
        self._run_save = run_in_background or run_quietly_in_thread
        self._run_restore = run_in_background or run_in_thread
        self._on_restored = on_restored
        self._changed = threading.Condition()
        self._save: Attempt | None = None
        # How many saves the chief knows to be done.
        self.num_fetched = 0
        self._restore: Attempt | None = None

    def save(self, request: SaveRequest) -> SaveProgress:
        """Copies the model's step and has it written, or says how far that is; see SaveRequest. The caller has been let in.

        An attempt that is over is begun anew if this asks for it without a wait, as long as the step stands, and the file does not.
        """
        storage, max_wait_s = self._required_storage(), request.max_wait_s
        key = request.fence.era, request.step, request.tag
        save = self._save
        if save is not None and save.key != key:
            save = None
        if save is not None and save.is_over and not max_wait_s and not _stands(storage, save):
            save = None
        if save is None:
            save, is_mine = self._begin_save(request, key)
            if is_mine:
                self._copy_and_write(save, request, storage)
        with self._changed:
            if max_wait_s or not save.is_copied:
                self._changed.wait_for(lambda: save.is_over or (save.is_copied and not max_wait_s), max_wait_s or TURN_WAIT_S)
            if save.is_done:
                self.num_fetched += not save.is_fetched
                save.is_fetched = True
                self._changed.notify_all()
            return save.save_progress

    @property
    def has_storage(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._storage is not None

    @property
    def is_saving(self) -> bool:
        """Whether one is being copied or written, or the chief has not heard yet that this is done."""
        with self._changed:
            return self._save is not None and self._save.failure is None and not self._save.is_fetched

    def await_fetched(self, num_fetched: int, *, timeout_s: float) -> None:
        """Waits until the chief has heard of more saves than `num_fetched` that they are done, but not longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_fetched > num_fetched, timeout_s)

    def wait_until_saved(self, timeout_s: float) -> None:
        """Waits until nothing is being written, but not longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: self._save is None or self._save.is_over, timeout_s)

    def break_off_save(self) -> None:
        """Abandons a save that is no longer wanted, at its next file operation. In a block, too."""
        with self._changed:
            if self._save is not None:
                self._save.unwanted = Cancelled(f"{self._name}: checkpoint {self._save.tag} is not wanted any more")

    def restore(self, request: RestoreRequest) -> RestoreProgress:
        """Begins a restoration, or says how far it is; see RestoreRequest. The caller has been let in, under the epoch of the request.

        One that has failed is begun anew if this asks for it without a wait.
        """
        storage, max_wait_s = self._required_storage(), request.max_wait_s
        if request.spec.shard != self._index:
            raise WrongRole(f"this is {self._name}, not ps {request.spec.shard}; check the addresses and their order")
        # A save or restoration for a chief of another life ends with that life, though epoch and checkpoint may be the same.
        key = request.fence.era, request.tag, request.manifest_sha256
        with self._changed:
            known = self._restore
            is_new = known is None or known.key != key or (known.failure is not None and not max_wait_s)
            if is_new:
                self.break_off_restore(Cancelled(f"{self._name}: another restoration has begun"))
            restore = Attempt(key, request.tag) if known is None or is_new else known
            self._restore = restore
        if is_new:
            self._run_restore(lambda: self._read(restore, request, storage))
        with self._changed:
            if max_wait_s:
                self._changed.wait_for(lambda: restore.is_over, max_wait_s)
            if restore.failure is not None:
                raise restore.failure
            return restore.restore_progress

    @property
    def restoring(self) -> str:
        """The progress of a restoration under way, as text; empty if there is none. In a block, too."""
        restore = self._restore
        return "" if restore is None or restore.is_over else restore.restore_words()

    def break_off_restore(self, reason: PsError) -> None:
        """Gives up a restoration under way, and drops the values read. In a block, too."""
        with self._changed:
            if self._restore is not None and not self._restore.is_over:
                self._restore.unwanted = self._restore.failure = reason
                self._changed.notify_all()

    def forget_restore(self, reason: PsError) -> None:
        """As `break_off_restore`; the caller drops the restored values, so that the same restoration may be requested again."""
        with self._changed:
            self.break_off_restore(reason)
            self._restore = None

    def _required_storage(self) -> CheckpointStorage:
        if self._storage is None:
            raise CheckpointStorageMissing(f"{self._name}: it was started without --checkpoint-dir; give all roles the same one")
        return self._storage

    def _end(self, attempt: Attempt, failure: PsError | None) -> None:
        with self._changed:
            if not attempt.is_over:
                attempt.failure, attempt.is_done = failure, failure is None
            self._changed.notify_all()

    def _failure_of(self, attempt: Attempt, work: Callable[[], None], *, what: str) -> PsError | None:
        """Does the work, and returns its error, or None; `what` says in the text of the error what could not be done."""
        try:
            work()
        except PsError as error:
            return error.with_traceback(None)  # which would hold on to the copy, or to the model that came to nothing
        except Exception as error:
            log.exception("%s: checkpoint %s could not be %s", self._name, attempt.tag, what)
            return InternalError(f"{self._name}: checkpoint {attempt.tag} could not be {what} ({type(error).__name__}); see its log")
        return None

    def _begin_save(self, request: SaveRequest, key: tuple[object, ...]) -> tuple[Attempt, bool]:
        # Only whether it can be saved: to look for rows that have changed is for one call alone.
        self._shard.find_state(replace(request, since=None))
        with self._changed:
            latest = self._save
            if latest is not None and not latest.is_over:
                if latest.key == key:
                    return latest, False
                self.break_off_save()
                raise Unavailable(f"{self._name}: checkpoint {latest.tag} is still being written; repeat the call")
            self._save = save = Attempt(key, request.tag)
            return save, True

    def _copy_and_write(self, save: Attempt, request: SaveRequest, storage: CheckpointStorage) -> None:
        try:
            snapshot, memory = self._copy(request)
        except BaseException:
            with self._changed:
                # As if it had never been asked for.
                self._save = None
            self._end(save, Cancelled(f"{self._name}: nothing was copied; ask again"))
            raise
        with self._changed:
            save.is_copied = True
            self._changed.notify_all()
        self._run_save(lambda: self._write(save, request, snapshot, memory, storage))

    def _copy(self, request: SaveRequest) -> tuple[Snapshot, CopyMemory]:
        model, like = self._shard.find_state(request)
        memory = self._memories.lend(like, purpose=f"the copy for checkpoint {request.tag}")

        def copy(state: StateMemory) -> None:
            started = time.perf_counter()
            copy_memory(state, like, memory.state, stripes=self._stripes)
            stall_s = time.perf_counter() - started
            log.debug("%s copied step=%d tag=%s bytes=%d stall_s=%.3f", self._name, request.step, request.tag, state.nbytes, stall_s)

        try:
            return self._shard.copy_state(request, model, memory.state, copy=copy), memory
        except BaseException:
            self._memories.take_back(memory)
            raise

    def _write(self, save: Attempt, request: SaveRequest, snapshot: Snapshot, memory: CopyMemory, storage: CheckpointStorage) -> None:
        started, pace = time.perf_counter(), SavePace(self._turns)

        def between() -> None:
            save.check_wanted()
            pace.give_way()

        def write() -> None:
            save.check_wanted()
            failpoint("ps.save.before_write")
            file = write_file(
                storage,
                request.tag,
                shard=self._index,
                num_shards=request.num_shards,
                tensors=[_saved(tensor) for tensor in snapshot.tensors()],
                metadata=encode_hidden_state(snapshot.hidden),
                between=between,
            )
            save.file = replace(file, is_delta=snapshot.memory.lacks_rows)
            failpoint("ps.save.before_ack")

        failure = self._failure_of(save, write, what="written")
        self._memories.take_back(memory)
        if failure is not None:
            log.warning("%s: checkpoint not saved tag=%s cause=%s", self._name, save.tag, failure.message)
        elif save.file is not None:
            seconds = time.perf_counter() - started
            log.debug("%s saved tag=%s size=%s seconds=%.3f", self._name, save.tag, format_bytes(save.file.num_bytes), seconds)
        self._end(save, failure)

    def _read(self, restore: Attempt, request: RestoreRequest, storage: CheckpointStorage) -> None:
        started = time.perf_counter()
        failure = self._failure_of(restore, lambda: self._read_model(restore, request, storage), what="restored")
        self._end(restore, failure)
        if failure is None:
            seconds, size = time.perf_counter() - started, format_bytes(restore.num_bytes)
            log.info("%s restored tag=%s step=%d size=%s seconds=%.3f", self._name, request.tag, request.spec.initial_step, size, seconds)
        else:
            log.warning("%s: not restored tag=%s cause=%s", self._name, request.tag, failure.message)
        self._on_restored()

    def _read_model(self, restore: Attempt, request: RestoreRequest, storage: CheckpointStorage) -> None:
        stored = read_checkpoint(storage, request.tag, sha256=request.manifest_sha256)
        plan = CheckpointPlan(stored.checkpoint, request.spec)
        restore.num_bytes = plan.num_bytes

        def note(num_bytes: int) -> None:
            failpoint("ps.restore.mid")
            restore.num_bytes_read = num_bytes
            restore.check_wanted()

        # Nothing has been changed until now: a checkpoint of another model does no damage.
        model = self._shard.make_room(request, check=restore.check_wanted)
        try:
            hidden = plan.read(storage, model.begin_restore(), model.tables, on_progress=note)
            self._shard.put_restored(model, hidden, request, from_epoch=stored.checkpoint.fence.epoch, check=restore.check_wanted)
        except BaseException:
            self._shard.drop_restored(model)
            raise


def encode_hidden_state(state: HiddenState) -> dict[str, str]:
    """Returns the numbers of a shard for its file's header."""
    return {_HIDDEN_STATE: b64encode(codec.encode(state).SerializeToString()).decode()}


def decode_hidden_state(metadata: Mapping[str, str], *, where: str) -> HiddenState:
    """Returns the numbers that `encode_hidden_state` was given. Raises DataLoss for other texts; `where` names the file."""
    try:
        return codec.decode(HiddenState, pb.HiddenState.FromString(b64decode(metadata[_HIDDEN_STATE], validate=True)))
    except (KeyError, ValueError, DecodeError, PsError) as error:
        raise DataLoss(f"{where}: the state of the shard in its header cannot be read ({str(error)[:80]})") from None


def _saved(tensor: StateTensor) -> SavedTensor:
    """Returns a tensor as files have it: with keys as programs have them."""
    array, keys = tensor.memory, tensor.piece.variable.keys
    if keys is not None and tensor.part == KEYS_PART:
        array = gathered(array).view(keys.kind.value)
    return SavedTensor(name=tensor_name(tensor.piece, tensor.part), array=array)


def _stands(storage: CheckpointStorage, save: Attempt) -> bool:
    """Whether the file of a finished save still exists: after a failure elsewhere it is removed, and the save is repeated."""
    file = save.file
    if file is None or save.failure is not None:
        return False
    sizes = [stored.files.get(file.name) for stored in storage.stored() if stored.tag == save.tag]
    return file.num_bytes in sizes
