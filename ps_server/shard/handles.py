"""What is under way between the shard and one caller: push, creation, reading. Copies bytes outside the shard's lock; knows no wire."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Condition
from types import TracebackType

import numpy as np

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.errors import Cancelled, FrameOutOfOrder, PsError, StepGone, TruncatedStream, VariableExists, WrongRole
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.allocator import give_back_freed_memory
from ps_protocol.roles.shard import PushReply, ShardSpec
from ps_server.contributions.inbox import Contribution
from ps_server.contributions.staging import StagedGradients
from ps_server.model.shard_model import SMALL_BYTES, ShardModel, difference
from ps_server.numbers.apply import ONE_THREAD, StripeRunner
from ps_server.numbers.memory import MemoryBudget, VariablesMemory, format_bytes, private_variables
from ps_server.numbers.tables import Table, check_indices

# A push, a creation and readings, each under way with one caller.


class Push:
    """One contribution on its way in; leaving the `with` block before `finish` drops it without effect. For one thread.

    `end` is called once all bytes are there, or no more are wanted, and says what became of it.
    """

    def __init__(
        self, lock: Condition, model: ShardModel, contribution: Contribution, *, end: Callable[[ShardModel, Contribution], PushReply]
    ) -> None:
        self._lock = lock
        self._model = model
        self._inbox = model.inbox
        self._contribution = contribution
        self._end = end

    def __enter__(self) -> "Push":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._contribution.outcome is None:
            with self._lock:
                self._inbox.abandon(self._contribution)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known and no more bytes are wanted."""
        return self._contribution.outcome is not None

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come, or no more are wanted; then `finish`."""
        memory = self._contribution.memory
        return memory is None or memory.writer.is_full

    @property
    def is_small(self) -> bool:
        """Whether it is put in order in a moment, in a model that is small: many rows may come for a table of few."""
        memory = self._contribution.memory
        return memory is None or memory.writer.nbytes <= SMALL_BYTES

    def expect(self, num_bytes: int) -> None:
        """Hears how many bytes will come; raises TruncatedStream or FrameOutOfOrder if that is not what the contribution has."""
        memory = self._contribution.memory
        if memory is None or memory.writer.nbytes == num_bytes:
            return
        error = TruncatedStream if num_bytes < memory.writer.nbytes else FrameOutOfOrder
        raise error(f"{num_bytes} bytes are to come, of {memory.writer.nbytes}; nothing was changed; send what the header stands for")

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted any more, since the outcome is known."""
        return self._with_memory(lambda memory: memory.writer.write(offset, data))

    def finish_with(self, data: bytes | memoryview) -> PushReply:
        """Does at once what `expect`, `write` and `finish` do for a contribution whose bytes come in one piece."""

        def complete(memory: StagedGradients) -> None:
            memory.writer.write(0, data)
            self._complete(memory)

        self.expect(len(data))
        self._with_memory(complete)
        return self._end(self._model, self._contribution)

    def finish(self) -> PushReply:
        """Stages or applies the contribution, if all of it has come (else TruncatedStream), or tells what else became of it.

        Raises IndexOutOfRange if a table has no such row, NonFiniteGradient where those are refused; that, too, has no effect.
        """
        self._with_memory(self._complete)
        return self._end(self._model, self._contribution)

    def _complete(self, memory: StagedGradients) -> None:
        self._inbox.complete(self._contribution, memory)

    def _with_memory(self, act: Callable[[StagedGradients], None]) -> bool:
        with self._lock:
            memory = self._inbox.begin_write(self._contribution)
        if memory is None:
            return False
        try:
            act(memory)
        finally:
            with self._lock:
                self._inbox.end_write(self._contribution)
        return True


class Creation:
    """Initial values on their way in; leaving the `with` block before `finish` drops them without effect. For one thread.

    `model` None: the variables stand already, and nothing is wanted.
    """

    def __init__(self, lock: Condition, spec: ShardSpec, model: ShardModel | None, *, end: "Callable[[Creation, bool], None]") -> None:
        self.spec = spec
        self.model = model
        self.is_writing = False
        self.failure: PsError | None = None
        self._lock = lock
        self._end = end
        self._is_ended = model is None
        # The first is the arena's.
        self._memories: list[Array] = [] if model is None else model.first_values
        self._writer = Segments(self._memories).writer() if self._memories else None

    def __enter__(self) -> "Creation":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._end(self, False)

    def let_go(self) -> None:
        """Drops its memory, after a failure, while its caller may still wait for a message."""
        self.model, self._memories, self._writer = None, [], None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received and wanted."""
        return (self._writer.num_written if self._writer else 0, self.spec.content_bytes)

    @property
    def is_settled(self) -> bool:
        """Whether no bytes are wanted."""
        return self.model is None or self.failure is not None

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted any more."""
        writer = self._writer
        if writer is None or not self._begin_write():
            return False
        try:
            writer.write(offset, data)
        finally:
            self._end_write()
        return True

    def finish(self) -> bool:
        """Makes the values the shard's variables, if all have come (else TruncatedStream); False if variables stood already."""
        model, writer, memories = self.model, self._writer, self._memories
        if model is not None and writer is not None and self._begin_write():
            try:
                writer.finish()
                model.fill_initial(memories[0])
            finally:
                self._end_write()
            self._is_ended = True
            self._end(self, True)
        has_created = model is not None
        # An error that is kept holds this frame.
        del model, writer, memories
        if self.failure is not None:
            raise self.failure
        return has_created

    def _begin_write(self) -> bool:
        with self._lock:
            self.is_writing = self.failure is None
            return self.is_writing

    def _end_write(self) -> None:
        with self._lock:
            self.is_writing = False
            self._lock.notify_all()


