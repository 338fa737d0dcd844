"""Named gradient accumulators on a parameter server, for programs that use them by themselves, and access to boards. Knows no step."""

import logging
import operator
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import DeadlineExceeded, DtypeMismatch, InvalidSpec, ShapeMismatch, Unimplemented
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import shown
from ps_protocol.model.variables import Array, DataType, SparseMean
from ps_protocol.process import waiting
from ps_protocol.process.waiting import SilenceWatch, Wait, checked_timeout
from ps_protocol.roles.accumulators import (
    UNKNOWN,
    Accumulators,
    AccumulatorSpec,
    AccumulatorStatus,
    AccumulatorStatusRequest,
    CreateAccumulatorRequest,
    DeleteAccumulatorRequest,
    GradientHeader,
    Reduction,
    SetAccumulatorStepRequest,
    Taken,
    TakeRequest,
    check_num_required,
    check_step,
    shard_of,
)
from ps_protocol.roles.board import Boards
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.accumulators import GrpcAccumulators
from ps_protocol.rpc.board import GrpcBoards
from worker_client.opening import access_of
from worker_client.session.observer import Observer
from worker_client.session.session import Session

if TYPE_CHECKING:
    from worker_client.model.declarations import IndexedSlices


# How a program reaches the named accumulators, and boards: through its session, or by a parameter server's address.


log = logging.getLogger("lockstep.worker")

TIMEOUT_S = 60.0


Calls = TypeVar("Calls")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Access(Generic[Calls]):
    """The accumulators, or boards, of one parameter server; `server` names it, and `timeout_s` is how long it is waited for.

    `watching(what, expected seconds)` has the enclosed call spoken for while it hangs; `close` may be called more than once.
    """

    calls: Calls
    server: str
    timeout_s: float
    watching: Callable[[str, float], AbstractContextManager[None]]
    close: Callable[[], None]


# An access that is open already stays open when an accumulator on it is closed.
Target = Session | Observer | str | Access[Accumulators]


def open_access(target: Target, name: str, *, timeout_s: float | None) -> Access[Accumulators]:
    """Returns access to the parameter server that accumulator `name` lies on; returns once it has answered.

    Of a session's several servers that is the same one for all programs. `timeout_s` None: the session's, else 60 s. Raises Unavailable,
    WrongRole, InvalidSpec.
    """
    timeout_s = None if timeout_s is None else checked_timeout(timeout_s)
    if isinstance(target, Access):
        return replace(target, timeout_s=timeout_s or target.timeout_s, close=lambda: None)
    if isinstance(target, str):
        client = GrpcAccumulators(target, access=access_of(None, os.environ, role=CallerRole.WORKER))
        return _remote(client, target, timeout_s=timeout_s or TIMEOUT_S)
    return _of_cluster(target, name, "accumulators", GrpcAccumulators, timeout_s=timeout_s)


def open_boards(target: Session | Observer, name: str, *, timeout_s: float | None) -> Access[Boards]:
    """Returns access to the parameter server that board `name` lies on, as `open_access`. Raises InvalidSpec where there is none."""
    if not target.membership.registration.shard_addresses:
        raise InvalidSpec("what workers send each other lies on parameter servers, and the cluster has none")
    return _of_cluster(target, name, "boards", GrpcBoards, timeout_s=timeout_s)


def _of_cluster(target: Session | Observer, name: str, kind: str, make: Callable[..., Calls], *, timeout_s: float | None) -> Access[Calls]:
    target.membership.check_open()
    way, addresses = target.membership.link.transport, target.membership.registration.shard_addresses
    index = shard_of(name, num_shards=len(addresses))
    if not way.is_in_process:
        return _remote(make(addresses[index], index=index, access=way.access), addresses[index], timeout_s=timeout_s or way.timeout_s)
    shard = way.open_shard(index, addresses[index])
    calls = getattr(shard, kind, None)
    if calls is None:
        raise Unimplemented(f"ps {index}, a {type(shard).__name__}, has no {kind}")
    return Access(
        calls=calls,
        server=f"ps {index}",
        timeout_s=timeout_s or way.timeout_s,
        watching=lambda what, expected_s: nullcontext(),
        close=lambda: None,
    )


