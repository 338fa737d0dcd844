"""A strategy's replicas in several worker processes: values meet in accumulators, variables lie on parameter servers. Knows the session."""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ps_protocol.errors import (
    AccumulatorNotFound,
    Cancelled,
    DeadlineExceeded,
    DtypeMismatch,
    InvalidSpec,
    LimitExceeded,
    PsError,
    ShapeMismatch,
    Unavailable,
)
from ps_protocol.model.updates import check_amount
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import PushOutcome
from worker_client.model.declarations import Buffer, IndexedSlices, Placement, UpdateFormula
from worker_client.model.optimizers import sgd
from worker_client.session.session import Session
from worker_client.strategy.group import Cell, CollectiveHints, Combination, FormulaCall, combine
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.messages import check
from worker_client.strategy.reduction import ReduceOp, frozen

log = logging.getLogger("lockstep.worker")

TIMEOUT_S = 60.0
# Worker 0 waits for all and says who is missing; the others give it this much longer to say so.
_GRACE_S = 5.0
# At the deadline, worker 0 still takes what has come from each.
_LOOK_S = 0.5
# What nobody has answered is said again: a parameter server that was started again has forgotten it.
_AGAIN_S = 3.0
# A parameter server that does not answer is given up for so long.
_SERVER_S = 5.0
_PAUSE_S = 0.2
_FIRST = 0
# Parameter servers compute formulas of no smaller elements.
_LEAST_ITEMSIZE = 4
_OPS: tuple[ReduceOp | None, ...] = (None, ReduceOp.SUM, ReduceOp.MEAN)
# What worker 0 may answer instead of results: the same error for all.
_ERRORS: tuple[type[Exception], ...] = (DeadlineExceeded, ShapeMismatch, DtypeMismatch, InvalidSpec, ValueError, Unavailable)
# What is said in place of a step before there are variables that steps change.
_NO_STEP = -1
# What a worker says in place of its reductions where it could not contribute; the error follows.
_REFUSED = np.array([-1], np.int64)


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
        self._mailboxes = Mailboxes(session, timeout_s=_SERVER_S)
        self._num_exchanges = self._num_pack = 0
        # Of this object: tells a program that was started again from the one before.
        self._run_id = secrets.randbits(32)
        self._to_first, *others = [self._link(worker) for worker in range(self._num_workers)]
        self._to_others = dict(enumerate(others, start=1))
        # Of each other worker, for worker 0: its run, with what its count of exchanges is short of the own; and its latest message's label.
        self._runs: dict[int, tuple[int, int]] = {}
        self._labels: dict[int, Array] = {}
        # Messages for a later exchange than the present one, of workers that have given that up.
        self._early: dict[int, list[Any]] = {}

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

    def combine(self, what: str, combinations: Sequence[Combination], *, hints: CollectiveHints) -> list[Any]:
        """Has all workers' contributions combined by worker 0. Raises DeadlineExceeded with the replicas that are missing."""
        wait_s = TIMEOUT_S if hints.timeout_seconds is None else hints.timeout_seconds
        results: list[Any] = []
        packs = list(_packs(combinations, hints.bytes_per_pack))
        begin = self._num_exchanges
        try:
            for self._num_pack, pack in enumerate(packs, start=1):
                self._num_exchanges += 1
                name = f"{what} (exchange {self._num_exchanges})"
                sent = pack if hints.wire_dtype is None else [_narrowed(one, hints.wire_dtype) for one in pack]
                found = self._lead(name, sent, wait_s) if self._index == _FIRST else self._follow(name, sent, wait_s + _GRACE_S)
                results += found if sent is pack else [_as_given(value, one) for value, one in zip(found, pack, strict=True)]
        finally:
            # Also where a worker gives up in the middle: the next call has the same numbers in all workers.
            self._num_exchanges = begin + len(packs)
        self._variables.has_reduced()
        return results

    def compute(self, call: FormulaCall) -> bool:
        """Has the parameter server of the variables compute a formula, with the other writes of the present block."""
        return self._variables.compute(call)

    def close(self) -> None:
        """Lets go of the connection that values meet over. Idempotent."""
        self._mailboxes.close()

    def _follow(self, what: str, combinations: Sequence[Combination], timeout_s: float) -> list[Any]:
        own = [value for one in combinations for value in (one.contributions[replica] for replica in self.replicas)]
        label = np.array(
            [self._run_id, self._num_exchanges, self._variables.step, *self._place, self._to_first.is_settled],
            np.float64,
        )
        try:
            _check_all(own)
        except InvalidSpec as error:
            # Worker 0 fails this exchange for all.
            self._to_first.say([label, _REFUSED, *_failed(error)])
        else:
            self._to_first.say([label, _codes(combinations), *own])
        deadline_s = time.monotonic() + timeout_s
        while (reply := self._to_first.hear(min(deadline_s, time.monotonic() + _AGAIN_S))) is None or not np.array_equal(reply[0], label):
            if reply is None and time.monotonic() >= deadline_s:
                reason = f"worker 0 with {self._named(_FIRST)} has not answered within {timeout_s:g} s; is its process there?"
                raise DeadlineExceeded(f"{what}: {reason}")
            if reply is None and self._variables.is_passed():
                reason = f"others have reduced this already, and written in step {self._variables.step}"
                raise Unavailable(f"{what}: {reason}; start the program of worker {self._index} again")
        self._to_first.is_answered()
        if int(reply[1]):
            raise _error_in(reply[1:])
        return [frozen(value) if isinstance(value, np.ndarray) else value for value in reply[2:]]

    def _lead(self, what: str, combinations: Sequence[Combination], timeout_s: float) -> list[Any]:
        arrived: list[int] = []
        try:
            gathered = self._gathered(what, combinations, arrived, timeout_s)
            _check_all([value for one in combinations for value in one.contributions.values()])
            results = [combine(one.op, contributions) for one, contributions in zip(combinations, gathered, strict=True)]
            _check_all(results)
        except Unavailable:
            raise  # this worker is behind; the others say again what they have said, to the program that comes after this one
        except _ERRORS as error:
            for worker in arrived:
                self._answer(worker, _failed(error))
            raise
        for worker in arrived:
            self._answer(worker, [np.float64(0), *results])
        return results

    def _gathered(self, what: str, combinations: Sequence[Combination], arrived: list[int], timeout_s: float) -> list[dict[int, Any]]:
        gathered = [dict(one.contributions) for one in combinations]
        codes, missing = _codes(combinations), list[int]()
        failed: Exception | None = None
        deadline_s = time.monotonic() + timeout_s
        for worker in range(1, self._num_workers):
            # What has come while another was waited for counts, too.
            received = self._received(worker, what, max(deadline_s, time.monotonic() + _LOOK_S))
            if received is None:
                missing.append(worker)
                continue
            if worker not in self._early:
                arrived.append(worker)
            if not isinstance(received, Exception) and not np.array_equal(received[0], codes):
                received = _unlike(f"{what}: worker {worker} reduces {_asked(received[0])} where worker 0 reduces {_asked(codes)}")
            if isinstance(received, Exception):
                failed = failed or received
                continue
            values = iter(received[1:])
            for contributions in gathered:
                contributions.update((replica, next(values)) for replica in self._replicas_of(worker))
        if missing:
            names = "; ".join(f"{self._named(worker)} of worker {worker}" for worker in missing)
            raise DeadlineExceeded(f"{what}: missing after {timeout_s:g} s: {names}; is its process there?")
        if failed is not None:
            raise failed
        return gathered

    def _received(self, worker: int, what: str, deadline_s: float) -> list[Any] | Exception | None:
        """Returns what a worker contributes to the present exchange, or why it does not; None if nothing has come by the deadline.

        Never what is for another exchange: a later one's message waits in `_early`.
        """
        link = self._to_others[worker]
        while (message := self._early.pop(worker, None) or link.hear(deadline_s)) is not None:
            run_id, number, step, *place, is_settled = (int(one) for one in message[0])
            own_step = self._variables.step
            is_behind = _NO_STEP < step < own_step
            if self._runs.get(worker, (0, 0))[0] != run_id:
                # A program that has been started again begins to count anew, and is where the others are, unless its variables are older.
                link.has_restarted()
                if is_behind:
                    self._labels[worker] = message[0]
                    self._answer(worker, _failed(_behind(what, worker, step, of=_FIRST, at=own_step)))
                    continue
                own_place = self._place
                if place[-1] != own_place[-1] or (_NO_STEP < step == own_step and place != own_place):
                    self._labels[worker] = message[0]
                    return _unlike(f"{what}: a program was started again: worker {worker} is at {_at(place)}, worker 0 at {_at(own_place)}")
                self._runs[worker] = run_id, self._num_exchanges - number
            exchange = number + self._runs[worker][1]
            if exchange >= self._num_exchanges and is_settled:
                link.is_answered()
            if exchange > self._num_exchanges:
                self._early[worker] = message
                return DeadlineExceeded(f"{what}: worker {worker} has given up this exchange, and waits for a later one")
            if exchange == self._num_exchanges:
                if _NO_STEP < own_step < step:
                    raise _behind(what, _FIRST, own_step, of=worker, at=step)
                self._labels[worker] = message[0]
                return _error_in(message[2:]) if np.array_equal(message[1], _REFUSED) else message[1:]
            latest = self._labels.get(worker)
            if latest is not None and np.array_equal(latest, message[0]):
                link.say_again()  # the answer was lost
            else:
                self._labels[worker] = message[0]
                self._answer(
                    worker, _failed(DeadlineExceeded(f"{what}: worker 0 has given up exchange {exchange}, which this one was for"))
                )
        return None

    @property
    def _place(self) -> list[int]:
        """Where in the step the present exchange is: the call, counted from 0, the reduction in it, and of that the part."""
        return [*self._variables.place, self._num_pack]

    def _answer(self, worker: int, answer: list[Any]) -> None:
        self._to_others[worker].say([self._labels[worker], *answer])

    def _replicas_of(self, worker: int) -> range:
        return range(worker * self._per_worker, (worker + 1) * self._per_worker)

    def _link(self, other: int) -> "_Link":
        here, there = (f"{self._named(worker)} of worker {worker}" for worker in (self._index, other))
        return _Link(
            self._mailboxes, f"strategy/{self._name}/{here} to worker {other}", f"strategy/{self._name}/{there} to worker {self._index}"
        )

    def _named(self, worker: int) -> str:
        replicas = self._replicas_of(worker)
        return f"replica {replicas[0]}" if len(replicas) == 1 else f"replicas {replicas[0]} to {replicas[-1]}"


