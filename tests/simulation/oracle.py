"""The promises, checked after every event by one who sees everything. Knows what was applied, saved, restored and said; no process.

It keeps its own model: of each epoch where it began, of each step its contributors, and of each variable its value, recomputed with NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ps_protocol.chief import CommitResult, PushOutcome
from ps_protocol.shard import ApplyRequest, PushId, RestoreRequest, ShardSpec
from ps_protocol.tensors import Array

LEARNING_RATE, MOMENTUM = 0.5, 0.25
Contributors = tuple[PushId, ...]


class BrokenPromise(AssertionError):
    """A promise does not hold; the text begins with its number."""


@dataclass(slots=True)
class _State:
    """One shard's variables at one step, and their slot."""

    value: Array
    momentum: Array


@dataclass(slots=True)
class _Epoch:
    """One epoch: where it began, and what each of its steps was made of."""

    number: int
    first_step: int
    parent: int | None
    steps: dict[int, Contributors] = field(default_factory=dict)
    # By shard, the step that it has, and its states.
    at: dict[int, int] = field(default_factory=dict)
    states: dict[tuple[int, int], _State] = field(default_factory=dict)


def gradient_of(push_id: PushId, *, shard: int, size: int) -> Array:
    """Returns what a worker contributes: small whole numbers that follow from the push id alone, so that a mix-up shows in the values."""
    number = push_id.worker * 31 + push_id.incarnation % 1009 * 17 + push_id.sequence * 7 + shard * 3
    return ((np.arange(size) * 5 + number) % 13 - 6).astype(np.float32)


