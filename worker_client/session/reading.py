"""Reads a model: variables, rows, slots, averages, metrics. Knows the model and its shards; no tokens, no pushes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, SlotNotFound, StepGone, StepNotReady
from ps_protocol.model.layout import Layout, Segments, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import AVERAGE_SLOT, ModelSpec
from ps_protocol.model.variables import Array, VariableSpec
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.shard import RowsRequest, Shard
from worker_client.core.outcomes import MetricReport, metric_reports
from worker_client.core.sides import Rows
from worker_client.model.gradients import row_indices, unknown_variable
from worker_client.model.memory import ModelMemory
from worker_client.shards.shards import Shards

# Rows of one table from all shards that have some, of one step, in the order asked for.


# Of a whole table, so many rows are asked for at a time: their numbers travel too.
MAX_ROWS_AT_ONCE = 1 << 20

_Steps = dict[int, int]


@light_dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one slice: their numbers within it, and where they go in the result; a slice object if that is one run."""

    table: int
    indices: Array
    target: "slice | Array"


def read_rows(
    shards: Shards,
    layouts: Sequence[Layout],
    variable: VariableSpec,
    indices: Array | None,
    *,
    step: int | None,
    slot: str = "",
    is_aligned: bool = True,
    is_held: bool = False,
) -> Rows:
    """Returns rows of a table, or of one of its slots: `indices` (of `row_indices`; None: all) in their shape, and then the row's.

    `step` None: the newest; of one step over all shards if `is_aligned`, else of each part the newest. `is_held`: all shards hear of a
    reader of that step first, at the cost of a call more for each of them. Raises IndexOutOfRange, SlotNotFound; StepGone, StepNotReady if
    the step that was named, or, for the newest, one of all shards, could not be had this time.
    """
    if indices is None and variable.keys is not None:
        raise InvalidSpec(f"variable {variable.name!r} has no size: name the keys of the rows that are to be read; a checkpoint has all")
    shape = (variable.num_rows,) if indices is None else indices.shape
    flat = None if indices is None else np.ascontiguousarray(indices).reshape(-1)
    values = np.empty((variable.num_rows if flat is None else len(flat), *variable.shape[1:]), variable.data_type.dtype)
    parts = [[*_parts(layout, variable.name, flat)] for layout in layouts]
    reading = _Reading(shards, layouts, values, parts, name=variable.name, slot=slot)
    if step is None and is_aligned and is_held and values.nbytes:
        step = reading.read_held()
        return Rows(values.reshape(*shape, *variable.shape[1:]), step)
    found = reading.read(range(len(parts)), step=step, is_whole=step is None and is_aligned)
    if step is None and is_aligned and found:
        # Shards keep the step before as well, so those that have gone ahead can be read again at the step of the others.
        least = min(found.values())
        ahead = [index for index, its_step in found.items() if its_step > least]
        found |= reading.read(ahead, step=least, is_whole=True) if ahead else {}
    return Rows(values.reshape(*shape, *variable.shape[1:]), min(found.values(), default=None))


class _Reading:
    """Rows on their way into `values`."""

    def __init__(
        self,
        shards: Shards,
        layouts: Sequence[Layout],
        values: Array,
        parts: "Sequence[Sequence[_Part]]",
        *,
        name: str,
        slot: str,
    ) -> None:
        self.parts = parts
        self._shards = shards
        self._layouts = layouts
        self._values = values
        self._name = name
        self._slot = slot

    def read(self, indices: Collection[int], *, step: int | None, is_whole: bool) -> "_Steps":
        """Reads what shards have and returns their steps; `step` None: the newest of each shard if `is_whole`, else of each part."""

        def read(index: int, shard: Shard, timeout_s: float) -> int | None:
            if index not in indices:
                return None
            at, least = step, None
            for part in self.parts[index]:
                found = _read_part(shard, part, self._values, self._request(index, part, at), timeout_s)
                least = found if least is None else min(least, found)
                at = found if is_whole else step
            return least

        steps = self._shards.each(f"read rows of {self._name!r}", read, num_bytes=[self._values.nbytes] * len(self.parts))
        return {index: found for index, found in enumerate(steps) if found is not None}

    def read_held(self) -> int:
        """Reads what shards have, of the newest step of the first of them, which all of them keep meanwhile if they can; returns it."""
        holders = [index for index, parts in enumerate(self.parts) if parts]
        kept: list[int] = []

        def hold(position: int, step: int | None) -> None:
            if step is not None and position == len(holders):
                self.read(holders, step=step, is_whole=True)
                kept.append(step)
                return
            index = holders[position]
            part = self.parts[index][0]
            row = Segments([np.empty(self._values[:1].nbytes, np.uint8)])
            request = self._request(index, part, step)
            self._shards.while_holding(index, request, part.indices[:1], row, lambda found: hold(position + 1, found))

        hold(0, None)
        return kept[-1]

    def _request(self, index: int, part: _Part, step: int | None) -> RowsRequest:
        layout_hash = self._layouts[index].hash
        return RowsRequest(epoch=self._shards.epoch, layout_hash=layout_hash, table=part.table, step=step, slot=self._slot)


