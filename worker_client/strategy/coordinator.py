"""Closures that any worker runs: scheduled in one program, run by functions that the workers' programs have registered. Knows no replica.

The coordinator's program has the queue. It hands each worker one closure at a time and waits for the outcome, over a link of mailboxes on
the parameter servers. If a worker is lost, another one runs its closure.

A coordinator first greets each worker, and uses those that answer. An outcome names the message that it answers, so that an outcome for an
earlier coordinator is never taken for one of this coordinator. A worker that serves answers every coordinator with its name.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ps_protocol.errors import Cancelled, InvalidSpec, LimitExceeded, MalformedMessage, PsError
from ps_protocol.model.variables import check_name
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import ParticipantKind
from worker_client.session.observer import Observer
from worker_client.session.session import Session
from worker_client.strategy.closures import (
    Call,
    Outcome,
    PerWorkerDataset,
    PerWorkerIterator,
    pack_call,
    pack_outcome,
    unpack_call,
    unpack_outcome,
)
from worker_client.strategy.links import AGAIN_S, Link, new_sender
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.messages import Message, Serial
from worker_client.strategy.values import arguments, map_nested

log = logging.getLogger("lockstep.worker")

# How long one look for a message blocks, and how often the workers are looked at.
_SLICE_S = 0.5
# A server that does not answer is given up for so long.
_SERVER_S = 5.0
_CLOSING_S = 5.0

_Worker = tuple[int, int]  # index and incarnation


class RemoteValue:
    """The result of a scheduled closure, once it has run. `coordinator.fetch()` and `fetch()` wait for it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_done = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether the closure has run, has failed, or was cancelled."""
        return self._is_done.is_set()

    @property
    def has_value(self) -> bool:
        """Whether the closure has run and has not failed."""
        return self._is_done.is_set() and self._error is None

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Waits for the closure and returns its value.

        Raises RuntimeError if it failed, Cancelled if it was cancelled because another one had failed, DeadlineExceeded.
        """
        wait = Wait(f"fetch: {self._what}", timeout_s)
        while not self._is_done.wait(wait.slice_s()):
            wait.explain("it has not run yet")
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any, error: Exception | None) -> None:
        """Sets the value or the error, once; for the coordinator."""
        if not self._is_done.is_set():
            self._value, self._error = value, error
            self._is_done.set()


class _Job:
    def __init__(self, number: int, call: Call) -> None:
        self.what = f"closure {number}, {call.function!r}"
        self.message = pack_call(call)
        self.value = RemoteValue(self.what)


class _Gone(Exception):
    """The worker is no more, or is another process now."""


class _GivenUp(Exception):
    """The coordinator is being closed."""


