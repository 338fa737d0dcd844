"""The named accumulators of a parameter server for many threads: locks, repeated calls, and calls that wait. Knows no wire, no sum.

A gradient or request that is repeated, because its answer was lost, gets the first answer. A caller that waits longer than one call
may last asks again, and keeps its place for a few seconds.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

from ps_protocol.errors import AccumulatorExists, AccumulatorNotFound, Cancelled, LimitExceeded, PsError, PushIdReused, ShuttingDown
from ps_protocol.model.differences import differences
from ps_protocol.model.layout import Segments, SegmentWriter
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.accumulators import (
    AccumulatorCreation,
    AccumulatorSpec,
    AccumulatorStatus,
    AccumulatorStatusRequest,
    CreateAccumulatorRequest,
    DeleteAccumulatorRequest,
    GradientHeader,
    GradientReply,
    SetAccumulatorStepRequest,
    Taken,
    TakeRequest,
    arrays_of,
    content_of,
)
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_server.accumulators.rounds import DenseSum, Gradient, Rounds, SparseSum, Take, combined
from ps_server.numbers.memory import MemoryBudget

# One named accumulator: owner of its lock, of the latest call of each caller, and of the waiting ones.


# How long a taking between two calls of its client keeps its place.
PLACE_S = 5.0
# Callers whose last gradient is remembered; the longest silent one is forgotten first.
MAX_CALLERS = 4_096
# Results that are kept in case their answer was lost, besides the newest one; the oldest is dropped first.
MAX_KEPT_RESULTS = 16
MAX_KEPT_BYTES = 64 << 20


@light_dataclass(slots=True)
class _Waiting:
    """A taking that is queued up; `calls` are at it now, and without any it ends at `ends_s`."""

    sequence: int
    take: Take
    calls: "set[Taking]" = field(default_factory=set)
    ends_s: float = 0.0
    failure: PsError | None = None


class NamedAccumulator:
    """Thread-safe. `clock` is in seconds. Every method raises Cancelled once the accumulator is deleted."""

    def __init__(self, spec: AccumulatorSpec, *, budget: MemoryBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self._budget = budget
        self._clock = clock
        self._lock = threading.Condition()
        self._rounds = Rounds(spec, SparseSum(spec) if spec.is_sparse else DenseSum(spec))
        self._failure: PsError | None = None
        self._replies: OrderedDict[int, tuple[int, GradientReply]] = OrderedDict()
        self._waiting: dict[int, _Waiting] = {}
        self._results: OrderedDict[int, tuple[int, Taken | None]] = OrderedDict()
        self._num_counted_bytes = 0

    def known_reply(self, header: GradientHeader) -> GradientReply | None:
        """Returns the answer if it does not depend on the gradient's content: for a repeated or a stale one; else None.

        Raises PushIdReused, and ShapeMismatch if it cannot be added now.
        """
        with self._lock:
            return self._known_reply_locked(header)

    def apply(self, header: GradientHeader, gradient: Gradient) -> GradientReply:
        """Adds a gradient whose arrays are its own. Raises ShapeMismatch, IndexOutOfRange, LimitExceeded, and then nothing has changed."""
        if self.spec.is_sparse:
            gradient = combined(gradient, self.spec)
        with self._lock:
            reply = self._known_reply_locked(header)
            if reply is not None:
                return reply
            self._drop_expired_locked()
            accepted = self._add_locked(gradient, local_step=header.local_step)
            reply = GradientReply(accepted=accepted, step=self._rounds.step)
            self._replies[header.client] = (header.sequence, reply)
            self._replies.move_to_end(header.client)
            while len(self._replies) > MAX_CALLERS:
                self._replies.popitem(last=False)
            return reply

    def open_take(self, request: TakeRequest) -> "Taking":
        """Begins to wait for gradients. Raises PushIdReused for a taking that is older than the caller's newest."""
        with self._lock:
            self._check_locked()
            self._drop_expired_locked()
            waiting = self._waiting.get(request.client)
            if waiting is not None and waiting.sequence != request.sequence:
                self._check_newer_locked(request, waiting.sequence)
                self._withdraw_locked(request.client, _withdrawn(self.spec, "its client asked for another"))
                waiting = None
            if waiting is None and not self._has_result_locked(request):
                waiting = _Waiting(request.sequence, self._rounds.take(request.num_required))
                self._waiting[request.client] = waiting
                self._collect_locked()
            taking = Taking(self, request, waiting)
            if waiting is not None:
                waiting.calls.add(taking)
            return taking

    def set_step(self, step: int) -> None:
        """Sets the step."""
        with self._lock:
            self._check_locked()
            self._rounds.set_step(step)

    def describe(self) -> AccumulatorStatus:
        """Reports the accumulator."""
        with self._lock:
            self._check_locked()
            self._drop_expired_locked()
            rounds = self._rounds
            return AccumulatorStatus(spec=self.spec, num_accumulated=rounds.count, step=rounds.step, num_waiting=rounds.num_waiting)

    def end(self, failure: PsError) -> None:
        """Makes every call, also those that wait, raise `failure`, and releases all memory. Idempotent: the first failure stays."""
        with self._lock:
            self._failure = self._failure or failure
            self._waiting.clear()
            self._results.clear()
            self._budget.release(self._num_counted_bytes)
            self._num_counted_bytes = 0
            self._lock.notify_all()

    def wait(self, request: TakeRequest, waiting: _Waiting | None) -> Taken:
        """Returns the taken gradient, or that the time was up; for Taking."""
        ends_s = self._clock() + min(request.max_wait_s, MAX_WAIT_SLICE_S)
        with self._lock:
            while True:
                self._check_locked()
                self._drop_expired_locked()
                if waiting is None:
                    return self._result_locked(request)
                if waiting.take.taken is not None:
                    return waiting.take.taken
                if waiting.failure is not None:
                    raise waiting.failure
                left_s = ends_s - self._clock()
                if left_s <= 0:
                    not_ready = Taken(count=self._rounds.count, step=self._rounds.step)
                    if request.max_wait_s <= 0 and len(waiting.calls) == 1:
                        self._withdraw_locked(request.client, _withdrawn(self.spec, "its client gave up"))
                    return not_ready
                # The places of callers that went away must end even if nothing else happens.
                self._lock.wait(min(left_s, PLACE_S))

    def leave(self, taking: "Taking", request: TakeRequest, waiting: _Waiting | None, *, is_gone: bool) -> None:
        """Ends one call's part in a take, which keeps its place for a while unless its caller is gone; for Taking. Idempotent."""
        with self._lock:
            if waiting is None or taking not in waiting.calls:
                return
            waiting.calls.remove(taking)
            if waiting.calls or self._waiting.get(request.client) is not waiting:
                return
            waiting.ends_s = self._clock() + PLACE_S
            if is_gone:
                self._withdraw_locked(request.client, _withdrawn(self.spec, "its caller went away"))

    def _add_locked(self, gradient: Gradient, *, local_step: int) -> bool:
        growth = self._rounds.total.growth(gradient)
        self._budget.reserve(growth, purpose=f"the gradients of accumulator {self.spec.name!r}")
        try:
            return self._rounds.apply(gradient, local_step=local_step)
        finally:
            self._collect_locked()
            self._budget.release(growth)

    def _check_locked(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _known_reply_locked(self, header: GradientHeader) -> GradientReply | None:
        self._check_locked()
        sequence, reply = self._replies.get(header.client, (0, None))
        if header.sequence < sequence:
            raise PushIdReused(
                f"accumulator {header.name!r}: gradient {header.sequence} of this client came after its gradient {sequence}; count upwards"
            )
        if header.sequence == sequence and reply is not None:
            return reply
        if self._rounds.is_stale(header.local_step):
            return GradientReply(accepted=False, step=self._rounds.step)
        self._rounds.total.check(header.shape, num_indices=header.num_indices, dense_shape=header.dense_shape)
        return None

    def _check_newer_locked(self, request: TakeRequest, sequence: int) -> None:
        if request.sequence < sequence:
            raise PushIdReused(
                f"accumulator {self.spec.name!r}: taking {request.sequence} of this client came after its taking {sequence}; count upwards"
            )

    def _has_result_locked(self, request: TakeRequest) -> bool:
        sequence, _ = self._results.get(request.client, (0, None))
        self._check_newer_locked(request, sequence)
        return request.sequence == sequence

    def _result_locked(self, request: TakeRequest) -> Taken:
        sequence, taken = self._results.get(request.client, (0, None))
        if sequence != request.sequence or taken is None:
            raise Cancelled(f"accumulator {self.spec.name!r}: the gradients were taken, but the result is not kept any more; take again")
        return taken

    def _collect_locked(self) -> None:
        """Keeps each finished taking's result for its caller, drops old results, and wakes the calls that wait."""
        done = [client for client, waiting in self._waiting.items() if waiting.take.taken is not None]
        for client in done:
            waiting = self._waiting.pop(client)
            self._results[client] = (waiting.sequence, waiting.take.taken)
            self._results.move_to_end(client)
        kept = [client for client, (_, taken) in self._results.items() if taken is not None]
        room = MAX_KEPT_BYTES
        for number, client in enumerate(reversed(kept)):
            sequence, taken = self._results[client]
            assert taken is not None
            room -= _nbytes(taken)
            if number and (room < 0 or number >= MAX_KEPT_RESULTS):
                # That it was taken is remembered, so that asking again does not take a second time.
                self._results[client] = (sequence, None)
        while len(self._results) > MAX_CALLERS:
            self._results.popitem(last=False)
        self._count_bytes_locked()
        if done:
            self._lock.notify_all()

    def _count_bytes_locked(self) -> None:
        held = self._rounds.total.nbytes + sum(_nbytes(taken) for _, taken in self._results.values() if taken is not None)
        self._budget.release(self._num_counted_bytes - held)
        self._num_counted_bytes = held

    def _withdraw_locked(self, client: int, reason: PsError) -> None:
        waiting = self._waiting.pop(client)
        waiting.failure = reason
        self._rounds.cancel(waiting.take)
        self._collect_locked()
        self._lock.notify_all()

    def _drop_expired_locked(self) -> None:
        now = self._clock()
        for client in [client for client, w in self._waiting.items() if not w.calls and now >= w.ends_s]:
            self._withdraw_locked(client, _withdrawn(self.spec, "its client did not ask again"))


class Taking:
    """One call's part in a taking, as a context manager; made by `open_take`. `wait` is for one thread, `abandon` for any."""

    def __init__(self, accumulator: NamedAccumulator, request: TakeRequest, waiting: _Waiting | None) -> None:
        self._accumulator = accumulator
        self._request = request
        self._waiting = waiting

    def __enter__(self) -> "Taking":
        return self

    def __exit__(self, *_: object) -> None:
        self._accumulator.leave(self, self._request, self._waiting, is_gone=False)

    def wait(self) -> Taken:
        """Returns the taken gradient, or that the time was up. Raises Cancelled."""
        return self._accumulator.wait(self._request, self._waiting)

    def abandon(self) -> None:
        """Handles a lost caller: withdraws its request if that waits and no other call shares it. Idempotent."""
        self._accumulator.leave(self, self._request, self._waiting, is_gone=True)


def _withdrawn(spec: AccumulatorSpec, why: str) -> Cancelled:
    return Cancelled(f"accumulator {spec.name!r}: TakeGrad operation was cancelled: {why}")


def _nbytes(taken: Taken) -> int:
    return sum(part.nbytes for part in (taken.values, taken.indices) if part is not None)


# The named accumulators by name.


MAX_ACCUMULATORS = 10_000
# Each of them holds one of the server's threads, and the training needs some as well.
MAX_TAKERS = 64


class AccumulatorRegistry:
    """All accumulators of one server. Thread-safe. Implements ps_protocol.roles.accumulators.Accumulators; `owner` is for texts."""

    def __init__(self, *, owner: str, budget: MemoryBudget) -> None:
        self._owner = owner
        self._budget = budget
        self._lock = threading.Lock()
        self._accumulators: dict[str, NamedAccumulator] = {}
        self._num_takers = 0
        self._shutdown: ShuttingDown | None = None
        self._answers: dict[type, Callable[[Any], Any]] = {
            CreateAccumulatorRequest: self._create,
            SetAccumulatorStepRequest: lambda request: self._find(request.name).set_step(request.step),
            AccumulatorStatusRequest: lambda request: self._find(request.name).describe(),
            DeleteAccumulatorRequest: self._delete,
        }

    def call(self, request: Request[Answer]) -> Answer:
        """Answers what is asked without a gradient. What each request does and raises, it says itself."""
        answer: Answer = self._answers[type(request)](request)
        return answer

    def _create(self, request: CreateAccumulatorRequest) -> AccumulatorCreation:
        spec = request.spec
        # An element type that this installation lacks is found out here, and not by the first gradient.
        _ = spec.data_type.dtype
        with self._lock:
            self._check_running_locked()
            existing = self._accumulators.get(spec.name)
            if existing is not None:
                difference = next(differences(existing.spec, spec, whose="the accumulator's"), "")
                if difference:
                    raise AccumulatorExists(f"{self._owner}: accumulator {spec.name!r} exists: {difference}; use another name")
                return AccumulatorCreation(created=False, step=existing.describe().step)
            if len(self._accumulators) >= MAX_ACCUMULATORS:
                raise LimitExceeded(f"{self._owner}: has {MAX_ACCUMULATORS} accumulators, the most there may be; delete some")
            self._accumulators[spec.name] = made = NamedAccumulator(spec, budget=self._budget)
            return AccumulatorCreation(created=True, step=made.describe().step)

    def apply_gradient(self, header: GradientHeader, values: Array, indices: Array | None = None) -> GradientReply:
        """Adds a copy of a gradient, unless it is stale."""

        def feed(writer: SegmentWriter) -> None:
            for offset, data in content_of(values, indices).chunks(1 << 30):
                writer.write(offset, data)

        return self.receive_gradient(header, feed)

    def receive_gradient(self, header: GradientHeader, feed: Callable[[SegmentWriter], None]) -> GradientReply:
        """Adds the gradient whose bytes `feed` writes, all of them (else TruncatedStream); `feed` is not called if none are wanted."""
        accumulator = self._find(header.name)
        if (reply := accumulator.known_reply(header)) is not None:
            return reply
        spec = accumulator.spec
        nbytes = header.num_bytes(spec.data_type)
        content = self._budget.allocate(nbytes, purpose=f"a gradient of accumulator {header.name!r}")
        try:
            Segments([content]).receive(feed)
            values, indices = arrays_of(content, data_type=spec.data_type, shape=header.shape, num_indices=header.num_indices)
            return accumulator.apply(header, Gradient(values, indices, header.dense_shape) if spec.is_sparse else Gradient(values))
        finally:
            self._budget.release(nbytes)

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

    def _delete(self, request: DeleteAccumulatorRequest) -> bool:
        name = request.name
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
