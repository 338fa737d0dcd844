"""Who may change a model now, and who is reading it: a step takes its turn alone, arrivals share theirs."""

from collections.abc import Callable
from threading import Condition
from types import TracebackType

from ps_protocol.errors import Unavailable

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
