"""Closures that any worker runs: scheduled in one program, run by functions that the workers' programs have registered. Knows no replica.

The coordinator's program has the queue. It posts one closure at a time for each worker, on a board of the two, and waits for the outcome at
the same key. If a worker is lost, another one runs its closure.

A coordinator first greets each worker, and uses those that answer. Its keys come after those of every earlier coordinator, so that an
outcome for one of these is never taken for one of its own. A worker that serves answers every coordinator with its name.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Self, TypeVar

from ps_protocol.errors import Cancelled, InvalidSpec, LimitExceeded, MalformedMessage, PsError, Superseded
from ps_protocol.model.variables import Array, check_name
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.board import Key, Post
from ps_protocol.roles.chief import ParticipantKind
from worker_client.session.observer import Observer
from worker_client.session.session import Session
from worker_client.strategy.board import Board
from worker_client.strategy.content import PerWorkerDataset, PerWorkerIterator, pack, unpack
from worker_client.strategy.values import arguments, map_nested

log = logging.getLogger("lockstep.worker")

# How long one look for a post blocks, and how often the workers are looked at.
_SLICE_S = 0.5
_CLOSING_S = 5.0
# How often a worker without a closure looks whether the coordinator was closed without having seen it.
CLOSED_LOOK_S = 3.0
# The authors on the board of a coordinator and a worker.
_COORDINATOR, _WORKER = 0, 1

_Worker = tuple[int, int]  # index and incarnation


class _Call(NamedTuple):
    """What a coordinator posts for an incarnation of a worker: a closure; without a function, a greeting, or that there are no more."""

    function: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    is_last: bool = False


class _Outcome(NamedTuple):
    """What a worker posts: the result of a call; or, if it failed, the text of the error."""

    value: Any = None
    error: str = ""


Message = TypeVar("Message", _Call, _Outcome)


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
    def __init__(self, number: int, call: _Call) -> None:
        self.what = f"closure {number}, {call.function!r}"
        self.call = call
        self.value = RemoteValue(self.what)


class _Gone(Exception):
    """The worker is no more, or is another process now."""


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

    def add(self, call: _Call, key: str | None) -> RemoteValue:
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

    def finish(self, worker: _Worker, outcome: _Outcome) -> None:
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
        self._own: int | None = target.worker_index if isinstance(target, Session) else None
        self._queue = _Queue()
        self._num_datasets = 0
        self._lanes: dict[_Worker, threading.Thread] = {}
        self._is_closing, self._is_closed = threading.Event(), False
        # Where it says that it is closed, at the key that all of its keys begin with.
        self._board, self._key = Board(target, _closings(name)), Key()
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
        call = _Call(function, tuple(given[0]), dict(given[1]))
        _packed(call, what=f"closure {function!r}")
        return self._queue.add(call, key)

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
            # For workers whose place the chief had given up, and which have taken it again since it was asked last.
            try:
                self._board.post(_COORDINATOR, Post(key=self._key, incarnation=0, content=pack(None)), keeps_from=self._key)
            except PsError as error:
                log.warning("coordinator: workers that have just joined may not learn that it is closed: %s", error)
        self._board.close()

    def _watch(self) -> None:
        """Looks which workers there are, and opens a lane to each."""
        found = self._board.read(_COORDINATOR, None, 0.0)
        # The time, too: a server that was started anew says nothing of earlier coordinators, and one that was killed has said nothing.
        self._key = Key(max(time.time_ns(), found.newest.first + 1 if found is not None and found.newest is not None else 0))
        is_last = False
        while not is_last:
            # Once more at the end, so that workers that have just joined get it.
            is_last = self._is_closing.is_set()
            try:
                participants = self._target.status().participants
            except (PsError, RuntimeError) as error:
                # While the chief is away, the workers are taken to be there.
                log.debug("coordinator: the chief did not answer which workers there are: %s", error)
                self._is_closing.wait(_SLICE_S)
                continue
            workers = [one for one in participants if one.kind is ParticipantKind.WORKER and one.state == "live" and one.index != self._own]
            live = frozenset((one.index, one.incarnation) for one in workers)
            self._queue.see(live)
            for worker in sorted(live - self._lanes.keys()):
                lane = threading.Thread(target=self._serve, args=(worker,), name=f"closures of worker {worker[0]}", daemon=True)
                self._lanes[worker] = lane
                lane.start()
            self._is_closing.wait(_SLICE_S)

    def _serve(self, worker: _Worker) -> None:
        """Hands a worker one closure after the other."""
        lane = _Lane(Board(self._target, _lane(self._name, worker)), worker, self._queue, key=self._key._replace(second=worker[1]))
        try:
            is_served = self._is_served(lane)
            while is_served and (job := self._queue.take(worker)) is not None:
                try:
                    outcome = lane.answered(job.call)
                except LimitExceeded as error:
                    outcome = _Outcome(error=f"it cannot be sent: {type(error).__name__}: {error.message}")
                except MalformedMessage as error:
                    outcome = _Outcome(error=f"what it returned: {error.message}")
                assert outcome is not None
                self._queue.finish(worker, outcome)
            lane.post(_Call(is_last=True))
        except _Gone:
            self._queue.put_back(worker)
        except PsError as error:
            log.warning("coordinator: worker %d is given up: %s", worker[0], error)
            self._queue.put_back(worker)
        finally:
            lane.board.close()

    def _is_served(self, lane: "_Lane") -> bool:
        """Waits until the worker serves; False: the coordinator was closed before. Raises _Gone."""
        while not self._is_closing.is_set():
            try:
                return lane.answered(_Call(), until=self._is_closing) is not None
            except (LimitExceeded, MalformedMessage) as error:
                log.debug("coordinator: worker %d is greeted again: %r", lane.worker[0], error)
        return False


class _Lane:
    """The way to one worker: what is posted for it, and what it answers."""

    def __init__(self, board: Board, worker: _Worker, queue: _Queue, *, key: Key) -> None:
        self.board, self.worker, self._queue, self._key = board, worker, queue, key

    def post(self, call: _Call) -> None:
        """Posts for the worker, in place of what was posted before. Raises LimitExceeded."""
        self._key = self._key.next
        self.board.post(_COORDINATOR, Post(key=self._key, incarnation=0, content=_packed(call)), keeps_from=self._key)

    def answered(self, call: _Call, *, until: threading.Event | None = None) -> _Outcome | None:
        """Posts and returns the answer; None at `until`. Raises LimitExceeded if it cannot be posted, MalformedMessage, _Gone."""
        self.post(call)
        while True:
            found = self.board.read(_WORKER, self._key, _SLICE_S)
            if found is not None and found.post is not None:
                if found.post.key != self._key:
                    raise Superseded("another coordinator of this name has it")
                return _unpacked(_Outcome, found.post.content)
            if not self._queue.is_live(self.worker):
                raise _Gone
            if until is not None and until.is_set():
                return None


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
    num_run, is_over, here = 0, False, _Here(functions)
    with closing(Board(session, _closings(name))) as closings:
        closed_before = _newest(closings)
        while not is_over:
            with closing(_Serving(session, here, name=name, closings=closings, closed_before=closed_before)) as serving:
                num_more, is_over = serving.run()
            num_run += num_more
    return num_run


class _Here:
    """The functions for closures in this process, and its iterators over datasets."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._iterators: dict[PerWorkerIterator, Iterator[Any]] = {}

    def answer(self, call: _Call) -> Array:
        """Runs a closure and returns its outcome as the content of a post."""
        try:
            function = self._function(call.function)
            args, kwargs = map_nested(self._own, (call.args, dict(call.kwargs)))
            return _packed(_Outcome(function(*args, **kwargs)), what="what the closure returned")
        except _NoFunction as error:
            return _packed(_Outcome(error=str(error)))
        except (Exception, SystemExit) as error:
            # SystemExit, too: if the worker ended, its closure would go to the next worker and end that one, too.
            log.warning("closure %r failed", call.function, exc_info=True)
            return _packed(_Outcome(error=f"{type(error).__name__}: {error}"))

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
    """Serves as one incarnation of a worker: answers each post of a coordinator once."""

    def __init__(self, session: Session, here: _Here, *, name: str, closings: Board, closed_before: Key) -> None:
        self._session, self._here, self._closings = session, here, closings
        # A coordinator is closed whose number is greater, or no smaller than that of the latest call.
        self._is_closed_from = closed_before.next
        self._worker = _identity(session)
        self._board = Board(session, _lane(name, self._worker))
        # The key of the latest post that was answered.
        self._answered = Key()

    def run(self) -> tuple[int, bool]:
        """Returns how many closures have run, and whether that is all: else the worker has another incarnation now."""
        num_run, before, looked_at_s = 0, self._read(None), time.monotonic()
        while _identity(self._session) == self._worker:
            post = self._read(self._answered.next)
            if self._session.is_finished:
                return num_run, True
            if post is None:
                if time.monotonic() >= looked_at_s + CLOSED_LOOK_S:
                    looked_at_s = time.monotonic()
                    if _newest(self._closings) >= self._is_closed_from:
                        return num_run, True
                continue
            self._answered = post.key
            try:
                call = _unpacked(_Call, post.content)
            except MalformedMessage as error:
                self._answer(_packed(_Outcome(error=error.message)))
                continue
            if call.is_last and (before is None or post.key > before.key):
                return num_run, True
            if post.key.second == self._worker[1] and not call.is_last:
                # One that it has left before may say late that it is closed.
                self._is_closed_from = Key(post.key.first)
                num_run += bool(call.function)
                self._answer(self._here.answer(call) if call.function else _packed(_Outcome()))
        return num_run, False

    def close(self) -> None:
        """Closes the connection."""
        self._board.close()

    def _read(self, since: Key | None) -> Post | None:
        try:
            found = self._board.read(_COORDINATOR, since, _SLICE_S if since is not None else 0.0)
        except LimitExceeded as error:
            # An earlier outcome, whose server has been restarted meanwhile.
            self._answer(_unsent(error))
            return None
        return None if found is None else found.post

    def _answer(self, outcome: Array) -> None:
        """Posts the outcome of the latest call, or the reason why it cannot be posted."""
        key, incarnation = self._answered, self._worker[1]
        try:
            self._board.post(_WORKER, Post(key=key, incarnation=incarnation, content=outcome), keeps_from=key)
        except LimitExceeded as error:
            self._board.post(_WORKER, Post(key=key, incarnation=incarnation, content=_unsent(error)), keeps_from=key)