def _parts(layout: Layout, name: str, indices: Array | None) -> Iterator[_Part]:
    for position, piece in enumerate(layout.tables):
        if piece.variable.name != name:
            continue
        if indices is None:
            yield from _runs(position, piece)
        elif piece.is_whole:
            if len(indices):
                yield _Part(position, indices, slice(0, len(indices)))
        else:
            least, greatest = piece.index_range
            found = np.flatnonzero((indices >= least) & (indices <= greatest))
            if len(found):
                yield _Part(position, indices[found] - piece.first_index, found)


def _runs(position: int, piece: VariableSlice) -> Iterator[_Part]:
    for start in range(piece.start, piece.stop, MAX_ROWS_AT_ONCE):
        stop = min(start + MAX_ROWS_AT_ONCE, piece.stop)
        yield _Part(position, np.arange(start - piece.start, stop - piece.start, dtype=np.int64), slice(start, stop))


def _read_part(shard: Shard, part: _Part, values: Array, request: RowsRequest, timeout_s: float) -> int:
    is_run = isinstance(part.target, slice)
    into = values[part.target] if is_run else np.empty((len(part.indices), *values.shape[1:]), values.dtype)
    step = shard.read_rows(request, part.indices, Segments([into.reshape(-1).view(np.uint8)]), timeout_s=timeout_s)
    if not is_run:
        values[part.target] = into
    return step


# The readable parts of a cluster's model besides variables: rows, slots, averages, metrics.


# After so many attempts to read a slot at one step of all shards, a cluster that steps faster than it is read gives what there is.
MAX_SLOT_ATTEMPTS = 10
# After the first attempt to read rows at one step of all shards, and then each time after so many, the policy is asked for.
ATTEMPTS_PER_POLICY = 8


