"""Recomputes a history's variables from the same contributions in the same order, and compares digests. Knows the server's core.

An epoch that continues an earlier one begins with the earlier one's values as recomputed here, never with those of a checkpoint file.
"""

from collections.abc import Callable
from dataclasses import field, replace

import numpy as np

from lockstep.audit.facts import Facts, ShardLife
from ps_protocol.errors import PsError
from ps_protocol.model.keys import KEYS_PART, OCCURRENCES_PART
from ps_protocol.model.layout import Segments, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process.history import digest
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.history import Applied, Configured, Created, StateKept
from ps_protocol.roles.shard import ApplyRequest, HiddenState, OptimizerPowers, ShardSettings, ShardSpec
from ps_server.model.shard_model import ShardModel
from ps_server.numbers.memory import MemoryBudget
from ps_server.numbers.tables import Table

Wanted = tuple[int, int]


@light_dataclass(slots=True)
class _Snapshot:
    """All variables, slots and averages of a cluster at one step, whole, by name and part; and each shard's hidden state.

    `rows`: the parts of keyed tables, by shard, each with its slice.
    """

    arrays: dict[tuple[str, str], Array] = field(default_factory=dict)
    states: dict[int, HiddenState] = field(default_factory=dict)
    rows: dict[int, list[tuple[VariableSlice, dict[str, Array]]]] = field(default_factory=dict)

    def rows_for(self, table: Table, shard: int) -> None:
        """Gives a shard's keyed table its rows, in the order in which it reads them from a checkpoint."""
        for _, saved in sorted(self.rows.items(), key=lambda item: (item[0] != shard, item[0])):
            for piece, parts in saved:
                if piece.variable.name == table.piece.variable.name:
                    first, chosen = table.extend(parts[KEYS_PART])
                    if OCCURRENCES_PART in parts:
                        table.take_counters(piece, parts[OCCURRENCES_PART], where=f"shard {shard}")
                    for name in parts.keys() - {KEYS_PART, OCCURRENCES_PART}:
                        table.memory_of(name)[first : first + chosen.size] = parts[name][chosen]

    def state_of(self, shard: int) -> HiddenState:
        """Returns a shard's hidden state, with the powers of optimizers that only other shards had."""
        powers: dict[str, tuple[float, ...]] = {}
        for _, state in sorted(self.states.items(), key=lambda item: (item[0] != shard, item[0])):
            powers = {**state.powers_by_key, **powers}
        joined = tuple(OptimizerPowers(key=key, powers=values) for key, values in powers.items())
        return replace(self.states.get(shard, self.states[min(self.states)]), powers=joined)


@light_dataclass(slots=True)
class Recomputed:
    """The number of server steps that were recomputed, and the problems found. `skipped`: what could not be, and why, in words.

    `since`: epoch and step from which on all could be, where records are no longer there.
    """

    num_steps: int = 0
    since: tuple[int, int] | None = None
    problems: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def recompute(facts: Facts, *, on_step: Callable[[], None] = lambda: None) -> Recomputed:
    """Recomputes all values of all epochs. Takes about as long as the servers took. `on_step` is called after each of their steps."""
    result = Recomputed()
    wanted = {(life.from_epoch, life.spec.initial_step) for life in facts.lives.values() if life.from_epoch is not None}
    snapshots: dict[Wanted, _Snapshot] = {}
    # In this order, the other server has reached the values that a returning standby begins with.
    for (epoch, *_), life in sorted(facts.lives.items(), key=lambda item: (item[0][0], item[1].spec.initial_step, item[0])):
        try:
            _Replica(facts, life, epoch, snapshots).replay(result, wanted, on_step)
        except PsError as error:
            result.problems.append(f"{life.where}: ps {life.shard} epoch {epoch} cannot be computed again: {error.message}")
    return result


