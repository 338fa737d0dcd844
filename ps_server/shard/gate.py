"""Who is let in, who may change a model now, and who is reading it. Knows threads, epochs and chiefs; no model.

A step takes its turn alone, arrivals share theirs; whoever waits for a step without a thread is told when anything has changed.
"""

from collections.abc import Callable
from threading import Condition
from types import TracebackType

from ps_protocol.errors import EpochMismatch, InternalError, InvalidSpec, LimitExceeded, ShuttingDown, Superseded, Unavailable
from ps_server.numbers.memory import MemoryBudget

# Who may change a model now, and who is reading it: a step takes its turn alone, arrivals share theirs.


# How long a call waits for a step under way before it asks its caller to repeat it.
TURN_WAIT_S = 20.0
# How long an apply waits for readers of what it would overwrite, where steps do not wait for anybody else.
READERS_WAIT_S = 2.0


class Turns:
    """`lock` is the owner's; what ends in `_locked` is called while it is held, and may let it go while waiting."""

    def __init__(self, lock: Condition, *, name: str) -> None:
        self._lock = lock
        self._name = name
        self._is_taken = False
        self._num_sharing = 0
        self._readers: dict[int, int] = {}
        # Readers of earlier steps than this one have been waited for in vain.
        self._given_up_before = 0

    @property
    def is_free(self) -> bool:
        """Whether whoever takes the turn now would wait for nobody, and nobody for readers."""
        return not (self._is_taken or self._num_sharing or self._readers)

    @property
    def is_idle(self) -> bool:
        """Whether no step and no arrival is under way; asks without the lock."""
        return not (self._is_taken or self._num_sharing)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits until no step and no arrival is under way, but not longer than this."""
        with self._lock:
            self._lock.wait_for(lambda: self.is_idle, timeout_s)

    def alone(self) -> "_Turn":
        """A turn that nobody else has, for the `with` block. Waits for those under way; raises Unavailable if that takes too long."""
        return _Turn(self)

    def wait_locked(self) -> None:
        """Waits until no step is under way. Raises Unavailable."""
        if self._is_taken:
            self._wait_for_locked(lambda: not self._is_taken)

    def share_locked(self) -> None:
        """Begins an arrival; `wait_locked` must have returned just now."""
        self._num_sharing += 1

    def end_shared_locked(self) -> None:
        """Ends an arrival."""
        self._num_sharing -= 1
        self._lock.notify_all()

    def reading(self, step: int) -> "_Reader":
        """A reader of `step` is at work in the `with` block; an apply that would overwrite what it reads may wait for it."""
        return _Reader(self._lock, self._readers, step)

    def wait_for_readers_locked(self, *, before: int) -> None:
        """Waits until nobody reads a step before `before`, but at most READERS_WAIT_S.

        Who is slower than that has to read again, and is not waited for any more: one reader that hangs does not set the pace.
        """
        if before < self._given_up_before:
            self._given_up_before = 0
        if not self._lock.wait_for(lambda: not any(self._given_up_before <= step < before for step in self._readers), READERS_WAIT_S):
            self._given_up_before = before

    def begin(self) -> None:
        """Takes the turn; see `alone`."""
        with self._lock:
            self.wait_locked()
            self._is_taken = True
            if not self._num_sharing:
                return
            try:
                self._wait_for_locked(lambda: not self._num_sharing)
            except BaseException:
                self._end_locked()
                raise

    def end(self) -> None:
        """Gives the turn back."""
        with self._lock:
            self._end_locked()

    def _wait_for_locked(self, is_so: Callable[[], bool]) -> None:
        if not self._lock.wait_for(is_so, TURN_WAIT_S):
            raise Unavailable(f"{self._name}: a step has been under way for {TURN_WAIT_S:g} s; repeat the call")

    def _end_locked(self) -> None:
        self._is_taken = False
        self._lock.notify_all()


class _Turn:
    """A turn for a `with` block. A generator would do, at three times the price, and every step takes one."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._turns.end()


class _Reader:
    """One reader among those of `readers`, which has their number by step."""

    __slots__ = ("_lock", "_readers", "_step")

    def __init__(self, lock: Condition, readers: dict[int, int], step: int) -> None:
        self._lock = lock
        self._readers = readers
        self._step = step

    def __enter__(self) -> None:
        with self._lock:
            self._readers[self._step] = self._readers.get(self._step, 0) + 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._readers[self._step] -= 1
            if not self._readers[self._step]:
                del self._readers[self._step]
                self._lock.notify_all()


# Whom a parameter server serves: its epoch, the chief that has it, and whether it still works at all.