def _remote(client: Any, address: str, *, timeout_s: float) -> Access[Any]:
    watch = SilenceWatch()

    def close() -> None:
        watch.close()
        client.close()

    try:
        what = f"the parameter server at {address}"
        with watch.expecting(what):
            reply = waiting.call(client.handshake, what=what, timeout_s=timeout_s)
    except BaseException:
        close()
        raise
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)
    return Access(
        calls=client,
        server=f"ps {reply.identity.index} at {address}",
        timeout_s=timeout_s,
        watching=lambda text, expected_s: watch.expecting(text, expected_s=expected_s),
        close=close,
    )


# What a user says of an accumulator, checked: element type, shape, numbers, reduction.


def data_type_of(dtype: npt.DTypeLike | DataType) -> DataType:
    """Returns the element type of a NumPy type, its name, or "bfloat16". Raises InvalidSpec for others."""
    if isinstance(dtype, DataType):
        return dtype
    name = dtype if dtype == DataType.BFLOAT16.value else np.dtype(dtype).name
    try:
        return DataType(name)
    except ValueError:
        raise InvalidSpec(f"dtype: got {name}, want one of {', '.join(data_type.value for data_type in DataType)}") from None


def declared_shape(shape: Sequence[int | None] | None) -> tuple[int, ...] | None:
    """Returns the shape with UNKNOWN for what is not declared. Raises InvalidSpec."""
    return None if shape is None else tuple(UNKNOWN if extent is None else whole_number("shape", extent) for extent in shape)


def whole_number(what: str, value: SupportsIndex) -> int:
    """Returns the number; `what` names it in the error. Raises InvalidSpec."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidSpec(f"{what}: got {shown(value)}, want a whole number") from None


def reduction_of(reduction_type: str) -> Reduction:
    """Returns the reduction of this name. Raises ValueError, as the original does."""
    if reduction_type not in Reduction.__members__:
        raise ValueError(f"reduction_type: got {reduction_type!r}, want one of {', '.join(Reduction.__members__)}")
    return Reduction[reduction_type]


# Named gradient accumulators on a parameter server, for programs that use them by themselves.
#
# They are those of tf.compat.v1.ConditionalAccumulator and SparseConditionalAccumulator, with the same methods, outside of a graph: each
# call does what running the operation did.


Result = TypeVar("Result")


class _Caller(threading.local):
    """One thread's name towards the accumulator, and its counts of gradients and takings."""

    def __init__(self) -> None:
        self.client = secrets.randbits(63) | 1
        self.num_gradients = 0
        self.num_takings = 0


