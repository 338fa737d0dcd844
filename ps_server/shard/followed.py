"""Copies of the variables for those who follow them, made where somebody asks. Knows encodings and memory; no lock of the shard."""

import threading
import weakref
from collections.abc import Callable

from ps_protocol.encodings.arena import encode_arena
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import StepGone
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.versions import WeightVersions
from ps_server.numbers.memory import MemoryBudget

# Copies that nobody has asked for lately are let go.
UNUSED_S = 60.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """The variables of one step, in memory that is theirs while `is_intact` says so."""

    step: int
    memory: Array
    is_intact: Callable[[], bool]


@light_dataclass(slots=True, kw_only=True, eq=False)
class _Followed:
    """The versions of one model in one encoding, and when somebody asked for them last. `lock` serialises all."""

    model: "weakref.ref[object]"
    versions: WeightVersions
    lock: threading.Lock
    asked_at: float


class FollowedWeights:
    """Answers the followers of a shard. Thread-safe: those who ask for one encoding wait for each other, and no step waits for them.

    It encodes a step when the first of them asks for it, and compares it with the one that it encoded before. `clock`: in seconds.
    """

    def __init__(self, budget: MemoryBudget, *, clock: Callable[[], float]) -> None:
        self._budget, self._clock = budget, clock
        self._lock = threading.Lock()
        self._followed: dict[FloatEncoding, _Followed] = {}
        budget.on_shortage(lambda: self._let_go(0.0))

    def answer(self, request: FetchRequest, *, model: object, layout: Layout, copy: StepCopy | None, newest_step: int) -> FetchReply:
        """Returns a page of the answer. `copy`: of the step that is wanted, if the shard has it. Raises StepGone, LimitExceeded."""
        one = self._of(request.encoding, model, layout)
        with one.lock:
            versions, now = one.versions, self._clock()
            one.asked_at = now
            if copy is not None and (versions.step is None or copy.step > versions.step):
                versions.take(copy.step, lambda memory: _encode(layout, request.encoding, copy, memory), now=now)
            if versions.step is None:
                raise StepGone(f"step {request.step} is gone", facts={"step": str(newest_step)})
            return versions.answer(request, newest_step=newest_step, now=now)

    def let_go_unused(self) -> None:
        """Gives back memory that no follower needs any more. Costs nothing where nobody follows."""
        if self._followed:
            self._let_go(UNUSED_S)

    def _of(self, encoding: FloatEncoding, model: object, layout: Layout) -> _Followed:
        with self._lock:
            one = self._followed.get(encoding)
            if one is not None and one.model() is model:
                return one
            if one is not None:
                with one.lock:
                    one.versions.close()
            one = _Followed(
                model=weakref.ref(model),
                versions=WeightVersions(
                    layout,
                    encoding,
                    allocate=lambda nbytes: self._budget.allocate(nbytes, purpose="a copy of the variables for followers"),
                    release=self._budget.release,
                ),
                lock=threading.Lock(),
                asked_at=self._clock(),
            )
            self._followed[encoding] = one
            return one

    def _let_go(self, unused_s: float) -> None:
        # Not those that are at work, which may be the caller.
        if not self._lock.acquire(blocking=False):
            return
        try:
            for encoding, one in [*self._followed.items()]:
                if one.asked_at + unused_s <= self._clock() and one.lock.acquire(blocking=False):
                    one.versions.close()
                    del self._followed[encoding]
                    one.lock.release()
        finally:
            self._lock.release()


def _encode(layout: Layout, encoding: FloatEncoding, copy: StepCopy, memory: Array) -> None:
    encode_arena(layout, copy.memory, encoding, memory)
    if not copy.is_intact():
        raise StepGone(f"step {copy.step} was overwritten while it was copied; ask for a later one", facts={"step": str(copy.step + 1)})
