"""Copies of the variables for those who follow them, made where somebody asks. Knows encodings and memory; no lock of the shard."""

import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding, units_of
from ps_protocol.errors import LimitExceeded, StepGone
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.copy import WeightCopy
from ps_protocol.weights.words import WORD_BYTES, Selection
from ps_server.model.shard_model import ShardModel
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.tables import Table

# Copies that nobody has asked for lately are let go.
UNUSED_S = 60.0
# Encoded and compared at a time: it stays in a core's cache with what it is compared with.
_BLOCK_BYTES = 1 << 18
# So often in a row a step is overwritten while it is copied; then steps wait for the copy.
_MAX_BROKEN_OFF = 2
# So many copies, of different tables or in different encodings, are kept.
_MAX_KINDS = 8
# An encoding, and which tables there are beside the dense variables.
_Kind = tuple[FloatEncoding, tuple[int, ...]]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """The dense variables of one step, in memory that is theirs while `is_intact` says so."""

    step: int
    memory: Array
    is_intact: Callable[[], bool]


@light_dataclass(slots=True, kw_only=True, eq=False)
class _Followed:
    """A copy of one model in one encoding, when somebody asked for it last, and how often it was broken off. `lock` serialises all."""

    model: "weakref.ref[ShardModel]"
    tables: "weakref.WeakSet[Table]"
    copy: WeightCopy
    lock: threading.Lock
    asked_at: float
    num_broken_off: int = 0


class FollowedWeights:
    """Answers the followers of a shard. Thread-safe: those who ask for one encoding wait for each other.

    It encodes a step when the first of them asks for it, block by block, and compares it with the one that it encoded before, whose place
    it takes; of tables, those that somebody asks for. No step waits for that, unless it `is_starved`. `clock`: in seconds.
    """

    def __init__(self, budget: MemoryBudget, *, clock: Callable[[], float]) -> None:
        self._budget, self._clock = budget, clock
        self._lock = threading.Lock()
        self._followed: dict[_Kind, _Followed] = {}
        budget.on_shortage(lambda: self._let_go(0.0))

    @property
    def is_starved(self) -> bool:
        """Whether steps pass so fast that there is none for somebody who follows them."""
        return any(one.num_broken_off >= _MAX_BROKEN_OFF for one in [*self._followed.values()])

    def answer(self, request: FetchRequest, *, model: ShardModel, copy: StepCopy | None, newest_step: int) -> FetchReply:
        """Returns a page of the answer. `copy`: of the step that is wanted, if the shard has it.

        Raises StepGone, LimitExceeded, InvalidSpec.
        """
        kind = _kind_of(request, model)
        while True:
            one = self._of(kind, model)
            with one.lock:
                if self._followed.get(kind) is not one:
                    continue  # it was let go meanwhile
                weights, now = one.copy, self._clock()
                one.asked_at = now
                if copy is not None and (weights.step is None or copy.step > weights.step):
                    try:
                        weights.advance(copy.step, _blocks(model, weights.selection, copy), now=now)
                        one.num_broken_off = 0
                    except StepGone:
                        one.num_broken_off += 1
                        raise
                return weights.answer(request, newest_step=newest_step, now=now)

    def keep(self, request: FetchRequest, model: ShardModel) -> None:
        """Keeps the copy for somebody who waits for a step, however long that takes; to be called again within UNUSED_S."""
        if (one := self._followed.get(_kind_of(request, model))) is not None:
            one.asked_at = self._clock()

    def let_go_unused(self) -> None:
        """Gives back memory that no follower needs any more. Costs nothing where nobody follows."""
        if self._followed:
            self._let_go(UNUSED_S)

    def _of(self, kind: _Kind, model: ShardModel) -> _Followed:
        with self._lock:
            one = self._followed.get(kind)
            if one is not None and one.model() is model:
                return one
            encoding, tables = kind
            layout = model.spec.layout
            selection = Selection(layout, encoding, [*layout.order, *(len(layout.slices) + number for number in tables)])
            if one is not None:
                with one.lock:
                    one.copy.close()
            elif len(self._followed) >= _MAX_KINDS:
                raise LimitExceeded(f"{_MAX_KINDS} other choices of encoding and tables are followed already; follow what others do")
            one = _Followed(
                model=weakref.ref(model),
                tables=weakref.WeakSet(model.table(number) for number in tables),
                copy=WeightCopy(
                    selection,
                    keeps_patches=True,
                    allocate=lambda nbytes: self._budget.allocate(nbytes, purpose="a copy of the variables for followers"),
                    reserve=self._budget.reserve_spare,
                    release=self._budget.release,
                ),
                lock=threading.Lock(),
                asked_at=self._clock(),
            )
            for table in one.tables:
                table.is_followed = True
            self._followed[kind] = one
            return one

    def _let_go(self, unused_s: float) -> None:
        # Not those that are at work, which may be the caller.
        if not self._lock.acquire(blocking=False):
            return
        try:
            for kind, one in [*self._followed.items()]:
                if one.asked_at + unused_s <= self._clock() and one.lock.acquire(blocking=False):
                    one.copy.close()
                    del self._followed[kind]
                    one.lock.release()
                    for table in one.tables:
                        table.is_followed = any(table in other.tables for other in self._followed.values())
        finally:
            self._lock.release()


def _kind_of(request: FetchRequest, model: ShardModel) -> _Kind:
    num_dense = len(model.spec.layout.slices)
    return request.encoding, tuple(sorted({index - num_dense for index in request.slices if index >= num_dense}))


def _blocks(model: ShardModel, selection: Selection, copy: StepCopy) -> Iterator[tuple[int, Array]]:
    """Yields the words of a selection at a step, with the position of the first; each block is valid until the next."""
    layout, encoding = selection.layout, selection.encoding
    for offset, frame in encoded_frames(layout, copy.memory, encoding, _BLOCK_BYTES):
        yield offset // WORD_BYTES, np.frombuffer(frame, np.uint16)
    if not copy.is_intact():
        raise StepGone(f"step {copy.step} was overwritten while it was copied; ask for a later one", facts={"step": str(copy.step + 1)})
    for number in selection.tables:
        place = selection.place(len(layout.slices) + number)
        table_encoding = encoding if selection.is_encoded[place] else FloatEncoding.AS_IS
        for offset, block in _row_blocks(model.table(number), table_encoding, None if model.applies_on_arrival else copy.step):
            yield int(selection.starts[place]) + offset // WORD_BYTES, block


def _row_blocks(table: Table, encoding: FloatEncoding, step: int | None) -> Iterator[tuple[int, Array]]:
    """Yields all rows of a table as they were at a step (None: as they are now), while steps change them; offsets in bytes."""
    rows = table.values
    if not table.piece.nbytes:
        return  # also one with keys, which nobody follows
    at_once = max(1, _BLOCK_BYTES // table.row_bytes)
    for first in range(0, len(rows), at_once):
        indices = np.arange(first, min(first + at_once, len(rows)))
        block = rows[first : first + at_once].copy()
        for journal in table.journals_since(step) if step is not None else ():
            journal.restore(indices, block)
        encoded = block.reshape(-1).view(np.uint8)
        if encoding is not FloatEncoding.AS_IS:
            units = units_of(encoding)
            encoded = np.empty(units.nbytes(block.size), np.uint8)
            units.encode(block.reshape(-1), encoded)
        yield first * (encoded.nbytes // len(block)), encoded.view(np.uint16)
    if step is not None:
        table.check_journals(step)