class _Queue:
    """Closures that wait, closures that run on workers, and the failure not raised yet. Owns the lock; closures are handed out in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running: dict[_Worker, tuple[_Job, float]] = {}
        # Workers that have answered and take closures.
        self._serving: set[_Worker] = set()
        self._keyed: dict[str, RemoteValue] = {}
        self._num_scheduled = 0
        self._failure: Exception | None = None
        self._live: frozenset[_Worker] = frozenset()
        self._is_closing = False

    def add(self, call: Call, key: str | None) -> RemoteValue:
        """Takes a closure in; one whose key was seen is the same as then."""
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the coordinator is closed")
            if key is not None and key in self._keyed:
                return self._keyed[key]
            self._num_scheduled += 1
            job = _Job(self._num_scheduled, call)
            self._jobs.append(job)
            if key is not None:
                self._keyed[key] = job.value
            self._changed.notify_all()
            return job.value

    def take(self, worker: _Worker) -> _Job | None:
        """Waits for a closure for this worker and returns it; None once the queue is closed. Raises _Gone."""
        with self._changed:
            self._serving.add(worker)
            while not self._jobs or self._failure is not None:
                if self._is_closing:
                    return None
                if worker not in self._live:
                    raise _Gone
                self._changed.wait(_SLICE_S)
            job = self._jobs.popleft()
            self._running[worker] = job, time.monotonic()
            return job

    def put_back(self, worker: _Worker) -> None:
        """Gives this worker's closure to another one, if it has one."""
        with self._changed:
            found = self._running.pop(worker, None)
            if found is not None and not found[0].value.is_done:
                log.warning("%s was on worker %d, which is lost; another worker runs it", found[0].what, worker[0])
                if self._failure is not None:
                    self._cancel(found[0])
                else:
                    self._jobs.appendleft(found[0])
            self._changed.notify_all()

    def finish(self, worker: _Worker, outcome: Outcome) -> None:
        """Handles an outcome. The first failure cancels closures that have not begun."""
        with self._changed:
            job, _ = self._running.pop(worker)
            error = RuntimeError(f"{job.what} failed on worker {worker[0]}: {outcome.error}") if outcome.error else None
            job.value.settle(outcome.value, error)
            if error is not None and self._failure is None:
                self._failure = error
                while self._jobs:
                    self._cancel(self._jobs.popleft())
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raises the failure that was not raised yet, once no closure is running; the queue can be used again afterwards."""
        wait = Wait("a closure has failed", None)
        with self._changed:
            failure = self._failure
            # Another thread may raise it meanwhile; then closures run again.
            while self._failure is not None and self._failure is failure and self._running:
                self._wait(wait)
            if self._failure is failure:
                self._raise_locked()

    def join(self, timeout_s: float | None) -> None:
        """Waits until nothing is queued and nothing runs. Raises the failure, or DeadlineExceeded, and then it stays."""
        wait = Wait("join", timeout_s)
        with self._changed:
            while self._running or (self._jobs and self._failure is None):
                self._wait(wait)
            self._raise_locked()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued and nothing runs."""
        with self._changed:
            return not self._jobs and not self._running

    def see(self, live: frozenset[_Worker]) -> None:
        """Takes note of the workers that there are."""
        with self._changed:
            self._live = live
            self._changed.notify_all()

    def is_live(self, worker: _Worker) -> bool:
        """Whether the worker was there when the chief was last asked."""
        return worker in self._live

    def close(self) -> None:
        """Cancels closures that have not begun."""
        with self._changed:
            self._is_closing = True
            while self._jobs:
                self._cancel(self._jobs.popleft())
            self._changed.notify_all()

    def _raise_locked(self) -> None:
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        # A closure that has failed or was cancelled may be scheduled again under its key.
        self._keyed = {key: value for key, value in self._keyed.items() if value.has_value}
        self._changed.notify_all()
        raise failure

    def _wait(self, wait: Wait) -> None:
        self._changed.wait(wait.slice_s())
        now = time.monotonic()
        running = [f"{job.what} on worker {worker[0]} for {now - since:.0f} s" for worker, (job, since) in self._running.items()]
        num_serving = len(self._serving & self._live)
        idle = f"none has begun yet; workers that serve: {num_serving}" if num_serving else "no worker has called serve(), as far as known"
        where = ", ".join(running[:3]) or idle
        wait.explain(f"{len(self._jobs)} closures queued, {len(self._running)} running: {where}")

    def _cancel(self, job: _Job) -> None:
        job.value.settle(None, Cancelled(f"{job.what} was cancelled: another closure had failed, or the coordinator was closed"))


