"""A shard's part of a checkpoint, saved and restored beside the steps. Knows files, threads and the model's state; no wire.

A save copies the state, for which steps wait, and writes it, for which nobody does. A restoration reads what the shard needs, however
many shards saved it, and which had what.
"""

import contextlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Protocol

import numpy as np

from ps_protocol.checkpoint.catalog import max_tensors_of
from ps_protocol.checkpoint.manifest import read_checkpoint
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, TensorFileReader, open_file, tensor_name, write_file
from ps_protocol.errors import (
    Cancelled,
    CheckpointMismatch,
    CheckpointStorageMissing,
    DataLoss,
    InternalError,
    PsError,
    StepMismatch,
    Unavailable,
    WrongRole,
)
from ps_protocol.model.layout import ALIGNMENT, VariableSlice
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.shard import CheckpointFile, RestoreProgress, RestoreRequest, SaveProgress, SaveRequest, SaveState, ShardSpec
from ps_server.model.shard_model import ShardModel
from ps_server.model.snapshot import (
    HiddenState,
    Snapshot,
    StateMemory,
    StateTensor,
    decode_hidden_state,
    encode_hidden_state,
    memory_like,
    rule_keys,
)
from ps_server.numbers.apply import ONE_THREAD, StripeRunner, share
from ps_server.numbers.memory import MemoryBudget, format_bytes
from ps_server.shard.gate import TURN_WAIT_S, Turns
from ps_server.shard.handles import Creations

# How work beside the steps is begun: in a thread of its own, unless the owner has another way.


# Begins to call the function some time, and returns at once.
RunInBackground = Callable[[Callable[[], None]], object]

# A little: a file gives way to steps by itself, and on a busy machine it should be whole before the next one is due.
_NICENESS = 2


def run_in_thread(work: Callable[[], None]) -> None:
    """Runs the work in a thread of its own, which does not keep the process from ending."""
    threading.Thread(target=work, name="checkpoint", daemon=True).start()


def run_quietly_in_thread(work: Callable[[], None]) -> None:
    """Does the same for work that nobody waits for: the system prefers all other threads to its own, also where they read and write."""

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # not every system has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        work()

    run_in_thread(run)


# How the writing of a checkpoint gives way to steps: between two of its pieces.


# So many seconds of steps may be waited for with each second of writing: a file takes three times as long at most.
_WAITS_PER_WORK = 2.0


class StepTurns(Protocol):
    """Whether a step is under way; `ps_server.shard.gate` knows."""

    @property
    def is_idle(self) -> bool:
        """Whether none is."""

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits until none is, but not longer than this."""


class SavePace:
    """The pace of one file; `give_way` is called between its pieces, by the thread that writes it."""

    def __init__(self, turns: StepTurns, *, clock: Callable[[], float] = time.perf_counter) -> None:
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


class CopyMemory:
    """Memory for one copy of a model's state, in one piece; it goes back to the system with its last user."""

    def __init__(self, like: StateMemory) -> None:
        self._mapping = mmap.mmap(-1, like.nbytes + ALIGNMENT * len(like.arrays), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        pages = np.frombuffer(self._mapping, np.uint8)
        # Else the machine gives the pages one by one while steps wait for the copy, which then takes several times as long.
        pages[:: mmap.PAGESIZE] = 0
        self._rest = pages
        self.state = memory_like(like, self._cut)

    def offer(self) -> None:
        """Lets the system have the pages if it needs them before they are written again: what they hold is not wanted any more."""
        self._advise("MADV_FREE")

    def _advise(self, name: str) -> None:
        with suppress(AttributeError, OSError):  # not every system knows it
            self._mapping.madvise(getattr(mmap, name))

    def _cut(self, nbytes: int) -> Array:
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes + -nbytes % ALIGNMENT :]
        return piece


