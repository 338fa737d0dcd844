"""Recomputes a history's variables from the same contributions in the same order, and compares digests. Knows the server's core.

An epoch that continues an earlier one begins with the earlier one's values as recomputed here, never with those of a checkpoint file.
"""

from collections.abc import Callable
from dataclasses import field, replace

import numpy as np

from lockstep.audit.facts import Facts, ShardLife, words_of
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Segments, VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process import history as events
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import ApplyRequest, ShardSettings
from ps_server.model.shard_model import ShardModel
from ps_server.model.snapshot import HiddenState
from ps_server.numbers.memory import MemoryBudget

Wanted = tuple[int, int]


@light_dataclass(slots=True)
class _Snapshot:
    """All variables, slots and averages of a cluster at one step, whole, by name and part; and each shard's hidden state."""

    arrays: dict[tuple[str, str], Array] = field(default_factory=dict)
    states: dict[int, HiddenState] = field(default_factory=dict)

    def state_of(self, shard: int) -> HiddenState:
        """Returns a shard's hidden state, with the powers of optimizers that only other shards had."""
        powers: dict[str, tuple[float, ...]] = {}
        for _, state in sorted(self.states.items(), key=lambda item: (item[0] != shard, item[0])):
            powers = {**state.powers, **powers}
        return replace(self.states.get(shard, self.states[min(self.states)]), powers=powers)


@light_dataclass(slots=True)
class Recomputed:
    """The number of server steps that were recomputed, and the problems found."""

    num_steps: int = 0
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
    def __init__(self, facts: Facts, life: ShardLife, epoch: int, snapshots: dict[Wanted, _Snapshot]) -> None:
        self._facts, self._life, self._epoch, self._snapshots = facts, life, epoch, snapshots
        self._model = ShardModel(life.spec, budget=MemoryBudget(None, owner="audit"))

    def replay(self, result: Recomputed, wanted: set[Wanted], on_step: Callable[[], None]) -> None:
        """Recomputes one life of a shard, and keeps the values that later epochs begin with."""
        life, epoch = self._life, self._epoch
        if life.arrived:
            result.skipped.append(f"ps {life.shard} epoch {epoch}: contributions were applied on arrival, in an unknown order")
            return
        if not self._begin(result):
            return
        self._keep(wanted)
        for record in life.records:
            if record.kind == events.CONFIGURED:
                self._model.configure(events.settings_of(record))
            elif record.kind == events.APPLIED:
                request = events.request_of(record)
                self._apply(request)
                result.num_steps += 1
                on_step()
                if self._digest() != events.text_of(record, "sha256"):
                    made = ", ".join(map(words_of, request.contributors))
                    result.problems.append(
                        f"{life.where}: ps {life.shard} epoch {epoch} step {request.step}: other values than {made} give; later steps"
                        " were not checked"
                    )
                    return
                self._keep(wanted)

    def _begin(self, result: Recomputed) -> bool:
        life, model, begun = self._life, self._model, self._life.begun
        if life.from_epoch is None and begun is not None:
            values, *tables = model.first_values
            Segments([values, *tables]).copy_from(Segments([np.array(begun.content)]))
            model.fill_initial(values)
            model.publish_initial(life.spec)
            return True
        snapshot = self._snapshots.get((life.from_epoch or 0, life.spec.initial_step))
        if snapshot is None:
            step = life.spec.initial_step
            result.skipped.append(f"ps {life.shard} epoch {self._epoch}: step {step} of epoch {life.from_epoch} is not in this history")
            return False
        for tensor in model.begin_restore():
            whole = snapshot.arrays.get((tensor.piece.variable.name, tensor.part))
            if whole is not None:
                np.copyto(tensor.memory, whole[_box(tensor.piece)])
        if begun is None:
            fence = Fence(era=Era(life=1, epoch=self._epoch), chief_incarnation=1)
            model.publish_restored(snapshot.state_of(life.shard), ShardSettings(fence=fence, version=0))
            return True
        model.publish_restored(snapshot.state_of(life.shard), events.settings_of(begun))
        if self._digest() != events.text_of(begun, "sha256"):
            result.problems.append(f"{life.where}: ps {life.shard} was restored to other values than it had")
            return False
        return True

    def _apply(self, request: ApplyRequest) -> None:
        for push_id in request.contributors:
            if push_id not in request.without:
                self._stage(push_id)
        if self._life.spec.clip.needs_norms:
            self._model.run_prepare(request, self._model.begin_prepare(request))
        work = self._model.begin_apply(request)
        self._model.finish_apply(request, work, num_nonfinite=self._model.run_apply(work))

    def _stage(self, push_id: PushId) -> None:
        part = self._facts.parts.get((self._epoch, push_id), {}).get(self._life.shard)
        if part is None:
            return  # `check_books` reports it
        inbox, step = self._model.inbox, self._model.step
        contribution = inbox.open(part.header, current_step=step)
        memory = inbox.begin_write(contribution)
        if memory is not None:
            memory.writer.write(0, part.content.data)
            inbox.complete(contribution, memory)
            inbox.end_write(contribution)
        inbox.stage(contribution, current_step=step)

    def _digest(self) -> str:
        values, *tables = self._model.contents
        return events.digest(values, tables)

    def _keep(self, wanted: set[Wanted]) -> None:
        model, key = self._model, (self._epoch, self._model.step)
        if key not in wanted:
            return
        snapshot = self._snapshots.setdefault(key, _Snapshot())
        now = model.snapshot()
        for tensor in now.tensors():
            variable = tensor.piece.variable
            whole = snapshot.arrays.setdefault((variable.name, tensor.part), np.zeros(variable.shape, tensor.memory.dtype))
            whole[_box(tensor.piece)] = tensor.memory
        snapshot.states[self._life.shard] = now.hidden


def _box(piece: VariableSlice) -> tuple[slice, ...]:
    whole = piece.variable.shape
    return tuple(slice(piece.start, piece.stop) if axis == piece.axis else slice(None) for axis in range(len(whole)))