class _Link:
    """Messages to and from one other worker. The latest is said again as long as nothing answers it, for a server may have lost it."""

    def __init__(self, mailboxes: Mailboxes, outgoing: str, incoming: str) -> None:
        self._mailboxes, self._outgoing, self._incoming = mailboxes, outgoing, incoming
        self._latest: list[Any] | None = None
        self._said_at_s = 0.0
        # Whether something may lie where the next message goes: at first, that of a program before this one.
        self._is_unclear = True
        # Whether the latest message was sent more than once, so that a copy may be left when it has been answered.
        self._is_repeated = False

    @property
    def is_settled(self) -> bool:
        """Whether the other is known to have the latest message, so that its answer was heard."""
        return self._latest is None

    def say(self, message: list[Any]) -> None:
        """Sends a message, in place of one not known to be read; `hear` tries again if it cannot. Raises InvalidSpec for other types."""
        again = self._is_unclear or self._latest is not None
        self._latest = message
        try:
            self._mailboxes.send(self._outgoing, message, again=again)
        except InvalidSpec:
            raise
        except PsError as error:
            self._fail(error)
        else:
            self._said_at_s, self._is_unclear = time.monotonic(), False

    def say_again(self) -> None:
        """Sends the latest message once more."""
        if self._latest is not None:
            self._is_unclear = self._is_repeated = True
            self.say(self._latest)

    def hear(self, deadline_s: float) -> list[Any] | None:
        """Returns the next message; None if there is none by the deadline. After 2 s, the log says what is waited for."""
        wait = Wait(self._incoming, None)
        while True:
            if time.monotonic() >= self._said_at_s + _AGAIN_S:
                self.say_again()
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._mailboxes.receive(self._incoming, min(left_s, wait.slice_s(), _AGAIN_S))
            except (DeadlineExceeded, Cancelled, AccumulatorNotFound):
                pass  # the latter: the other is just sending it again
            except PsError as error:
                self._fail(error)
            if time.monotonic() >= deadline_s:
                return None
            wait.explain("no message yet")

    def has_restarted(self) -> None:
        """Takes note that the other is a new process: what was sent to the one before may still lie there."""
        self._is_unclear = True

    def is_answered(self) -> None:
        """Takes note that the other has the latest message, and removes a copy of it that was sent for nothing."""
        self._latest = None
        if self._is_repeated:
            self._is_repeated = False
            try:
                self._mailboxes.discard(self._outgoing)
            except PsError as error:
                self._fail(error)

    def _fail(self, error: PsError) -> None:
        log.debug("%s: %s", self._outgoing, error)
        self._is_unclear = self._is_repeated = True
        self._said_at_s = 0.0
        self._mailboxes.renew()
        time.sleep(_PAUSE_S)


