"""What is under way between the store and one caller: push, creation, reading. Copies bytes outside the store's lock; knows no wire."""

from collections.abc import Callable, Iterator
from threading import Condition
from types import TracebackType

from ps_protocol.errors import PsError, StepGone
from ps_protocol.segments import Segments, SegmentWriter
from ps_protocol.shard import PushReply, ShardSpec
from ps_protocol.tensors import Array
from ps_server.accumulator import Contribution
from ps_server.shard_model import ShardModel


class Push:
    """One contribution on its way in; leaving the `with` block before `finish` drops it without effect. For one thread."""

    def __init__(self, lock: Condition, model: ShardModel, contribution: Contribution) -> None:
        self._lock = lock
        self._model = model
        self._accumulator = model.accumulator
        self._contribution = contribution

    def __enter__(self) -> "Push":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._accumulator.abandon(self._contribution)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known and no more bytes are wanted."""
        return self._contribution.outcome is not None

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted any more, since the outcome is known."""
        return self._with_buffer(lambda writer, memory: writer.write(offset, data))

    def finish(self) -> PushReply:
        """Stages the contribution, if all of it has come (else TruncatedStream), or tells what else became of it."""
        self._with_buffer(self._complete)
        with self._lock:
            return self._accumulator.stage(self._contribution, current_step=self._model.step)

    def _complete(self, writer: SegmentWriter, memory: Array) -> None:
        writer.finish()
        self._model.arena.clear_padding(memory)

    def _with_buffer(self, act: Callable[[SegmentWriter, Array], None]) -> bool:
        with self._lock:
            buffer = self._accumulator.begin_write(self._contribution)
        if buffer is None:
            return False
        try:
            act(*buffer)
        finally:
            with self._lock:
                self._accumulator.end_write(self._contribution)
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
        self._memory: Array | None = None if model is None else model.arena.begin_next().memory
        self._writer = None if self._memory is None else Segments([self._memory]).writer()

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
        self.model = self._memory = self._writer = None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received and wanted."""
        return (self._writer.num_written if self._writer else 0, self.spec.layout.nbytes)

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
        model, writer, memory = self.model, self._writer, self._memory
        if model is not None and writer is not None and memory is not None and self._begin_write():
            try:
                writer.finish()
                model.fill_initial(memory)
            finally:
                self._end_write()
            self._is_ended = True
            self._end(self, True)
        if self.failure is not None:
            raise self.failure
        return model is not None

    def _begin_write(self) -> bool:
        with self._lock:
            self.is_writing = self.failure is None
            return self.is_writing

    def _end_write(self) -> None:
        with self._lock:
            self.is_writing = False
            self._lock.notify_all()


class Reading:
    """An arena to be copied, valid until `check` fails. `step` is the step that it belongs to."""

    def __init__(self, memory: Array, *, step: int, is_intact: Callable[[], bool], name: str) -> None:
        self.step = step
        self._memory = memory
        self._is_intact = is_intact
        self._name = name

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset, bytes) in order, without copying. Copy, then call `check`, then use the copy."""
        return Segments([self._memory]).chunks(max_bytes)

    def check(self) -> None:
        """Raises StepGone unless everything copied before this call belongs to one step."""
        if not self._is_intact():
            raise StepGone(f"{self._name} of step {self.step} was overwritten while it was read; read a later step")
