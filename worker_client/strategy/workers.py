"""A strategy's replicas in several worker processes: values meet in accumulators, variables lie on parameter servers. Knows the session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ps_protocol.errors import DeadlineExceeded, DtypeMismatch, InvalidSpec, PsError, ShapeMismatch, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import PushOutcome
from worker_client.accumulators import Access, ConditionalAccumulator, open_access
from worker_client.model.declarations import Buffer, Placement
from worker_client.model.optimizers import sgd
from worker_client.session.session import Session
from worker_client.strategy.group import Cell, Combination, combine
from worker_client.strategy.messages import pack, unpack
from worker_client.strategy.reduction import ReduceOp, frozen

TIMEOUT_S = 60.0
# Worker 0 waits for all and says who is missing; the others give it this much longer to say so.
_GRACE_S = 5.0
_FIRST = 0
_OPS: tuple[ReduceOp | None, ...] = (None, ReduceOp.SUM, ReduceOp.MEAN)
# What worker 0 may answer instead of results: the same error for all.
_ERRORS: tuple[type[Exception], ...] = (DeadlineExceeded, ShapeMismatch, DtypeMismatch, InvalidSpec, ValueError)


class WorkerGroup:
    """The replicas of all workers of a cluster, `replicas_per_worker` in each, seen from one of them.

    Worker 0 gathers what all contribute, adds it in the order of the replicas, and sends everybody the result. Variables with one copy are
    the session's model: the writes of one `run()`, or outside of it of one `update()`, are one step of the cluster. For the thread that the
    session belongs to.
    """

    def __init__(self, session: Session, replicas_per_worker: int, *, name: str) -> None:
        self._name = name
        self._session, self._per_worker = session, replicas_per_worker
        self._num_workers, self._index = session.num_workers, session.worker_index
        if self._num_workers < 1:
            raise InvalidSpec("a strategy needs a cluster for a certain number of workers; start the chief with --workers")
        addresses = session.membership.registration.shard_addresses
        self._parameter_devices = tuple(f"ps:{index}" + (f" at {address}" if address else "") for index, address in enumerate(addresses))
        self._variables = _SharedVariables(session, self._parameter_devices, writes=self._index == _FIRST)
        self._access: Access | None = None
        self._num_exchanges = 0

    @property
    def replicas(self) -> range:
        """The ids of this worker's replicas."""
        return self._replicas_of(self._index)

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all workers."""
        return self._num_workers * self._per_worker

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of all replicas, by id."""
        return tuple(f"worker:{replica // self._per_worker}/replica:{replica}" for replica in range(self.num_replicas))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The parameter servers."""
        return self._parameter_devices

    def begin(self) -> None:
        """Creates the variables on the parameter servers, or finds those of another worker. Idempotent."""
        self._variables.begin()

    def place(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns the cell of a new variable on a parameter server. Raises RuntimeError after `begin`."""
        return self._variables.declare(name, value, beside=beside)

    def writing(self) -> AbstractContextManager[None]:
        """Makes one step of the cluster of all writes in the block. Blocks may be nested: the outermost counts."""
        return self._variables.together()

    def combine(self, what: str, combinations: Sequence[Combination], *, timeout_s: float | None) -> list[Any]:
        """Has all workers' contributions combined by worker 0. Raises DeadlineExceeded with the replicas that are missing."""
        self._num_exchanges += 1
        what = f"{what} (exchange {self._num_exchanges})"
        wait_s = TIMEOUT_S if timeout_s is None else timeout_s
        if self._index == _FIRST:
            return self._lead(what, combinations, wait_s)
        own = [value for one in combinations for value in (one.contributions[replica] for replica in self.replicas)]
        self._send(_FIRST, [_codes(combinations), *own])
        try:
            reply = self._receive(_FIRST, wait_s + _GRACE_S)
        except DeadlineExceeded:
            text = f"{what}: worker 0 with {self._named(_FIRST)} has not answered within {wait_s + _GRACE_S:g} s; is its process there?"
            raise DeadlineExceeded(text) from None
        kind = int(reply[0])
        if kind:
            raise _ERRORS[kind - 1](_text_of(reply[1]))
        return [frozen(value) if isinstance(value, np.ndarray) else value for value in reply[1:]]

    def close(self) -> None:
        """Lets go of the connection that values meet over. Idempotent."""
        if self._access is not None:
            self._access.close()
            self._access = None

    def _lead(self, what: str, combinations: Sequence[Combination], timeout_s: float) -> list[Any]:
        others = [worker for worker in range(self._num_workers) if worker != self._index]
        arrived: list[int] = []
        try:
            gathered = self._gathered(what, combinations, others, arrived, timeout_s)
            results = [combine(one.op, contributions) for one, contributions in zip(combinations, gathered, strict=True)]
        except _ERRORS as error:
            kind = next(index for index, known in enumerate(_ERRORS) if isinstance(error, known))
            text = error.message if isinstance(error, PsError) else str(error)
            for worker in arrived:
                self._send(worker, [np.float64(kind + 1), _numbers_of(text)])
            raise
        for worker in others:
            self._send(worker, [np.float64(0), *results])
        return results

    def _gathered(
        self, what: str, combinations: Sequence[Combination], others: list[int], arrived: list[int], timeout_s: float
    ) -> list[dict[int, Any]]:
        gathered = [dict(one.contributions) for one in combinations]
        codes, missing, left_s = _codes(combinations), list[int](), timeout_s
        wrong = ""
        for worker in others:
            try:
                received = self._receive(worker, left_s)
            except DeadlineExceeded:
                missing.append(worker)
                left_s = 0.0  # who is there by now is not missing
                continue
            arrived.append(worker)
            if not np.array_equal(received[0], codes):
                wrong = wrong or f"{what}: worker {worker} reduces {_asked(received[0])} where worker 0 reduces {_asked(codes)}"
                continue
            values = iter(received[1:])
            for contributions in gathered:
                contributions.update((replica, next(values)) for replica in self._replicas_of(worker))
        if missing:
            names = "; ".join(f"{self._named(worker)} of worker {worker}" for worker in missing)
            raise DeadlineExceeded(f"{what}: missing after {timeout_s:g} s: {names}; is its process there?")
        if wrong:
            raise ValueError(f"{wrong}; all workers must make the same calls in the same order")
        return gathered

    def _send(self, to: int, values: Sequence[Any]) -> None:
        for part, vector in pack(values).items():
            with self._mailbox(self._index, to, part, vector.dtype) as mailbox:
                mailbox.apply_grad(vector)

    def _receive(self, sender: int, timeout_s: float) -> list[Any]:
        def receive(part: str) -> Array:
            dtype = np.dtype(np.float64 if part == "head" else part)
            with self._mailbox(sender, self._index, part, dtype) as mailbox:
                vector = mailbox.take_grad(1, timeout_s=timeout_s)
                mailbox.delete()
                return vector

        return unpack(receive)

    def _mailbox(self, sender: int, to: int, part: str, dtype: np.dtype[Any]) -> ConditionalAccumulator:
        """One message's part: an accumulator of its own, so that a message that nobody took is never added to another."""
        if self._access is None:
            self._access = open_access(self._session, f"strategy/{self._name}", timeout_s=None)
        name = f"strategy/{self._name}/exchange {self._num_exchanges}/{self._named(sender)} of worker {sender} to worker {to}/{part}"
        return ConditionalAccumulator(self._access, dtype, shared_name=name, reduction_type="SUM")

    def _replicas_of(self, worker: int) -> range:
        return range(worker * self._per_worker, (worker + 1) * self._per_worker)

    def _named(self, worker: int) -> str:
        replicas = self._replicas_of(worker)
        return f"replica {replicas[0]}" if len(replicas) == 1 else f"replicas {replicas[0]} to {replicas[-1]}"


