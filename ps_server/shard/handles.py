"""The calls under way between the shard and one caller: push, creation, reading. Copies bytes outside the shard's lock; knows no wire."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.errors import FrameOutOfOrder, PsError, StepGone, TruncatedStream
from ps_protocol.model.layout import Layout, Segments, VariableSlice
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import PushReply, ShardSpec, held_bytes
from ps_server.contributions.inbox import Contribution
from ps_server.contributions.staging import StagedGradients
from ps_server.model.shard_model import SMALL_BYTES, ShardModel
from ps_server.numbers.row_gradients import check_indices
from ps_server.shard.gate import Gate


class OpenPush:
    """One contribution on its way in; leaving the `with` block before `finish` drops it without effect. For one thread.

    What a stream that breaks has brought of a large one is kept for its sender, who may go on with it; it has no effect either.
    `end` is called once all bytes are there, or no more are wanted; it ends the writing, and returns the outcome of the contribution.
    """

    def __init__(
        self, gate: Gate, model: ShardModel, contribution: Contribution, *, end: Callable[[ShardModel, Contribution], PushReply]
    ) -> None:
        self._gate = gate
        self._model = model
        self._inbox = model.inbox
        self._contribution = contribution
        self._end = end

    def __enter__(self) -> "OpenPush":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._contribution.outcome is None:
            with self._gate:
                if kind is GeneratorExit:  # its stream is over, while it waited for the rest
                    self._inbox.suspend(self._contribution)
                else:
                    self._inbox.abandon(self._contribution)

    @property
    def num_received(self) -> int:
        """Bytes that have arrived."""
        return self._contribution.num_received

    @property
    def is_answered(self) -> bool:
        """Whether the outcome is known and no more bytes are wanted."""
        return self._contribution.outcome is not None

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived, or no more are needed; then `finish`."""
        memory = self._contribution.memory
        return memory is None or memory.writer.is_full

    @property
    def is_small(self) -> bool:
        """Whether sorting the rows takes a moment only, in a small model: many rows may arrive for a small table."""
        memory = self._contribution.memory
        return memory is None or memory.writer.nbytes <= SMALL_BYTES

    def expect(self, num_bytes: int) -> None:
        """Notes how many bytes will come; raises TruncatedStream or FrameOutOfOrder if the contribution has another number."""
        memory = self._contribution.memory
        if memory is None or memory.writer.nbytes == num_bytes:
            return
        error = TruncatedStream if num_bytes < memory.writer.nbytes else FrameOutOfOrder
        raise error(f"{num_bytes} bytes are to come, of {memory.writer.nbytes}; nothing was changed; send what the header stands for")

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted any more, since the outcome is known."""
        memory = self._begin_write()
        if memory is None:
            return False
        try:
            memory.writer.write(offset, data)
        finally:
            self._end_write()
        return True

    def receive(self, receive: Callable[[memoryview], int]) -> bool:
        """Has `receive` write the next bytes into the contribution's memory; False if they are not wanted. It must not wait for long."""
        memory = self._begin_write()
        if memory is None:
            return False
        try:
            memory.writer.fill(receive)
        finally:
            self._end_write()
        return True

    def finish_with(self, data: bytes | memoryview) -> PushReply:
        """Does the work of `expect`, `write` and `finish` for a contribution whose bytes come in one piece."""
        self.expect(len(data))
        return self._finish(data)

    def finish(self) -> PushReply:
        """Stages or applies the contribution, if all of it has arrived (else TruncatedStream), or returns its other outcome.

        Raises IndexOutOfRange if a table has no such row, NonFiniteGradient where those are refused; that, too, has no effect.
        """
        return self._finish(None)

    def _finish(self, data: bytes | memoryview | None) -> PushReply:
        memory = self._begin_write()
        if memory is not None:
            try:
                if data is not None:
                    memory.writer.write(0, data)
                self._inbox.complete(self._contribution, memory)
            except BaseException:
                self._end_write()
                raise
        return self._end(self._model, self._contribution)

    def _begin_write(self) -> StagedGradients | None:
        with self._gate:
            return self._inbox.begin_write(self._contribution)

    def _end_write(self) -> None:
        with self._gate:
            self._inbox.end_write(self._contribution)


