"""The shard's one lock: which calls are admitted, have the turn, read or wait. Knows threads, epochs and chiefs; no model.

A step takes its turn alone, arrivals share theirs; a waiter without a thread registers a listener, which is called after each change.
"""

import time
from collections.abc import Callable
from functools import partial

from ps_protocol.errors import (
    EpochMismatch,
    InvalidSpec,
    LeaseExpired,
    LimitExceeded,
    NotInitialized,
    ShuttingDown,
    Superseded,
    Unavailable,
)
from ps_protocol.process.waiting import QuickCondition
from ps_protocol.roles.fence import LIVING_CHIEF_S, NOBODY, Era, Fence, joined_keys, session_secret
from ps_protocol.roles.shard import ONLY_REPLICA, ReplicaState
from ps_server.numbers.memory import MemoryBudget

# How long a call waits for a step under way before it asks its caller to repeat it.
TURN_WAIT_S = 20.0
# How long an apply waits for readers of the copy that it would overwrite.
READERS_WAIT_S = 2.0
# As much as one message can carry, with room for its other fields.
MAX_RECORD_BYTES = 12 << 20
MAX_STORY_BYTES = 64 << 10


class Gate:
    """Owns the lock of a shard; only here is it waited for. `name` is the server's, for texts; `clock` is monotonic, in seconds.

    All that belongs to the shard is looked at and changed inside a block: `with gate:`, or one of those that the methods return. A block
    holds the lock. What is called in it may let the lock go while it waits, where it says so; then everything may have changed.
    """

    def __init__(self, name: str, *, budget: MemoryBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self.fences = Fences(name)
        self.admitted = AdmittedWorkers(name)
        self.chief = ChiefNotes(budget=budget, clock=clock)
        self._name = name
        self._lock = QuickCondition()
        self._is_taken = False
        self._num_arrivals = 0
        # How many readers each step has. Every apply waits for holders, and for the others only where contributions may be stale.
        self._readers: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        # The wait for readers of earlier steps than this one has timed out.
        self._given_up_before = 0
        self._listeners: set[Callable[[], object]] = set()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    # Admission

    def admit(self, epoch: int) -> "_Admission":
        """A block for a caller of this epoch; raises EpochMismatch, ShuttingDown or NotInitialized unless it is served."""
        return _Admission(self, epoch)

    def check_chief(self, fence: Fence) -> None:
        """In a block: notes a call of the chief; raises the errors of `Fences.check_chief_call`."""
        self.fences.check_chief_call(fence)
        self.chief.heard()

    def step(self, fence: Fence) -> "_Turn":
        """A turn for a chief, which is checked before it waits, and after it has; see `turn`."""
        return _Turn(self, partial(self.check_chief, fence))

    def turn(self, check: Callable[[], object]) -> "_Turn":
        """A block with an exclusive turn. Waits for those under way; raises Unavailable if that takes too long.

        `check` raises if the caller is not served any more; it is asked before the wait, and after it.
        """
        return _Turn(self, check)

    def arrival(self) -> "_Turn":
        """A block with a turn that others like it share, while no step is under way. Waits for a step; raises Unavailable."""
        return _Turn(self, None)

    # -- readers

    def reading(self, step: int) -> "_Reader":
        """Notes a reader of `step` for the `with` block, which is without the lock; an apply that would overwrite its step may wait."""
        return _Reader(self._lock, self._readers, step)

    def holding(self, step: int) -> "_Reader":
        """Does as `reading`, for a reader that each apply waits for: one that would get no step at all."""
        return _Reader(self._lock, self._holders, step)

    # Waiting

    @property
    def is_free(self) -> bool:
        """Whether no step, arrival or reader is under way, so a turn would start at once. Does not take the lock."""
        return not (self._is_taken or self._num_arrivals or self._readers or self._holders)

    @property
    def is_idle(self) -> bool:
        """Whether no step and no arrival is under way. Does not take the lock."""
        return not (self._is_taken or self._num_arrivals)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits until no step and no arrival is under way, but not longer than this. Not in a block."""
        with self._lock:
            self._lock.wait_for(lambda: self.is_idle, timeout_s)

    def wait_for_step(self) -> None:
        """In a block: waits until no step is under way, without the lock. Raises Unavailable."""
        if self._is_taken:
            self._wait_for(lambda: not self._is_taken)

    def wait_for_readers(self, *, before: int, is_for_all: bool) -> None:
        """In a block: waits until no reader reads a step before `before`, without the lock, but at most READERS_WAIT_S.

        `is_for_all`: else only for those that hold it. A slower reader has to read again, and steps no longer wait for it: one reader that
        hangs does not set the pace.
        """
        if before < self._given_up_before:
            self._given_up_before = 0
        if not (self._holders or (is_for_all and self._readers)):
            return  # the way of nearly every step

        def is_free() -> bool:
            waited_for = (self._holders, self._readers) if is_for_all else (self._holders,)
            return not any(self._given_up_before <= step < before for readers in waited_for for step in readers)

        if not self._lock.wait_for(is_free, READERS_WAIT_S):
            self._given_up_before = before

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """In a block: releases the lock and waits until `is_so()` is true. The code that makes it true must call `changed`."""
        self._lock.wait_for(is_so)

    def wait_at_most(self, timeout_s: float, is_so: Callable[[], bool]) -> bool:
        """In a block: does as `wait_for`, but not for longer than this; returns whether it is so."""
        return self._lock.wait_for(is_so, timeout_s)

    def changed(self) -> None:
        """In a block: wakes all that wait in other blocks, so that they check again."""
        self._lock.notify_all()

    @property
    def num_listeners(self) -> int:
        """Readers that wait for a step without a thread."""
        return len(self._listeners)

    def listen(self, listener: Callable[[], object]) -> None:
        """In a block: has a listener called once, without the lock, when anything has changed."""
        self._listeners.add(listener)

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        with self._lock:
            self._listeners.discard(listener)

    def tell(self) -> None:
        """Calls all listeners. Not in a block."""
        if self._listeners:
            with self._lock:
                told, self._listeners = self._listeners, set()
            for listener in told:
                listener()

    def _begin_turn(self, check: Callable[[], object] | None) -> None:
        if check is None:
            self.wait_for_step()
            self._num_arrivals += 1
            return
        check()
        if not self._is_taken and not self._num_arrivals:
            self._is_taken = True
            return
        self.wait_for_step()
        self._is_taken = True
        try:
            self._wait_for(lambda: not self._num_arrivals)
            check()
        except BaseException:
            self._end_turn(check)
            raise

    def _end_turn(self, check: Callable[[], object] | None) -> None:
        if check is None:
            self._num_arrivals -= 1
        else:
            self._is_taken = False
        self._lock.notify_all()

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        if not self._lock.wait_for(is_so, TURN_WAIT_S):
            raise Unavailable(f"{self._name}: a step has been under way for {TURN_WAIT_S:g} s; repeat the call")


# Blocks are classes with slots: a generator would do, at three times the price, and every step takes some.


class _Admission:
    """Holds the lock, if the caller's epoch is served."""

    __slots__ = ("_epoch", "_gate")

    def __init__(self, gate: Gate, epoch: int) -> None:
        self._gate, self._epoch = gate, epoch

    def __enter__(self) -> None:
        gate = self._gate
        gate._lock.acquire()
        try:
            gate.fences.check_caller(self._epoch)
        except BaseException:
            gate._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._gate._lock.release()


class _Turn:
    """Holds the lock and the turn; the turn alone in a block of `unlocked`. `check` None: the turn is shared with others like it."""

    __slots__ = ("_check", "_gate")

    def __init__(self, gate: Gate, check: Callable[[], object] | None) -> None:
        self._gate, self._check = gate, check

    def __enter__(self) -> "_Turn":
        gate = self._gate
        gate._lock.acquire()
        try:
            gate._begin_turn(self._check)
        except BaseException:
            gate._lock.release()
            raise
        return self

    def unlocked(self) -> "_Unlocked":
        """A block inside this one that does not hold the lock, for what takes long."""
        return _Unlocked(self._gate._lock)

    def __exit__(self, *_: object) -> None:
        self._gate._end_turn(self._check)
        self._gate._lock.release()


class _Unlocked:
    """Lets the lock of the block around it go."""

    __slots__ = ("_lock",)

    def __init__(self, lock: QuickCondition) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self._lock.acquire()


class _Reader:
    """One reader of a step, among others."""

    __slots__ = ("_lock", "_readers", "_step")

    def __init__(self, lock: QuickCondition, readers: dict[int, int], step: int) -> None:
        self._lock, self._readers, self._step = lock, readers, step

    def __enter__(self) -> None:
        with self._lock:
            self._readers[self._step] = self._readers.get(self._step, 0) + 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers[self._step] -= 1
            if not self._readers[self._step]:
                del self._readers[self._step]
                self._lock.notify_all()


# Workers that are known not to have to be looked at again; beyond it the one known longest is.
_MAX_KNOWN = 10_000


class AdmittedWorkers:
    """Knows the incarnations of workers that a chief of this life has admitted by their secrets. The caller serialises the calls.

    Without a key every worker is believed. `name` is the server's, for texts.
    """

    def __init__(self, name: str) -> None:
        self.keys: tuple[bytes, ...] = ()
        self._name = name
        self._known: dict[tuple[int, int], int] = {}  # worker and incarnation: its secret

    def take_keys(self, keys: tuple[bytes, ...], *, is_new_life: bool) -> None:
        """A chief has adopted the server, and knows these keys."""
        if is_new_life:
            self.keys, self._known = (), {}
        self.keys = joined_keys(keys, self.keys)

    def check(self, worker: int, incarnation: int, secret: int) -> None:
        """Raises LeaseExpired unless the secret is that of this incarnation."""
        if self._known.get((worker, incarnation)) == secret or not self.keys:
            return
        if all(secret != session_secret(key, name=f"worker {worker}", incarnation=incarnation) for key in self.keys):
            raise LeaseExpired(
                f"{self._name}: incarnation {incarnation} of worker {worker} is not registered, or not to you. Register again",
                facts={"worker": str(worker)},
            )
        self._known[worker, incarnation] = secret
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]