def _newest(closings: Board) -> Key:
    found = closings.read(_COORDINATOR, None, 0.0)
    return Key() if found is None or found.newest is None else found.newest


def _unsent(error: LimitExceeded) -> Array:
    return _packed(_Outcome(error=f"what the closure returned cannot be sent: {type(error).__name__}: {error.message}"))


def _packed(message: _Call | _Outcome, *, what: str = "") -> Array:
    return pack(tuple(message), what=what)


def _unpacked(kind: type[Message], content: Array) -> Message:
    """Returns a call, or an outcome. Raises MalformedMessage."""
    fields = unpack(content)
    kinds = [object if default is None else type(default) for default in kind()]
    if not isinstance(fields, tuple) or len(fields) != len(kinds) or not all(map(isinstance, fields, kinds)):
        raise MalformedMessage("a closure's post cannot be read")
    return kind(*fields)


def _name_of(fn: object, what: str) -> str:
    function = fn if isinstance(fn, str) else getattr(fn, "__name__", "")
    if not isinstance(function, str) or not function:
        raise InvalidSpec(f"{what}: got a {type(fn).__name__}, want the name of a function that the workers have registered")
    return function


def _identity(session: Session) -> _Worker:
    participant = session.membership.participant
    return participant.index, participant.incarnation


def _closings(name: str) -> str:
    return f"coordinator/{name}"


def _lane(name: str, worker: _Worker) -> str:
    return f"coordinator/{name}/worker {worker[0]}"
