"""Which keys of a table have rows, and which rows: admission, age, and who makes room; and where rows lie. Knows no values, and no lock.

`plan` says what a step's keys get, and changes nothing, so that readers can be told first; `carry_out` does it. Which keys have rows
follows from keys and steps alone, not from the number of servers, the order of rows, or anybody's timing.
"""

from collections.abc import Sequence

import numpy as np

from ps_protocol.errors import LimitExceeded
from ps_protocol.model.keys import KEYS_PART, OCCURRENCES_PART, USE_PART, KeySpec, draws
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import MAX_TENSOR_BYTES, Array
from ps_server.numbers.key_index import MAX_ROWS, KeyIndex
from ps_server.numbers.memory import BytesInFile, MemoryBudget, growing_bytes
from ps_server.numbers.occurrences import BUCKET_BYTES, Occurrences
from ps_server.numbers.row_buckets import RowBuckets

# The step that used a row last; and in a bounded table its place in a bucket, and whether a step needs it.
_USE_BYTES, _BOUNDED_BYTES = 4, 5 + 1
# The rows that a step looks at to find those that are gone, at least, and for each that it needs.
_LOOKED_AT, _LOOKED_AT_PER_ROW = 1 << 12, 16
_GOLDEN = 0x9E3779B97F4A7C15
_STEP_BITS = (1 << 32) - 1
_NUM_AGES = 32
# The rows that are counted at once, in less than 1 ms.
_COUNTED_ROWS = 1 << 15
_KEY_DTYPE = np.dtype("<i8")
_NONE = np.empty(0, np.int64)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows of some keys, ascending. `numbers`: of each; -1: there is no room for it.

    `begins`: positions of keys whose rows begin with first values. `new`: those of them that have no row yet, of which the last ones get
    the rows `evicted` of other keys.
    """

    numbers: Array
    begins: Array
    new: Array
    evicted: Array


class NumberedRows:
    """The rows of a table of a size: all are there, and named by their numbers."""

    place_bytes = nbytes_per_row = nbytes = num_found = num_made = num_evicted = num_refused = num_unadmitted = 0

    def __init__(self, piece: VariableSlice, budget: MemoryBudget) -> None:
        self.num_rows = self.max_rows = piece.stop - piece.start
        self.parts: dict[str, Array] = {}
        self.memories: dict[str, Array] = {}
        self.file: BytesInFile | None = None
        # Of what was allocated for all rows.
        self.held_bytes = 0
        self._piece, self._budget = piece, budget

    def allocate(self, what: str, row_bytes: int) -> Array:
        """Returns zeroed memory for all rows. Raises LimitExceeded."""
        nbytes = self.num_rows * row_bytes
        memory = self._budget.allocate(nbytes, purpose=f"{what} of variable {self._piece.variable.name!r}")
        self.held_bytes += nbytes
        return memory

    def allocate_rows(self, names: Sequence[str]) -> list[Array]:
        """Returns zeroed memory for parts of rows, one row after the other. Raises LimitExceeded."""
        row_bytes = self._piece.row_bytes
        return [self.allocate(name, row_bytes).reshape(self.num_rows, row_bytes) for name in names]

    def find(self, indices: Array, *, step: int) -> Array:
        """Returns the numbers."""
        return indices

    def are_admitted(self, indices: Array, *, step: int, now: int) -> Array | None:
        """Returns None: all."""
        return None

    def count_unadmitted(self, indices: Array) -> None:
        """Has no effect."""

    def plan(self, indices: Array, *, now: int, evicts: bool = True) -> Plan:
        """Returns the numbers."""
        return Plan(numbers=indices, begins=_NONE, new=_NONE, evicted=_NONE)

    def former_keys(self, rows: Array) -> Array:
        """Returns the numbers."""
        return rows

    def carry_out(self, plan: Plan, indices: Array, *, step: int) -> None:
        """Has no effect."""

    def counts_by_age(self, *, step: int) -> list[int]:
        """Returns nothing: these rows keep no step of their last use."""
        return []


class KeyedRows:
    """The rows of a slice of a keyed table; of those that there may be, the first `num_rows` are in use.

    Their memory takes none until it is used. The counters are of all steps: keys that had a row, rows that were made, those that made
    room or grew too old, keys that found none, and keys that were not admitted.
    """

    # A key's place in the index, of which 25 to 70 % are taken; while a larger one is made there are two.
    place_bytes = 30

    def __init__(self, piece: VariableSlice, spec: KeySpec, budget: MemoryBudget) -> None:
        initializer = piece.variable.initializer
        # Of values and slots.
        self.file: BytesInFile | None = None
        self.held_bytes = 0
        self._piece, self._spec, self._budget = piece, spec, budget
        self._seed = initializer.seed if initializer is not None else 0
        most = min(MAX_ROWS, MAX_TENSOR_BYTES // max(1, piece.row_bytes))
        self.max_rows = min(most, spec.max_rows or most)
        self.num_found = self.num_made = self.num_evicted = self.num_refused = self.num_unadmitted = 0
        self._index = KeyIndex(self.allocate("keys", _KEY_DTYPE.itemsize).view(_KEY_DTYPE))
        self._buckets = RowBuckets(piece, spec.max_rows, self._growing) if spec.max_rows else None
        # By row, the step that used it last, modulo 2^32.
        has_use = bool(spec.max_rows or spec.max_age_steps)
        self._use = self.allocate("use of rows", _USE_BYTES * has_use).view(np.uint32)
        self.memories = {USE_PART: self._use} if has_use else {}
        admit_after = spec.admit_after or 1
        counters = self._growing("occurrences of keys", BUCKET_BYTES, piece.stop - piece.start if admit_after > 1 else 0)
        self.occurrences = Occurrences(piece, counters, most=admit_after) if counters.size else None
        self._bucket_parts = {OCCURRENCES_PART: counters} if counters.size else {}
        self.nbytes_per_row = _KEY_DTYPE.itemsize + _USE_BYTES * has_use + _BOUNDED_BYTES * (self._buckets is not None)

    def allocate(self, what: str, row_bytes: int) -> Array:
        """Returns zeroed memory for as many rows as there may be. Raises LimitExceeded."""
        return self._growing(what, row_bytes, self.max_rows)

    def allocate_rows(self, names: Sequence[str]) -> list[Array]:
        """Returns zeroed memory for parts of rows, one row after the other. Raises LimitExceeded.

        In a file, the parts of a row lie beside each other: who needs one needs all, and the disk reads and writes whole pages.
        """
        row_bytes = self._piece.row_bytes
        if self._budget.make_file is None:
            return [self.allocate(name, row_bytes).reshape(self.max_rows, row_bytes) for name in names]
        self.file = self._budget.make_file(self.max_rows * row_bytes * len(names))
        # Who looks for keys without rows copies the first row in their place, also before there is one.
        self.file.reserve(row_bytes * len(names))
        return np.split(self.file.memory.reshape(self.max_rows, -1), len(names), axis=1)

    def _growing(self, what: str, row_bytes: int, num_rows: int) -> Array:
        return growing_bytes(num_rows * row_bytes, purpose=f"{what} of variable {self._piece.variable.name!r}")

    @property
    def num_rows(self) -> int:
        """The number of rows that are in use."""
        return self._index.num_rows

    @property
    def keys(self) -> Array:
        """The keys of the rows, spread."""
        return self._index.keys[: self.num_rows]

    @property
    def parts(self) -> dict[str, Array]:
        """What a checkpoint has of each row, beside values and slots, and of each bucket."""
        return {KEYS_PART: self.keys} | {name: memory[: self.num_rows] for name, memory in self.memories.items()} | self._bucket_parts

    @property
    def nbytes(self) -> int:
        """Bytes of the index, without the keys, and of counters."""
        return self._index.nbytes + sum(part.nbytes for part in self._bucket_parts.values())

    def find(self, keys: Array, *, step: int) -> Array:
        """Returns the row of each key; -1 where it has none at a step."""
        numbers = self._index.find(keys)
        if self._spec.max_age_steps:
            numbers[self._are_gone(numbers, step)] = -1
        return numbers

    def are_admitted(self, keys: Array, *, step: int, now: int) -> Array | None:
        """Returns which keys have a row `now` or may get one in a step; None: all."""
        if self._spec.admit_probability < 1:
            stays = draws(keys, seed=self._seed, step=step) < self._spec.admit_probability
        elif self.occurrences is not None:
            stays = self.occurrences.estimates(keys) + 1 >= (self._spec.admit_after or 1)
        else:
            return None
        return stays | (self.find(keys, step=now) >= 0)

    def count_unadmitted(self, keys: Array) -> None:
        """Counts keys that a step had gradients for, and that it did not admit."""
        self.num_unadmitted += keys.size
        if self.occurrences is not None:
            self.occurrences.count(keys)

    def plan(self, keys: Array, *, now: int, evicts: bool = True) -> Plan:
        """Returns the rows that keys are to have, where none has been used since the step `now`. Raises LimitExceeded; nothing changes."""
        numbers, evicted = self._index.find(keys), _NONE
        new = np.flatnonzero(numbers < 0)
        again = np.flatnonzero((numbers >= 0) & self._are_gone(numbers, now)) if self._spec.max_age_steps else _NONE
        if self._buckets is not None and new.size:
            needed = numbers[numbers >= 0]
            ages = (lambda rows: np.uint32((now + 1) & _STEP_BITS) - self._use[rows]) if evicts else None
            places = self._buckets.places(keys[new], needed=needed, ages=ages, keys_of=self._index.keys)
            new, evicted = new[np.concatenate([places.added, places.replacing])], places.evicted
        elif self._spec.max_age_steps and evicts and new.size:
            evicted = self._some_that_are_gone(new.size, needed=numbers, now=now)
        self._check_room(new.size - evicted.size)
        if new.size:
            numbers[new] = np.concatenate([np.arange(self.num_rows, self.num_rows + new.size - evicted.size), evicted])
        return Plan(numbers=numbers, begins=np.concatenate([new, again]) if again.size else new, new=new, evicted=evicted)

    def former_keys(self, rows: Array) -> Array:
        """Returns the keys that rows have as yet."""
        return self._index.keys[rows]

    def carry_out(self, plan: Plan, keys: Array, *, step: int) -> None:
        """Gives the keys of the plan their rows, which are used at a step. First values must be there: who finds a key finds its row."""
        num_added = plan.new.size - plan.evicted.size
        self.add(keys[plan.new[:num_added]])
        if plan.evicted.size:
            self._index.replace(plan.evicted, keys[plan.new[num_added:]])
        num_without = int(np.count_nonzero(plan.numbers < 0))
        # A row that grew too old and begins anew in its place is one that went and one that was made.
        num_again = plan.begins.size - plan.new.size
        self.num_found += plan.numbers.size - plan.begins.size - num_without
        self.num_made += plan.new.size + num_again
        self.num_evicted += plan.evicted.size + num_again
        self.num_refused += num_without
        if self._use.size:
            self._use[plan.numbers[plan.numbers >= 0]] = step & _STEP_BITS

    def counts_by_age(self, *, step: int) -> list[int]:
        """Returns how many rows were used last 1 step ago (by the one that led to `step`), 2 to 3 steps ago, 4 to 7, and so on.

        Empty: rows keep no step of their last use. For any thread, beside steps: other threads go on after each part of the rows.
        """
        if not self._use.size:
            return []
        counts = np.zeros(_NUM_AGES, np.int64)
        for start in range(0, self.num_rows, _COUNTED_ROWS):
            used = self._use[start : min(start + _COUNTED_ROWS, self.num_rows)]
            # Signed: a step that is being applied has used rows later.
            ages = np.maximum((np.uint32(step & _STEP_BITS) - used).view(np.int32), 0)
            counts += np.bincount(np.frexp(ages + 1.0)[1] - 1, minlength=counts.size)
        found: list[int] = counts.tolist()
        return found

    def add(self, keys: Array) -> None:
        """Gives the next rows to keys that have none. Raises LimitExceeded."""
        self._check_room(keys.size)
        if not keys.size:
            return
        if self._buckets is not None:
            self._buckets.add(keys, np.arange(self.num_rows, self.num_rows + keys.size))
        self._index.add(keys)

    def _are_gone(self, numbers: Array, step: int) -> Array:
        """Returns whether no step for so long used the rows, or that before the number -1, that they are gone at `step`."""
        return self._spec.are_gone(np.take(self._use, numbers, mode="clip"), step=step)

    def _some_that_are_gone(self, count: int, *, needed: Array, now: int) -> Array:
        """Returns at most so many rows that are gone, of a part of the table that follows from the step alone, but none of those needed."""
        num_rows = self.num_rows
        size = min(num_rows, max(_LOOKED_AT, _LOOKED_AT_PER_ROW * count))
        start = (now * _GOLDEN % (1 << 64)) * num_rows >> 64
        part = (start + np.arange(size)) % max(1, num_rows)
        return np.setdiff1d(part[self._are_gone(part, now)], needed)[:count]

    def _check_room(self, num_new: int) -> None:
        if self.num_rows + num_new > self.max_rows:
            raise LimitExceeded(
                f"variable {self._piece.variable.name!r}: {self.num_rows} rows and {num_new} more, {self.max_rows} at most on one"
                " parameter server; add parameter servers"
            )