class Fences:
    """The values that calls must name to be served: the era, and of a chief also its number. Chiefs set them.

    `name` is the server's, for texts. The caller serialises the calls.
    """

    def __init__(self, name: str) -> None:
        self.fence = NOBODY
        self._name = name
        # Why the shard's state can only be dropped; empty: it is intact.
        self.damage = ""
        self._shutdown_reason: str | None = None

    @property
    def epoch(self) -> int:
        """The cluster's; 0 before a chief has adopted the server."""
        return self.fence.epoch

    def adopt(self, fence: Fence) -> bool:
        """Lets a chief take over, and says whether a new epoch begins; raises InvalidSpec or Superseded."""
        if min(fence.life, fence.epoch, fence.chief_incarnation) < 1:
            raise InvalidSpec(f"{self._name}: adopted by {fence}: want life, epoch and chief incarnation >= 1")
        self.check_chief(fence)
        if fence.epoch < self.epoch:
            raise Superseded(
                f"{self._name}: cluster epoch is {self.epoch}, you have {fence.epoch}; a later chief has rolled the cluster back"
            )
        is_new = fence.era != self.fence.era
        if is_new:
            # Damaged state is dropped with its epoch.
            self.damage = ""
        self.fence = fence
        return is_new

    def forget_chief(self) -> None:
        """Obeys no chief from now on, as a server that has just been started."""
        self.fence = NOBODY

    @property
    def served_epoch(self) -> int:
        """The epoch whose callers are served; 0: none."""
        return self.epoch if self._shutdown_reason is None and not self.damage else 0

    def check_not_ending(self) -> None:
        """Raises ShuttingDown if the server ends."""
        if self._shutdown_reason is not None:
            raise ShuttingDown(f"{self._name} is shutting down: {self._shutdown_reason}")

    def check_running(self) -> None:
        """Raises ShuttingDown or NotInitialized if the server no longer serves calls."""
        self.check_not_ending()
        if self.damage:
            raise NotInitialized(f"{self.damage} and has lost its variables; ask the chief")

    def check_caller(self, epoch: int) -> None:
        """Raises EpochMismatch, or the errors of `check_running`."""
        if epoch == self.fence.era.epoch and epoch and self._shutdown_reason is None and not self.damage:
            return
        self.check_running()
        if not self.epoch:
            raise self.other_epoch(epoch)
        self.check_epoch(epoch)

    def check_era(self, era: Era) -> None:
        """Raises EpochMismatch unless it is the cluster's."""
        if era == self.fence.era:
            return
        self.check_epoch(era.epoch)
        raise EpochMismatch(f"{self._name}: the cluster has begun anew since you joined it; reconnect", facts={"epoch": str(self.epoch)})

    def check_epoch(self, epoch: int) -> None:
        """Raises EpochMismatch unless it is the cluster's."""
        if epoch != self.epoch:
            raise self.other_epoch(epoch)

    def check_chief_call(self, fence: Fence) -> None:
        """Notes the number of a chief that calls; raises Superseded, or the errors of `check_caller`."""
        if fence is self.fence and fence.era.epoch and self._shutdown_reason is None and not self.damage:
            return  # as with every step but its first: all later checks would pass
        self.check_not_ending()
        # First: a superseded chief is to end, whatever its epoch, and must not conclude that its training has failed.
        self.check_chief(fence)
        self.check_caller(fence.epoch)
        self.check_era(fence.era)
        self.fence = fence

    def other_epoch(self, epoch: int) -> EpochMismatch:
        """Returns the error for a caller of another epoch."""
        stands = f"cluster epoch is {self.epoch}" if self.epoch else "no chief has adopted it since it started"
        return EpochMismatch(f"{self._name}: {stands}, you have epoch {epoch}; reconnect", facts={"epoch": str(self.epoch)})

    @property
    def is_refusing(self) -> bool:
        """Whether every call is refused, since the shard shuts down."""
        return bool(self._shutdown_reason)

    def refuse_from_now_on(self, reason: str) -> None:
        """Makes every later call raise ShuttingDown. The first reason stays."""
        self._shutdown_reason = self._shutdown_reason or reason or "asked to"

    def note_damage(self, step: int) -> None:
        """Makes every later call raise NotInitialized: values that an apply changes in place are half old, half new."""
        self.damage = f"{self._name} failed half-way through step {step}"

    def check_chief(self, fence: Fence) -> None:
        """Raises Superseded if a later chief has the server, or one of another life that was given the same number."""
        if not fence.is_overtaken_by(self.fence):
            return
        known, number = self.fence.chief_incarnation, fence.chief_incarnation
        who = f"chief incarnation {known}" if number < known else "a chief of another life of the cluster"
        raise Superseded(f"{self._name}: {who} has adopted it, you are {number}; end this chief", facts={"chief_incarnation": str(known)})


