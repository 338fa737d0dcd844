"""Named gradient accumulators: the calls to their holder, and the values of those calls. Knows no transport, no sum."""

import enum
import hashlib
import math
from typing import ClassVar, Protocol

import numpy as np

from ps_protocol.errors import InvalidSpec, LimitExceeded
from ps_protocol.model.layout import Segments
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import MAX_TENSOR_BYTES, Array, DataType, SparseMean, check_name, check_shape
from ps_protocol.roles.request import READERS, WORKER, Answer, Request, asks

# An extent that is not declared.
UNKNOWN = -1
MAX_STEP = 1 << 62
INDEX_BYTES = 8


class Reduction(enum.Enum):
    """The result that a take computes from the gradients."""

    MEAN = 1
    SUM = 2


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorSpec:
    """The specification of an accumulator. `shape` None: not declared; UNKNOWN in it: this extent is not declared.

    A sparse one takes rows; `shape` is that of the whole, and `sparse_mean` says what the mean divides rows by.
    """

    name: str
    data_type: DataType
    shape: tuple[int, ...] | None = None
    reduction: Reduction = Reduction.MEAN
    is_sparse: bool = False
    sparse_mean: SparseMean = SparseMean.PER_INDEX

    def __post_init__(self) -> None:
        check_name(self.name)
        # An extent that is not declared may be anything, also 1.
        _check_shape(tuple(1 if extent == UNKNOWN else extent for extent in self.shape or ()), name=self.name)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class GradientHeader:
    """One gradient on its way to an accumulator; `client` (random) and `sequence` (growing) name it, so that it counts once.

    `shape` is that of the elements, or of the values of a sparse gradient, which has `num_indices` rows; `dense_shape` is that of the
    whole that its rows belong to, if the sender knows.
    """

    name: str
    client: int
    sequence: int
    local_step: int
    shape: tuple[int, ...]
    num_indices: int = 0
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_caller(self.client, self.sequence, name=self.name)
        check_step("local_step", self.local_step)
        _check_shape(self.shape, name=self.name)
        _check_shape(self.dense_shape or (), name=self.name)
        if self.num_indices < 0:
            raise InvalidSpec(f"accumulator {self.name!r}: {self.num_indices} indices; want 0 or more")

    def num_bytes(self, data_type: DataType) -> int:
        """Returns the bytes of its content, indices included. Raises LimitExceeded if no tensor may be so large."""
        nbytes = math.prod(self.shape) * data_type.itemsize + self.num_indices * INDEX_BYTES
        if nbytes > MAX_TENSOR_BYTES:
            raise LimitExceeded(f"accumulator {self.name!r}: a gradient of {nbytes} bytes, limit {MAX_TENSOR_BYTES}; split it")
        return nbytes


@light_dataclass(frozen=True, slots=True, kw_only=True)
class TakeRequest:
    """Asks for the gradients of a round, once `num_required` are in; `client` and `sequence` name the taking, so that it happens once.

    Waits `max_wait_s` seconds, and 20 at most. A taking that has to wait keeps its place for 5 s after its call, to be asked for again;
    with `max_wait_s` 0 it is withdrawn at once unless it is ready.
    """

    name: str
    client: int
    sequence: int
    num_required: int
    max_wait_s: float

    def __post_init__(self) -> None:
        check_caller(self.client, self.sequence, name=self.name)
        check_num_required(self.num_required, name=self.name)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class GradientReply:
    """Whether a gradient was accepted (else it was stale and was dropped), and the accumulator's step."""

    accepted: bool
    step: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The result of a take: the mean or sum of `count` gradients; `step` is the accumulator's, after it.

    `values` None: the time was up; `count` are then those that were in. Of a sparse one `indices` ascend, `values` are the rows, and
    `dense_shape` is that of the whole, UNKNOWN for what is not known.
    """

    count: int
    step: int
    values: Array | None = None
    indices: Array | None = None
    dense_shape: tuple[int, ...] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is something."""
        return self.values is not None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorStatus:
    """An accumulator at one moment: the gradients of its round, its step, and how many wait for it."""

    spec: AccumulatorSpec
    num_accumulated: int
    step: int
    num_waiting: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorCreation:
    """Whether an accumulator was created (else it was there), and its step."""

    created: bool
    step: int


