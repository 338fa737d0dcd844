"""Leases of ranges of the training data, and the order in which they are handed out. Knows workers by number; no call, step or clock."""

import hashlib
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ps_protocol.errors import DataMismatch
from ps_protocol.model.data import DataMarks, DataPass, DataRange, DataSpec
from ps_protocol.roles.chief import DataStatus
from ps_protocol.roles.contribution import PushId

_NUM_ROUNDS = 4


def nth_range(position: int, *, num_ranges: int, epoch: int, seed: int | None) -> int:
    """Returns the number of the range that comes at `position` (0 to num_ranges - 1) in this pass; without a seed they come in order.

    A permutation by a Feistel network over the smallest even number of bits that holds all numbers, repeated until the result is one.
    """
    if seed is None or num_ranges < 2:
        return position
    half = ((num_ranges - 1).bit_length() + 1) // 2
    key = f"{seed}:{epoch}".encode()
    number = _shuffled(position, half, key)
    while number >= num_ranges:
        number = _shuffled(number, half, key)
    return number


def _shuffled(number: int, half: int, key: bytes) -> int:
    mask = (1 << half) - 1
    left, right = number >> half, number & mask
    for turn in range(_NUM_ROUNDS):
        digest = hashlib.blake2b(bytes([turn]) + right.to_bytes(8, "little"), key=key[:64], digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half | right


# A range is free, then leased to a worker, then counted (a contribution made from it is part of a step that is not applied yet), then done.
# It is free again if its worker goes, gives it back, or its contribution is refused.


MAX_RANGES_A_CALL = 1024
# Of all workers: of passes without end one could lease ranges until there is no memory left.
MAX_LEASED = 1 << 20
# Passes that may be under way: no worker can have ranges of later ones, and each has a list of the ranges that are done.
MAX_PASSES_AHEAD = 64
_Holder = tuple[int, int]  # worker, incarnation


class DataLeases:
    """The cluster's progress through its training data; empty until a worker names the data."""

    def __init__(self) -> None:
        self.resume(None)

    def resume(self, marks: DataMarks | None) -> None:
        """Only this is done; nothing is leased or counted."""
        self.spec: DataSpec | None = None
        # Workers without a range: they asked, and all remaining ranges are counted or leased to others.
        self.starved: set[int] = set()
        self._pass, self._position = 0, 0  # the next range to hand out, after those that came back
        # Ranges in the order in which they are handed out: so many are done without a gap, and those after them, as far as that has come.
        # Where another chief goes on it looks at the latter alone: there may be millions of the former.
        self._num_done_first = 0
        self._after_those: deque[int] = deque()
        self._returned: deque[int] = deque()
        self._leased: dict[int, _Holder] = {}
        # By worker, its incarnation and the ranges that an earlier chief has leased to it, by what the worker itself has said.
        self._said: dict[int, tuple[int, set[int]]] = {}
        self._counted: dict[PushId, tuple[int, ...]] = {}
        self._in_counted: set[int] = set()
        self._done: dict[int, bytearray] = {}  # one bit a range, by pass; passes before the first of these are done
        self._num_done: dict[int, int] = {}
        self._first_pass = 0
        self._latest: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # worker: incarnation, request, ranges
        if marks is not None:
            self.spec, self._first_pass, self._pass, self._position = marks.data, marks.epoch, marks.epoch, marks.position
            self._num_done_first = marks.epoch * marks.data.num_ranges + marks.position
            for one in marks.passes:
                self._done[one.epoch] = bytearray(one.done)
                self._num_done[one.epoch] = sum(byte.bit_count() for byte in one.done)

    @property
    def has_counted(self) -> bool:
        """Whether ranges become done with the contributions that wait to be applied."""
        return bool(self._counted)

    @property
    def is_exhausted(self) -> bool:
        """Whether all passes are done."""
        spec = self.spec
        return spec is not None and bool(spec.num_epochs) and self._first_pass >= spec.num_epochs

    def check(self, spec: DataSpec) -> None:
        """Raises DataMismatch if the cluster goes through other data."""
        if self.spec is not None and spec != self.spec:
            raise DataMismatch(
                f"your training data differs from this cluster's: you have {_words(spec)}, it has {_words(self.spec)};"
                " give all workers the same, or start the cluster again"
            )

    def lease(self, worker: int, incarnation: int, spec: DataSpec, *, max_ranges: int, request_id: int) -> tuple[DataRange, ...]:
        """Hands out at most so many ranges, none if there are none; the same again if the request is repeated. Raises DataMismatch."""
        self.check(spec)
        self.spec = spec
        last_incarnation, last_request, last = self._latest.get(worker, (0, -1, ()))
        if last_incarnation == incarnation and request_id <= last_request:
            # A late copy, perhaps after the worker has used its ranges: the worker would never learn of others.
            still = (identity for identity in last if self._leased.get(identity) == (worker, incarnation))
            return tuple(spec.range(identity) for identity in still) if request_id == last_request else ()
        granted: list[int] = []
        while (
            len(granted) < min(max_ranges, MAX_RANGES_A_CALL, MAX_LEASED - len(self._leased) + len(granted))
            and (identity := self._next(spec)) is not None
        ):
            self._leased[identity] = worker, incarnation
            granted.append(identity)
        if granted:
            self._latest[worker] = incarnation, request_id, tuple(granted)
            self._said_by(worker, incarnation).difference_update(granted)
            self.starved.discard(worker)
        else:
            self.starved.add(worker)
        return tuple(spec.range(identity) for identity in granted)

    def compare(self, worker: int, incarnation: int, held: Collection[int], *, request_id: int) -> bool:
        """Compares the ranges that a request names with those given to the one before, and with those that the worker said it had.

        Ranges that the worker does not have are free: the one before was a late copy, of a request that another chief had answered; or
        the worker said that it had them, and heard then from another chief that their contribution counts for nothing. Returns whether
        any is free again.
        """
        last_incarnation, last_request, last = self._latest.get(worker, (0, -1, ()))
        if last_incarnation != incarnation or request_id <= last_request:
            return False
        said = self._said_by(worker, incarnation)
        gone = {*last, *said}.difference(held)
        said -= gone
        return self.give_back(worker, incarnation, sorted(gone))

    def waits_no_more(self, worker: int, incarnation: int, *, request_id: int) -> None:
        """Notes that a request was answered without ranges. A late copy of it gets none, since its worker would not learn of them."""
        last_incarnation, last_request, _ = self._latest.get(worker, (0, -1, ()))
        if last_incarnation != incarnation or request_id > last_request:
            self._latest[worker] = incarnation, request_id, ()

    def is_answered(self, worker: int, incarnation: int, *, request_id: int) -> bool:
        """Whether a request is a late copy of one that was answered, and that has no ranges any more."""
        last_incarnation, last_request, last = self._latest.get(worker, (0, -1, ()))
        if last_incarnation != incarnation or request_id > last_request:
            return False
        return request_id < last_request or not any(self._leased.get(identity) == (worker, incarnation) for identity in last)

    def give_back(self, worker: int, incarnation: int, ranges: Iterable[int]) -> bool:
        """Frees these ranges again if the worker holds them; True if it held any."""
        back = [identity for identity in dict.fromkeys(ranges) if self._leased.get(identity) == (worker, incarnation)]
        for identity in back:
            del self._leased[identity]
        self._returned.extend(back)
        return bool(back)

    def drop(self, worker: int, incarnation: int) -> bool:
        """Frees the ranges of a lost worker; returns whether it had any."""
        self.starved.discard(worker)
        self._latest.pop(worker, None)
        holder = (worker, incarnation)
        return self.give_back(worker, incarnation, [identity for identity, has in self._leased.items() if has == holder])

    def count(self, push_id: PushId, ranges: Sequence[int]) -> None:
        """Counts these ranges, whose contribution will be part of a later step. Leaves out those that are done or counted already."""
        self.starved.discard(push_id.worker)
        if self.spec is None:
            return
        last_pass = min(self.spec.num_epochs or math.inf, self._first_pass + MAX_PASSES_AHEAD)
        valid = (identity for identity in dict.fromkeys(ranges) if 0 <= identity < last_pass * self.spec.num_ranges)
        taken = tuple(identity for identity in valid if not self._is_over(identity))
        for identity in taken:
            self._leased.pop(identity, None)
        if taken:
            self._counted[push_id] = taken
            self._in_counted.update(taken)

    def applied(self, contributors: Iterable[PushId]) -> list[int]:
        """Marks the ranges of these applied contributions as done, and returns them."""
        done: list[int] = []
        for push_id in contributors:
            ranges = self._counted.pop(push_id, ())
            self._in_counted.difference_update(ranges)
            done += ranges
        self.finish(done)
        return done

    def uncount(self, push_id: PushId) -> bool:
        """A contribution that was counted is in no step: its ranges are free again; True if it had any."""
        ranges = self._counted.pop(push_id, ())
        self._in_counted.difference_update(ranges)
        if ranges and not self._has_said(push_id.worker, push_id.incarnation):
            # It would name these, which it never uses again.
            self._said[push_id.worker] = push_id.incarnation, set()
        self._returned.extend(ranges)
        return bool(ranges)

    def finish(self, ranges: Iterable[int]) -> None:
        """Marks these as done, whichever worker had them."""
        if self.spec is not None:
            for identity in ranges:
                self._leased.pop(identity, None)
                self._mark_done(identity)

    def counted_ranges(self, push_id: PushId) -> tuple[int, ...]:
        """Returns the ranges of a contribution that is counted and not applied."""
        return self._counted.get(push_id, ())

    def may_use(self, worker: int, incarnation: int, ranges: Sequence[int]) -> bool:
        """Whether the worker may contribute gradients of these ranges: none is done, counted, or leased to another worker."""
        if self.spec is None or not ranges:
            return True
        holder = (worker, incarnation)
        return not any(identity >= 0 and (self._is_over(identity) or self._leased.get(identity, holder) != holder) for identity in ranges)

    def hold(self, worker: int, incarnation: int, ranges: Collection[int]) -> bool:
        """Leases these to the worker, if they are free: an earlier chief leased them, and the worker still has them.

        The worker may say this several times, and an earlier message may come after a later one. Between them it can only have used some
        of the ranges. So those that are not in all messages are free; returns whether any is free again.
        """
        if self.spec is None:
            return False
        is_first = not self._has_said(worker, incarnation)
        said = self._said_by(worker, incarnation)
        if not is_first:
            gone = said.difference(ranges)
            said -= gone
            return self.give_back(worker, incarnation, sorted(gone))
        last_pass = min(self.spec.num_epochs or math.inf, self._first_pass + MAX_PASSES_AHEAD)
        for identity in ranges:
            if len(self._leased) >= MAX_LEASED:
                break
            if 0 <= identity < last_pass * self.spec.num_ranges and not self._is_taken(identity):
                self._leased[identity] = worker, incarnation
                said.add(identity)
        return False

    def _has_said(self, worker: int, incarnation: int) -> bool:
        return worker in self._said and self._said[worker][0] >= incarnation

    def _said_by(self, worker: int, incarnation: int) -> set[int]:
        if not self._has_said(worker, incarnation):
            self._said[worker] = incarnation, set()
        return self._said[worker][1]

    def marks(self) -> DataMarks | None:
        """Returns what is done, in few bytes; None without training data."""
        if self.spec is None:
            return None
        position = max(0, self._num_done_first - self._first_pass * self.spec.num_ranges)
        passes = tuple(DataPass(epoch=number, done=bytes(self._done[number])) for number in sorted(self._done))
        return DataMarks(data=self.spec, epoch=self._first_pass, position=position, passes=passes)

    def status(self) -> DataStatus | None:
        """Returns the progress; None without training data."""
        if self.spec is None:
            return None
        size, number = self.spec.num_ranges, self._first_pass
        if self.is_exhausted:
            return DataStatus(name=self.spec.name, epoch=self.spec.num_epochs - 1, num_done=size, num_leased=0, num_ranges=size)
        num_leased = sum(1 for identity in (*self._leased, *self._in_counted) if identity // size == number)
        return DataStatus(name=self.spec.name, epoch=number, num_done=self._num_done.get(number, 0), num_leased=num_leased, num_ranges=size)

    def explain(self) -> str:
        """Returns words for the wait of a worker that gets no range."""
        holders = sorted({worker for worker, _ in self._leased.values()})
        named = ", ".join(f"worker {worker}" for worker in holders[:5]) + (f" and {len(holders) - 5} more" if len(holders) > 5 else "")
        parts = [f"{len(self._leased)} ranges of the training data are leased to {named}"] if holders else []
        if self._in_counted:
            parts.append(f"{len(self._in_counted)} are in contributions that are not applied yet")
        return "; ".join(parts) or "there are ranges again"

    def _next(self, spec: DataSpec) -> int | None:
        while self._returned:
            identity = self._returned.popleft()
            if not self._is_taken(identity):
                return identity
        while not spec.num_epochs or self._pass < spec.num_epochs:
            if self._position == spec.num_ranges:
                self._pass, self._position = self._pass + 1, 0
                continue
            number = nth_range(self._position, num_ranges=spec.num_ranges, epoch=self._pass, seed=spec.shuffle_seed)
            self._position += 1
            identity = self._pass * spec.num_ranges + number
            self._after_those.append(identity)
            if not self._is_taken(identity):
                return identity
        return None

    def _is_taken(self, identity: int) -> bool:
        return identity in self._leased or self._is_over(identity)

    def _is_over(self, identity: int) -> bool:
        return identity in self._in_counted or self._is_done(identity)

    def _is_done(self, identity: int) -> bool:
        assert self.spec is not None
        number, index = divmod(identity, self.spec.num_ranges)
        if number < self._first_pass:
            return True
        bits = self._done.get(number)
        return bits is not None and bool(bits[index >> 3] >> (index & 7) & 1)

    def _mark_done(self, identity: int) -> None:
        assert self.spec is not None
        size = self.spec.num_ranges
        number, index = divmod(identity, size)
        if number < self._first_pass or self._is_over(identity):
            return
        bits = self._done.setdefault(number, bytearray((size + 7) // 8))
        bits[index >> 3] |= 1 << (index & 7)
        self._num_done[number] = self._num_done.get(number, 0) + 1
        while self._num_done.get(self._first_pass) == size:
            del self._num_done[self._first_pass], self._done[self._first_pass]
            self._first_pass += 1
        while self._after_those and self._is_done(self._after_those[0]):
            self._after_those.popleft()
            self._num_done_first += 1


def _words(spec: DataSpec) -> str:
    order = "in order" if spec.shuffle_seed is None else f"shuffled by seed {spec.shuffle_seed}"
    passes = f"{spec.num_epochs} passes" if spec.num_epochs else "passes without end"
    return f"{spec.name!r} ({spec.num_samples} samples in ranges of {spec.range_size}, {passes}, {order})"
