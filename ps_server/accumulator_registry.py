"""The named accumulators by name."""

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from ps_protocol.accumulators import (
    AccumulatorSpec,
    AccumulatorStatus,
    GradientHeader,
    GradientReply,
    Taken,
    TakeRequest,
    arrays_of,
    content_of,
)
from ps_protocol.errors import AccumulatorExists, AccumulatorNotFound, Cancelled, LimitExceeded, ShuttingDown
from ps_protocol.segments import Segments
from ps_protocol.tensors import Array
from ps_server.conditional_accumulator import Gradient
from ps_server.memory import MemoryBudget
from ps_server.named_accumulator import NamedAccumulator, Taking

MAX_ACCUMULATORS = 10_000
# Each of them holds one of the server's threads, and the training needs some as well.
MAX_TAKERS = 64


class AccumulatorRegistry:
    """All accumulators of one server. Thread-safe. Implements ps_protocol.accumulators.Accumulators; `owner` is for texts."""

    def __init__(self, *, owner: str, budget: MemoryBudget) -> None:
        self._owner = owner
        self._budget = budget
        self._lock = threading.Lock()
        self._accumulators: dict[str, NamedAccumulator] = {}
        self._num_takers = 0
        self._shutdown: ShuttingDown | None = None

    def create(self, spec: AccumulatorSpec) -> bool:
        """Creates an accumulator, or finds the one of this name (False). Raises AccumulatorExists, LimitExceeded."""
        # An element type that this installation lacks is found out here, and not by the first gradient.
        _ = spec.data_type.dtype
        with self._lock:
            self._check_running_locked()
            existing = self._accumulators.get(spec.name)
            if existing is not None:
                difference = existing.spec.difference(spec)
                if difference:
                    raise AccumulatorExists(f"{self._owner}: accumulator {spec.name!r} exists: {difference}; use another name")
                return False
            if len(self._accumulators) >= MAX_ACCUMULATORS:
                raise LimitExceeded(f"{self._owner}: has {MAX_ACCUMULATORS} accumulators, the most there may be; delete some")
            self._accumulators[spec.name] = NamedAccumulator(spec, budget=self._budget)
            return True

    def open_gradient(self, header: GradientHeader) -> "IncomingGradient":
        """Begins to take a gradient in; it is settled at once if its content is not wanted."""
        accumulator = self._find(header.name)
        reply = accumulator.settled(header)
        return IncomingGradient(accumulator, header, budget=self._budget, reply=reply)

    def apply_gradient(self, header: GradientHeader, values: Array, indices: Array | None = None) -> GradientReply:
        """Adds a copy of a gradient, unless it is stale."""
        with self.open_gradient(header) as incoming:
            for offset, data in content_of(values, indices).chunks(1 << 30):
                if incoming.is_settled:
                    break
                incoming.write(offset, data)
            return incoming.finish()

    @contextlib.contextmanager
    def open_take(self, request: TakeRequest) -> Iterator[Taking]:
        """Queues up for gradients; the block then waits for them. Raises LimitExceeded if too many do so already."""
        accumulator = self._find(request.name)
        with self._lock:
            if self._num_takers >= MAX_TAKERS:
                raise LimitExceeded(f"{self._owner}: {MAX_TAKERS} calls wait for gradients, the most there may be; ask again later")
            self._num_takers += 1
        try:
            with accumulator.open_take(request) as taking:
                yield taking
        finally:
            with self._lock:
                self._num_takers -= 1

    def take_gradient(self, request: TakeRequest) -> Taken:
        """Waits for gradients and takes them."""
        with self.open_take(request) as taking:
            return taking.wait()

    def set_step(self, name: str, step: int) -> None:
        """Sets the step of an accumulator."""
        self._find(name).set_step(step)

    def describe(self, name: str) -> AccumulatorStatus:
        """Reports an accumulator."""
        return self._find(name).describe()

    def delete(self, name: str) -> bool:
        """Drops an accumulator; who waits for it gets Cancelled. False if there was none."""
        with self._lock:
            self._check_running_locked()
            accumulator = self._accumulators.pop(name, None)
        if accumulator is not None:
            accumulator.end(Cancelled(f"accumulator {name!r}: TakeGrad operation was cancelled: the accumulator was deleted"))
        return accumulator is not None

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls from now on, and ends those that wait. Idempotent: the first reason stays."""
        with self._lock:
            self._shutdown = self._shutdown or ShuttingDown(f"{self._owner} is shutting down: {reason}")
            accumulators, self._accumulators = list(self._accumulators.values()), {}
        for accumulator in accumulators:
            accumulator.end(self._shutdown)

    def _find(self, name: str) -> NamedAccumulator:
        with self._lock:
            self._check_running_locked()
            if name not in self._accumulators:
                raise AccumulatorNotFound(
                    f"{self._owner}: no accumulator {name!r}; create it first, and again after the parameter server has restarted"
                )
            return self._accumulators[name]

    def _check_running_locked(self) -> None:
        if self._shutdown is not None:
            raise self._shutdown


class IncomingGradient:
    """A gradient on its way in; leaving the `with` block before `finish` drops it without effect. For one thread."""

    def __init__(self, accumulator: NamedAccumulator, header: GradientHeader, *, budget: MemoryBudget, reply: GradientReply | None) -> None:
        self._accumulator = accumulator
        self._header = header
        self._budget = budget
        self._reply = reply
        self._nbytes = 0 if reply is not None else header.num_bytes(accumulator.spec.data_type)
        self._buffer = budget.allocate(self._nbytes, purpose=f"a gradient of accumulator {header.name!r}")
        self._writer = Segments([self._buffer]).writer()

    def __enter__(self) -> "IncomingGradient":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.release(self._nbytes)
        self._nbytes = 0

    @property
    def is_settled(self) -> bool:
        """Whether no bytes are wanted."""
        return self._reply is not None

    def write(self, offset: int, data: bytes | memoryview) -> bool:
        """Takes the next bytes; False if they are not wanted. Raises FrameOutOfOrder."""
        if self._reply is not None:
            return False
        self._writer.write(offset, data)
        return True

    def finish(self) -> GradientReply:
        """Adds the gradient if all of it has come (else TruncatedStream), and tells what became of it."""
        if self._reply is None:
            self._writer.finish()
            self._reply = self._accumulator.apply(self._header, self._gradient())
        return self._reply

    def _gradient(self) -> Gradient:
        header, spec = self._header, self._accumulator.spec
        values, indices = arrays_of(self._buffer, data_type=spec.data_type, shape=header.shape, num_indices=header.num_indices)
        return Gradient(values, indices, header.dense_shape) if spec.is_sparse else Gradient(values)