class ClusterCoordinator:
    """Has the workers of a cluster run closures. A context manager: at its end, `serve()` returns in the workers.

    `target`: an observer of the cluster, or a session, whose worker then runs none itself. A closure runs at least once: if its worker is
    lost before the outcome has come, another one runs it. Its value counts once. Coordinators that use one cluster at a time have
    different names. Thread-safe.
    """

    def __init__(self, target: Session | Observer, *, name: str = "main") -> None:
        check_name(name)
        if not isinstance(target, Session | Observer):
            raise InvalidSpec(
                f"target: got a {type(target).__name__}, want the session of lockstep.connect(), or lockstep.observe()'s observer"
            )
        self._target, self._name = target, name
        self._sender = new_sender()
        self._own: int | None = target.worker_index if isinstance(target, Session) else None
        self._queue = _Queue()
        self._num_datasets = 0
        self._mail = Mailboxes(target, timeout_s=_SERVER_S)
        self._lanes: dict[_Worker, threading.Thread] = {}
        self._is_closing, self._is_closed = threading.Event(), False
        self._monitor = threading.Thread(target=self._watch, name=f"coordinator {name}", daemon=True)
        self._monitor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schedule(
        self, fn: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> RemoteValue:
        """Has a worker call the function that it has registered under this name, or that of a function given here; returns at once.

        Arguments and result are arrays, IndexedSlices, numbers, text, and tuples, lists and dicts of them; a RemoteValue among the
        arguments is waited for. With `key`, a closure that was scheduled with the same key is the same closure, and runs for one result.
        Raises the error of a closure that has failed before, as `join()` does, and InvalidSpec for arguments that cannot travel.
        """
        self._queue.raise_failure()
        function = _name_of(fn, "schedule()")
        given = map_nested(lambda one: one.fetch() if isinstance(one, RemoteValue) else one, arguments("schedule()", args, kwargs))
        return self._queue.add(Call(function=function, args=given[0], kwargs=given[1]), key)

    def create_per_worker_dataset(self, dataset_fn: str | Callable[..., Any]) -> PerWorkerDataset:
        """Returns a dataset of each worker's own, made there by the function that it has registered under this name.

        `iter()` of it can be an argument of closures: in each worker, they get the elements of one iterator of that worker, one after the
        other. It is made for the worker's first closure with it, and anew when another process has taken the worker's place.
        """
        self._num_datasets += 1
        return PerWorkerDataset(_name_of(dataset_fn, "create_per_worker_dataset()"), self._num_datasets)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all closures have run. Raises the error of the first that failed, once, as RuntimeError; DeadlineExceeded.

        A failure cancels the closures that had not begun. When it is raised, none runs any more, and more can be scheduled. If the running
        ones take longer than `timeout_s`, DeadlineExceeded is raised, and a later call raises the failure.
        """
        self._queue.join(timeout_s)

    def done(self) -> bool:
        """Whether all closures have run. Raises the errors of `join()`; waits only if one has failed, for the running ones."""
        self._queue.raise_failure()
        return self._queue.is_idle

    def fetch(self, value: Any, timeout_s: float | None = None) -> Any:
        """Returns the value of a RemoteValue, also in tuples, lists and dicts. Raises the errors of its `fetch()`."""
        return map_nested(lambda one: one.fetch(timeout_s) if isinstance(one, RemoteValue) else one, value)

    def close(self) -> None:
        """Cancels closures that have not begun, waits up to 5 s for running ones, and has `serve()` return in the workers. Idempotent."""
        self._is_closing.set()
        self._queue.close()
        end = time.monotonic() + _CLOSING_S
        self._monitor.join(_CLOSING_S)
        for lane in list(self._lanes.values()):
            lane.join(max(0.0, end - time.monotonic()))
        if not self._is_closed:
            self._is_closed = True
            try:
                # For workers whose place the chief had given up, and which have taken it again since it was asked last.
                self._mail.mark(_closings(self._name))
                self._mail.mark(_closing(self._name, self._sender.run))
            except PsError as error:
                log.warning("coordinator: workers that have just joined may not learn that it is closed: %s", error)
        self._mail.close()

    def _watch(self) -> None:
        """Looks which workers there are, and opens a lane to each."""
        is_last = False
        while not is_last:
            # Once more at the end, so that workers that have just joined get it.
            is_last = self._is_closing.is_set()
            try:
                found = self._target.status().participants
            except (PsError, RuntimeError) as error:
                # While the chief is away, the workers are taken to be there.
                log.debug("coordinator: the chief did not answer which workers there are: %s", error)
                self._is_closing.wait(_SLICE_S)
                continue
            workers = [one for one in found if one.kind is ParticipantKind.WORKER and one.state == "live" and one.index != self._own]
            live = frozenset((one.index, one.incarnation) for one in workers)
            self._queue.see(live)
            for worker in sorted(live - self._lanes.keys()):
                lane = threading.Thread(target=self._serve, args=(worker,), name=f"closures of worker {worker[0]}", daemon=True)
                self._lanes[worker] = lane
                lane.start()
            self._is_closing.wait(_SLICE_S)

    def _serve(self, worker: _Worker) -> None:
        """Hands a worker one closure after the other."""
        link = Link(self._mail, outgoing=_closures(self._name, worker), incoming=_outcomes(self._name, worker))
        try:
            if not self._is_served(worker, link):
                return
            while (job := self._queue.take(worker)) is not None:
                try:
                    outcome = unpack_outcome(self._answered(worker, link, self._sender.message(job.message)))
                except (InvalidSpec, LimitExceeded) as error:
                    outcome = Outcome(error=f"it cannot be sent: {type(error).__name__}: {error.message}")
                except MalformedMessage as error:
                    outcome = Outcome(error=f"what it returned: {error.message}")
                self._queue.finish(worker, outcome)
            link.send(self._sender.message(pack_call(Call(function="", kwargs={}))))
        except _Gone:
            self._queue.put_back(worker)
            link.discard()
        except PsError as error:
            log.warning("coordinator: worker %d is given up: %s", worker[0], error)
            self._queue.put_back(worker)

    def _is_served(self, worker: _Worker, link: Link) -> bool:
        """Waits until the worker serves; False: the coordinator was closed before. Raises _Gone."""
        while not self._is_closing.is_set():
            try:
                self._answered(worker, link, self._sender.message(()), until=self._is_closing)
                return True
            except _GivenUp:
                link.discard()
            except LimitExceeded as error:
                log.debug("coordinator: worker %d: %s", worker[0], error)
        return False

    def _answered(self, worker: _Worker, link: Link, message: Message, *, until: threading.Event | None = None) -> Sequence[Any]:
        """Sends a message and returns its answer.

        Raises _Gone if the worker is no more, InvalidSpec and LimitExceeded if the message cannot be sent, and _GivenUp at `until`.
        """
        link.send(message)
        while True:
            answer = link.receive(_SLICE_S)
            if answer is not None and _answered_by(answer) == message.serial:
                link.settle()
                return answer.values[1:]
            if not self._queue.is_live(worker):
                raise _Gone
            if until is not None and until.is_set():
                raise _GivenUp


def serve(session: Session, functions: Mapping[str, Callable[..., Any]], *, name: str = "main") -> int:
    """Runs the closures that the coordinator of this name schedules, until it is closed; returns how many have run here.

    `functions`: the functions that can be scheduled, by name. If one raises, the coordinator gets the error. Returns too once
    training is finished. Raises what the session raises when it cannot continue.
    """
    check_name(name)
    if not isinstance(session, Session):
        raise InvalidSpec(f"session: got a {type(session).__name__}, want the session that lockstep.connect() returns")
    if not isinstance(functions, Mapping):
        raise InvalidSpec(f"serve(): got a {type(functions).__name__}, want a dict of functions by name")
    for function in functions.values():
        if not callable(function):
            raise InvalidSpec(f"serve(): got a {type(function).__name__}, want functions by name")
    mail = Mailboxes(session, timeout_s=_SERVER_S)
    num_run, num_closings = 0, mail.num_marks(_closings(name))
    try:
        is_over, here = False, _Here(functions)
        while not is_over:
            num_more, is_over = _Serving(session, mail, here, name=name, num_closings=num_closings).run()
            num_run += num_more
        return num_run
    finally:
        mail.close()


class _Here:
    """The functions for closures in this process, and its iterators over datasets."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._iterators: dict[PerWorkerIterator, Iterator[Any]] = {}

    def answer(self, call: Call) -> list[Any]:
        """Runs a closure and returns its outcome as a message."""
        try:
            function = self._function(call.function)
            args, kwargs = map_nested(self._own, (call.args, dict(call.kwargs)))
            return pack_outcome(Outcome(value=function(*args, **kwargs)))
        except _NoFunction as error:
            return pack_outcome(Outcome(error=str(error)))
        except (Exception, SystemExit) as error:
            # SystemExit, too: if the worker ended, its closure would go to the next worker and end that one, too.
            log.warning("closure %r failed", call.function, exc_info=True)
            return pack_outcome(Outcome(error=f"{type(error).__name__}: {error}"))

    def _function(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            raise _NoFunction(f"the worker has no function {name!r}; it has {', '.join(sorted(self._functions)) or 'none'}")
        return self._functions[name]

    def _own(self, value: Any) -> Any:
        if not isinstance(value, PerWorkerIterator):
            return value
        if value not in self._iterators:
            self._iterators[value] = iter(self._function(value.dataset.function)())
        return self._iterators[value]


class _NoFunction(Exception):
    """A closure names a function that there is not."""


class _Serving:
    """Serves as one incarnation of a worker: answers each message of a coordinator once."""

    def __init__(self, session: Session, mail: Mailboxes, here: _Here, *, name: str, num_closings: int) -> None:
        self._session, self._mail, self._here, self._name, self._num_closings = session, mail, here, name, num_closings
        self._worker = _identity(session)
        self._sender = new_sender()
        self._link = Link(mail, outgoing=_outcomes(name, self._worker), incoming=_closures(name, self._worker))
        # The latest message that was answered.
        self._latest: Serial | None = None

    def run(self) -> tuple[int, bool]:
        """Returns how many closures have run, and whether that is all: else the worker has another incarnation now."""
        num_run, looked_at_s = 0, time.monotonic()
        while _identity(self._session) == self._worker:
            message = self._received()
            if self._session.is_finished:
                return num_run, True
            if message is not None and not self._is_copy(message.serial):
                try:
                    call = self._begun(message)
                except MalformedMessage as error:
                    self._answer(pack_outcome(Outcome(error=error.message)))
                    continue
                if call is not None and not call.function:
                    return num_run, True
                num_run += call is not None
                self._answer(pack_outcome(Outcome()) if call is None else self._here.answer(call))
            elif time.monotonic() >= looked_at_s + AGAIN_S:
                looked_at_s = time.monotonic()
                if self._is_closed():
                    return num_run, True
        return num_run, False

    def _received(self) -> Message | None:
        try:
            return self._link.receive(_SLICE_S)
        except LimitExceeded as error:
            # An earlier outcome, whose server has been restarted meanwhile.
            self._answer(_unsent(error))
            return None

    def _begun(self, message: Message) -> Call | None:
        """Takes in a coordinator's message: a closure, or a greeting."""
        # A message of another coordinator does not say that the one before has got its outcome.
        if self._latest is not None and self._latest.run == message.serial.run:
            self._link.settle()
        self._latest = message.serial
        return unpack_call(message.values) if message.values else None

    def _is_copy(self, serial: Serial) -> bool:
        return self._latest is not None and serial.run == self._latest.run and serial.number <= self._latest.number

    def _is_closed(self) -> bool:
        """Whether the coordinator is closed; before its first message, whether more with its name are closed than at the start."""
        try:
            # A worker that has just left one coordinator may learn late that it is closed, and must not leave the next one for that.
            if self._latest is not None:
                return self._mail.num_marks(_closing(self._name, self._latest.run)) > 0
            return self._mail.num_marks(_closings(self._name)) > self._num_closings
        except PsError as error:
            log.debug("closures: %s", error)
            return False

    def _answer(self, outcome: list[Any]) -> None:
        """Sends the outcome of the latest message, or the reason why it cannot be sent."""
        assert self._latest is not None
        head = np.array([self._latest.run, self._latest.number], np.int64)
        try:
            self._link.send(self._sender.message([head, *outcome]))
        except LimitExceeded as error:
            self._link.send(self._sender.message([head, *_unsent(error)]))


def _unsent(error: LimitExceeded) -> list[Any]:
    return pack_outcome(Outcome(error=f"what the closure returned cannot be sent: {type(error).__name__}: {error.message}"))


def _answered_by(message: Message) -> Serial | None:
    """Returns the serial of the message that this one answers; None if it cannot be read."""
    try:
        run, number = (int(one) for one in message.values[0])
    except (IndexError, TypeError, ValueError, OverflowError):
        return None
    return Serial(run, number)


def _name_of(fn: object, what: str) -> str:
    function = fn if isinstance(fn, str) else getattr(fn, "__name__", "")
    if not isinstance(function, str) or not function:
        raise InvalidSpec(f"{what}: got a {type(fn).__name__}, want the name of a function that the workers have registered")
    return function


def _closings(name: str) -> str:
    return f"coordinator/{name}/closings"


def _closing(name: str, run: int) -> str:
    return f"coordinator/{name}/run {run}/closing"


def _identity(session: Session) -> _Worker:
    participant = session.membership.participant
    return participant.index, participant.incarnation


def _closures(name: str, worker: _Worker) -> str:
    return f"coordinator/{name}/closures for worker {worker[0]} incarnation {worker[1]}"


def _outcomes(name: str, worker: _Worker) -> str:
    return f"coordinator/{name}/outcomes of worker {worker[0]} incarnation {worker[1]}"