class ModelReader:
    """Reads the parts that not every step needs. For one thread; `who` names the reader in messages about waits.

    `applies_on_arrival` asks whether shards do so now: then none of them has steps that could be the same as another's.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        layouts: tuple[Layout, ...],
        shards: Shards,
        who: str,
        timeout_s: float,
        applies_on_arrival: Callable[[], bool],
    ) -> None:
        self.model = model
        self._layouts = layouts
        self._shards = shards
        self._who = who
        self._timeout_s = timeout_s
        self._applies_on_arrival = applies_on_arrival
        self._variables: Mapping[str, VariableSpec] = {spec.name: spec for spec in model.variables}

    def rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool = True) -> Rows:
        """Returns rows of one table (`indices` None: all), of one step, in the given order, repetitions included.

        `step` None: the newest that can be had from all shards, in as many attempts as it takes within the reader's `timeout_s`; without
        `is_aligned`, and where shards apply on arrival, each part is the newest. Raises VariableNotFound, InvalidSpec, DtypeMismatch,
        IndexOutOfRange; StepGone, StepNotReady for a step that was named; DeadlineExceeded.
        """
        spec = self._spec(name)
        if not spec.is_sparse:
            raise InvalidSpec(f"variable {name!r} is dense: read() gives it; only an EmbeddingTable is read by rows")
        wanted = None if indices is None else row_indices(f"rows of {name!r}", indices, spec)
        if step is not None:
            return read_rows(self._shards, self._layouts, spec, wanted, step=step)
        return self._newest_rows(spec, wanted, is_aligned=is_aligned)

    def prefetch(self, name: str, indices: Any) -> None:
        """Has servers read rows from their disks, without waiting for them. Raises as `rows` does."""
        spec = self._spec(name)
        if not spec.is_sparse:
            raise InvalidSpec(f"variable {name!r} is dense: it lies in memory; only rows of an EmbeddingTable are read from a disk")
        wanted = np.ascontiguousarray(row_indices(f"rows of {name!r}", indices, spec)).reshape(-1)
        parts = [[*_parts(layout, name, wanted)] for layout in self._layouts]

        def ask(index: int, shard: Shard, timeout_s: float) -> None:
            for part in parts[index]:
                request = RowsRequest(
                    epoch=self._shards.epoch, layout_hash=self._layouts[index].hash, table=part.table, step=None, is_prefetch=True
                )
                shard.read_rows(request, part.indices, Segments([]), timeout_s=timeout_s)

        self._shards.each(f"prefetch rows of {name!r}", ask)

    def slot(self, name: str, slot: str) -> Array:
        """Returns a copy of one variable's slot, of the newest step. Raises VariableNotFound, SlotNotFound.

        Where steps come too fast for some attempts to find all shards at one step, each shard's newest. A slot that changes while it is
        copied is read again, within the reader's `timeout_s`: else DeadlineExceeded.
        """
        spec = self._spec(name)
        known = tuple((spec.optimizer or self.model.optimizer).slots)
        if slot not in known:
            raise SlotNotFound(f"variable {name!r} has no slot {slot!r}; its optimizer has {', '.join(known) or 'none'}")
        if spec.is_sparse:
            return self._newest_rows(spec, None, slot=slot).values
        return self._dense_slot(slot, [name])[name].copy()

    def slot_names(self) -> list[str]:
        """Returns the names of all optimizers' slots, sorted."""
        return self._shards.slot_names()

    def averages(self, names: Iterable[str] | None) -> dict[str, Array]:
        """Returns the moving averages of the newest step, of all variables that have one or of those named.

        Raises SlotNotFound, VariableNotFound.
        """
        kept = self._averaged()
        wanted = kept if names is None else [self._spec(name).name for name in ([names] if isinstance(names, str) else names)]
        for name in wanted:
            if name not in kept:
                raise SlotNotFound(f"variable {name!r} has no moving average; name it in create_or_join(…, averages=moving_average(…))")
        if not wanted:
            return {}
        arrays = self._dense_slot(AVERAGE_SLOT, wanted)
        return {name: arrays[name] for name in wanted}

    def metrics(self) -> dict[str, MetricReport]:
        """Returns the metrics that workers have reported in contributions that count, by name."""
        return metric_reports(self._shards.metrics())

    def _averaged(self) -> list[str]:
        averages = self.model.averages
        if averages is None:
            raise SlotNotFound("the model keeps no moving averages; create it with create_or_join(…, averages=moving_average(0.99))")
        trained = [spec.name for spec in self.model.variables if not (spec.is_sparse or spec.is_state)]
        return [name for name in trained if name in averages.variables] if averages.variables else trained

    def _newest_rows(self, spec: VariableSpec, indices: Array | None, *, slot: str = "", is_aligned: bool = True) -> Rows:
        what = f"slot {slot!r}" if slot else "rows"
        wait = Wait(f"{self._who} reads {what} of {spec.name!r}", timeout_s=self._timeout_s)
        num_failures = 0
        while True:
            try:
                # Many small calls do not keep up with fast steps, so from the second time on shards hear of the reader first.
                is_held = not slot and num_failures > 0
                return read_rows(self._shards, self._layouts, spec, indices, step=None, slot=slot, is_aligned=is_aligned, is_held=is_held)
            except (StepGone, StepNotReady) as error:
                wait.explain(f"steps pass faster than these {what} can be read at one step of all shards: {error.message}")
            num_failures += 1
            if slot and num_failures >= MAX_SLOT_ATTEMPTS:
                is_aligned = False
            elif num_failures % ATTEMPTS_PER_POLICY == 1:
                is_aligned = not self._applies_on_arrival()

    def _dense_slot(self, slot: str, names: list[str]) -> dict[str, Array]:
        memory = ModelMemory(self.model, layouts=self._layouts, is_writable=True)
        wait = Wait(f"{self._who} reads slot {slot!r}", timeout_s=self._timeout_s)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                steps = self._shards.read_slot(slot, memory, names=frozenset(names))
                if len(steps) <= 1 or num_attempts >= MAX_SLOT_ATTEMPTS:
                    return memory.arrays
            except StepGone as error:
                wait.explain(error.message)

    def _spec(self, name: str) -> VariableSpec:
        if not isinstance(name, str) or name not in self._variables:
            raise unknown_variable(name, self._variables)
        return self._variables[name]