class _SharedVariables:
    """The variables with one copy: the session's model, of buffers. Every worker makes the same writes; one of them sends the values.

    What has been written is read here at once, and reaches the parameter servers with everything else of its block.
    """

    def __init__(self, session: Session, devices: tuple[str, ...], *, writes: bool) -> None:
        self._session, self._devices, self._writes = session, devices, writes
        self._declared: dict[str, tuple[Array, int]] = {}
        self._values: dict[str, Array] | None = None
        self._pending: dict[str, Array] = {}
        self._num_blocks = 0

    def declare(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns the cell of a new variable: on the device `beside`, else on the one with the fewest bytes so far."""
        if self._values is not None:
            raise RuntimeError(f'variable "{name}": the model has been created already; create all variables before the first is used')
        if name in self._declared:
            raise ValueError(f'variable "{name}" exists already; on parameter servers every variable needs a name of its own')
        loads = [0] * len(self._devices)
        for known, shard in self._declared.values():
            loads[shard] += max(known.nbytes, 1)
        shard = self._devices.index(beside) if beside is not None else loads.index(min(loads))
        self._declared[name] = (value, shard)
        return _SharedCell(self._devices[shard], read=lambda: self.read(name), write=lambda new: self.write(name, new))

    def begin(self) -> None:
        """Creates the model or joins it, if there is anything in it."""
        if self._values is None:
            pins = {name: shard for name, (_, shard) in self._declared.items()}
            if self._declared:
                buffers = {name: Buffer(value) for name, (value, _) in self._declared.items()}
                self._session.create_or_join(buffers, optimizer=sgd(1.0), placement=Placement(pins=pins, split_bytes=0))
            self._refresh()

    def read(self, name: str) -> Array:
        """Returns a variable's value."""
        self.begin()
        assert self._values is not None
        return self._values[name]

    def write(self, name: str, value: Array) -> None:
        """Sets a variable, here at once, and on its parameter server when the block ends."""
        with self.together():
            self.begin()
            assert self._values is not None
            self._values[name] = self._pending[name] = value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sends what was written in the block when it ends; if it fails, nothing was written."""
        self._num_blocks += 1
        try:
            yield
        except BaseException:
            if self._num_blocks == 1 and self._pending:
                self._pending = {}
                self._refresh()
            raise
        else:
            if self._num_blocks == 1 and self._pending:
                self._send()
        finally:
            self._num_blocks -= 1

    def _send(self) -> None:
        written, self._pending = self._pending, {}
        push = self._session.step({}, updates=written if self._writes else {}, timeout_s=TIMEOUT_S)
        if push.outcome is not PushOutcome.ACCEPTED:
            names = ", ".join(map(repr, written))
            raise Unavailable(
                f"not written: variables {names}: the contribution is {push.outcome.name}; the cluster went back to an earlier step, or "
                "training is finished"
            )
        self._refresh()

    def _refresh(self) -> None:
        self._values = {name: frozen(value) for name, value in self._session.read().items()} if self._declared else {}


class _SharedCell:
    """The one copy of a variable on a parameter server."""

    def __init__(self, device: str, *, read: Callable[[], Array], write: Callable[[Array], None]) -> None:
        self._device, self._read, self._write = device, read, write

    @property
    def device(self) -> str:
        """The parameter server."""
        return self._device

    def read(self) -> Array:
        """Returns the value; the array cannot be written."""
        return self._read()

    def write(self, value: Array) -> None:
        """Replaces the value, in all workers."""
        self._write(value)


def _codes(combinations: Sequence[Combination]) -> Array:
    return np.array([_OPS.index(one.op) for one in combinations], np.int64)


def _asked(codes: Array) -> str:
    return ", ".join("the first" if (op := _OPS[int(code)]) is None else op.name for code in codes) or "nothing"


def _numbers_of(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)


def _text_of(numbers: Array) -> str:
    return bytes(numbers.astype(np.uint8)).decode()
