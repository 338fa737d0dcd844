"""A strategy's replicas in several worker processes: reductions over mailboxes, variables on parameter servers. Knows the session."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import DeadlineExceeded, InvalidSpec, LimitExceeded, MalformedMessage, PsError
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import FIRST_NOTICE_S, Wait
from worker_client.model.declarations import IndexedSlices
from worker_client.session.session import Session
from worker_client.strategy.exchange import FIRST, Action, Contributing, Gathering, Place, Send, exchange_text, replicas_of
from worker_client.strategy.group import Cell, CollectiveHints, Combination
from worker_client.strategy.links import AGAIN_S, Link, new_sender
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.messages import Message
from worker_client.strategy.reduction import frozen
from worker_client.strategy.shared_variables import SharedVariables

log = logging.getLogger("lockstep.worker")

TIMEOUT_S = 60.0
# Worker 0 waits for all workers and names the missing ones; the other workers wait this much longer for that.
_GRACE_S = 5.0
# At the deadline, worker 0 still takes messages that have arrived from each.
_LOOK_S = 0.5
# A worker that took part in earlier exchanges is not asked for its results of the present one before this time.
_LONG_S = 15.0
# A parameter server that does not answer is given up for so long.
_SERVER_S = 5.0


class WorkerGroup:
    """The replicas of all workers of a cluster, `replicas_per_worker` in each, as one worker's group.

    Worker 0 gathers all contributions, adds them in the order of the replicas, and sends the result to all. Variables with one copy are
    the session's model: the writes of one `run()`, or outside of it of one `update()`, are one step of the cluster. For the thread that the
    session belongs to.
    """

    def __init__(self, session: Session, replicas_per_worker: int, *, name: str) -> None:
        self._per_worker = replicas_per_worker
        self._num_workers, self._index = session.num_workers, session.worker_index
        if self._num_workers < 1:
            raise InvalidSpec("a strategy needs a cluster for a certain number of workers; start the chief with --workers")
        addresses = session.membership.registration.shard_addresses
        self._parameter_devices = tuple(f"ps:{index}" + (f" at {address}" if address else "") for index, address in enumerate(addresses))
        self._exchanges = _exchanges(session, replicas_per_worker, name=name)
        is_first = self._index == FIRST
        self._variables = SharedVariables(session, self._parameter_devices, writes=is_first, stepping=self._exchanges.answering)

    @property
    def replicas(self) -> range:
        """The ids of this worker's replicas."""
        return range(self._index * self._per_worker, (self._index + 1) * self._per_worker)

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

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes one step of the cluster of all writes in the block. Blocks may be nested: the outermost counts."""
        with self._variables.together():
            yield
        if not self._variables.is_in_call:
            self._exchanges.end_call()

    def combine(self, what: str, combinations: Sequence[Combination], *, hints: CollectiveHints) -> list[Any]:
        """Has all workers' contributions combined by worker 0. Raises DeadlineExceeded with the replicas that are missing."""
        wait_s = TIMEOUT_S if hints.timeout_seconds is None else hints.timeout_seconds
        results: list[Any] = []
        packs = list(_packs(combinations, hints.bytes_per_pack))
        numbers = self._variables.numbers(len(packs))
        for part, (pack, number) in enumerate(zip(packs, numbers, strict=True), start=1):
            sent = pack if hints.wire_dtype is None else [_narrowed(one, hints.wire_dtype) for one in pack]
            place = self._variables.place(part)
            found = self._exchanges.combined(f"{what} ({exchange_text(number)})", sent, place=place, number=number, timeout_s=wait_s)
            results += found if sent is pack else [_as_given(value, one) for value, one in zip(found, pack, strict=True)]
        self._variables.has_reduced()
        return results

    def close(self) -> None:
        """Lets go of the connection that values meet over. Idempotent."""
        self._exchanges.close()