class Fences:
    """Epoch, incarnation and life that calls must have, as chiefs have told them.

    `name` is the server's, for texts. The caller serialises the calls.
    """

    def __init__(self, name: str) -> None:
        self.epoch = 0
        self.chief_incarnation = 0
        self.life = 0
        self._name = name
        self._damage = ""
        self._shutdown_reason: str | None = None

    def adopt(self, *, epoch: int, chief_incarnation: int, life: int = 0) -> bool:
        """Lets a chief take over, and says whether a new epoch begins; raises InvalidSpec or Superseded."""
        if epoch < 1 or chief_incarnation < 1:
            raise InvalidSpec(f"{self._name}: epoch {epoch} and chief incarnation {chief_incarnation}: want both >= 1")
        self.check_chief(chief_incarnation)
        if chief_incarnation == self.chief_incarnation:
            self.check_chief_life(life)
        if epoch < self.epoch:
            raise Superseded(f"{self._name}: cluster epoch is {self.epoch}, you have {epoch}; a later chief has rolled the cluster back")
        is_new = epoch > self.epoch
        if is_new:
            # What is damaged goes with its epoch; see `is_damaged`.
            self._damage = ""
        self.epoch, self.chief_incarnation, self.life = epoch, chief_incarnation, life
        return is_new

    @property
    def served_epoch(self) -> int:
        """The epoch whose callers are served; 0: nobody is."""
        return self.epoch if self._shutdown_reason is None and not self._damage else 0

    @property
    def is_damaged(self) -> bool:
        """Whether what is here can only be dropped."""
        return bool(self._damage)

    def check_not_ending(self) -> None:
        """Raises ShuttingDown if the server ends."""
        if self._shutdown_reason is not None:
            raise ShuttingDown(f"{self._name} is shutting down: {self._shutdown_reason}")

    def check_running(self) -> None:
        """Raises ShuttingDown or InternalError if the server serves nobody any more."""
        self.check_not_ending()
        if self._damage:
            raise InternalError(self._damage)

    def check_caller(self, epoch: int) -> None:
        """Raises EpochMismatch, or what `check_running` raises."""
        if epoch == self.epoch and epoch and self._shutdown_reason is None and not self._damage:
            return
        self.check_running()
        if not self.epoch:
            raise self.other_epoch(epoch)
        self.check_epoch(epoch)

    def check_life(self, life: int) -> None:
        """Raises EpochMismatch if the caller is known to stem from another life of the cluster."""
        if life != self.life and life and self.life:
            raise EpochMismatch(
                f"{self._name}: the cluster has begun anew since you joined it; reconnect", facts={"epoch": str(self.epoch)}
            )

    def check_chief_life(self, life: int) -> None:
        """Raises Superseded if a chief is of another life of the cluster: its number may have been given again, and says nothing."""
        if life != self.life and life and self.life:
            raise Superseded(f"{self._name}: a chief of another life of the cluster has adopted it; end this chief")

    def check_epoch(self, epoch: int) -> None:
        """Raises EpochMismatch unless it is the cluster's."""
        if epoch != self.epoch:
            raise self.other_epoch(epoch)

    def check_chief_call(self, epoch: int, chief_incarnation: int) -> None:
        """Notes the incarnation of a chief that asks for something; raises Superseded, or what `check_caller` raises."""
        self.check_not_ending()
        # First: a superseded chief is to end, whatever has become of its epoch, and not to believe that its training has failed.
        self.check_chief(chief_incarnation)
        self.check_caller(epoch)
        self.chief_incarnation = chief_incarnation

    def other_epoch(self, epoch: int) -> EpochMismatch:
        """Returns the error for a caller of another epoch."""
        stands = f"cluster epoch is {self.epoch}" if self.epoch else "no chief has adopted it since it started"
        return EpochMismatch(f"{self._name}: {stands}, you have epoch {epoch}; reconnect", facts={"epoch": str(self.epoch)})

    def refuse_from_now_on(self, reason: str) -> None:
        """Makes every later call raise ShuttingDown. The first reason stays."""
        self._shutdown_reason = self._shutdown_reason or reason or "asked to"

    def note_damage(self, step: int) -> None:
        """Makes every later call raise InternalError: what an apply changes in place is half old, half new."""
        self._damage = f"{self._name}: applying step {step} failed half-way; its values are lost, go back to a checkpoint"

    def check_chief(self, chief_incarnation: int) -> None:
        """Raises Superseded if a later chief has the server."""
        if chief_incarnation < self.chief_incarnation:
            raise Superseded(
                f"{self._name}: chief incarnation {self.chief_incarnation} has adopted it, you are {chief_incarnation}; end this chief",
                facts={"chief_incarnation": str(self.chief_incarnation)},
            )


# Readers that wait for a step without a thread: whom to call when anything has changed.


class Listeners:
    """Each is called once, without the lock. What ends in `_locked` is called while the lock is held, the rest while it is not."""

    def __init__(self, lock: Condition) -> None:
        self._lock = lock
        self._waiting: set[Callable[[], object]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add_locked(self, listener: Callable[[], object]) -> None:
        """Has a listener called the next time."""
        self._waiting.add(listener)

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        with self._lock:
            self._waiting.discard(listener)

    def tell(self) -> None:
        """Calls them all."""
        if self._waiting:
            with self._lock:
                told, self._waiting = self._waiting, set()
            for listener in told:
                listener()


# What a server keeps for its chief, and knows of it: a record for the successor, its address, when it was heard.


# As much as one message can carry, with room for what stands beside it.
MAX_RECORD_BYTES = 12 << 20


class ChiefNotes:
    """Notes of one server. The caller serialises the calls, and has checked that they are the chief's; `now` is monotonic, in seconds."""

    def __init__(self, *, budget: MemoryBudget) -> None:
        self.address = ""
        # Of several replicas of the shard, the chief counts on this one alone.
        self.is_alone = False
        self.record = b""
        self.record_version = 0
        self._budget = budget
        self._heard_at: float | None = None

    def heard(self, now: float) -> None:
        """The chief has called."""
        self._heard_at = now

    def heard_ago_s(self, now: float) -> float | None:
        """Returns how long ago the chief was heard; None: never."""
        return None if self._heard_at is None else max(0.0, now - self._heard_at)

    def keep(self, record: bytes, *, version: int) -> None:
        """Keeps a record, unless there is one of this version or a later one. Raises LimitExceeded."""
        if version <= self.record_version:
            return
        if len(record) > MAX_RECORD_BYTES:
            raise LimitExceeded(f"record: {len(record)} bytes, {MAX_RECORD_BYTES} at most; use fewer variables, or shorter names")
        self._budget.reserve(len(record), purpose="the chief's record")
        self._budget.release(len(self.record))
        self.record, self.record_version = record, version