class _SharedVariables:
    """The variables with one copy: the session's model, of buffers. Every worker makes the same writes; one of them sends the values.

    What has been written is read here at once, and reaches the parameter servers with everything else of its block. What a formula gives
    is computed there, with the same step; here only if it is read or written before.
    """

    def __init__(self, session: Session, devices: tuple[str, ...], *, writes: bool) -> None:
        self._session, self._devices, self._writes = session, devices, writes
        self._declared: dict[str, tuple[Array, int]] = {}
        self._values: dict[str, Array] | None = None
        # Whether the values here may not be those on the parameter servers, since a write has failed.
        self._is_stale = False
        # Of the present block: values, and formulas that nothing here has needed the values of. No variable is in both, or in two formulas.
        self._pending: dict[str, Array] = {}
        self._calls: list[FormulaCall] = []
        self._num_blocks = 0
        # Where in the step the next reduction is: blocks with reductions that have ended, and reductions since then or in the present one.
        self._num_ended = self._num_reduced = 0

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

    @property
    def step(self) -> int:
        """The step of the variables, where all workers make each step together; _NO_STEP elsewhere, and before there are variables."""
        is_common = self._declared and self._values is not None and not self._session.policy.reads_latest
        return self._session.local_step if is_common else _NO_STEP

    @property
    def place(self) -> tuple[int, int]:
        """Where in the step the next reduction is: in which block, or between which, and its number there."""
        return 2 * self._num_ended + bool(self._num_blocks), self._num_reduced

    def has_reduced(self) -> None:
        """Counts a reduction that has succeeded."""
        self._num_reduced += 1

    def is_passed(self) -> bool:
        """Whether another worker has made the writes of the present step, or more, so that what came before them is over."""
        try:
            status = self._session.status() if self.step != _NO_STEP else None
        except PsError:
            return False  # the chief is away; then there are no steps either
        return status is not None and (status.global_step, bool(status.num_contributions)) > (self.step, False)

    def begin(self) -> None:
        """Creates the model or joins it, if there is anything in it."""
        if self._values is None:
            pins = {name: shard for name, (_, shard) in self._declared.items()}
            if self._declared:
                buffers = {name: Buffer(value) for name, (value, _) in self._declared.items()}
                self._session.create_or_join(buffers, optimizer=sgd(1.0), placement=Placement(pins=pins, split_bytes=0))
            self._refresh()
            if self._session.membership.participant.incarnation > 1 and self.is_passed():
                # In place of a program that was lost: the others have reduced what belongs to this step, and wait for its writes.
                self._session.step({}, updates={}, timeout_s=TIMEOUT_S)
                self._refresh()
        elif self._is_stale:
            self._refresh()

    def read(self, name: str) -> Array:
        """Returns a variable's value."""
        self.begin()
        if any(name in call.written for call in self._calls):
            self._compute_here()
        assert self._values is not None
        return self._values[name]

    def compute(self, call: FormulaCall) -> bool:
        """Has the parameter server compute a formula when the block ends; False if it cannot."""
        self.begin()
        if not self._can_be_sent(call):
            return False
        with self.together():
            self._calls.append(call)
        return True

    def write(self, name: str, value: Array) -> None:
        """Sets a variable, here at once, and on its parameter server when the block ends."""
        with self.together():
            self.begin()
            # Parameter servers compute formulas after they have set values.
            if any(name in call.variables.values() for call in self._calls):
                self._compute_here()
            assert self._values is not None
            self._values[name] = self._pending[name] = value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sends what was written in the block when it ends; if it fails, nothing was written."""
        self._num_blocks += 1
        if self._num_blocks == 1:
            num_before, step_before, self._num_reduced = self._num_reduced, self.step, 0
        try:
            yield
        except BaseException:
            if self._num_blocks == 1:
                self._num_reduced = num_before  # the call may be made again, as in a program that is started again
            if self._num_blocks == 1 and (self._pending or self._calls):
                self._pending, self._calls = {}, []
                self._undo()
            raise
        else:
            if self._num_blocks == 1 and (self._pending or self._calls):
                self._send()
            if self._num_blocks == 1 and _NO_STEP < step_before < self.step:
                self._num_ended = self._num_reduced = 0
            elif self._num_blocks == 1:
                self._num_ended += bool(self._num_reduced)
                self._num_reduced = 0 if self._num_reduced else num_before
        finally:
            self._num_blocks -= 1

    def _can_be_sent(self, call: FormulaCall) -> bool:
        """Whether a contribution can have this formula beside what there is already."""
        names = list(call.variables.values())
        value, shard = self._declared[call.variables["v"]]
        others = [self._declared[name] for name in names]
        is_alike = all((one.shape, one.dtype, where) == (value.shape, value.dtype, shard) for one, where in others)
        arrays = [array for array in call.values.values() if not isinstance(array, float)]
        is_given = len(arrays) <= len(call.written) and all((one.shape, one.dtype) == (value.shape, value.dtype) for one in arrays)
        has_type = value.dtype.itemsize >= _LEAST_ITEMSIZE
        is_free = not call.written & {*self._pending, *(name for one in self._calls for name in one.written)}
        texts = [one.formula.text for one in (*self._calls, call)]
        if not (is_alike and is_given and has_type and is_free and len(set(names)) == len(names)):
            return False
        try:
            check_amount(texts)
            _update_of(call)
        except (LimitExceeded, InvalidSpec):
            return False
        return True

    def _compute_here(self) -> None:
        """Makes the values of all formulas of the block, so far, known here."""
        calls, self._calls = self._calls, []
        assert self._values is not None
        for call in calls:
            given = {name: self._values[variable] for name, variable in call.variables.items()}
            for name, result in call.formula.compute({**given, **call.values}, in_double=True).items():
                self._values[call.variables[name]] = self._pending[call.variables[name]] = frozen(result)

    def _send(self) -> None:
        written, calls = self._pending, self._calls
        self._pending, self._calls = {}, []
        updates = [*written.items(), *((call.variables["v"], _update_of(call)) for call in calls)]
        try:
            push = self._session.step({}, updates=updates if self._writes else {}, timeout_s=TIMEOUT_S)
        except BaseException:
            self._undo()
            raise
        if push.outcome is not PushOutcome.ACCEPTED:
            self._undo()
            names = ", ".join(map(repr, sorted({*written, *(name for call in calls for name in call.written)})))
            raise Unavailable(
                f"not written: variables {names}: the contribution is {push.outcome.name}; the cluster went back to an earlier step, or "
                "training is finished"
            )
        self._refresh()

    def _undo(self) -> None:
        """Takes the values of the parameter servers again, now or when one is next used: what was written here has not reached them."""
        self._is_stale = self._values is not None
        try:
            self._refresh()
        except PsError as error:
            log.debug("the variables are read again when one is next used: %s", error)

    def _refresh(self) -> None:
        self._values = {name: frozen(value) for name, value in self._session.read().items()} if self._declared else {}
        self._is_stale = False


def _packs(combinations: Sequence[Combination], max_bytes: int) -> Iterator[Sequence[Combination]]:
    """Yields values that go together. All workers cut alike, for replicas may have different rows, but arrays of one shape."""
    begin = num_bytes = 0
    for index, one in enumerate(combinations):
        value = one.contributions[min(one.contributions)]
        nbytes = 0 if isinstance(value, IndexedSlices) else np.asarray(value).nbytes
        if max_bytes and index > begin and num_bytes + nbytes > max_bytes:
            yield combinations[begin:index]
            begin, num_bytes = index, 0
        num_bytes += nbytes
    yield combinations[begin:]


def _narrowed(combination: Combination, dtype: str) -> Combination:
    """Returns a combination whose floats travel as `dtype`, if they are wider."""
    return Combination(op=combination.op, contributions={replica: _cast(one, dtype) for replica, one in combination.contributions.items()})


def _cast(value: Any, dtype: str) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(value.indices, _cast(np.asarray(value.values), dtype), value.dense_shape)
    array = np.asarray(value)
    with np.errstate(over="ignore"):  # what is too large is infinite, as everywhere
        return array.astype(dtype) if array.dtype.kind == "f" and array.dtype.itemsize > np.dtype(dtype).itemsize else array


def _as_given(result: Any, combination: Combination) -> Any:
    """Returns a result in the element type of what was contributed."""
    value = combination.contributions[min(combination.contributions)]
    if isinstance(result, IndexedSlices):
        return IndexedSlices(result.indices, result.values.astype(np.asarray(value.values).dtype), result.dense_shape)
    dtype = np.asarray(value).dtype
    return frozen(result.astype(dtype)) if dtype.kind == "f" and result.dtype != dtype else result


def _update_of(call: FormulaCall) -> UpdateFormula:
    variables = {name: variable for name, variable in call.variables.items() if name != "v"}
    return UpdateFormula(call.formula.text, **variables, **call.values)


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


def _behind(what: str, worker: int, step: int, *, of: int, at: int) -> Unavailable:
    return Unavailable(
        f"{what}: worker {worker} is at step {step}, worker {of} at {at}: they would reduce values of different steps; "
        f"start the program of worker {worker} again"
    )


def _check_all(values: Sequence[Any]) -> None:
    for value in values:
        check(value)


def _unlike(what: str) -> ValueError:
    return ValueError(f"{what}; all workers must make the same calls in the same order")


def _at(place: Sequence[int]) -> str:
    block, reduction, part = place
    return f"{'call' if block % 2 else 'outside, before call'} {block // 2 + 1} of the step, reduction {reduction + 1}, part {part}"


def _error_in(message: Sequence[Any]) -> Exception:
    """Returns the error of which `_failed` made this."""
    return _ERRORS[int(message[0]) - 1](_text_of(message[1]))


def _failed(error: Exception) -> list[Any]:
    kind = next(index for index, known in enumerate(_ERRORS) if isinstance(error, known))
    return [np.float64(kind + 1), _numbers_of(error.message if isinstance(error, PsError) else str(error))]


def _codes(combinations: Sequence[Combination]) -> Array:
    return np.array([_OPS.index(one.op) for one in combinations], np.int64)


def _asked(codes: Array) -> str:
    return ", ".join("the first" if (op := _OPS[int(code)]) is None else op.name for code in codes) or "nothing"


def _numbers_of(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)


def _text_of(numbers: Array) -> str:
    return bytes(numbers.astype(np.uint8)).decode()
