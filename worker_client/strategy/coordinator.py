"""Closures that any worker runs: scheduled in one program, run by functions that the workers' programs have registered. Knows no replica.

The coordinator's program has the queue. It hands each worker one closure at a time and waits for the outcome, over mailboxes on the
parameter servers. What may have been lost with a server is sent again; a worker that is gone has its closure run by another one.

A coordinator calls each worker by a run of its own and the number of the closure that it is to wait for, 0 for a worker that has not
answered yet. All that follows names the run, so that nothing of an earlier coordinator is taken for this one's. The call is sent again
until it is answered; a worker that waits looks for calls every few seconds, and changes to the run that called it last.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ps_protocol.errors import AccumulatorNotFound, Cancelled, DeadlineExceeded, InvalidSpec, PsError
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
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.values import map_nested

log = logging.getLogger("lockstep.worker")

# How long one look for a message blocks, and how often the workers are looked at.
_SLICE_S = 0.5
# What has had no answer for so long is said again: a server that was started again has forgotten it.
_AGAIN_S = 3.0
# A server that does not answer is given up for so long.
_SERVER_S = 5.0
_PAUSE_S = 0.2
# How long a worker that waits for a closure looks for the call of another coordinator.
_LOOK_S = 0.2
_CLOSING_S = 5.0

_Worker = tuple[int, int]  # index and incarnation


class RemoteValue:
    """What a scheduled closure returns, once it has run. `coordinator.fetch()` and `fetch()` wait for it."""

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
        """Sets what it is, once; for the coordinator."""
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


class _Queue:
    """What is to run, what runs where, and the failure that has not been told yet. Owns the lock; closures are handed out in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._running: dict[_Worker, tuple[_Job, float]] = {}
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
        """Waits for a closure for this worker; None: there will be none. Raises _Gone."""
        with self._changed:
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
        """Has another worker run what this one was running, if anything."""
        with self._changed:
            found = self._running.pop(worker, None)
            if found is not None and not found[0].value.is_done:
                log.warning("%s was on worker %d, which is gone; another one runs it", found[0].what, worker[0])
                if self._failure is not None:
                    self._cancel(found[0])
                else:
                    self._jobs.appendleft(found[0])
            self._changed.notify_all()

    def finish(self, worker: _Worker, outcome: Outcome) -> None:
        """Takes an outcome in. The first failure cancels what has not begun."""
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
        """Raises the failure that has not been told yet, once nothing is running any more; the queue can be used again afterwards."""
        wait = Wait("a closure has failed", None)
        with self._changed:
            failure = self._failure
            # Another thread may be told it meanwhile; then closures run again.
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
        """Cancels what has not begun."""
        with self._changed:
            self._is_closing = True
            while self._jobs:
                self._cancel(self._jobs.popleft())
            self._changed.notify_all()

    def _raise_locked(self) -> None:
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        # What has failed or was cancelled may be scheduled again under its key.
        self._keyed = {key: value for key, value in self._keyed.items() if value.has_value}
        self._changed.notify_all()
        raise failure

    def _wait(self, wait: Wait) -> None:
        self._changed.wait(wait.slice_s())
        now = time.monotonic()
        running = [f"{job.what} on worker {worker[0]} for {now - since:.0f} s" for worker, (job, since) in self._running.items()]
        where = ", ".join(running[:3]) or "no worker has called serve()"
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
        self._target, self._name = target, name
        self._run = secrets.randbits(48)  # exact in a message of floats
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
        given = map_nested(lambda one: one.fetch() if isinstance(one, RemoteValue) else one, (tuple(args), dict(kwargs or {})))
        return self._queue.add(Call(function=function, args=given[0], kwargs=given[1]), key)

    def create_per_worker_dataset(self, dataset_fn: str | Callable[..., Any]) -> PerWorkerDataset:
        """Returns a dataset of each worker's own, made there by the function that it has registered under this name.

        `iter()` of it can be an argument of closures: in each worker, they get the elements of one iterator of that worker, one after the
        other. It is made when the worker's first closure wants it, and anew when another process has taken the worker's place.
        """
        self._num_datasets += 1
        return PerWorkerDataset(_name_of(dataset_fn, "create_per_worker_dataset()"), self._num_datasets)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all closures have run. Raises the error of the first that failed, once, as RuntimeError; DeadlineExceeded.

        A failure cancels the closures that had not begun. When it is raised, none runs any more, and more can be scheduled. If what runs
        takes longer than `timeout_s`, DeadlineExceeded is raised, and the failure by a later call.
        """
        self._queue.join(timeout_s)

    def done(self) -> bool:
        """Whether all closures have run. Raises what `join()` raises, but waits only for what runs when one has failed."""
        self._queue.raise_failure()
        return self._queue.is_idle

    def fetch(self, value: Any, timeout_s: float | None = None) -> Any:
        """Returns the value of a RemoteValue, also in tuples, lists and dicts. Raises what its `fetch()` raises."""
        return map_nested(lambda one: one.fetch(timeout_s) if isinstance(one, RemoteValue) else one, value)

    def close(self) -> None:
        """Cancels what has not begun, waits up to 5 s for what runs, and has `serve()` return in the workers. Idempotent."""
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
                self._mail.mark(_closing(self._name, self._run))
            except PsError as error:
                log.warning("coordinator: workers that have just come may not hear that it is closed: %s", error)
        self._mail.close()

    def _watch(self) -> None:
        """Looks which workers there are, and opens a lane to each."""
        is_last = False
        while not is_last:
            # Once more at the end, so that workers that have just come hear of it.
            is_last = self._is_closing.is_set()
            try:
                found = self._target.status().participants
            except (PsError, RuntimeError) as error:
                # While the chief is away, the workers are taken to be there.
                log.debug("coordinator: the chief does not say which workers there are: %s", error)
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
        try:
            number = 0
            if self._exchanged(worker, number, None) is None:
                return
            while (job := self._queue.take(worker)) is not None:
                number += 1
                outcome = self._exchanged(worker, number, job.message)
                assert outcome is not None
                self._queue.finish(worker, unpack_outcome(outcome))
            self._mail.send(_job(self._name, self._run, worker, number + 1), pack_call(Call(function="", kwargs={})), again=True)
        except _Gone:
            self._queue.put_back(worker)
        except PsError as error:
            log.warning("coordinator: worker %d is given up: %s", worker[0], error)
            self._queue.put_back(worker)

    def _exchanged(self, worker: _Worker, number: int, message: list[Any] | None) -> list[Any] | None:
        """Sends a closure and returns the answer to it. Raises _Gone if the worker is no more.

        Without a closure, waits until the worker serves; None: the coordinator was closed before.
        """
        job, reply = _job(self._name, self._run, worker, number), _reply(self._name, self._run, worker, number)
        num_sent, sent_at, is_answered = 0, 0.0, False
        try:
            while True:
                try:
                    if not num_sent or time.monotonic() >= sent_at + _AGAIN_S:
                        is_again, num_sent = num_sent > 0, num_sent + 1
                        if message is None or is_again:
                            self._mail.send(_calling(self._name, worker), [np.array([self._run, number], np.int64)], again=True)
                        if message is not None:
                            self._mail.send(job, message, again=is_again)
                        sent_at = time.monotonic()
                    answer = self._mail.receive(reply, _SLICE_S)
                    is_answered = True
                    return answer
                except (DeadlineExceeded, Cancelled, AccumulatorNotFound):
                    pass  # the latter: it is just being sent again
                except PsError as error:
                    log.debug("coordinator: worker %d, closure %d: %s", worker[0], number, error)
                    self._mail.renew()
                    sent_at = 0.0
                    time.sleep(_PAUSE_S)
                if not self._queue.is_live(worker):
                    raise _Gone
                if self._is_closing.is_set() and message is None:
                    return None
        finally:
            # What was sent once and answered was taken; of the rest a copy may be there that nobody will take.
            if message is None or num_sent > 1 or not is_answered:
                self._discard(_calling(self._name, worker), *([] if message is None else [job]))

    def _discard(self, *names: str) -> None:
        for name in names:
            try:
                self._mail.discard(name)
            except PsError as error:
                log.debug("coordinator: %s stays on its server: %s", name, error)


def serve(session: Session, functions: Mapping[str, Callable[..., Any]], *, name: str = "main") -> int:
    """Runs the closures that the coordinator of this name schedules, until it is closed; returns how many have run here.

    `functions`: what can be scheduled, by name. A function that raises does not end this; the coordinator gets the error. Returns too once
    training is finished. Raises what the session raises when it cannot go on.
    """
    for function in functions.values():
        if not callable(function):
            raise InvalidSpec(f"serve(): got {function!r}, want functions by name")
    mail = Mailboxes(session, timeout_s=_SERVER_S)
    num_run, num_closings = 0, mail.num_marks(_closings(name))
    try:
        is_over, here = False, _Here(functions)
        while not is_over:
            num_more, is_over = _served(session, mail, here, name, num_closings)
            num_run += num_more
        return num_run
    finally:
        mail.close()


class _Here:
    """What closures are run with in this process: its functions, and its iterators over datasets."""

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
        except Exception as error:
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


def _served(session: Session, mail: Mailboxes, here: _Here, name: str, num_closings: int) -> tuple[int, bool]:
    """Serves as the present incarnation; returns how many have run, and whether that is all."""
    worker = _identity(session)
    place, num_run, looked_at = _Place(mail, name, worker), 0, time.monotonic()
    while True:
        try:
            if time.monotonic() >= looked_at + _AGAIN_S:
                looked_at = time.monotonic()
                if place.is_closed(num_closings):
                    return num_run, True
            place.look()
            call = place.received()
        except (DeadlineExceeded, Cancelled, AccumulatorNotFound):
            if session.is_finished:
                return num_run, True
        except PsError as error:
            log.debug("closures: %s", error)
            if session.is_finished:
                return num_run, True
            mail.renew()
            place.send_again()
            time.sleep(_PAUSE_S)
        else:
            if session.is_finished if call is None else not call.function:
                return num_run, True
            if call is not None:
                num_run += 1
                place.answered(here.answer(call))
        if _identity(session) != worker:
            return num_run, False


class _Place:
    """The run of the coordinator that has called a worker, its last closure's number, and the answer, which is sent again."""

    def __init__(self, mail: Mailboxes, name: str, worker: _Worker) -> None:
        self._mail, self._name, self._worker = mail, name, worker
        self._run: int | None = None
        self._number = 0
        self._answer: list[Any] | None = None
        self._num_sent, self._sent_at, self._looked_at = 0, 0.0, float("-inf")

    def is_closed(self, num_closings: int) -> bool:
        """Whether the coordinator is closed; where none has called, whether more than `num_closings` of its name are."""
        # A worker that has just left one run may hear late that this is closed, and must not leave the next one for it.
        if self._run is not None:
            return self._mail.num_marks(_closing(self._name, self._run)) > 0
        return self._mail.num_marks(_closings(self._name)) > num_closings

    def look(self) -> None:
        """Sends the answer if it is time to, and looks whether a coordinator calls. Raises what the mailboxes raise."""
        if self._answer is not None and (not self._num_sent or time.monotonic() >= self._sent_at + _AGAIN_S):
            self._num_sent, self._sent_at = self._num_sent + 1, time.monotonic()
            self._mail.send(self._reply(), self._answer, again=self._num_sent > 1)
        if self._run is not None and time.monotonic() < self._looked_at + _AGAIN_S:
            return
        self._looked_at = time.monotonic()
        try:
            ((run, number),) = self._mail.receive(_calling(self._name, self._worker), _SLICE_S if self._run is None else _LOOK_S)
        except (DeadlineExceeded, Cancelled, AccumulatorNotFound):
            return
        except (TypeError, ValueError):
            log.debug("closures: a coordinator's call cannot be read; it will be sent again")
            return
        # A call that crossed with the answer to it is of this run, and of no later closure.
        if run != self._run or number > self._number + 1:
            self._forget_answer()
            if self._run is not None:
                self._mail.discard(_job(self._name, self._run, self._worker, self._number + 1))
            self._run, self._number = int(run), max(0, int(number) - 1)
            if not number:
                self.answered(pack_outcome(Outcome()), number=0)

    def received(self) -> Call | None:
        """Returns the next closure; None: no coordinator has called. Raises what the mailboxes raise."""
        if self._run is None:
            return None
        if self._answer is not None and not self._num_sent:
            self.look()
        call = unpack_call(self._mail.receive(_job(self._name, self._run, self._worker, self._number + 1), _SLICE_S))
        self._forget_answer()
        return call

    def answered(self, answer: list[Any], *, number: int | None = None) -> None:
        """Takes the answer to the closure that has come; it is sent until the next one comes."""
        self._number = self._number + 1 if number is None else number
        self._answer, self._num_sent = answer, 0
        self._looked_at = time.monotonic()  # who has just had a closure has a coordinator

    def send_again(self) -> None:
        """Has the answer sent again now: it may be lost."""
        self._sent_at = float("-inf")

    def _forget_answer(self) -> None:
        if self._answer is not None and self._num_sent > 1:
            self._mail.discard(self._reply())
        self._answer = None

    def _reply(self) -> str:
        assert self._run is not None
        return _reply(self._name, self._run, self._worker, self._number)


def _name_of(fn: object, what: str) -> str:
    function = fn if isinstance(fn, str) else getattr(fn, "__name__", "")
    if not isinstance(function, str) or not function:
        raise InvalidSpec(f"{what}: got {fn!r}, want the name of a function that the workers have registered")
    return function


def _closings(name: str) -> str:
    return f"coordinator/{name}/closings"


def _closing(name: str, run: int) -> str:
    return f"coordinator/{name}/run {run}/closing"


def _identity(session: Session) -> _Worker:
    participant = session.membership.participant
    return participant.index, participant.incarnation


def _calling(name: str, worker: _Worker) -> str:
    return f"coordinator/{name}/call of worker {worker[0]} incarnation {worker[1]}"


def _job(name: str, run: int, worker: _Worker, number: int) -> str:
    return f"coordinator/{name}/run {run}/closure {number} for worker {worker[0]} incarnation {worker[1]}"


def _reply(name: str, run: int, worker: _Worker, number: int) -> str:
    return f"coordinator/{name}/run {run}/outcome {number} of worker {worker[0]} incarnation {worker[1]}"
