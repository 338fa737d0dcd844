"""A strategy's replicas in several worker processes: reductions over boards, variables on parameter servers. Knows the session."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import FIRST_NOTICE_S, Wait
from ps_protocol.roles.board import Found, Key, Post
from worker_client.core.sides import run
from worker_client.model.declarations import IndexedSlices
from worker_client.session.session import Session
from worker_client.strategy.board import Board
from worker_client.strategy.exchange import FIRST, NO_STEP, Exchanges, Place, Waited
from worker_client.strategy.group import Cell, CollectiveHints, Combination
from worker_client.strategy.reduction import frozen
from worker_client.strategy.shared_variables import SharedVariables

log = logging.getLogger("lockstep.worker")

TIMEOUT_S = 60.0
# Worker 0 waits for all workers and names the missing ones; the other workers wait this much longer for that. It tries for so long to post
# results before its call returns: its program may end then.
_GRACE_S = 5.0
# How often a program that waits for its step looks whether a server has lost what was posted, after the first 2 s.
_LOOK_S = 0.5
_PAUSE_S = 0.2


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
        self.parameter_devices = tuple(f"ps:{index}" + (f" at {address}" if address else "") for index, address in enumerate(addresses))
        self._boards = _Boards(session, name=name)
        self._variables = SharedVariables(session, self.parameter_devices, writes=self._index == FIRST, stepping=self._boards.tended)
        self._exchanges = Exchanges(
            self._boards,
            worker=self._index,
            incarnation=session.membership.participant.incarnation,
            num_workers=self._num_workers,
            per_worker=replicas_per_worker,
            is_restarted=session.membership.may_have_predecessor,
        )

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

    def begin(self) -> None:
        """Creates the variables on the parameter servers, or finds those of another worker. Idempotent."""
        self._variables.begin()

    def place(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns the cell of a new variable on a parameter server. Raises RuntimeError after `begin`."""
        return self._variables.declare(name, value, beside=beside)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes one step of the cluster of all writes in the block. Blocks may be nested: the outermost counts."""
        places = self._exchanges.places
        if places.is_in_call:
            yield
            return
        places.begin_call(self._variables.moment)
        try:
            with self._variables.together():
                yield
        except BaseException:
            self._end_call(has_failed=True)
            raise
        self._end_call(has_failed=False)

    def combine(self, what: str, combinations: Sequence[Combination], *, hints: CollectiveHints) -> list[Any]:
        """Has all workers' contributions combined by worker 0. Raises DeadlineExceeded with the replicas that are missing."""
        timeout_s = TIMEOUT_S if hints.timeout_seconds is None else hints.timeout_seconds
        results: list[Any] = []
        for pack in _packs(combinations, hints.bytes_per_pack):
            sent = pack if hints.wire_dtype is None else [_narrowed(one, hints.wire_dtype) for one in pack]
            place = run(self._exchanges.begin(self._variables.moment))
            whole = f"{what} ({place})"
            self._boards.begin_wait(whole, timeout_s + (_GRACE_S if self._index != FIRST else 0.0), self._variables)
            found = run(self._exchanges.combined(whole, sent, place, timeout_s=timeout_s))
            results += found if sent is pack else [_as_given(value, one) for value, one in zip(found, pack, strict=True)]
        return results

    def close(self) -> None:
        """Lets go of the connection that values meet over. Idempotent."""
        self._boards.close()

    def _end_call(self, *, has_failed: bool) -> None:
        try:
            run(self._exchanges.end_call(self._variables.moment, has_failed=has_failed))
        except PsError as error:
            log.debug("the other workers do not hear that this one has left its call: %s", error)


class _Boards:
    """Implements BoardSide: a board for exchanges with a step, and one for those without."""

    def __init__(self, session: Session, *, name: str) -> None:
        self._session = session
        self._boards = {True: Board(session, f"strategy/{name}"), False: Board(session, f"strategy/{name}/without steps")}
        self._wait: tuple[Wait, float, SharedVariables] | None = None

    def begin_wait(self, what: str, timeout_s: float, variables: SharedVariables) -> None:
        """Begins an exchange: `what` it is, and for how long posts are waited for."""
        self._wait = Wait(what, None), time.monotonic() + timeout_s, variables

    async def wait_for(self, author: int, place: Place, *, why: str) -> Waited:
        """Waits a while for a post, and follows the variables."""
        assert self._wait is not None
        wait, deadline_s, variables = self._wait
        # Also when time is up, what is there counts.
        left_s = max(deadline_s - time.monotonic(), 0.0)
        found = self._of(place).read(author, place.key, min(left_s, wait.slice_s()))
        if found is None or found.post is None:
            wait.explain(why)
        elif found.post.key.first != place.key.first:
            time.sleep(_PAUSE_S)  # this program has not heard of the author's epoch yet
        variables.follow()
        return Waited(found or Found(process_incarnation=0), not left_s, variables.moment)

    async def put(self, author: int, place: Place, content: Array, *, keeps_from: Key, is_last: bool = False) -> None:
        """Posts, and keeps the post."""
        post = Post(key=place.key, incarnation=self._session.membership.participant.incarnation, content=content)
        self._of(place).post(author, post, keeps_from=keeps_from, timeout_s=_GRACE_S if is_last else 0.0)

    async def get(self, author: int, place: Place, *, since: Key | None) -> Found:
        """Looks for a post, and tries again for a while where the server does not answer."""
        end_s = time.monotonic() + _GRACE_S
        while True:
            found = self._of(place).read(author, since, 0.0)
            if found is not None or time.monotonic() >= end_s:
                return found or Found(process_incarnation=0)

    async def keep(self, place: Place, post: Post, *, keeps_from: Key) -> None:
        """Keeps worker 0's results."""
        self._of(place).keep(FIRST, post, keeps_from=keeps_from)

    @contextmanager
    def tended(self) -> Iterator[None]:
        """Posts again what a server loses while this program waits in the block: others may need it for their part of the step."""
        over = threading.Event()
        thread = threading.Thread(target=self._tend, args=(over,), name="strategy boards", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self) -> None:
        """Lets go of the connections. Idempotent."""
        for board in self._boards.values():
            board.close()

    def _of(self, place: Place) -> Board:
        return self._boards[place.at.step != NO_STEP]

    def _tend(self, over: threading.Event) -> None:
        # A step that takes no longer than usual costs nothing but the thread.
        wait_s = FIRST_NOTICE_S
        while not over.wait(wait_s):
            self._boards[True].read(FIRST, None, 0.0)
            wait_s = _LOOK_S


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