class Creation:
    """Initial values on their way in; leaving the `with` block before `finish` drops them without effect. For one thread.

    `model` None: the variables exist already, and no values are needed. `end` is called once, with whether all values have arrived.
    """

    def __init__(self, gate: Gate, spec: ShardSpec, model: ShardModel | None, *, end: "Callable[[Creation, bool], None]") -> None:
        self.spec = spec
        self.model = model
        self.failure: PsError | None = None
        self._gate = gate
        self._end = end
        self._is_writing = False
        self._is_ended = model is None
        # The first is the arena's.
        self._memories: list[Array] = [] if model is None else model.first_values
        self._writer = Segments(self._memories).writer() if self._memories else None

    def __enter__(self) -> "Creation":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._end(self, False)

    def break_off(self, reason: PsError) -> None:
        """In a block: refuses more bytes, and waits, without the lock, for a copy that is at work, which takes a moment."""
        self.failure = reason
        self._gate.wait_for(lambda: not self._is_writing)

    def let_go(self) -> None:
        """Drops its memory, after a failure, while its caller may still wait for a message."""
        self.model, self._memories, self._writer = None, [], None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received or made, and wanted."""
        done = (self._writer.num_written if self._writer else 0) + (self.model.filled_bytes if self.model else 0)
        return done, held_bytes(self.spec.layout)

    @property
    def is_answered(self) -> bool:
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
        """Makes the values the shard's variables, if all have arrived (else TruncatedStream); False if variables exist already."""
        model, writer, memories = self.model, self._writer, self._memories
        if model is not None and writer is not None and self._begin_write():
            try:
                writer.finish()
                model.fill_initial(memories[0])
            finally:
                self._end_write()
            self._is_ended = True
            self._end(self, True)
        if self.failure is not None:
            raise self.failure
        return model is not None

    def _begin_write(self) -> bool:
        with self._gate:
            self._is_writing = self.failure is None
            return self._is_writing

    def _end_write(self) -> None:
        with self._gate:
            self._is_writing = False
            self._gate.changed()


class Reading:
    """An arena to be copied, valid until `check` fails. `step` is the step that it belongs to; `hold` is entered while it is copied.

    `encode`: yields its frames in an encoding, as `encoded_frames` does. `encode_moves`: returns how the values moved since the step that
    the reader has, or None.
    """

    def __init__(
        self,
        memory: Array,
        *,
        layout: Layout,
        step: int,
        is_intact: Callable[[], bool],
        hold: Callable[[int], AbstractContextManager[None]],
        name: str,
        encode: Callable[[Layout, Array, FloatEncoding, int], Iterable[tuple[int, memoryview]]] = encoded_frames,
        encode_moves: Callable[[], Array | None] = lambda: None,
    ) -> None:
        self.step = step
        self._memory = memory
        self._layout = layout
        self._is_intact = is_intact
        self._hold = hold
        self._name = name
        self._encode = encode
        self._encode_moves = encode_moves

    def moves(self) -> "Reading | None":
        """Returns how the values moved since the step that the reader has, to be copied in their place; None: it cannot be said in less."""
        with self._hold(self.step):
            found = self._encode_moves()
        if found is None:
            return None
        return Reading(found, layout=self._layout, step=self.step, is_intact=lambda: True, hold=lambda _: nullcontext(), name=self._name)

    def nbytes(self, encoding: FloatEncoding = FloatEncoding.AS_IS) -> int:
        """Returns how many bytes the chunks have together."""
        return self._memory.nbytes if encoding is FloatEncoding.AS_IS else encoded_nbytes(self._layout, encoding)

    def chunks(self, max_bytes: int, encoding: FloatEncoding = FloatEncoding.AS_IS) -> Generator[tuple[int, memoryview], None, None]:
        """Yields (offset, bytes) in order, as they travel, each valid until the next one. Copy, then `check`, then use the copy."""
        with self._hold(self.step):
            if encoding is FloatEncoding.AS_IS:
                yield from Segments([self._memory]).chunks(max_bytes)
            else:
                yield from self._encode(self._layout, self._memory, encoding, max_bytes)

    def check(self) -> None:
        """Raises StepGone unless everything copied before this call belongs to one step."""
        if not self._is_intact():
            raise StepGone(f"{self._name} of step {self.step} was overwritten while it was read; read a later step")


class RowReading:
    """Rows of one table to be had of `copy(indices)` inside the `with` block, as they are at `step`.

    `is_intact`: whether what was copied is still of that step, where `copy` does not see to that.
    """

    def __init__(
        self,
        piece: VariableSlice,
        copy: Callable[[Array], Array],
        *,
        step: int,
        is_intact: Callable[[], bool] | None,
        hold: AbstractContextManager[None],
    ) -> None:
        self.step = step
        self.row_bytes = piece.row_bytes
        self._piece = piece
        self._copy = copy
        self._is_intact = is_intact
        self._hold = hold

    def __enter__(self) -> "RowReading":
        self._hold.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.__exit__(None, None, None)

    def take(self, indices: Array) -> Array:
        """Returns rows by int64 indices (counted from the slice's first row; or spread keys), one after the other, in memory of their own.

        Raises IndexOutOfRange, or StepGone if rows of this step cannot be had any more.
        """
        check_indices(indices, self._piece)
        rows = self._copy(indices)
        if self._is_intact is not None and not self._is_intact():
            name = self._piece.variable.name
            raise StepGone(f"a slot of variable {name!r} changed while it was read at step {self.step}; read it again")
        return rows
