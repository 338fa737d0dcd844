"""Workers that share the shard's memory: the segments offered to each, and when sharing ends. Knows models and segments; no messages.

A sharing lasts as long as its `with` block. An offered segment counts only once the worker has proved that it has mapped it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import field
from types import TracebackType

from ps_protocol.errors import Cancelled, InvalidSpec, LimitExceeded, Unimplemented
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.shared_memory.segment import SegmentMaker, SharedSegment
from ps_server.contributions.shared_buffers import SharedBuffer
from ps_server.model.shard_model import ShardModel
from ps_server.shard.gate import Gate


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The worker that asks for memory, and its number of buffers at first."""

    epoch: int
    worker: int
    incarnation: int
    layout_hash: str
    num_buffers: int
    secret: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if self.incarnation < 1:
            raise InvalidSpec(f"worker {self.worker}: incarnation {self.incarnation}, want >= 1")


class Sharing:
    """The memory that one worker shares. For one thread, except its end."""

    def __init__(self, owner: "Sharings", model: ShardModel, claim: Claim, *, on_end: Callable[[], object]) -> None:
        self.model = model
        self.claim = claim
        self.on_end = on_end
        self.is_ended = False
        self.buffers: list[SharedBuffer] = []
        self._owner = owner
        self._offered: list[SharedSegment] = []
        self._is_granted = False

    def __enter__(self) -> "Sharing":
        return self

    def __exit__(
        self, exception_type: type[BaseException] | None, exception: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._take_back()
        self._owner.close(self, is_lost=exception_type is not None)

    @property
    def num_buffers(self) -> int:
        """Buffers that the worker may use."""
        return len(self.buffers)

    def offer(self, num_buffers: int) -> Sequence[SharedSegment]:
        """Makes memory for so many buffers in all, at most one for each contribution that a worker may have here; returns the new ones.

        The first offer begins with the segment of the variables. Raises LimitExceeded if the worker has no buffer and gets none; where it
        has some, it has to do with those.
        """
        missing = min(num_buffers, self.model.spec.max_staged_per_worker) - len(self.buffers)
        if missing > 0:
            self._owner.check_claim(self)
        try:
            for _ in range(missing):
                self._offered.append(self._owner.make_buffer(self))
        except LimitExceeded:
            if not (self.buffers or self._offered):
                raise
        return self._offered if self._is_granted else [self._owner.variables(self.model), *self._offered]

    def prove(self, nonces: Sequence[bytes], offered: Sequence[SharedSegment]) -> None:
        """Lets the worker use the offered memory; raises InvalidSpec unless it has read the nonces there."""
        if len(nonces) != len(offered) or not all(map(secrets.compare_digest, nonces, (segment.nonce for segment in offered))):
            raise InvalidSpec(f"worker {self.claim.worker}: it has not mapped the memory that it was offered; send the gradients")
        # Both sides have mapped the segments, so no other process needs to open them. They are sealed before they count: else a process
        # that opened one earlier could write it.
        try:
            for segment in self._offered:
                segment.hand_over()
        except OSError as error:
            raise Unimplemented(f"worker {self.claim.worker}: its memory cannot be sealed: {error}; send the gradients") from None
        claim = self.claim
        buffers = [
            SharedBuffer(segment.arenas[0], segment.words, worker=claim.worker, incarnation=claim.incarnation, epoch=claim.epoch)
            for segment in self._offered
        ]
        self._owner.grant(self, buffers)
        self._offered, self._is_granted = [], True

    def _take_back(self) -> None:
        for segment in self._offered:
            segment.close_descriptor()
            self.model.budget.release(segment.arenas[0].nbytes)
        self._offered = []


class Sharings:
    """All sharings of one shard. Calls that end in `_locked` are made in a block of its gate, the others are not."""

    def __init__(self, gate: Gate, maker: SegmentMaker | None, *, name: str) -> None:
        self._gate = gate
        self._maker = maker
        self._name = name
        self.open: list[Sharing] = []

    @property
    def num_sharing(self) -> int:
        """Workers that share memory now."""
        return len(self.open)

    def open_locked(self, model: ShardModel, claim: Claim, *, on_end: Callable[[], object]) -> Sharing:
        """Begins to share; `on_end` is called, from any thread, when it must end. Raises Unimplemented where memory cannot be shared."""
        self.variables(model)
        return Sharing(self, model, claim, on_end=on_end)

    def variables(self, model: ShardModel) -> SharedSegment:
        """Returns the segment that a model's variables lie in."""
        memory = model.memory
        if self._maker is None or not isinstance(memory, SharedSegment):
            raise Unimplemented(f"{self._name}: its system has no memory that could be shared", facts={"same_host": "true"})
        return memory

    def make_buffer(self, sharing: Sharing) -> SharedSegment:
        """Makes memory for one contribution; raises LimitExceeded."""
        assert self._maker is not None
        maker, nbytes, worker = self._maker, sharing.model.spec.layout.nbytes, sharing.claim.worker
        return sharing.model.budget.allocate_by(
            lambda: maker.gradients(nbytes, worker=worker), nbytes, purpose=f"a gradient buffer for worker {worker}"
        )

    def check_claim(self, sharing: Sharing) -> None:
        """Raises LeaseExpired if no chief has admitted the worker, Superseded if a later incarnation of it has pushed."""
        claim = sharing.claim
        with self._gate:
            self._gate.admitted.check(claim.worker, claim.incarnation, claim.secret)
            sharing.model.inbox.claim(worker=claim.worker, incarnation=claim.incarnation)

    def grant(self, sharing: Sharing, buffers: Sequence[SharedBuffer]) -> None:
        """Looks in the buffers, too. Ends an earlier sharing of the same worker; raises Cancelled if this one has ended."""
        with self._gate:
            if sharing.is_ended:
                raise Cancelled(f"{self._name}: sharing memory with worker {sharing.claim.worker} has ended; register again")
            earlier = [other for other in self.open if buffers and other.buffers and self._is_earlier(other, sharing)]
            say_so = self.end_locked(earlier)
            sharing.model.inbox.share(buffers)
            sharing.buffers += buffers
            if sharing not in self.open:
                self.open.append(sharing)
        say_so()

    def close(self, sharing: Sharing, *, is_lost: bool) -> None:
        """Takes back the shared memory; whole contributions stay until they are applied or their step is over.

        `is_lost`: the worker has not announced its end.
        """
        with self._gate:
            self.end_locked([sharing], is_lost=is_lost)

    def _is_earlier(self, other: Sharing, sharing: Sharing) -> bool:
        mine = sharing.claim
        return other is not sharing and other.claim.worker == mine.worker and other.claim.incarnation <= mine.incarnation

    def end_locked(self, sharings: Sequence[Sharing], *, is_lost: bool = False) -> Callable[[], None]:
        """Ends sharings; returns a function that informs the workers, to be called when the lock is free."""
        sharings = tuple(sharings)
        for sharing in sharings:
            sharing.is_ended = True
            sharing.model.inbox.unshare(sharing.buffers, is_lost=is_lost)
            sharing.buffers = []
            if sharing in self.open:
                self.open.remove(sharing)
        callbacks = [sharing.on_end for sharing in sharings]

        def say_so() -> None:
            for callback in callbacks:
                callback()

        return say_so
