"""The promises, checked after every event by one who sees everything. Knows what was applied, saved, restored and said; no process.

It keeps its own model: of each epoch where it began, of each step its contributors, and of each variable its value, recomputed with NumPy.
"""

from collections.abc import Mapping, Set

import numpy as np

from ps_protocol.chief import CommitResult, PushOutcome
from ps_protocol.data_ranges import DataSpec
from ps_protocol.shard import ApplyRequest, PushId, RestoreRequest, ShardSpec
from ps_protocol.tensors import Array
from tests.simulation.epochs import Contributors, Epoch, State

LEARNING_RATE, MOMENTUM = 0.5, 0.25
CHIEF = "chief"


class BrokenPromise(AssertionError):
    """A promise does not hold; the text begins with its number."""


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
        self._epochs: dict[int, Epoch] = {}
        # The highest step that anybody was told of, by epoch; and what workers were told of their contributions.
        self._told_step: dict[int, int] = {}
        self._accepted: dict[tuple[int, PushId], int] = {}
        self._refused: set[tuple[int, PushId]] = set()
        # What workers were told is in a step to come, by epoch and step; and what training data a contribution was made from.
        self._promised: dict[tuple[int, int], set[PushId]] = {}
        self._made_from: dict[PushId, tuple[int, ...]] = {}
        self.committed: list[tuple[int, int]] = []
        self.is_rotten = False
        self.num_rollbacks = self.num_anew = 0
        self.num_applied = 0

    # -- what shards do

    def created(self, shard: int, spec: ShardSpec, arena: Array) -> None:
        """A shard's variables have their first values."""
        epoch = self._epochs.setdefault(spec.epoch, Epoch(number=spec.epoch, first_step=spec.initial_step, parent=None))
        was_told = shard in epoch.at and any(number == spec.epoch for number, _ in (*self._accepted, *self._refused))
        if was_told or epoch.at.get(shard, spec.initial_step) != spec.initial_step:
            epoch = self._begin_anew(spec)
        epoch.at[shard] = spec.initial_step
        value = self._values(arena)
        epoch.states[shard, spec.initial_step] = State(value, np.zeros_like(value))

    def applied(self, shard: int, request: ApplyRequest, arena: Array) -> None:
        """A shard has applied a step."""
        epoch, step, contributors = self._epoch(request.epoch, shard), request.step, request.contributors
        if len(set(contributors)) != len(contributors):
            raise BrokenPromise(f"1: step {step} of epoch {epoch.number} has one twice: {contributors}")
        if epoch.at.get(shard) != step:
            raise BrokenPromise(f"2: ps {shard} applied step {step} of epoch {epoch.number} and was at {epoch.at.get(shard)}")
        known = epoch.steps.get(step)
        if known is None:
            self._check_once(epoch, step, contributors)
            self._check_said(epoch, step, contributors)
            self._count(epoch, step, contributors)
        elif known != contributors:
            raise BrokenPromise(f"2: step {step} of epoch {epoch.number}: ps {shard} applied {contributors}, another {known}")
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
        is_known = spec.epoch in self._saved_epochs or (self._is_durable_at_once and self._told_step.get(spec.epoch, 0) > spec.initial_step)
        if epoch is None or (not is_known and (epoch.at.get(shard, step) != step or self._is_forgotten(epoch))):
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
        epoch.states[shard, step] = State(state.value.copy(), state.momentum.copy())

    def died(self, who: str) -> None:
        """A shard, by its number, or a chief is gone, with all that it knew."""
        for epoch in self._epochs.values():
            epoch.dead.add(who)

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
        known = self._epochs.get(epoch)
        if outcome is PushOutcome.ACCEPTED and result.applied_step is not None:
            step = result.applied_step
            before = self._accepted.setdefault((epoch, push_id), step)
            if before != step:
                raise BrokenPromise(f"3: {push_id} was said to be in step {before}, then in {step}")
            applied = known.steps.get(step) if known is not None else None
            if applied is not None and push_id not in applied:
                raise BrokenPromise(f"3: {push_id} was accepted for step {step} of epoch {epoch}, made of {applied}")
            self._promised.setdefault((epoch, step), set()).add(push_id)
        elif outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self._refused.add((epoch, push_id))
            if known is not None and push_id in known.made:
                raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch}, and is applied")
            if (epoch, push_id) in self._accepted:
                raise BrokenPromise(f"3: {push_id} was accepted, and then refused in the same epoch {epoch}")

    # -- training data

    def contributed(self, push_id: PushId, ranges: tuple[int, ...]) -> None:
        """A worker has made a contribution from these ranges of the training data."""
        self._made_from[push_id] = ranges

    def told_exhausted(self, epoch: int, data: DataSpec, *, to: str) -> None:
        """A worker was told that all of the training data is done."""
        known = self._epochs.get(epoch)
        left = [identity for identity in range(data.num_epochs * data.num_ranges) if known is None or identity not in known.used]
        if left:
            raise BrokenPromise(f"8: {to} was told that all data is done in epoch {epoch}, and ranges {left} are in no step")

    @property
    def _saved_epochs(self) -> set[int]:
        return {epoch for epoch, _ in self.committed}

    def committed_checkpoint(self, epoch: int, step: int, done: Set[int]) -> None:
        """A checkpoint is whole; it says that these ranges of the training data are done."""
        self.committed.append((epoch, step))
        known = self._epochs.get(epoch)
        if known is not None:
            used = {identity for identity, in_step in known.used.items() if in_step < step}
            if used != done:
                words = f"of step {step} in epoch {epoch}: it lacks ranges {used - done} and has {done - used}, which are in no step"
                raise BrokenPromise(f"8: the checkpoint {words}")

    # -- what workers see

    def read(self, epoch: int, step: int, arenas: Mapping[int, Array], *, by: str) -> None:
        """A worker has read the variables of one step from all shards."""
        known = self._epochs.get(epoch) or self._gone_on(epoch, step)
        if known is None:
            raise BrokenPromise(f"2: {by} read step {step} of epoch {epoch}, which no shard has")
        for shard, arena in arenas.items():
            state = known.states.get((shard, step))
            if state is None or state.value.tobytes() != self._values(arena).tobytes():
                raise BrokenPromise(f"2: {by} read step {step} of epoch {epoch} from ps {shard}: {self._values(arena)}, want {state}")

    # -- what follows

    def _epoch(self, number: int, shard: int) -> Epoch:
        epoch = self._epochs.get(number)
        if epoch is None or shard not in epoch.at:
            raise BrokenPromise(f"2: ps {shard} applied a step of epoch {number}, in which it has no variables")
        return epoch

    def _begin_anew(self, spec: ShardSpec) -> Epoch:
        """All was lost, and the cluster begins as if it were the first time."""
        if self.committed and not self.is_rotten:
            raise BrokenPromise(f"4: the cluster begins anew although checkpoints are whole: {self.committed}")
        for known in (self._epochs, self._told_step, self._accepted, self._refused, self._promised):
            known.clear()
        self.num_anew += 1
        epoch = self._epochs[spec.epoch] = Epoch(number=spec.epoch, first_step=spec.initial_step, parent=None)
        return epoch

    def _gone_on(self, number: int, step: int) -> Epoch | None:
        """A chief found the servers in two epochs, all at one step and nothing to go back to: that step is where the later one begins."""
        earlier = self._epochs.get(max((one for one in self._epochs if one < number), default=0))
        if earlier is None or any(earlier.at.get(index) != step for index in range(self._num_shards)):
            return None
        epoch = self._epochs[number] = earlier.child(number, first_step=step)
        epoch.at = dict(earlier.at)
        epoch.states = {(shard, at): state for (shard, at), state in earlier.states.items() if at == step}
        return epoch

    def _begin_epoch(self, spec: ShardSpec, tag: str) -> Epoch:
        wanted = [one for one in self.committed if one[1] == spec.initial_step and one[0] < spec.epoch]
        if not wanted:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins with {tag}, step {spec.initial_step}, of which no checkpoint was whole")
        parent = max(wanted)[0]
        lost = [(told, step) for told, step in self._told_step.items() if told < spec.epoch and step > spec.initial_step]
        lost = [(told, step) for told, step in lost if self._is_ancestor(told, parent)]
        if self._is_durable_at_once and lost and not self.is_rotten:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins at step {spec.initial_step}, but {lost} was told (epoch, step)")
        if spec.epoch in self._epochs:
            self._forget_told(spec.epoch)
        self.num_rollbacks += 1
        epoch = self._epochs[spec.epoch] = self._epochs[parent].child(spec.epoch, first_step=spec.initial_step)
        return epoch

    def _is_forgotten(self, epoch: Epoch) -> bool:
        return epoch.dead.issuperset({CHIEF, *map(str, range(self._num_shards))})

    def _forget_told(self, number: int) -> None:
        """What was told in an epoch of which nobody knows any more says nothing about the one that has its number now."""
        self.num_anew += 1
        self._told_step.pop(number, None)
        self._accepted = {key: step for key, step in self._accepted.items() if key[0] != number}
        self._refused = {key for key in self._refused if key[0] != number}
        self._promised = {key: pushes for key, pushes in self._promised.items() if key[0] != number}

    def _is_ancestor(self, number: int, of: int) -> bool:
        at: int | None = of
        while at is not None:
            if at == number:
                return True
            at = self._epochs[at].parent if at in self._epochs else None
        return False

    def _state_at(self, epoch: Epoch, shard: int, step: int) -> State:
        at = self._epochs.get(epoch.parent) if epoch.parent is not None else None
        while at is not None:
            if (state := at.states.get((shard, step))) is not None:
                return state
            at = self._epochs.get(at.parent) if at.parent is not None else None
        raise BrokenPromise(f"4: epoch {epoch.number} begins at step {step}, which ps {shard} never had")

    def _check_once(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        for push_id in contributors:
            if push_id in epoch.made:
                raise BrokenPromise(f"1: {push_id} in step {epoch.made[push_id]} and in step {step} of epoch {epoch.number}")
            for identity in self._made_from.get(push_id, ()):
                if identity in epoch.used:
                    raise BrokenPromise(f"8: range {identity} in step {epoch.used[identity]} and in step {step} of epoch {epoch.number}")

    def _check_said(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        for push_id in contributors:
            if (epoch.number, push_id) in self._refused:
                raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch.number}, and applied in step {step}")
            said = self._accepted.get((epoch.number, push_id), step)
            if said != step:
                raise BrokenPromise(f"3: {push_id} was accepted for step {said} of epoch {epoch.number}, and applied in step {step}")
        left_out = self._promised.get((epoch.number, step), set()).difference(contributors)
        if left_out:
            raise BrokenPromise(f"3: {left_out} were accepted for step {step} of epoch {epoch.number}, made of {contributors}")

    def _count(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        epoch.steps[step] = contributors
        for push_id in contributors:
            epoch.made[push_id] = step
            for identity in self._made_from.get(push_id, ()):
                epoch.used[identity] = step

    def _next_state(self, state: State, shard: int, request: ApplyRequest) -> State:
        total = np.zeros_like(state.value)
        for push_id in sorted(request.contributors):
            total = total + gradient_of(push_id, shard=shard, size=self._size)
        mean = total / np.float32(len(request.contributors))
        momentum = state.momentum * np.float32(MOMENTUM) + mean
        return State(state.value - momentum * np.float32(LEARNING_RATE), momentum)

    def _values(self, arena: Array) -> Array:
        return arena[: self._size * 4].view(np.float32)