class Oracle:
    """Raises BrokenPromise at the event that breaks one."""

    def __init__(self, *, num_shards: int, size: int, is_durable_at_once: bool) -> None:
        self._num_shards = num_shards
        self._size = size
        self._is_durable_at_once = is_durable_at_once
        self._epochs: dict[int, _Epoch] = {}
        # The highest step that anybody was told of, by epoch; and what workers were told of their contributions.
        self._told_step: dict[int, int] = {}
        self._accepted: dict[tuple[int, PushId], int] = {}
        self._refused: set[tuple[int, PushId]] = set()
        self.committed: list[tuple[int, int]] = []
        self.is_rotten = False
        self.num_rollbacks = 0
        self.num_applied = 0

    # -- what shards do

    def created(self, shard: int, spec: ShardSpec, arena: Array) -> None:
        """A shard's variables have their first values."""
        epoch = self._epochs.setdefault(spec.epoch, _Epoch(number=spec.epoch, first_step=spec.initial_step, parent=None))
        if epoch.at.get(shard, spec.initial_step) != spec.initial_step:
            epoch = self._begin_anew(spec)
        epoch.at[shard] = spec.initial_step
        value = self._values(arena)
        epoch.states[shard, spec.initial_step] = _State(value, np.zeros_like(value))

    def applied(self, shard: int, request: ApplyRequest, arena: Array) -> None:
        """A shard has applied a step."""
        epoch, step, contributors = self._epoch(request.epoch, shard), request.step, request.contributors
        if len(set(contributors)) != len(contributors):
            raise BrokenPromise(f"1: step {step} of epoch {epoch.number} has one twice: {contributors}")
        if epoch.at.get(shard) != step:
            raise BrokenPromise(f"2: ps {shard} applied step {step} of epoch {epoch.number} and was at {epoch.at.get(shard)}")
        known = epoch.steps.setdefault(step, contributors)
        if known != contributors:
            raise BrokenPromise(f"2: step {step} of epoch {epoch.number}: ps {shard} applied {contributors}, another {known}")
        self._check_once(epoch, step, contributors)
        self._check_said(epoch, step, contributors)
        state = self._next_state(epoch.states[shard, step], shard, request)
        if state.value.tobytes() != self._values(arena).tobytes():
            raise BrokenPromise(
                f"5: ps {shard} step {step} of epoch {epoch.number}: has {self._values(arena)}, {contributors} make {state.value}"
            )
        epoch.states[shard, step + 1] = state
        epoch.at[shard] = step + 1
        self.num_applied += 1

    def restored(self, shard: int, request: RestoreRequest, step: int | None, arena: Array) -> None:
        """A shard was brought back to a checkpoint."""
        spec = request.spec
        if step != spec.initial_step:
            return  # the answer to a repetition; it has gone on since
        epoch = self._epochs.get(spec.epoch)
        if epoch is None or (not self._is_durable_at_once and spec.epoch not in self._saved_epochs and epoch.at.get(shard, step) != step):
            # All servers were lost before anything of that epoch was saved, so that nobody knows any more that there was one.
            epoch = self._begin_epoch(spec, request.tag)
        if epoch.first_step != spec.initial_step:
            raise BrokenPromise(f"2: epoch {epoch.number} begins at step {epoch.first_step} and, on ps {shard}, at {spec.initial_step}")
        if epoch.at.get(shard, step) != step:
            raise BrokenPromise(f"2: ps {shard} was restored to step {step} of epoch {epoch.number} after it had gone on")
        state = self._state_at(epoch, shard, step)
        if state.value.tobytes() != self._values(arena).tobytes():
            raise BrokenPromise(f"5: ps {shard} restored to {request.tag} has {self._values(arena)}, it had {state.value}")
        epoch.at[shard] = step
        epoch.states[shard, step] = _State(state.value.copy(), state.momentum.copy())

    # -- what the chief says

    def told_step(self, epoch: int, step: int, *, to: str) -> None:
        """Somebody was told that so many steps are applied."""
        known = self._epochs.get(epoch)
        if known is not None:
            behind = [index for index in range(self._num_shards) if known.at.get(index, known.first_step) < step]
            if behind:
                raise BrokenPromise(f"2: {to} was told of step {step} of epoch {epoch}, which ps {behind} have not applied")
        if step > self._told_step.get(epoch, 0):
            self._told_step[epoch] = step
            first = 0 if known is None or known.parent is None else known.first_step
            if self._is_durable_at_once and step > first and (epoch, step) not in self.committed:
                raise BrokenPromise(
                    f"4: {to} was told of step {step} of epoch {epoch} before a checkpoint of it was whole: {self.committed}"
                )

    def told_commit(self, epoch: int, push_id: PushId, result: CommitResult) -> None:
        """A worker was told what becomes of its contribution."""
        outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE else result.outcome
        if outcome is PushOutcome.ACCEPTED and result.applied_step is not None:
            before = self._accepted.setdefault((epoch, push_id), result.applied_step)
            if before != result.applied_step:
                raise BrokenPromise(f"3: {push_id} was said to be in step {before}, then in {result.applied_step}")
            applied = self._epochs[epoch].steps.get(result.applied_step) if epoch in self._epochs else None
            if applied is not None and push_id not in applied:
                raise BrokenPromise(f"3: {push_id} was accepted for step {result.applied_step} of epoch {epoch}, made of {applied}")
        elif outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self._refused.add((epoch, push_id))
            if any(push_id in made for made in self._lineage(epoch).values()):
                raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch}, and is applied")

    @property
    def _saved_epochs(self) -> set[int]:
        return {epoch for epoch, _ in self.committed}

    def committed_checkpoint(self, epoch: int, step: int) -> None:
        """A checkpoint is whole."""
        self.committed.append((epoch, step))

    # -- what workers see

    def read(self, epoch: int, step: int, arenas: Mapping[int, Array], *, by: str) -> None:
        """A worker has read the variables of one step from all shards."""
        known = self._epochs.get(epoch)
        if known is None:
            raise BrokenPromise(f"2: {by} read step {step} of epoch {epoch}, which no shard has")
        for shard, arena in arenas.items():
            state = known.states.get((shard, step))
            if state is None or state.value.tobytes() != self._values(arena).tobytes():
                raise BrokenPromise(f"2: {by} read step {step} of epoch {epoch} from ps {shard}: {self._values(arena)}, want {state}")

    # -- what follows

    def _epoch(self, number: int, shard: int) -> _Epoch:
        epoch = self._epochs.get(number)
        if epoch is None or shard not in epoch.at:
            raise BrokenPromise(f"2: ps {shard} applied a step of epoch {number}, in which it has no variables")
        return epoch

    def _begin_anew(self, spec: ShardSpec) -> _Epoch:
        """All was lost, and the cluster begins as if it were the first time."""
        if self.committed and not self.is_rotten:
            raise BrokenPromise(f"4: the cluster begins anew although checkpoints are whole: {self.committed}")
        for known in (self._epochs, self._told_step, self._accepted, self._refused):
            known.clear()
        epoch = self._epochs[spec.epoch] = _Epoch(number=spec.epoch, first_step=spec.initial_step, parent=None)
        return epoch

    def _begin_epoch(self, spec: ShardSpec, tag: str) -> _Epoch:
        wanted = [one for one in self.committed if one[1] == spec.initial_step and one[0] < spec.epoch]
        if not wanted:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins with {tag}, step {spec.initial_step}, of which no checkpoint was whole")
        parent = max(wanted)[0]
        lost = [(told, step) for told, step in self._told_step.items() if told < spec.epoch and step > spec.initial_step]
        lost = [(told, step) for told, step in lost if self._is_ancestor(told, parent)]
        if self._is_durable_at_once and lost and not self.is_rotten:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins at step {spec.initial_step}, but {lost} was told (epoch, step)")
        self.num_rollbacks += 1
        epoch = self._epochs[spec.epoch] = _Epoch(number=spec.epoch, first_step=spec.initial_step, parent=parent)
        return epoch

    def _is_ancestor(self, number: int, of: int) -> bool:
        at: int | None = of
        while at is not None:
            if at == number:
                return True
            at = self._epochs[at].parent if at in self._epochs else None
        return False

    def _state_at(self, epoch: _Epoch, shard: int, step: int) -> _State:
        at = self._epochs.get(epoch.parent) if epoch.parent is not None else None
        while at is not None:
            if (state := at.states.get((shard, step))) is not None:
                return state
            at = self._epochs.get(at.parent) if at.parent is not None else None
        raise BrokenPromise(f"4: epoch {epoch.number} begins at step {step}, which ps {shard} never had")

    def _lineage(self, number: int) -> dict[int, Contributors]:
        """All steps that the values of this epoch are made of."""
        steps: dict[int, Contributors] = {}
        at = self._epochs.get(number)
        below = None
        while at is not None:
            steps |= {step: made for step, made in at.steps.items() if below is None or step < below}
            below = at.first_step if below is None else min(below, at.first_step)
            at = self._epochs.get(at.parent) if at.parent is not None else None
        return steps

    def _check_once(self, epoch: _Epoch, step: int, contributors: Contributors) -> None:
        wanted = set(contributors)
        for earlier, made in self._lineage(epoch.number).items():
            if earlier != step and not wanted.isdisjoint(made):
                raise BrokenPromise(f"1: {wanted & set(made)} in step {earlier} and in step {step} of epoch {epoch.number}")

    def _check_said(self, epoch: _Epoch, step: int, contributors: Contributors) -> None:
        for push_id in contributors:
            if (epoch.number, push_id) in self._refused:
                raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch.number}, and applied in step {step}")
            said = self._accepted.get((epoch.number, push_id), step)
            if said != step:
                raise BrokenPromise(f"3: {push_id} was accepted for step {said} of epoch {epoch.number}, and applied in step {step}")

    def _next_state(self, state: _State, shard: int, request: ApplyRequest) -> _State:
        total = np.zeros_like(state.value)
        for push_id in sorted(request.contributors):
            total = total + gradient_of(push_id, shard=shard, size=self._size)
        mean = total / np.float32(len(request.contributors))
        momentum = state.momentum * np.float32(MOMENTUM) + mean
        return _State(state.value - momentum * np.float32(LEARNING_RATE), momentum)

    def _values(self, arena: Array) -> Array:
        return arena[: self._size * 4].view(np.float32)