class CopyMemories:
    """Lends memory for one copy at a time, counted in the budget, and keeps it for the next. Thread-safe.

    What is kept is let go as soon as the budget has too little for anything else, and the system may take its pages for other processes.
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
            self._budget.release(kept.state.nbytes)
            del kept
        return self._budget.allocate_by(lambda: CopyMemory(like), like.nbytes, purpose=purpose)

    def take_back(self, memory: CopyMemory) -> None:
        """Accepts what was lent; nobody else may hold it any more."""
        memory.offer()
        with self._lock:
            self._kept = memory

    def release(self) -> None:
        """Lets go of what is kept."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            self._budget.release(kept.state.nbytes)


def copy_memory(source: StateMemory, into: StateMemory, *, stripes: StripeRunner) -> None:
    """Copies all bytes, in all threads there are. Takes as long as that takes."""
    pairs = [(_flat(one), _flat(other)) for one, other in zip(source.arrays, into.arrays, strict=True)]
    parts = [(one, other, start) for one, other in pairs for start in range(0, one.size, _PART_BYTES)]

    def copy(part: tuple[np.ndarray, np.ndarray, int], thread: int) -> int:
        one, other, start = part
        other[start : start + _PART_BYTES] = one[start : start + _PART_BYTES]
        return 0

    share(stripes, parts, copy, num_threads=min(stripes.num_threads, len(parts)) or 1, within=np.errstate)


def _sizes(state: StateMemory) -> list[tuple[tuple[int, ...], str]]:
    return [(memory.shape, memory.dtype.str) for memory in state.arrays]


def _flat(memory: np.ndarray) -> np.ndarray:
    return memory.reshape(-1).view(np.uint8)


# Where slices of one variable overlap, and a slice that comes as a stream of bytes put into others.


# As much as is read at once on the way into another arrangement.
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
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
    """Copies what lies in both; `at` is where in the variable the values are."""
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


# A shard's part of a checkpoint read into a model, however many shards saved it, and which had what.