class _Replica:
    """One life of a shard. `_model` is None while the values are unknown, because records that they follow from are gone."""

    def __init__(self, facts: Facts, life: ShardLife, epoch: int, snapshots: dict[Wanted, _Snapshot]) -> None:
        self._facts, self._life, self._epoch, self._snapshots = facts, life, epoch, snapshots
        self._who = f"ps {life.shard} epoch {epoch}"
        self._model: ShardModel | None = None

    def replay(self, result: Recomputed, wanted: set[Wanted], on_step: Callable[[], None]) -> None:
        """Recomputes one life of a shard, and keeps the values that later epochs begin with."""
        life = self._life
        if life.arrived:
            result.skipped.append(f"{self._who}: contributions were applied on arrival, in an unknown order")
            return
        if life.records and not isinstance(life.records[0].event, (Created, StateKept)):
            self._continue()
        # The first step that could not be computed, in words, until one can again.
        gap, why = None if self._model is not None else f" from step {life.spec.initial_step}", "its first values are unknown"
        if life.is_cut:
            gap, why = "", "the records are no longer there"
        for record in life.records:
            match record.event:
                case Created():
                    self._create(record.content)
                    gap = None
                case StateKept() as state:
                    if (wrong := self._meet(result, state, record.content)) is not None:
                        result.problems.append(f"{life.where}: {self._who} step {state.spec.initial_step}: {wrong}")
                        return
                    gap = gap if state.from_epoch is None else None
                case Configured(settings=settings) if self._model is not None:
                    self._model.configure(settings)
                case Applied(request=request, sha256=sha256) if self._model is not None:
                    if gone := self._cut_contributions(request):
                        self._model, why = None, f"contributions are no longer there, such as {gone[0]}"
                        gap = f" from step {request.step}" if gap is None else gap
                        continue
                    if gap is not None:
                        result.skipped.append(f"{self._who}{gap} to step {request.step - 1}: {why}")
                        result.since, gap = max(result.since or (0, 0), (self._epoch, request.step)), None
                    self._apply(self._model, request)
                    result.num_steps += 1
                    on_step()
                    if _digest(self._model) != sha256:
                        made = ", ".join(map(str, request.contributors))
                        result.problems.append(
                            f"{life.where}: {self._who} step {request.step}: other values than {made} give; later steps were not checked"
                        )
                        return
            if self._model is not None:
                self._keep(self._model, wanted)
        if gap is not None and life.applied:
            result.skipped.append(f"{self._who}{gap} to its end: {why}")

    def _new_model(self, spec: ShardSpec) -> ShardModel:
        self._model = ShardModel(spec, budget=MemoryBudget(None, owner="audit"))
        return self._model

    def _create(self, content: Array) -> None:
        model = self._new_model(self._life.spec)
        values, *tables = model.first_values
        Segments([values, *tables]).copy_from(Segments([np.array(content)]))
        model.fill_initial(values)
        model.publish_initial(self._life.spec)

    def _continue(self) -> None:
        """Begins with the values that the same process had in the epoch before, if they are known."""
        fence = Fence(era=Era(life=1, epoch=self._epoch), chief_incarnation=1)
        self._begin_with_snapshot(self._life.spec, self._life.from_epoch, ShardSettings(fence=fence, version=0))

    def _begin_with_snapshot(self, spec: ShardSpec, from_epoch: int | None, settings: ShardSettings) -> None:
        snapshot = self._snapshots.get((from_epoch or 0, spec.initial_step))
        if snapshot is None or {*snapshot.states} != {shard for epoch, shard, *_ in self._facts.lives if epoch == from_epoch}:
            return
        model = self._new_model(spec)
        for tensor in model.begin_restore():
            whole = snapshot.arrays.get((tensor.piece.variable.name, tensor.part))
            if whole is not None:
                np.copyto(tensor.memory, whole[_box(tensor.piece)])
        for table in model.keyed_tables:
            snapshot.rows_for(table, self._life.shard)
        model.publish_restored(snapshot.state_of(self._life.shard), settings)

    def _meet(self, result: Recomputed, state: StateKept, content: Array) -> str | None:
        """Compares a state with the values computed so far, or begins with it if there are none. Returns what is wrong."""
        if state.from_epoch is not None:
            self._begin_with_snapshot(state.spec, state.from_epoch, state.settings)
        if self._model is None and state.from_epoch is not None:
            step = state.spec.initial_step
            result.skipped.append(f"{self._who} begins with step {step} of epoch {state.from_epoch}, which is not in this history")
        if self._model is None:
            model = self._new_model(state.spec)
            hidden = state.hidden
            _fill(model, np.array(content), hidden)
            model.publish_restored(hidden, state.settings)
        elif b"".join(tensor.content.data for tensor in self._model.snapshot().tensors()) != content.tobytes():
            return "it was restored to other values than it had" if state.from_epoch is not None else "it kept other values than it had"
        return None

    def _cut_contributions(self, request: ApplyRequest) -> list[PushId]:
        """Returns the contributions of a step that may have been in records that are gone."""
        shard, parts = self._life.shard, self._facts.parts
        lacking = [one for one in request.contributors if one not in request.without and shard not in parts.get((self._epoch, one), {})]
        return [one for one in lacking if self._facts.may_be_cut(self._epoch, one)]

    def _apply(self, model: ShardModel, request: ApplyRequest) -> None:
        for push_id in request.contributors:
            if push_id not in request.without:
                self._stage(model, push_id)
        if self._life.spec.clip.needs_norms:
            model.run_prepare(request, model.begin_prepare(request))
        work = model.begin_apply(request)
        model.finish_apply(request, work, num_nonfinite=model.run_apply(work))

    def _stage(self, model: ShardModel, push_id: PushId) -> None:
        part = self._facts.parts.get((self._epoch, push_id), {}).get(self._life.shard)
        if part is None:
            return  # `check_books` reports it
        inbox, step = model.inbox, model.step
        contribution = inbox.open(part.header, current_step=step)
        memory = inbox.begin_write(contribution)
        if memory is not None:
            memory.writer.write(0, part.content.data)
            inbox.complete(contribution, memory)
            inbox.end_write(contribution)
        inbox.stage(contribution, current_step=step)

    def _keep(self, model: ShardModel, wanted: set[Wanted]) -> None:
        key = (self._epoch, model.step)
        if key not in wanted:
            return
        snapshot = self._snapshots.setdefault(key, _Snapshot())
        now = model.snapshot()
        snapshot.rows[self._life.shard] = [
            (table.piece, {name: part.copy() for name, part in table.parts.items()}) for table in model.keyed_tables
        ]
        for tensor in now.tensors():
            variable = tensor.piece.variable
            if variable.keys is not None:
                continue
            whole = snapshot.arrays.setdefault((variable.name, tensor.part), np.zeros(variable.shape, tensor.memory.dtype))
            whole[_box(tensor.piece)] = tensor.memory
        snapshot.states[self._life.shard] = now.hidden


def _fill(model: ShardModel, content: Array, hidden: HiddenState) -> None:
    """Fills a new model with the bytes of all tensors of a state, in their order."""
    tensors, counts = model.begin_restore(), iter(hidden.table_rows)
    pieces = [tensor.content for tensor in tensors if not tensor.piece.variable.is_sparse]
    for table in model.tables:
        parts = table.parts
        if table.piece.variable.keys is not None:
            start = sum(piece.nbytes for piece in pieces)
            keys = content[start : start + next(counts, 0) * 8].copy().view("<i8")
            table.extend(keys)
            parts = table.parts
        pieces += [part.reshape(-1).view(np.uint8) for part in parts.values()]
    Segments(pieces).copy_from(Segments([content]))


def _digest(model: ShardModel) -> str:
    values, *tables = model.contents
    return digest(values, tables)


def _box(piece: VariableSlice) -> tuple[slice, ...]:
    whole = piece.variable.shape
    return tuple(slice(piece.start, piece.stop) if axis == piece.axis else slice(None) for axis in range(len(whole)))