class Reading:
    """An arena to be copied, valid until `check` fails. `step` is the step that it belongs to; `hold` is entered while it is copied."""

    def __init__(
        self,
        memory: Array,
        *,
        layout: Layout,
        step: int,
        is_intact: Callable[[], bool],
        hold: Callable[[int], AbstractContextManager[None]],
        name: str,
    ) -> None:
        self.step = step
        self._memory = memory
        self._layout = layout
        self._is_intact = is_intact
        self._hold = hold
        self._name = name

    def nbytes(self, encoding: FloatEncoding = FloatEncoding.AS_IS) -> int:
        """Returns how many bytes the chunks have together."""
        return self._memory.nbytes if encoding is FloatEncoding.AS_IS else encoded_nbytes(self._layout, encoding)

    def chunks(self, max_bytes: int, encoding: FloatEncoding = FloatEncoding.AS_IS) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset, bytes) in order, as they travel, each valid until the next one. Copy, then `check`, then use the copy."""
        with self._hold(self.step):
            if encoding is FloatEncoding.AS_IS:
                yield from Segments([self._memory]).chunks(max_bytes)
            else:
                yield from encoded_frames(self._layout, self._memory, encoding, max_bytes)

    def check(self) -> None:
        """Raises StepGone unless everything copied before this call belongs to one step."""
        if not self._is_intact():
            raise StepGone(f"{self._name} of step {self.step} was overwritten while it was read; read a later step")


class RowReading:
    """Rows of one table, or of a slot of it (`slot`), to be copied inside the `with` block. `step` is the step that they belong to.

    `is_intact` is for slots: whether they are still those of `step`. `is_torn_allowed`: whatever the rows are now, is wanted.
    """

    def __init__(
        self,
        table: Table,
        *,
        slot: Array | None,
        step: int,
        is_torn_allowed: bool,
        is_intact: Callable[[], bool],
        hold: AbstractContextManager[None],
    ) -> None:
        self.step = step
        self.row_bytes = table.row_bytes
        self._table = table
        self._slot = slot
        self._is_torn_allowed = is_torn_allowed
        self._is_intact = is_intact
        self._hold = hold

    def __enter__(self) -> "RowReading":
        self._hold.__enter__()
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hold.__exit__(exception_type, exception, traceback)

    def take(self, indices: Array) -> Array:
        """Returns rows by their indices (int64, counted from the slice's first row), one after the other, in memory of their own.

        Raises IndexOutOfRange, or StepGone if rows of this step cannot be had any more.
        """
        piece = self._table.piece
        check_indices(indices, num_rows=self._table.num_rows, name=piece.variable.name, first_row=piece.start)
        if self._slot is None:
            return self._table.take(indices, step=None if self._is_torn_allowed else self.step)
        rows: Array = np.take(self._slot, indices, axis=0, mode="clip")
        if not self._is_intact():
            raise StepGone(f"a slot of variable {piece.variable.name!r} changed while it was read at step {self.step}; read it again")
        return rows


# How a shard comes to its model: the creation under way, and the model that came of one.


_LARGE_BYTES = 16 << 20


class Creations:
    """`model` is None until a creation is whole. All calls are made while the owner's `lock` is held, and may let it go while waiting.

    `allocate` gives memory for the variables. `on_model` is called, with the lock held, when `model` has changed.
    """

    def __init__(
        self,
        lock: Condition,
        *,
        index: int,
        name: str,
        budget: MemoryBudget,
        stripes: StripeRunner = ONE_THREAD,
        allocate: Callable[[int], VariablesMemory] = private_variables,
        on_model: Callable[[], None] = lambda: None,
        half_done: Callable[[], None] = lambda: None,
    ) -> None:
        self.model: ShardModel | None = None
        self._lock = lock
        self._index = index
        self._name = name
        self._budget = budget
        self._stripes = stripes
        self._allocate = allocate
        self._on_model = on_model
        self._half_done = half_done
        # Says how far a restoration is, while one is under way.
        self.restoring: Callable[[], str] | None = None
        self._creation: Creation | None = None

    def open_locked(self, spec: ShardSpec, *, check: Callable[[], None]) -> Creation:
        """Begins to create all variables; `check` raises if the caller is not served. The latest attempt displaces one under way."""
        # Displacing may have to wait, and then everything may have changed.
        while True:
            check()
            if self._is_created_locked(spec):
                return Creation(self._lock, spec, None, end=self._end)
            if self._creation is None:
                break
            self._displace_locked(self._creation, spec)
        model = self.model or self.make(spec)
        if model.spec.layout.tables:
            # Tables have one copy: while it is written anew, there are no variables.
            model.inbox.clear(Cancelled(f"{self._name}: the variables are created anew"))
            model.serve(0)
            self.model = None
            self._on_model()
        self._creation = Creation(self._lock, spec, model, end=self._end)
        return self._creation

    def make(self, spec: ShardSpec) -> ShardModel:
        """Returns a model whose values are undefined. Raises LimitExceeded if there is no memory for it."""
        return ShardModel(spec, budget=self._budget, stripes=self._stripes, allocate=self._allocate, half_done=self._half_done)

    def drop_model_locked(self, reason: PsError) -> None:
        """Drops contributions, creations and the model; streams under way end with `reason`, and callers find no values."""
        self.drop_locked(reason)
        if self.model is not None:
            model, self.model = self.model, None
            model.serve(0)
            self._on_model()
            model.release()

    def put_locked(self, model: ShardModel) -> None:
        """Makes a model, whose values stand, the one that is here."""
        self.model = model
        self._on_model()

    def drop_locked(self, reason: PsError) -> None:
        """Drops contributions and creations, whole or under way; their streams end with `reason`."""
        if self.model is not None:
            self.model.inbox.clear(reason)
        while self._creation is not None:
            self._break_off_locked(self._creation, reason)

    def awaited_locked(self) -> str:
        """Says in words what is being waited for until there is a model."""
        if self.restoring is not None:
            return self.restoring()
        if self._creation is None:
            return "waiting for a worker to initialise the model"
        received, wanted = self._creation.progress
        spec = self._creation.spec
        share = f"{format_bytes(received)} of {format_bytes(wanted)} for {len(spec.layout.slices) + len(spec.layout.tables)} variables"
        return f"{share} received in attempt {spec.attempt}; waiting for the rest"

    def _is_created_locked(self, spec: ShardSpec) -> bool:
        if spec.shard != self._index:
            raise WrongRole(
                f"this is {self._name}, not ps {spec.shard}; check the addresses and their order", facts={"index": str(self._index)}
            )
        if self.model is None:
            return False
        if spec.epoch > self.model.spec.epoch and not (self.model.has_applied and self.model.step):
            # Nobody has trained it: what a worker of an earlier epoch began, or a checkpoint of step 0 had, need not be gone on with.
            self.drop_model_locked(Cancelled(f"{self._name}: the variables are created anew, in epoch {spec.epoch}"))
            return False
        words = difference(self.model.spec, spec)
        if words:
            raise VariableExists(f"{self._name}: {words}; use another cluster for another model")
        return spec.attempt <= self.model.spec.attempt or self.model.has_applied

    def _displace_locked(self, creation: Creation, spec: ShardSpec) -> None:
        newest = max(spec.attempt, creation.spec.attempt)
        reason = Cancelled(
            f"{self._name}: initialisation attempt {spec.attempt} was broken off, attempt {newest} has begun on another stream"
        )
        if spec.attempt < newest:
            raise reason
        self._break_off_locked(creation, reason)

    def _break_off_locked(self, creation: Creation, reason: PsError) -> None:
        creation.failure = reason
        # Its buffer may be written anew by another; a copy into it that is at work, which takes a moment, must end first.
        self._lock.wait_for(lambda: not creation.is_writing)
        self._forget_locked(creation)
        creation.let_go()

    def _end(self, creation: Creation, is_whole: bool) -> None:
        with self._lock:
            if creation.failure is None and is_whole and creation.model is not None:
                creation.model.publish_initial(creation.spec)
                self.model, self._creation = creation.model, None
                self._on_model()
            else:
                self._forget_locked(creation)
        if creation.spec.content_bytes >= _LARGE_BYTES:
            # The messages of the first values; none like them comes again where steps go by shared memory.
            give_back_freed_memory()

    def _forget_locked(self, creation: Creation) -> None:
        if self._creation is creation:
            self._creation = None
            if creation.model is not None and creation.model is not self.model:
                creation.model.release()