@asks("AccumulatorService", "CreateAccumulator", by=WORKER)
class CreateAccumulatorRequest:
    """Creates an accumulator, or finds the one of this name. Raises AccumulatorExists if that is another one, LimitExceeded."""

    spec: AccumulatorSpec
    answer: ClassVar[type[AccumulatorCreation]] = AccumulatorCreation

    @property
    def awaited(self) -> str:
        """A description of what the caller waits for."""
        return f"accumulator {self.spec.name!r}"


@asks("AccumulatorService", "SetAccumulatorStep", by=WORKER)
class SetAccumulatorStepRequest:
    """Sets an accumulator's step; gradients that are in stay in. Raises AccumulatorNotFound."""

    name: str
    step: int
    answer: ClassVar[type[None]] = type(None)
    awaited: ClassVar[str] = "the accumulator's step"

    def __post_init__(self) -> None:
        check_step("step", self.step)


@asks("AccumulatorService", "GetAccumulator", by=READERS)
class AccumulatorStatusRequest:
    """Reports an accumulator. Raises AccumulatorNotFound."""

    name: str
    answer: ClassVar[type[AccumulatorStatus]] = AccumulatorStatus
    awaited: ClassVar[str] = "the accumulator's status"


@asks("AccumulatorService", "DeleteAccumulator", by=WORKER)
class DeleteAccumulatorRequest:
    """Drops an accumulator; calls that wait for it raise Cancelled. False if there was none."""

    name: str
    answer: ClassVar[type[bool]] = bool
    awaited: ClassVar[str] = "the accumulator's end"


class Accumulators(Protocol):
    """The named accumulators of one parameter server. Thread-safe. All calls are idempotent: what ends as Unavailable can be repeated."""

    def call(self, request: Request[Answer]) -> Answer:
        """Asks, and returns the answer. What each request does and raises, it says itself."""

    def apply_gradient(self, header: GradientHeader, values: Array, indices: Array | None = None) -> GradientReply:
        """Adds a gradient, unless it is stale. Never blocks. Raises AccumulatorNotFound, ShapeMismatch, IndexOutOfRange, LimitExceeded."""

    def take_gradient(self, request: TakeRequest) -> Taken:
        """Waits for gradients and takes them; in order of asking. Raises AccumulatorNotFound, Cancelled, LimitExceeded."""


def shard_of(name: str, *, num_shards: int) -> int:
    """Returns the shard that an accumulator of this name lies on: the same for all clients, of any version and machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % num_shards


def content_of(values: Array, indices: Array | None) -> Segments:
    """Returns a gradient's bytes as they travel: the indices of a sparse one, then its elements. Shares memory where that can be."""
    parts = [values] if indices is None else [indices.astype(np.dtype("<i8"), copy=False), values]
    return Segments([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def arrays_of(content: Array, *, data_type: DataType, shape: tuple[int, ...], num_indices: int) -> tuple[Array, Array]:
    """Returns elements and indices of a gradient that came as these bytes; they share its memory."""
    begin = num_indices * INDEX_BYTES
    return content[begin:].view(data_type.dtype).reshape(shape), content[:begin].view(np.dtype("<i8"))


def check_num_required(num_required: int, *, name: str) -> None:
    """Raises InvalidSpec unless at least one gradient is required."""
    if isinstance(num_required, bool) or not isinstance(num_required, int) or num_required <= 0:
        raise InvalidSpec(f"accumulator {name!r}: num_required: got {num_required!r}, want >= 1")


def check_step(what: str, step: int) -> None:
    """Raises InvalidSpec unless this can be a step."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise InvalidSpec(f"{what}: got {step!r}, want 0 to 2^62")


def check_caller(client: int, sequence: int, *, name: str) -> None:
    """Raises InvalidSpec unless the numbers can name a call."""
    if client < 1 or sequence < 1:
        raise InvalidSpec(f"accumulator {name!r}: client {client} and sequence {sequence}: want both >= 1")


def _check_shape(shape: tuple[int, ...], *, name: str) -> None:
    try:
        check_shape(shape, name=name)
    except InvalidSpec as error:
        raise InvalidSpec(error.message.replace("variable", "accumulator", 1)) from None
