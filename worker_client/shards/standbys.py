"""A shard that several processes hold: their addresses, which the chief names, and calls to them. Knows registrations; no transport."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TypeVar

from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    EpochMismatch,
    LeaseExpired,
    NotInitialized,
    PsError,
    ShuttingDown,
    StepAhead,
    StepNotReady,
    Unavailable,
)
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import Registration
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import PushHeader, PushReply, PushResult, ReadRequest, RowsRequest, Shard, ShardSpec
from worker_client.cluster.threads import Lane, run_bounded

log = logging.getLogger("lockstep.worker")

# A call that has not ended after this may be one to a server that is not counted on any more.
_SLOW_S = 0.7
_LOOK_INTERVAL_S = 0.3
# The chief is not asked more often than this about refusals of a server.
_PAUSE_S = 0.2
# Errors that may only mean that the chief no longer counts on the process. The chief is then asked which processes hold the shard.
DOUBTFUL = (Unavailable, NotInitialized, StepNotReady, StepAhead, EpochMismatch, LeaseExpired, Cancelled, DeadlineExceeded, ShuttingDown)
# Errors that end without the worker. A process that was restarted knows no values and no epoch, nor at first the key of an earlier chief
# and so the workers that this one had registered: the chief soon names another process, or begins another epoch. A process at an earlier
# step is about to apply the next one, which the worker has read at the other process; or it was left behind, and the chief has not noticed
# yet. A worker whose lease has ended learns that when it asks the chief.
_PASSING = (NotInitialized, EpochMismatch, LeaseExpired, StepAhead)
# A contribution counts only if all processes have it, so the worst result is the contribution's.
_WORST_FIRST = (PushResult.STALE, PushResult.STAGED, PushResult.APPLIED, PushResult.DUPLICATE)


def is_urgent(error: PsError) -> bool:
    """Whether the worker asks the chief at once: a process without an epoch, a model or this worker has been restarted."""
    return isinstance(error, (NotInitialized, EpochMismatch, LeaseExpired))


def lasting(error: PsError) -> PsError:
    """Returns the error to raise while the chief still names the same processes: Unavailable, which is retried, for one that passes."""
    return Unavailable(error.message, facts=error.facts) if isinstance(error, _PASSING) else error


def in_one(replies: Sequence[PushReply]) -> PushReply:
    """Returns the worst of the replies that the processes of one shard gave to a contribution."""
    return min(replies, key=lambda reply: _WORST_FIRST.index(reply.result))


class ShardPlaces:
    """The addresses of all shards. Thread-safe. `ask_again` registers again, unless that has been done since a version of the addresses.

    `on_change` is called, by whichever thread, when other processes hold the shards than before. While a call is under way that takes
    long, a separate thread asks the chief now and then, because the blocked caller cannot.
    """

    def __init__(self, registration: Registration, *, ask_again: Callable[[int], Registration]) -> None:
        self._registration = registration
        self._ask_again = ask_again
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._asked_at = 0.0
        self._calls: dict[int, float] = {}  # those under way, by their number, and when they began
        self._num_calls = 0
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def version(self) -> int:
        """Grows with each change."""
        return self._registration.shards_version

    def addresses(self, index: int) -> tuple[str, ...]:
        """Returns where a shard is: first where it is asked, then its standby, if one goes along."""
        registration = self._registration
        standbys = registration.standby_addresses
        return (registration.shard_addresses[index], *([standbys[index]] if index < len(standbys) and standbys[index] else []))

    def listen(self, on_change: Callable[[], None]) -> None:
        """Has a listener called at changes."""
        self._listeners.append(on_change)

    def hear(self, version: int, *, is_urgent: bool = False) -> bool:
        """Asks the chief, unless that has been done since `version`, or just now; returns whether it is another version by now.

        Blocks while the chief cannot be reached. Raises the errors of registering.
        """
        now = time.monotonic()
        if self.version == version and (is_urgent or now - self._asked_at >= _PAUSE_S):
            self._asked_at = now
            found = self._ask_again(version)
            with self._lock:
                has_changed = found.shards_version != self.version
                self._registration = found
            if has_changed:
                for listener in self._listeners:
                    listener()
        return self.version != version

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Has the enclosed call watched."""
        with self._lock:
            number = self._num_calls = self._num_calls + 1
            self._calls[number] = time.monotonic()
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="lockstep-shards", daemon=True)
                self._watcher.start()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def close(self) -> None:
        """Watches no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_INTERVAL_S):
            now = time.monotonic()
            with self._lock:
                is_slow = any(now - began >= _SLOW_S for began in self._calls.values())
            if is_slow and now - self._asked_at >= _SLOW_S:
                try:
                    self.hear(self.version, is_urgent=True)
                except PsError as error:
                    log.debug("the chief did not answer which servers hold the shards: %s", error.message)


# A shard held by several processes: writes go to all of them, reads to the first.
#
# The chief names the processes. If one fails, the chief is asked again, and the call is repeated with those that it names then.


Result = TypeVar("Result")

_CLOSE_S = 0.25


class ReplicatedShard:
    """Implements Shard: thread-safe, one attempt a call, or another one if the chief names other processes.

    `open_replica` returns a shard without a call to it.
    """

    def __init__(self, index: int, places: ShardPlaces, *, open_replica: Callable[[int, str], Shard]) -> None:
        self.index = index
        self._places = places
        self._open = open_replica
        self._lock = threading.Lock()
        self._shards: dict[str, Shard] = {}
        self._order: tuple[str, ...] = ()
        self._layout: Layout | None = None
        self._lane: Lane | None = None
        self._is_closed = False
        self._take_up(places.addresses(index))
        places.listen(self.update)

    @property
    def address(self) -> str:
        """The address of the primary."""
        return self._order[0]

    @property
    def replicas(self) -> tuple[Shard, ...]:
        """The replicas that are counted on now, the primary first."""
        with self._lock:
            return tuple(self._shards[address] for address in self._order)

    @property
    def transport(self) -> str:
        """How variables and gradients travel to the primary."""
        return self.replicas[0].transport

    def know_layout(self, layout: Layout) -> None:
        """Notes how the variables lie at each replica, also at those that come later."""
        with self._lock:
            self._layout = layout
            for shard in self._shards.values():
                shard.know_layout(layout)

    def update(self) -> None:
        """Goes over to the processes that the chief names now; ends calls under way at others. Idempotent."""
        addresses = self._places.addresses(self.index)
        with self._lock:
            if self._is_closed or addresses == self._order:
                return
            self._take_up(addresses)
            gone = [self._shards.pop(address) for address in [*self._shards] if address not in addresses]
        run_bounded([shard.close for shard in gone], name="lockstep-close", timeout_s=_CLOSE_S)

    def _take_up(self, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            if address not in self._shards:
                shard = self._open(self.index, address)
                if self._layout is not None:
                    shard.know_layout(self._layout)
                self._shards[address] = shard
        self._order = addresses

    # -- calls of all processes

    def create_variables(self, spec: ShardSpec, values: Segments, *, timeout_s: float | None = None) -> bool:
        """Creates all variables at all replicas; False if they exist already."""
        return any(self._at_all(lambda shard: shard.create_variables(spec, values, timeout_s=timeout_s)))

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        """Stages one contribution at all replicas."""
        return in_one(self._at_all(lambda shard: shard.push_gradients(header, gradients, timeout_s=timeout_s)))

    # -- calls of the first process

    def call(self, request: Request[Answer], *, timeout_s: float | None = None) -> Answer:
        """Asks, and returns the answer."""
        return self._at_first(lambda shard: shard.call(request, timeout_s=timeout_s))

    def read(self, request: ReadRequest, into: Segments, *, timeout_s: float | None = None) -> int:
        """Copies the variables of a step, or a slot, into the caller's memory; returns their step."""
        requests = chain([request], repeat(dataclasses.replace(request, held_step=None)))  # an answer that broke off leaves anything there
        return self._at_first(lambda shard: shard.read(next(requests), into, timeout_s=timeout_s))

    def expect(self, request: ReadRequest) -> None:
        """Says that the variables of a step will be read."""
        self.replicas[0].expect(request)

    def read_rows(
        self,
        request: RowsRequest,
        indices: Array,
        into: Segments,
        *,
        timeout_s: float | None = None,
        meanwhile: Callable[[int], None] | None = None,
    ) -> int:
        """Copies rows of a table; returns their step."""
        return self._at_first(lambda shard: shard.read_rows(request, indices, into, timeout_s=timeout_s, meanwhile=meanwhile))

    def close(self) -> None:
        """Releases the connections. Idempotent."""
        with self._lock:
            self._is_closed = True
            shards, lane = [*self._shards.values()], self._lane
        if lane is not None:
            lane.close()
        run_bounded([shard.close for shard in shards], name="lockstep-close", timeout_s=_CLOSE_S)

    # -- inside

    def _at_first(self, call: Callable[[Shard], Result]) -> Result:
        while True:
            version, first = self._places.version, self.replicas[0]
            try:
                with self._places.calling():
                    return call(first)
            except DOUBTFUL as error:
                self._ask_about(error, version, (first,))

    def _at_all(self, call: Callable[[Shard], Result]) -> list[Result]:
        while True:
            version, shards = self._places.version, self.replicas
            try:
                with self._places.calling():
                    results = self._of_each(shards, call)
            except DOUBTFUL as error:
                self._ask_about(error, version, shards)
                continue
            if set(self.replicas) <= set(shards):
                return results

    def _of_each(self, shards: Sequence[Shard], call: Callable[[Shard], Result]) -> list[Result]:
        """Calls all at once, the first in this thread, and returns when all have ended; raises the first error."""
        if len(shards) == 1:
            return [call(shards[0])]
        if self._lane is None:
            self._lane = Lane(f"lockstep-standby-{self.index}")
        jobs = [self._lane.submit(lambda shard=shard: call(shard)) for shard in shards[1:]]  # type: ignore[misc]
        try:
            results = [call(shards[0])]
        finally:
            for job in jobs:
                job.wait()
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [*results, *(job.result for job in jobs)]

    def _ask_about(self, error: PsError, version: int, shards: Sequence[Shard]) -> None:
        """Raises the error, or one that says that it may pass, unless the chief names other processes now."""
        if self._is_closed:
            raise error
        self._places.hear(version, is_urgent=is_urgent(error))
        if self.replicas[: len(shards)] == tuple(shards):
            raise lasting(error)