class ChiefNotes:
    """Notes of one server. The caller serialises the calls, and has checked that they are the chief's; `clock` is monotonic, in seconds."""

    def __init__(self, *, budget: MemoryBudget, clock: Callable[[], float]) -> None:
        self.address = ""
        # How the chief counts on this replica, by its latest message; and whether the chief before counted on it alone.
        self.replica, self.was_alone = ONLY_REPLICA, False
        self.record = b""
        self.record_version = 0
        self._story = b""
        self._budget = budget
        self._clock = clock
        self._heard_at: float | None = None

    def heard(self) -> None:
        """The chief has called."""
        self._heard_at = self._clock()

    @property
    def heard_ago_s(self) -> float | None:
        """How long ago the chief was heard; None: never."""
        return None if self._heard_at is None else max(0.0, self._clock() - self._heard_at)

    @property
    def is_silent(self) -> bool:
        """Whether the chief has not been heard for so long that it may be gone."""
        ago_s = self.heard_ago_s
        return ago_s is None or ago_s >= LIVING_CHIEF_S

    def forget(self) -> None:
        """Drops all notes of the chief that had the server."""
        self._budget.release(len(self.record))
        self.address, self.replica, self.record, self.record_version, self._story = "", ONLY_REPLICA, b"", 0, b""
        self._heard_at = None

    def begin_another(self) -> None:
        """Another chief has the server: it numbers what it says from 1 again."""
        self.replica, self.was_alone = ONLY_REPLICA, self.replica.is_alone

    def count_on(self, replica: ReplicaState) -> bool:
        """Sets how the chief counts on this replica; returns whether that is new, and not a late copy."""
        is_news = replica.version > self.replica.version
        if is_news:
            self.replica = replica
        return is_news

    def keep(self, record: bytes, *, version: int) -> None:
        """Keeps a record, unless there is one of this version or a later one. Raises LimitExceeded."""
        if version <= self.record_version:
            return
        if len(record) > MAX_RECORD_BYTES:
            raise LimitExceeded(f"record: {len(record)} bytes, {MAX_RECORD_BYTES} at most; use fewer variables, or shorter names")
        self._budget.reserve(len(record), purpose="the chief's record")
        self._budget.release(len(self.record))
        self.record, self.record_version = record, version

    def keep_story(self, story: bytes) -> bytes:
        """Keeps what the chief's page shows of the past, unless it is empty; returns what was kept before. Raises LimitExceeded."""
        if len(story) > MAX_STORY_BYTES:
            raise LimitExceeded(f"past of the page: {len(story)} bytes, {MAX_STORY_BYTES} at most")
        before, self._story = self._story, story or self._story
        return before
