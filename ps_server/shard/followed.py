"""Copies of the variables for those who follow them, made where somebody asks. Knows encodings and memory; no lock of the shard."""

import threading
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np

from ps_protocol.encodings.arena import encode_arena
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes, units_of
from ps_protocol.errors import LimitExceeded, StepGone
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.versions import WeightVersions
from ps_protocol.weights.words import Selection
from ps_server.model.shard_model import ShardModel
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.tables import Table

# Copies that nobody has asked for lately are let go.
UNUSED_S = 60.0
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
    """The versions of one model in one encoding, and when somebody asked for them last. `lock` serialises all."""

    model: "weakref.ref[ShardModel]"
    tables: "weakref.WeakSet[Table]"
    versions: WeightVersions
    lock: threading.Lock
    asked_at: float


class FollowedWeights:
    """Answers the followers of a shard. Thread-safe: those who ask for one encoding wait for each other, and no step waits for them.

    It encodes a step when the first of them asks for it, and compares it with the one that it encoded before; of tables, those that
    somebody asks for. `clock`: in seconds.
    """

    def __init__(self, budget: MemoryBudget, *, clock: Callable[[], float]) -> None:
        self._budget, self._clock = budget, clock
        self._lock = threading.Lock()
        self._followed: dict[_Kind, _Followed] = {}
        budget.on_shortage(lambda: self._let_go(0.0))

    def answer(self, request: FetchRequest, *, model: ShardModel, copy: StepCopy | None, newest_step: int) -> FetchReply:
        """Returns a page of the answer. `copy`: of the step that is wanted, if the shard has it.

        Raises StepGone, LimitExceeded, InvalidSpec.
        """
        num_dense = len(model.spec.layout.slices)
        kind = request.encoding, tuple(sorted({index - num_dense for index in request.slices if index >= num_dense}))
        while True:
            one = self._of(kind, model)
            with one.lock:
                if self._followed.get(kind) is not one:
                    continue  # it was let go meanwhile
                versions, now = one.versions, self._clock()
                one.asked_at = now
                if copy is not None and (versions.step is None or copy.step > versions.step):
                    versions.take(copy.step, partial(_encode, model, versions.selection, copy), now=now)
                if versions.step is None:
                    raise StepGone(f"step {request.step} is gone", facts={"step": str(newest_step)})
                return versions.answer(request, newest_step=newest_step, now=now)

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
                    one.versions.close()
            elif len(self._followed) >= _MAX_KINDS:
                raise LimitExceeded(f"{_MAX_KINDS} other choices of encoding and tables are followed already; follow what others do")
            one = _Followed(
                model=weakref.ref(model),
                tables=weakref.WeakSet(model.table(number) for number in tables),
                versions=WeightVersions(
                    selection,
                    allocate=lambda nbytes: self._budget.allocate(nbytes, purpose="a copy of the variables for followers"),
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
                    one.versions.close()
                    del self._followed[kind]
                    one.lock.release()
                    for table in one.tables:
                        table.is_followed = any(table in other.tables for other in self._followed.values())
        finally:
            self._lock.release()


def _encode(model: ShardModel, selection: Selection, copy: StepCopy, memory: Array) -> None:
    """Writes the words of a selection at a step."""
    encode_arena(selection.layout, copy.memory, selection.encoding, memory[: encoded_nbytes(selection.layout, selection.encoding)])
    if not copy.is_intact():
        raise StepGone(f"step {copy.step} was overwritten while it was copied; ask for a later one", facts={"step": str(copy.step + 1)})
    words = memory.view(np.uint16)
    for number in selection.tables:
        content, is_encoded = selection.content_of(words, selection.place(len(selection.layout.slices) + number))
        encoding = selection.encoding if is_encoded else FloatEncoding.AS_IS
        _encode_rows(model.table(number), encoding, None if model.applies_on_arrival else copy.step, content)


def _encode_rows(table: Table, encoding: FloatEncoding, step: int | None, content: Array) -> None:
    """Writes all rows of a table as they were at a step (None: as they are now), while steps change them."""
    if not content.size:
        return  # rows without elements, or with keys, which nobody follows
    rows = content.reshape(table.num_rows, -1)
    _encode_into(rows, table.values, encoding)
    for journal in table.journals_since(step) if step is not None else ():
        before = np.empty((len(journal.rows), rows.shape[1]), np.uint8)
        _encode_into(before, journal.rows, encoding)
        rows[slice(None) if journal.indices is None else journal.indices] = before
    if step is not None:
        table.check_journals(step)


def _encode_into(encoded: Array, rows: Array, encoding: FloatEncoding) -> None:
    if encoding is FloatEncoding.AS_IS:
        np.copyto(encoded.reshape(-1), rows.reshape(-1).view(np.uint8))
    else:
        units_of(encoding).encode(rows.reshape(-1), encoded.reshape(-1))