class _RemoteAccumulator:
    """The common part of dense and sparse accumulators: the name, the server, and the calls that carry no gradient."""

    def __init__(self, target: Target, spec: AccumulatorSpec, *, timeout_s: float | None) -> None:
        self.spec = spec
        self._access: Access[Accumulators] = open_access(target, spec.name, timeout_s=timeout_s)
        self._caller = _Caller()
        try:
            self._ask("create it", lambda accumulators: accumulators.call(CreateAccumulatorRequest(spec=spec)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The accumulator's name on its parameter server."""
        return self.spec.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of its gradients."""
        return self.spec.data_type.dtype

    def num_accumulated(self) -> int:
        """Returns how many gradients of the current round are in."""
        return self.status().num_accumulated

    def set_global_step(self, new_global_step: SupportsIndex) -> None:
        """Sets the accumulator's step, backwards too; gradients that are in stay in. Idempotent. Raises InvalidSpec below 0."""
        step = whole_number("new_global_step", new_global_step)
        check_step("new_global_step", step)
        self._ask("set its step", lambda accumulators: accumulators.call(SetAccumulatorStepRequest(name=self.name, step=step)))

    def status(self) -> AccumulatorStatus:
        """Returns the accumulator's specification, count, step, and how many wait for it."""
        return self._ask("its status", lambda accumulators: accumulators.call(AccumulatorStatusRequest(name=self.name)))

    def delete(self) -> bool:
        """Drops the accumulator for all its clients; who waits for it gets Cancelled. False if there was none. Idempotent."""
        return self._ask("delete it", lambda accumulators: accumulators.call(DeleteAccumulatorRequest(name=self.name)))

    def close(self) -> None:
        """Lets go of the connection; the accumulator stays. Idempotent."""
        self._access.close()

    def _apply(self, values: Array, indices: Array | None, dense_shape: tuple[int, ...] | None, local_step: SupportsIndex) -> bool:
        caller, step = self._caller, whole_number("local_step", local_step)
        caller.num_gradients += 1
        header = GradientHeader(
            name=self.name,
            client=caller.client,
            sequence=caller.num_gradients,
            local_step=step,
            shape=values.shape,
            num_indices=0 if indices is None else len(indices),
            dense_shape=dense_shape,
        )
        return self._ask("apply a gradient", lambda accumulators: accumulators.apply_gradient(header, values, indices)).accepted

    def _take(self, num_required: SupportsIndex, timeout_s: float | None) -> Taken:
        wanted = whole_number("num_required", num_required)
        check_num_required(wanted, name=self.name)
        caller, wait = self._caller, Wait(f"accumulator {self.name!r}: take {wanted} gradients", timeout_s=timeout_s)
        caller.num_takings += 1
        client, sequence = caller.client, caller.num_takings

        def attempt(max_wait_s: float) -> Taken:
            request = TakeRequest(name=self.name, client=client, sequence=sequence, num_required=wanted, max_wait_s=max_wait_s)
            return self._ask(f"take {wanted}", lambda accumulators: accumulators.take_gradient(request), expected_s=max_wait_s)

        while True:
            taken = attempt(wait.slice_s())
            if taken.is_ready:
                return taken
            try:
                wait.explain(f"{taken.count} of {wanted} gradients are in")
            except DeadlineExceeded:
                # Withdraws the place in the queue, unless the gradients have come just now.
                taken = attempt(0.0)
                if taken.is_ready:
                    return taken
                raise

    def _ask(self, what: str, question: Callable[[Accumulators], Result], *, expected_s: float = 0.0) -> Result:
        subject = f"accumulator {self.name!r} on {self._access.server}: {what}"
        with self._access.watching(subject, expected_s):
            timeout_s = self._access.timeout_s + expected_s
            return waiting.call(lambda _: question(self._access.calls), what=subject, timeout_s=timeout_s)

    def _elements(self, value: npt.ArrayLike, what: str) -> Array:
        """Returns the value as a contiguous array; numbers and lists of them take the accumulator's type, arrays must have it."""
        if value is None:
            raise InvalidSpec(f"accumulator {self.name!r}: the {what} is None; want an array")
        array = np.asarray(value) if hasattr(value, "dtype") else np.asarray(value, self.dtype)
        if array.dtype != self.dtype:
            raise DtypeMismatch(
                f"accumulator {self.name!r}: the {what} is {array.dtype}, want {self.dtype}; cast with .astype({self.dtype.name!r})"
            )
        return np.ascontiguousarray(array).reshape(array.shape)


class ConditionalAccumulator(_RemoteAccumulator):
    """Collects dense gradients on a parameter server and gives their mean or sum once enough are in.

    `target`: a Session or an Observer, whose cluster is then used (of several parameter servers the one that a hash of the name picks),
    the address of a parameter server, or the Access that `open_access()` gives. `shape` None: any, fixed anew by the first gradient of each
    round; None or -1 in it: any extent. `shared_name` names the accumulator on its parameter server: the same name is the same accumulator
    for all programs, and it lives as long as that process, or until `delete()`. `reduction_type`: "MEAN" (of as many as are in, not only
    of those required) or "SUM".

    Thread-safe; a context manager that closes the connection. `timeout_s` is how long a server that does not answer is waited for (None:
    as the target does, else 60 s). Every method raises AccumulatorNotFound once the accumulator is gone, and Unavailable. Raises
    ValueError for another reduction, AccumulatorExists if the name belongs to an accumulator of another specification, InvalidSpec.
    """

    def __init__(
        self,
        target: Target,
        dtype: npt.DTypeLike | DataType,
        shape: Sequence[int | None] | None = None,
        *,
        shared_name: str,
        reduction_type: str = "MEAN",
        timeout_s: float | None = None,
    ) -> None:
        spec = AccumulatorSpec(
            name=shared_name, data_type=data_type_of(dtype), shape=declared_shape(shape), reduction=reduction_of(reduction_type)
        )
        super().__init__(target, spec, timeout_s=timeout_s)

    def apply_grad(self, grad: npt.ArrayLike, local_step: SupportsIndex = 0) -> bool:
        """Adds a gradient and returns True, or drops it and returns False if `local_step` is behind the accumulator's step.

        Never blocks for gradients of others. Counted once, however often the network makes it be sent. A stale gradient is not looked at.
        Raises ShapeMismatch, DtypeMismatch.
        """
        return self._apply(self._elements(grad, "gradient"), None, None, local_step)

    def take_grad(self, num_required: SupportsIndex, timeout_s: float | None = None) -> Array:
        """Waits until `num_required` gradients are in, and returns the mean or sum of all that are; the step rises by one.

        Calls are served in order, even behind one that wants more. Logs what it waits for after 2 s. Raises InvalidSpec
        for `num_required` below 1, DeadlineExceeded after `timeout_s` seconds (None: never), having taken nothing, and Cancelled if the
        accumulator is deleted meanwhile.
        """
        taken = self._take(num_required, timeout_s)
        assert taken.values is not None
        return taken.values


class SparseConditionalAccumulator(_RemoteAccumulator):
    """Collects sparse gradients, as rows and their indices, and gives their mean or sum once enough are in.

    Arguments and errors are those of ConditionalAccumulator; `shape` is that of the whole, of which gradients have some rows.
    `sparse_mean`: "per_index" divides each row by the number of gradients that have it, as the original does; "per_replica" by all.
    A gradient may name rows in any order and more than once: they are sorted, and rows of the same index summed.
    """

    def __init__(
        self,
        target: Target,
        dtype: npt.DTypeLike | DataType,
        shape: Sequence[int | None] | None = None,
        *,
        shared_name: str,
        reduction_type: str = "MEAN",
        sparse_mean: str = "per_index",
        timeout_s: float | None = None,
    ) -> None:
        means = {mean.name.lower(): mean for mean in SparseMean}
        if sparse_mean not in means:
            raise ValueError(f"sparse_mean: got {sparse_mean!r}, want one of {', '.join(means)}")
        spec = AccumulatorSpec(
            name=shared_name,
            data_type=data_type_of(dtype),
            shape=declared_shape(shape),
            reduction=reduction_of(reduction_type),
            is_sparse=True,
            sparse_mean=means[sparse_mean],
        )
        super().__init__(target, spec, timeout_s=timeout_s)

    def apply_grad(
        self,
        grad_indices: npt.ArrayLike,
        grad_values: npt.ArrayLike,
        grad_shape: Sequence[int] | None = None,
        local_step: SupportsIndex = 0,
    ) -> bool:
        """Adds a gradient and returns True, or drops it and returns False if `local_step` is behind the accumulator's step.

        `grad_values` has one row for each of `grad_indices`, of any integer type; no row at all is a gradient too, and counts.
        `grad_shape`: that of the whole, if known. Never blocks for gradients of others; counted once. Raises ShapeMismatch, DtypeMismatch,
        IndexOutOfRange.
        """
        indices = np.asarray(grad_indices)
        if not indices.size:
            indices = indices.astype(np.int64)
        if indices.ndim != 1:
            raise ShapeMismatch(f"accumulator {self.name!r}: input indices should be vector, got shape {indices.shape}")
        if indices.dtype.kind not in "iu":
            raise DtypeMismatch(f"accumulator {self.name!r}: indices are {indices.dtype}; want integers")
        values = self._elements(grad_values, "values of the gradient")
        whole = None if grad_shape is None else tuple(whole_number("grad_shape", extent) for extent in grad_shape)
        return self._apply(values, np.ascontiguousarray(indices, np.dtype("<i8")), whole, local_step)

    def apply_indexed_slices_grad(self, grad: "IndexedSlices", local_step: SupportsIndex = 0) -> bool:
        """Does `apply_grad` with the parts of an IndexedSlices."""
        return self.apply_grad(grad.indices, grad.values, grad.dense_shape, local_step)

    def take_grad(self, num_required: SupportsIndex, timeout_s: float | None = None) -> tuple[Array, Array, Array]:
        """Waits as ConditionalAccumulator.take_grad does; returns ascending indices, their rows, and the shape of the whole (int64).

        In the shape, -1 marks an extent that was not declared.
        """
        taken = self._take(num_required, timeout_s)
        assert taken.values is not None
        assert taken.indices is not None
        return taken.indices, taken.values, np.asarray(taken.dense_shape, np.int64)

    def take_indexed_slices_grad(self, num_required: SupportsIndex, timeout_s: float | None = None) -> "IndexedSlices":
        """Does `take_grad` and returns an IndexedSlices; its `dense_shape` is None if the number of rows was not declared."""
        from worker_client.model.declarations import IndexedSlices

        indices, values, shape = self.take_grad(num_required, timeout_s)
        whole = tuple(int(extent) for extent in shape)
        return IndexedSlices(indices, values, None if UNKNOWN in whole else whole)