# The dense variables as a reader has them: on the shards' arenas where those show them, else copied.


# Each shard has two arenas, and all shards are at one step, so mostly two are needed.
_MAX_KEPT = 8


def holders(layouts: Sequence[Layout], names: Collection[str]) -> list[int]:
    """Returns the shards that hold a slice of one of these variables, by index."""
    return [index for index, layout in enumerate(layouts) if any(piece.variable.name in names for piece in layout.slices)]


class VariableMemory:
    """The variables read last. Memories on shards' arenas are made once for each combination of them. For one thread."""

    def __init__(self, model: ModelSpec, own: ModelMemory, shards: Shards) -> None:
        self._model = model
        self._own = own
        self._shards = shards
        self._kept: dict[tuple[int, ...], ModelMemory] = {}
        self._memory = own
        self._own_steps: list[int | None] = [None] * len(own.layouts)
        self.step: int | None = None  # of the held variables, if they are of one step, requested by its number

    @property
    def views(self) -> Mapping[str, Array]:
        """The variables by name, read-only."""
        return self._memory.views

    @property
    def is_lent(self) -> bool:
        """Whether some of the held variables lie in memory of servers, which will write there again."""
        return self._memory is not self._own

    @property
    def held(self) -> Sequence[int | None]:
        """The step of each shard's part of the session's own memory; None: anything may be there."""
        return self._own_steps

    def fetch(self, step: int, *, may_view: bool) -> None:
        """Holds the variables of `step`; with `may_view` where shards have them. Raises StepGone, StepNotReady; then nothing is held."""
        self.step = None
        arenas = self._shards.memories.variables(self._own.layouts, step=step) if may_view else ()
        memory = self._on(arenas) if arenas else self._own
        held, self._own_steps = self._own_steps, [None] * len(self._own_steps)
        self._shards.read(memory, step=step, held=held)
        if arenas and memory.copies:
            # A slow reader may have copied values that were being overwritten: then this raises StepGone.
            self._shards.memories.variables(self._own.layouts, step=step)
        self._memory, self.step = memory, step
        if not arenas:
            self._own_steps = [step] * len(self._own_steps)

    def fetch_named(self, step: int, names: Collection[str]) -> None:
        """Holds copies of these variables of `step`, and of what else their shards have. Raises StepGone, StepNotReady."""
        wanted = holders(self._own.layouts, names)
        missing, held = [index for index in wanted if self._own_steps[index] != step], [*self._own_steps]
        self._memory, self.step = self._own, None
        for index in missing:
            self._own_steps[index] = None
        self._shards.read(self._own, step=step, among=missing, held=held)
        for index in missing:
            self._own_steps[index] = step
        if len(wanted) == len(self._own_steps):
            self.step = step

    def fetch_latest(self, *, is_aligned: bool) -> int | None:
        """Holds a copy of the newest variables, and returns the least of their steps; None if no shard has any.

        All of one step if `is_aligned`, where possible. Transfers nothing that has not changed.
        """
        self.step = None
        # Shards without common steps count what arrives and change in place: the same number need not be the same values.
        held, self._own_steps = self._own_steps if is_aligned else (), [None] * len(self._own_steps)
        found = self._shards.read_latest(self._own, is_aligned=is_aligned, held=held)
        self._memory = self._own
        self._own_steps = [found.get(index) for index in range(len(self._own_steps))]
        return min(found.values(), default=None)

    def copied(self, names: Collection[str] | None = None) -> dict[str, Array]:
        """Returns writable copies of the held variables, or of those named.

        Raises StepGone if servers have overwritten them, StepNotReady.
        """
        views = self.views
        if self.is_lent and self.step is not None:
            # From the servers' memory by their own way, which sees whether they write there meanwhile.
            memory = ModelMemory(self._model, layouts=self._own.layouts, is_writable=True)
            self._shards.read(memory, step=self.step)
            if names is None:
                return memory.views
            views = memory.views
        return {name: views[name].copy() for name in (views if names is None else names)}

    def _on(self, arenas: Sequence[Array | None]) -> ModelMemory:
        # The memory holds its arenas, so their ids stay theirs.
        key = tuple(map(id, arenas))
        memory = self._kept.get(key)
        if memory is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.pop(next(iter(self._kept)))
            memory = self._kept[key] = self._own.on(arenas)
        return memory
