"""One named accumulator: owner of its lock, of what each caller sent last, and of those who wait."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.accumulators import MAX_WAIT_SLICE_S, AccumulatorSpec, AccumulatorStatus, GradientHeader, GradientReply, Taken, TakeRequest
from ps_protocol.errors import Cancelled, PsError, PushIdReused
from ps_server.conditional_accumulator import ConditionalAccumulator, DenseSum, Gradient, Take
from ps_server.memory import MemoryBudget
from ps_server.sparse_conditional_accumulator import SparseSum, combined

# How long a taking between two calls of its client keeps its place.
PLACE_S = 5.0
# Callers whose last gradient is remembered; the longest silent one is forgotten first.
MAX_CALLERS = 4_096
# Results that are kept in case their answer was lost, besides the newest one; the oldest is let go first.
MAX_KEPT_RESULTS = 16
MAX_KEPT_BYTES = 64 << 20


@dataclass(slots=True)
class _Waiting:
    """A taking that is queued up; `num_calls` are at it now, and without any it ends at `ends_s`."""

    sequence: int
    take: Take
    num_calls: int = 0
    ends_s: float = 0.0
    failure: PsError | None = None


class NamedAccumulator:
    """Thread-safe. `clock` is in seconds. Every method raises Cancelled once the accumulator is deleted."""

    def __init__(self, spec: AccumulatorSpec, *, budget: MemoryBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self._budget = budget
        self._clock = clock
        self._lock = threading.Condition()
        self._core = ConditionalAccumulator(spec, SparseSum(spec) if spec.is_sparse else DenseSum(spec))
        self._failure: PsError | None = None
        self._replies: OrderedDict[int, tuple[int, GradientReply]] = OrderedDict()
        self._waiting: dict[int, _Waiting] = {}
        self._results: OrderedDict[int, tuple[int, Taken | None]] = OrderedDict()
        self._num_counted_bytes = 0

    def settled(self, header: GradientHeader) -> GradientReply | None:
        """Returns the answer if it is known without the gradient's content: it came before, or it is stale; else None.

        Raises PushIdReused, and ShapeMismatch if it cannot be added now.
        """
        with self._lock:
            return self._settled_locked(header)

    def apply(self, header: GradientHeader, gradient: Gradient) -> GradientReply:
        """Adds a gradient whose arrays are its own. Raises ShapeMismatch, IndexOutOfRange, LimitExceeded, and then nothing has changed."""
        if self.spec.is_sparse:
            gradient = combined(gradient, self.spec)
        with self._lock:
            reply = self._settled_locked(header)
            if reply is not None:
                return reply
            self._drop_expired_locked()
            accepted = self._add_locked(gradient, local_step=header.local_step)
            reply = GradientReply(accepted=accepted, step=self._core.step)
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
                waiting = _Waiting(request.sequence, self._core.take(request.num_required))
                self._waiting[request.client] = waiting
                self._collect_locked()
            if waiting is not None:
                waiting.num_calls += 1
            return Taking(self, request, waiting)

    def set_step(self, step: int) -> None:
        """Sets the step."""
        with self._lock:
            self._check_locked()
            self._core.set_step(step)

    def describe(self) -> AccumulatorStatus:
        """Reports the accumulator."""
        with self._lock:
            self._check_locked()
            self._drop_expired_locked()
            core = self._core
            return AccumulatorStatus(spec=self.spec, num_accumulated=core.count, step=core.step, num_waiting=core.num_waiting)

    def end(self, failure: PsError) -> None:
        """Makes every call, also those that wait, raise `failure`, and lets go of all memory. Idempotent: the first failure stays."""
        with self._lock:
            self._failure = self._failure or failure
            self._waiting.clear()
            self._results.clear()
            self._budget.release(self._num_counted_bytes)
            self._num_counted_bytes = 0
            self._lock.notify_all()

    def wait(self, request: TakeRequest, waiting: _Waiting | None) -> Taken:
        """Returns what was taken, or, without it, that the time was up; for Taking."""
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
                    not_ready = Taken(count=self._core.count, step=self._core.step)
                    if request.max_wait_s <= 0 and waiting.num_calls == 1:
                        self._withdraw_locked(request.client, _withdrawn(self.spec, "its client gave up"))
                    return not_ready
                # Places of those who went away must end even if nothing else happens.
                self._lock.wait(min(left_s, PLACE_S))

    def leave(self, request: TakeRequest, waiting: _Waiting, *, is_gone: bool) -> None:
        """Ends one call's part in a taking, which keeps its place for a while unless its caller is gone; for Taking."""
        with self._lock:
            waiting.num_calls -= 1
            if waiting.num_calls or self._waiting.get(request.client) is not waiting:
                return
            waiting.ends_s = self._clock() + PLACE_S
            if is_gone:
                self._withdraw_locked(request.client, _withdrawn(self.spec, "its caller went away"))

    def _add_locked(self, gradient: Gradient, *, local_step: int) -> bool:
        growth = self._core.growth(gradient)
        self._budget.reserve(growth, purpose=f"the gradients of accumulator {self.spec.name!r}")
        try:
            return self._core.apply(gradient, local_step=local_step)
        finally:
            self._collect_locked()
            self._budget.release(growth)

    def _check_locked(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _settled_locked(self, header: GradientHeader) -> GradientReply | None:
        self._check_locked()
        sequence, reply = self._replies.get(header.client, (0, None))
        if header.sequence < sequence:
            raise PushIdReused(
                f"accumulator {header.name!r}: gradient {header.sequence} of this client came after its gradient {sequence}; count upwards"
            )
        if header.sequence == sequence and reply is not None:
            return reply
        if self._core.is_stale(header.local_step):
            return GradientReply(accepted=False, step=self._core.step)
        self._core.check(header.shape, num_indices=header.num_indices, dense_shape=header.dense_shape)
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
        """Files what has been taken under its caller, lets old results go, and wakes who waits."""
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
        held = self._core.nbytes + sum(_nbytes(taken) for _, taken in self._results.values() if taken is not None)
        self._budget.release(self._num_counted_bytes - held)
        self._num_counted_bytes = held

    def _withdraw_locked(self, client: int, reason: PsError) -> None:
        waiting = self._waiting.pop(client)
        waiting.failure = reason
        self._core.cancel(waiting.take)
        self._collect_locked()
        self._lock.notify_all()

    def _drop_expired_locked(self) -> None:
        now = self._clock()
        for client in [client for client, w in self._waiting.items() if not w.num_calls and now >= w.ends_s]:
            self._withdraw_locked(client, _withdrawn(self.spec, "its client did not ask again"))


class Taking:
    """One call's part in a taking, as a context manager; made by `open_take`. `wait` is for one thread, `abandon` for any."""

    def __init__(self, accumulator: NamedAccumulator, request: TakeRequest, waiting: _Waiting | None) -> None:
        self._accumulator = accumulator
        self._request = request
        self._waiting = waiting
        self._lock = threading.Lock()
        self._has_left = waiting is None

    def __enter__(self) -> "Taking":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(is_gone=False)

    def wait(self) -> Taken:
        """Returns what was taken, or, without it, that the time was up. Raises Cancelled."""
        return self._accumulator.wait(self._request, self._waiting)

    def abandon(self) -> None:
        """Takes note that the caller is gone: the taking is withdrawn if it waits and is nobody else's. Idempotent."""
        self._leave(is_gone=True)

    def _leave(self, *, is_gone: bool) -> None:
        with self._lock:
            has_left, self._has_left = self._has_left, True
        if not has_left and self._waiting is not None:
            self._accumulator.leave(self._request, self._waiting, is_gone=is_gone)


def _withdrawn(spec: AccumulatorSpec, why: str) -> Cancelled:
    return Cancelled(f"accumulator {spec.name!r}: TakeGrad operation was cancelled: {why}")


def _nbytes(taken: Taken) -> int:
    return sum(part.nbytes for part in (taken.values, taken.indices) if part is not None)