class CheckpointPlan:
    """Which files of a checkpoint have what a shard needs. Raises CheckpointMismatch if it is not the checkpoint of such a model."""

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
        # Its own file first, if it has what is needed: in doubt its numbers are this shard's.
        self._shards = sorted(shards, key=lambda shard: (shard != spec.shard, shard))

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """The files to read, in order. The metrics of a cluster are its first shard's."""
        shards = self._shards if self._spec.shard or 0 in self._shards else [*self._shards, 0]
        return tuple(self._checkpoint.files[shard] for shard in shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files to read."""
        return sum(file.num_bytes for file in self.files)

    def read(self, storage: CheckpointStorage, tensors: Iterable[StateTensor], *, on_progress: Callable[[int], None]) -> HiddenState:
        """Reads all files, fills the tensors, and returns the rest of the state. `on_progress` is told the bytes read so far, now and then.

        Raises DataLoss if a file is not what was written, CheckpointMismatch if it lacks something, what the storage raises, and what
        `on_progress` raises.
        """
        wanted: dict[tuple[str, str], list[Target]] = {}
        for tensor in tensors:
            wanted.setdefault((tensor.piece.variable.name, tensor.part), []).append(Target(tensor.piece, tensor.memory))
        states: dict[int, HiddenState] = {}
        num_before = 0
        for file in self.files:
            limit = max_tensors_of(self._checkpoint, file.shard)
            with open_file(storage, self._checkpoint.tag, file, max_tensors=limit) as reader:
                self._read_file(reader, file.shard, wanted, lambda num, before=num_before: on_progress(before + num))  # type: ignore[misc]
                states[file.shard] = decode_hidden_state(reader.metadata, where=f"{self._checkpoint.tag}/{file.name}")
            num_before += file.num_bytes
        self._check_steps(states)
        return self._joined([states[shard] for shard in self._shards], states)

    def _read_file(
        self,
        reader: TensorFileReader,
        shard: int,
        wanted: Mapping[tuple[str, str], Sequence[Target]],
        on_progress: Callable[[int], None],
    ) -> None:
        expected = {
            tensor_name(piece, part): (piece, targets)
            for (name, part), targets in wanted.items()
            for piece, owner in self._saved[name]
            if owner == shard and any(overlap(piece, target.piece) for target in targets)
        }
        for entry in reader:
            found = expected.pop(entry.name, None)
            if found is not None:
                piece, targets = found
                if entry.shape != piece.shape or entry.dtype != piece.variable.data_type.dtype:
                    raise DataLoss(
                        f"{self._where(shard)}: tensor {entry.name!r} is {entry.shape} {entry.dtype}, the manifest says otherwise"
                    )
                fill(piece, targets, reader.read_into)
            on_progress(reader.num_bytes_read)
        if expected:
            missing = ", ".join(repr(name) for name in list(expected)[:5])
            raise CheckpointMismatch(f"{self._where(shard)}: has no tensor {missing}; it is the checkpoint of another model")

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
                raise DataLoss(f"{self._where(shard)}: is of step {state.step}, the manifest says {self._checkpoint.step}")

    def _joined(self, sources: Sequence[HiddenState], states: Mapping[int, HiddenState]) -> HiddenState:
        """One state of several: what they all count is the same in each, but where contributions were applied as they arrived."""
        powers: dict[str, tuple[float, ...]] = {}
        for state in sources:
            for key, values in state.powers.items():
                powers.setdefault(key, values)
        missing = [key for key in rule_keys(self._spec.layout) if key not in powers]
        if missing:
            raise CheckpointMismatch(f"checkpoint {self._checkpoint.tag}: knows nothing of optimizer {missing[0] or 'of the model'!r}")
        first = sources[0] if sources else HiddenState(step=self._checkpoint.step)
        return replace(
            first,
            powers=powers,
            metrics=states[0].metrics if self._spec.shard == 0 and 0 in states else (),
            pushes=self._checkpoint.pushes or first.pushes,
        )

    def _where(self, shard: int) -> str:
        return f"{self._checkpoint.tag}/{self._checkpoint.files[shard].name}"


# Saving one shard's part of a checkpoint: the copy, for which steps wait, and the writing, for which nobody does.


log = logging.getLogger("lockstep.server")


@dataclass(slots=True, eq=False)
class _Save:
    """One attempt. `is_copied`: steps may go on; `progress` says the rest."""

    request: SaveRequest
    is_copied: bool = False
    is_unwanted: bool = False
    progress: SaveProgress = field(default_factory=lambda: SaveProgress(state=SaveState.WRITING))

    @property
    def is_over(self) -> bool:
        return self.progress.state is not SaveState.WRITING

    def is_for(self, request: SaveRequest) -> bool:
        return (self.request.epoch, self.request.step, self.request.tag) == (request.epoch, request.step, request.tag)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is to be written, in memory of its own."""

    snapshot: Snapshot
    memory: CopyMemory

    def tensors(self) -> list[SavedTensor]:
        """One for each tensor of each slice: takes a while where there are many."""
        return [SavedTensor(name=tensor_name(tensor.piece, tensor.part), array=tensor.memory) for tensor in self.snapshot.tensors()]


class ShardSaves:
    """The saves of one shard, one at a time. Thread-safe. `find_model` returns the model, or raises why there is none, under the lock.

    `stripes` share the copying, while no step has them.
    """

    def __init__(
        self,
        lock: Condition,
        turns: Turns,
        *,
        index: int,
        budget: MemoryBudget,
        storage: CheckpointStorage | None,
        find_model: Callable[[SaveRequest], ShardModel],
        run_in_background: RunInBackground,
        stripes: StripeRunner = ONE_THREAD,
    ) -> None:
        self._lock, self._turns = lock, turns
        self._index, self._name = index, f"ps {index}"
        self._memories = CopyMemories(budget)
        self._stripes = stripes
        self._storage = storage
        self._find_model = find_model
        self._run_in_background = run_in_background
        self._latest: _Save | None = None

    def save(self, request: SaveRequest, *, max_wait_s: float) -> SaveProgress:
        """Copies the model's step and has it written, or says how far that is; see Shard.save. The caller has been let in.

        An attempt that is over is begun anew if this asks for it without a wait, as long as the step stands, and the file does not.
        """
        storage = self._storage
        if storage is None:
            raise CheckpointStorageMissing(f"{self._name}: it was started without --checkpoint-dir; give all roles the same one")
        with self._lock:
            save = self._known_locked(request)
        if save is not None and save.is_over and not max_wait_s and not self._stands(storage, save):
            save = None
        if save is None:
            save, is_mine = self._begin(request)
            if is_mine:
                self._copy_and_write(save, storage)
        with self._lock:
            if max_wait_s or not save.is_copied:
                self._lock.wait_for(lambda: save.is_over if max_wait_s else save.is_copied or save.is_over, max_wait_s or TURN_WAIT_S)
            return save.progress

    def wait_until_over(self, timeout_s: float) -> None:
        """Waits until nothing is being written, but not longer than this."""
        with self._lock:
            self._lock.wait_for(lambda: self._latest is None or self._latest.is_over, timeout_s)

    def break_off_locked(self) -> None:
        """Lets go of a save that nobody wants any more, as soon as it comes to its next file operation."""
        if self._latest is not None:
            self._latest.is_unwanted = True

    def _known_locked(self, request: SaveRequest) -> _Save | None:
        return self._latest if self._latest is not None and self._latest.is_for(request) else None

    def _begin(self, request: SaveRequest) -> tuple[_Save, bool]:
        with self._lock:
            model, latest = self._find_model(request), self._latest
            self._check_step(model, request)
            if latest is not None and not latest.is_over:
                if latest.is_for(request):
                    return latest, False
                latest.is_unwanted = True
                raise Unavailable(f"{self._name}: checkpoint {latest.request.tag} is still being written; repeat the call")
            self._latest = save = _Save(request)
            return save, True

    def _copy_and_write(self, save: _Save, storage: CheckpointStorage) -> None:
        try:
            copy = self._copy(save.request)
        except BaseException:
            with self._lock:
                # As if it had never been asked for.
                self._latest = None
                save.progress = SaveProgress(state=SaveState.FAILED, failure=Cancelled(f"{self._name}: nothing was copied; ask again"))
                self._lock.notify_all()
            raise
        with self._lock:
            save.is_copied = True
            self._lock.notify_all()
        self._run_in_background(lambda: self._write(save, copy, storage))

    def _copy(self, request: SaveRequest) -> _Copy:
        with self._lock:
            model = self._find_model(request)
            like = model.state
        memory = self._memories.lend(like, purpose=f"the copy for checkpoint {request.tag}")
        try:
            with self._turns.alone():
                with self._lock:
                    # Another one would not be the model that there is memory for.
                    if self._find_model(request) is not model:
                        raise Unavailable(f"{self._name}: the model was replaced; repeat the call")
                    self._check_step(model, request)
                started = time.perf_counter()
                copy_memory(model.state, memory.state, stripes=self._stripes)
                snapshot = model.snapshot(memory.state, step=request.step)
            seconds = time.perf_counter() - started
        except BaseException:
            self._memories.take_back(memory)
            raise
        log.debug("%s copied step=%d tag=%s bytes=%d stall_s=%.3f", self._name, request.step, request.tag, like.nbytes, seconds)
        return _Copy(snapshot, memory)

    def _write(self, save: _Save, copy: _Copy, storage: CheckpointStorage) -> None:
        request, started = save.request, time.perf_counter()
        file: CheckpointFile | None = None
        failure: PsError | None = None
        try:
            self._check_wanted(save)
            failpoint("ps.save.before_write")
            file = self._write_file(save, copy, storage)
            failpoint("ps.save.before_ack")
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold on to the copy
        except Exception as error:
            log.exception("%s: checkpoint %s could not be written", self._name, request.tag)
            failure = InternalError(f"{self._name}: checkpoint {request.tag} could not be written ({type(error).__name__}); see its log")
        self._memories.take_back(copy.memory)
        self._end(save, file, failure, seconds=time.perf_counter() - started)

    def _write_file(self, save: _Save, copy: _Copy, storage: CheckpointStorage) -> CheckpointFile:
        request, pace = save.request, SavePace(self._turns)

        def between() -> None:
            self._check_wanted(save)
            pace.give_way()

        return write_file(
            storage,
            request.tag,
            shard=self._index,
            num_shards=request.num_shards,
            tensors=copy.tensors(),
            metadata=encode_hidden_state(copy.snapshot.hidden),
            between=between,
        )

    def _check_wanted(self, save: _Save) -> None:
        if save.is_unwanted:
            raise Cancelled(f"{self._name}: checkpoint {save.request.tag} is not wanted any more")

    def _end(self, save: _Save, file: CheckpointFile | None, failure: PsError | None, *, seconds: float) -> None:
        tag = save.request.tag
        if failure is not None:
            log.warning("%s: checkpoint not saved tag=%s cause=%s", self._name, tag, failure.message)
        elif file is not None:
            log.debug("%s saved tag=%s size=%s seconds=%.3f", self._name, tag, format_bytes(file.num_bytes), seconds)
        with self._lock:
            if failure is None:
                save.progress = SaveProgress(state=SaveState.DONE, file=file)
            else:
                save.progress = SaveProgress(state=SaveState.FAILED, failure=failure)
            self._lock.notify_all()

    def _check_step(self, model: ShardModel, request: SaveRequest) -> None:
        # Where contributions are applied as they arrive, no two shards are at one step: what they have at this moment is what is saved.
        if model.step != request.step and not model.applies_on_arrival:
            raise StepMismatch(
                f"{self._name}: step {request.step} cannot be saved, it is at step {model.step}", facts={"step": str(model.step)}
            )

    def _stands(self, storage: CheckpointStorage, save: _Save) -> bool:
        """Whether the file of a save that is done is still there: what was begun in vain elsewhere is removed, and tried again."""
        file = save.progress.file
        if file is None:
            return False
        sizes = [stored.files.get(file.name) for stored in storage.stored() if stored.tag == save.request.tag]
        return file.num_bytes in sizes


# Bringing a shard back to a checkpoint, beside the calls that ask how far that is.


@dataclass(slots=True, eq=False)
class _Restore:
    """One attempt. `reason` is set when nobody wants it any more."""

    request: RestoreRequest
    num_bytes: int = 0
    num_bytes_read: int = 0
    is_done: bool = False
    failure: PsError | None = None
    reason: PsError | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.failure is not None

    def is_for(self, request: RestoreRequest) -> bool:
        mine = self.request
        return (mine.spec.epoch, mine.tag, mine.manifest_sha256) == (request.spec.epoch, request.tag, request.manifest_sha256)

    def progress(self) -> RestoreProgress:
        return RestoreProgress(is_done=self.is_done, num_bytes_read=self.num_bytes_read, num_bytes=self.num_bytes)

    def words(self) -> str:
        share = f"{format_bytes(self.num_bytes_read)} of {format_bytes(self.num_bytes)} read" if self.num_bytes else "its manifest is read"
        return f"being restored from checkpoint {self.request.tag}: {share}"


class ShardRestores:
    """The restorations of one shard, one at a time. Thread-safe. `on_restored` is told of the model that comes
    of one, with the epoch that it was saved in, before anybody else; `on_done` is called, without the lock, when it is over.
    """

    def __init__(
        self,
        lock: Condition,
        turns: Turns,
        creations: Creations,
        *,
        index: int,
        storage: CheckpointStorage | None,
        run_in_background: RunInBackground,
        on_restored: Callable[[ShardModel, RestoreRequest, int], None],
        on_done: Callable[[], None],
    ) -> None:
        self._lock, self._turns, self._creations = lock, turns, creations
        self._index, self._name = index, f"ps {index}"
        self._storage = storage
        self._run_in_background = run_in_background
        self._on_restored = on_restored
        self._on_done = on_done
        self._latest: _Restore | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the shard is being brought back now."""
        return self._latest is not None and not self._latest.is_over

    def restore(self, request: RestoreRequest, *, max_wait_s: float) -> RestoreProgress:
        """Begins a restoration, or says how far it is; see Shard.restore. The caller has been let in, under the epoch of the request.

        One that has failed is begun anew if this asks for it without a wait.
        """
        storage = self._storage
        if storage is None:
            raise CheckpointStorageMissing(f"{self._name}: it was started without --checkpoint-dir; give all roles the same one")
        if request.spec.shard != self._index:
            raise WrongRole(f"this is {self._name}, not ps {request.spec.shard}; check the addresses and their order")
        with self._lock:
            restore = self._latest
            if restore is None or not restore.is_for(request) or (restore.failure is not None and not max_wait_s):
                self.break_off_locked(Cancelled(f"{self._name}: another restoration has begun"))
                self._latest = restore = self._begin_locked(request, storage)
        with self._lock:
            if max_wait_s:
                self._lock.wait_for(lambda: restore.is_over, max_wait_s)
            if restore.failure is not None:
                raise restore.failure
            return restore.progress()

    def break_off_locked(self, reason: PsError) -> None:
        """Gives up a restoration under way: what has been read is dropped."""
        if self.is_under_way and self._latest is not None:
            self._latest.reason = self._latest.failure = reason
            self._creations.restoring = None
            self._lock.notify_all()

    def forget_locked(self, reason: PsError) -> None:
        """As `break_off_locked`; and what has been restored is dropped by the caller, so that the same may be asked for again."""
        self.break_off_locked(reason)
        self._latest = None

    def _begin_locked(self, request: RestoreRequest, storage: CheckpointStorage) -> _Restore:
        restore = _Restore(request)
        self._creations.restoring = restore.words
        self._run_in_background(lambda: self._run(restore, storage))
        return restore

    def _run(self, restore: _Restore, storage: CheckpointStorage) -> None:
        started, failure = time.perf_counter(), None
        try:
            self._restore(restore, storage)
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold on to the model that came to nothing
        except Exception as error:
            log.exception("%s: checkpoint %s could not be restored", self._name, restore.request.tag)
            failure = InternalError(
                f"{self._name}: checkpoint {restore.request.tag} could not be restored ({type(error).__name__}); see its log"
            )
        with self._lock:
            if restore.reason is None:
                restore.failure, restore.is_done = failure, failure is None
                self._creations.restoring = None
            self._lock.notify_all()
        seconds, request = time.perf_counter() - started, restore.request
        if failure is None:
            size = format_bytes(restore.num_bytes)
            log.info("%s restored tag=%s step=%d size=%s seconds=%.3f", self._name, request.tag, request.spec.initial_step, size, seconds)
        else:
            log.warning("%s: not restored tag=%s cause=%s", self._name, request.tag, failure.message)
        self._on_done()

    def _restore(self, restore: _Restore, storage: CheckpointStorage) -> None:
        request = restore.request
        stored = read_checkpoint(storage, request.tag, sha256=request.manifest_sha256)
        plan = CheckpointPlan(stored.checkpoint, request.spec)
        restore.num_bytes = plan.num_bytes
        # Nothing has been changed until now: what is no checkpoint of this model harms nothing.
        model = self._make_room(restore)
        try:
            tensors = model.begin_restore()
            hidden = plan.read(storage, tensors, on_progress=lambda num_bytes: self._note(restore, num_bytes))
            with self._lock:
                self._check_wanted(restore)
                model.publish_restored(hidden, request.settings)
                self._on_restored(model, request, stored.checkpoint.epoch)
                self._creations.put_locked(model)
        except BaseException:
            with self._lock:
                model.release()
            raise

    def _make_room(self, restore: _Restore) -> ShardModel:
        """Drops the model that is here, for there may not be memory for two."""
        tag = restore.request.tag
        with self._turns.alone(), self._lock:
            self._check_wanted(restore)
            self._creations.drop_model_locked(Cancelled(f"{self._name}: it is brought back to checkpoint {tag}; connect again"))
            return self._creations.make(restore.request.spec)

    def _note(self, restore: _Restore, num_bytes: int) -> None:
        failpoint("ps.restore.mid")
        restore.num_bytes_read = num_bytes
        self._check_wanted(restore)

    def _check_wanted(self, restore: _Restore) -> None:
        if restore.reason is not None:
            raise restore.reason