class _Exchanges:
    """Carries out exchanges: this worker's part in them, and its links to the other workers."""

    def __init__(self, side: Gathering | Contributing, links: dict[int, Link], mailboxes: Mailboxes, *, per_worker: int) -> None:
        self._side, self._links, self._mailboxes, self._per_worker = side, links, mailboxes, per_worker

    def combined(self, what: str, combinations: Sequence[Combination], *, place: Place, number: int, timeout_s: float) -> list[Any]:
        """Returns the combined contributions of all workers. Raises the exchange's error."""
        if isinstance(self._side, Gathering):
            return self._gathered(self._side, what, combinations, place=place, number=number, timeout_s=timeout_s)
        return self._contributed(self._side, what, combinations, place=place, number=number, timeout_s=timeout_s + _GRACE_S)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answers other workers while this one waits in the block: a restarted program asks for earlier results."""
        over = threading.Event()
        thread = threading.Thread(target=self._answer, args=(over,), name="strategy answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def end_call(self) -> None:
        """Takes note that a call of the program is over."""
        self._side.end_call()

    def close(self) -> None:
        """Lets go of the connection. Idempotent."""
        self._mailboxes.close()

    def _gathered(
        self, side: Gathering, what: str, combinations: Sequence[Combination], *, place: Place, number: int, timeout_s: float
    ) -> list[Any]:
        wait, begin_s = Wait(what, None), time.monotonic()
        try:
            self._do(side.begin(what, place, combinations, exchange=number, timeout_s=timeout_s))
            while (worker := side.waits_for) is not None:
                # Also when time is up, messages that have arrived from each count.
                left_s = max(begin_s + timeout_s - time.monotonic(), 0.0)
                message = self._links[worker].receive(min(left_s, wait.slice_s()) or _LOOK_S)
                if message is not None:
                    self._do(_taken(side, worker, message))
                elif not left_s:
                    self._do(side.miss(worker))
                else:
                    wait.explain(f"nothing has come of {replicas_of(worker, self._per_worker)} of worker {worker}; is its process there?")
                    if time.monotonic() >= begin_s + (AGAIN_S if side.is_new_to(worker) else _LONG_S):
                        self._do(side.ask(worker))
            self._deliver()
        except (InvalidSpec, LimitExceeded) as error:
            self._do(side.fail(error))
            self._deliver()
        return side.results()

    def _contributed(
        self, side: Contributing, what: str, combinations: Sequence[Combination], *, place: Place, number: int, timeout_s: float
    ) -> list[Any]:
        first = f"worker 0 with {replicas_of(FIRST, self._per_worker)}"
        wait, deadline_s = Wait(what, None), time.monotonic() + timeout_s
        try:
            self._do(side.begin(place, combinations, exchange=number))
        except (InvalidSpec, LimitExceeded) as error:
            self._do(side.refuse(error, exchange=number))
        while not side.is_over:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                side.give_up(DeadlineExceeded(f"{what}: {first} has not answered within {timeout_s:g} s; is its process there?"))
            elif (message := self._links[FIRST].receive(min(left_s, wait.slice_s()))) is not None:
                self._do(_taken(side, FIRST, message))
            else:
                wait.explain(f"no answer of {first}, which gathers what all contribute; it says who is missing")
        return side.results()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            link = self._links[action.worker]
            if isinstance(action, Send):
                link.send(action.message)
            else:
                link.settle()

    def _deliver(self) -> None:
        """Tries again to send what could not be sent, as long as the others may wait for it: this program may end now."""
        end_s = time.monotonic() + _GRACE_S
        for link in self._links.values():
            link.deliver(end_s - time.monotonic())

    def _answer(self, over: threading.Event) -> None:
        """Takes messages in until the block is over. A step that takes no longer than usual costs nothing but the thread."""
        if over.wait(FIRST_NOTICE_S):
            return
        while not over.wait(_LOOK_S):
            for worker, link in self._links.items():
                try:
                    while not over.is_set() and (message := link.receive(0.0)) is not None:
                        self._do(_taken(self._side, worker, message))
                except PsError as error:
                    log.warning("worker %d was not answered: %s", worker, error)


def _taken(side: Gathering | Contributing, worker: int, message: Message) -> list[Action]:
    try:
        return side.receive(worker, message)
    except MalformedMessage as error:
        log.warning("a message of worker %d is ignored: %s", worker, error)
        return []


def _exchanges(session: Session, per_worker: int, *, name: str) -> _Exchanges:
    mailboxes, sender = Mailboxes(session, timeout_s=_SERVER_S), new_sender()
    index, num_workers = session.worker_index, session.num_workers

    def link(other: int) -> Link:
        # Also if programs differ in their number of replicas: they exchange messages, and get an error that says so.
        return Link(mailboxes, outgoing=f"strategy/{name}/worker {index} to {other}", incoming=f"strategy/{name}/worker {other} to {index}")

    is_restarted = session.membership.may_have_predecessor
    if index != FIRST:
        side = Contributing(sender, is_restarted=is_restarted)
        return _Exchanges(side, {FIRST: link(FIRST)}, mailboxes, per_worker=per_worker)
    gathering = Gathering(sender, num_workers=num_workers, per_worker=per_worker, is_restarted=is_restarted)
    return _Exchanges(gathering, {worker: link(worker) for worker in range(1, num_workers)}, mailboxes, per_worker=per_worker)


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
    return replace(combination, contributions={replica: _cast(one, dtype) for replica, one in combination.contributions.items()})


def _cast(value: Any, dtype: str) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(value.indices, _cast(np.asarray(value.values), dtype), value.dense_shape)
    array = np.asarray(value)
    with np.errstate(over="ignore"):  # too large values become infinite, as everywhere
        return array.astype(dtype) if array.dtype.kind == "f" and array.dtype.itemsize > np.dtype(dtype).itemsize else array


def _as_given(result: Any, combination: Combination) -> Any:
    """Returns a result in the element type of the contributions."""
    value = combination.contributions[min(combination.contributions)]
    if isinstance(result, IndexedSlices):
        return IndexedSlices(result.indices, result.values.astype(np.asarray(value.values).dtype), result.dense_shape)
    dtype = np.asarray(value).dtype
    return frozen(result.astype(dtype)) if dtype.kind == "f" and result.dtype != dtype else result
