"""The promises, checked after every event with full knowledge of the cluster. Knows steps, saves, restores and answers; no process.

It keeps its own model: of each epoch of each life its first step, of each step its contributors, and of each variable its value, which it
computes anew with NumPy. Where servers apply contributions as they arrive, each has steps of its own, of one contribution each.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from ps_protocol.model.data import DataSpec
from ps_protocol.model.keys import draws
from ps_protocol.model.layout import ALIGNMENT
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import CommitResult, PushOutcome
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, RestoreRequest, ShardReport, ShardSpec
from tests.simulation.arenas import FIRST_VALUE, keys_of
from tests.simulation.epochs import Contributors, Epoch, Era, State
from tests.simulation.rules import Changes, PolicyRules, Setting, weight_of

LEARNING_RATE, MOMENTUM = 0.5, 0.25
# More than a chief's record takes here.
_RECORD_BYTES = 4096
# Of all rows that a table gets here, with slots and a step's journal, twice.
_ROWS_BYTES = 8192
# The last step that used a row which a key never had.
_NEVER = -(1 << 40)


class BrokenPromise(AssertionError):
    """A promise does not hold; the text begins with its number, or "P": it is the policy's."""


def gradient_of(push_id: PushId, *, shard: int, size: int) -> Array:
    """Returns what a worker contributes: small whole numbers that follow from the push id alone, so that a mix-up shows in the values."""
    number = push_id.worker * 31 + push_id.incarnation % 1009 * 17 + push_id.sequence * 7 + shard * 3
    return ((np.arange(size) * 5 + number) % 13 - 6).astype(np.float32)


def lie_of(push_id: PushId, *, shard: int, size: int) -> Array:
    """Returns what a worker gives one of a shard's two servers that it lies to."""
    return gradient_of(push_id, shard=shard, size=size) + np.float32(1)


def rate_of(worker: int, sequence: int) -> float | None:
    """Returns the learning rate that a worker's contribution has its step use: one that follows from its number; None: it has none."""
    number = worker * 5 + sequence * 3
    return None if number % 4 == 0 else LEARNING_RATE / 2 ** (number % 3)


def phase_of(sequence: int) -> int:
    """Returns the phase of training that a contribution with a learning rate names; it grows with the worker's contributions. 0: none."""
    return sequence // 6


def _trimmed_mean(gradients: Sequence[Array], weights: Sequence[float], num_trimmed: int) -> Array:
    mean = np.zeros_like(gradients[0])
    for element in range(mean.size):
        order = sorted(range(len(gradients)), key=lambda one: gradients[one][element])
        kept = sorted(order[num_trimmed : len(order) - num_trimmed])
        mean[element] = np.float32(sum(weights[one] * gradients[one][element] for one in kept)) / np.float32(
            sum(weights[one] for one in kept)
        )
    return mean


def index_of(server: str) -> int:
    """Returns which shard a server of this name holds."""
    return int(server.split("-")[1])


@dataclass(slots=True, kw_only=True)
class Room:
    """The memory of one server: what it needs at rest, and for each contribution that it stages of those who give to it."""

    at_rest: int
    push_bytes: int
    max_pushes: int
    givers: set[tuple[int, int]] = field(default_factory=set)

    @property
    def max_staged(self) -> int:
        """How many contributions it may stage."""
        return self.max_pushes * len(self.givers)

    @property
    def max_bytes(self) -> int:
        """How much it may allocate: a copy of its state while that is written, rows that it makes, and the chief's record besides."""
        return 2 * self.at_rest + _RECORD_BYTES + _ROWS_BYTES + self.max_staged * (self.push_bytes + ALIGNMENT)


class Oracle:
    """Raises BrokenPromise at the event that breaks one. An era is one epoch of one life of the cluster: what is said in it holds in it."""

    def __init__(
        self,
        *,
        servers: Sequence[str],
        size: int,
        is_durable_at_once: bool,
        rules: PolicyRules,
        max_age: int = 0,
        admitted: float = 0.0,
        admit_after: int = 0,
    ) -> None:
        self.rules = rules
        # After how many steps a row is gone (0: never), and with which probability a step gives a key one (0: always), or its how manyth.
        self._max_age, self._admitted, self._admit_after = max_age, admitted, admit_after
        # The rules that hold at each chief, by its incarnation; and those that held when a chief was asked to count a contribution.
        self._rules_at: dict[int, PolicyRules] = {}
        self._counted_under: dict[PushId, set[PolicyRules]] = {}
        # What people were told of their changes, by era; and those that they have asked for, and not been told of yet, by their numbers.
        self._policies: dict[Era, Changes] = {}
        self._rates: dict[Era, Changes] = {}
        self._asked: dict[int, Setting] = {}
        # The latest step that people were told is saved, by era.
        self._told_saved: dict[Era, int] = {}
        self._servers = servers
        # Those whose process has no variables yet, or none any more.
        self._without: set[str] = set()
        self._size = size
        self._is_durable_at_once = is_durable_at_once
        self._epochs: dict[Era, Epoch] = {}
        # The highest step that anybody was told of, by era; and what workers were told of their contributions.
        self._told_step: dict[Era, int] = {}
        self._accepted: dict[tuple[Era, PushId], int] = {}
        self._accepted_in: dict[Era, set[PushId]] = {}
        self._refused: set[tuple[Era, PushId]] = set()
        # The last of them that each worker was told is accepted, by era and incarnation.
        self._latest: dict[tuple[Era, int, int], PushId] = {}
        # What workers were told is in a step to come, by era and step; and what training data a contribution was made from, by life.
        self._promised: dict[tuple[Era, int], set[PushId]] = {}
        self._made_from: dict[tuple[int, PushId], tuple[int, ...]] = {}
        # The step whose variables a contribution was computed from, by life.
        self._made_at: dict[int, dict[PushId, int]] = {}
        # The state of its worker's program that a contribution has brought, by life; empty: none.
        self._brought: dict[tuple[int, PushId], str] = {}
        # Those that have no gradient, by life.
        self._empty: set[tuple[int, PushId]] = set()
        # What each server needs, and may need.
        self._rooms: dict[str, Room] = {}
        # What is whole: era and step, by name.
        self.committed: dict[str, tuple[Era, int]] = {}
        # The life in which servers were adopted last, and what was whole before: its chief had that to look for.
        self._last_life, self._whole_before = 0, frozenset[str]()
        self._lives: set[int] = set()
        # Where contributions are applied as they arrive: those that a server has applied, by era and server; as which step a chief has
        # counted them, by era and chief; and what a shard had when it was saved, by name of the checkpoint, era and shard.
        self._arrived: dict[tuple[Era, str], set[PushId]] = {}
        self._counted_as: dict[tuple[Era, str, int], PushId] = {}
        # The same by era and contribution: the number that each chief has given it.
        self._numbers: dict[tuple[Era, PushId], dict[str, int]] = {}
        self._saved: dict[tuple[str, Era, int], list[tuple[State, set[PushId]]]] = {}
        # What workers have committed and not given to all shards.
        self._forged: set[PushId] = set()
        # Whether a server has staged something else as a contribution than follows from its push id; and whether a worker has lied at all.
        self._lies: dict[tuple[str, PushId], bool] = {}
        self.has_heard_lies = False
        self.is_rotten = False
        self.num_rollbacks = 0
        self.num_applied = 0

    # -- what shards do

    def emptied(self, server: str) -> None:
        """A server has no variables: it has just been started, or has dropped them."""
        self._without.add(server)

    def adopted(self, life: int) -> None:
        """A server is in this life from now on."""
        if life not in self._lives:
            self._lives.add(life)
            self._last_life, self._whole_before = life, frozenset(self.committed)

    def created(self, server: str, life: int, spec: ShardSpec, held: Array, *, is_new: bool) -> None:
        """A shard's variables have their first values; or have had them (then this changes nothing), perhaps since an earlier epoch."""
        era = life, spec.epoch
        was_trained = any(step for _, step in self.committed.values())
        if era not in self._epochs and was_trained and not self.is_rotten:
            raise BrokenPromise(f"4: the cluster begins anew although checkpoints are whole: {self.committed}")
        epoch = self._epochs.setdefault(era, Epoch(era=era, first_step=spec.initial_step, parent=None))
        if not is_new and server in epoch.at:
            return
        if epoch.at.get(server, spec.initial_step) != spec.initial_step:
            return  # by one who comes late, at a server that was restarted: were it taken for what was there, its steps would show it
        self._without.discard(server)
        epoch.at[server] = spec.initial_step
        keys = keys_of(spec.layout)
        epoch.states[server, spec.initial_step] = State(
            held, np.zeros_like(held), keys, np.full(keys.size, _NEVER), np.zeros(keys.size, np.int64)
        )

    def applied(self, server: str, life: int, request: ApplyRequest, held: Array, *, rate: float = LEARNING_RATE) -> None:
        """A shard has applied a step. `rate`: the learning rate that it was told to use, for want of another."""
        epoch, step, contributors = self._epoch((life, request.fence.epoch), server), request.step, request.contributors
        if len(set(contributors)) != len(contributors):
            raise BrokenPromise(f"1: step {step} of epoch {epoch.number} has one twice: {contributors}")
        if epoch.at.get(server) != step:
            raise BrokenPromise(f"2: {server} applied step {step} of epoch {epoch.number} and was at {epoch.at.get(server)}")
        if honest := set(request.without) - self._forged:
            raise BrokenPromise(f"3: {server} applied step {step} of epoch {epoch.number} without {honest}, which their workers gave")
        known = epoch.steps.get(step)
        if known is None:
            self._check_once(epoch, step, contributors)
            self._check_said(epoch, step, contributors)
            rules = self._rules_at.get(request.fence.chief_incarnation, self.rules)
            made_at = self._made_at.get(life, {})
            if words := rules.broken_by_step(step, contributors, request.weights, made_at, self._counted_under, merge=request.merge):
                raise BrokenPromise(f"P: step {step} of epoch {epoch.number} under {rules.spec.text}: {words}")
            self._check_changes(epoch, step, rules.spec, rate)
            epoch.rates[step] = rate
            self._count(epoch, step, contributors)
        elif known != contributors:
            raise BrokenPromise(f"2: step {step} of epoch {epoch.number}: {server} applied {contributors}, another {known}")
        if epoch.rates.setdefault(step, rate) != rate:
            raise BrokenPromise(f"2: step {step} of epoch {epoch.number}: {server} uses the rate {rate}, another {epoch.rates[step]}")
        self._note_without(epoch, step, server, request.without)
        # One alone has a factor; of several, each counts in the mean as its worker said.
        factor = request.weights[0] if request.weights else 1.0
        num_given = len(contributors) - len(request.without)
        weights = [factor if len(contributors) == 1 else 1.0 if num_given == 1 else weight_of(one.worker) for one in contributors]
        given = [one for one in zip(contributors, weights, strict=True) if one[0] not in request.without]
        rate, phase = self._numbers_of(life, [push_id for push_id, _ in given], rate)
        state = self._next_state(epoch.states[server, step], step, life, server, given, rate=rate, phase=phase, merge=request.merge)
        if self._readable(state, step + 1) != held.tobytes():
            raise BrokenPromise(f"5: {server} step {step} of epoch {epoch.number}: has {held}, {contributors} make {state}")
        epoch.states[server, step + 1] = state
        epoch.at[server] = step + 1
        self.num_applied += 1

    def arrived(self, server: str, life: int, push_id: PushId, epoch_number: int, held: Array) -> None:
        """A shard has applied a contribution as it came."""
        era = life, epoch_number
        epoch, made = self._epoch(era, server), self._arrived.setdefault((era, server), set())
        step = epoch.at[server]
        if push_id in made:
            raise BrokenPromise(f"1: {server} has applied {push_id} before, in epoch {epoch_number}")
        if (era, push_id) in self._refused:
            raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch_number}, and {server} has applied it")
        state = self._next_state(epoch.states[server, step], step, life, server, [(push_id, 1.0)], rate=LEARNING_RATE, phase=0)
        if self._readable(state, step + 1) != held.tobytes():
            raise BrokenPromise(f"5: {server} with {push_id} of epoch {epoch_number}: has {held}, it makes {state}")
        made.add(push_id)
        epoch.at[server], epoch.states[server, step + 1] = step + 1, state
        self.num_applied += 1

    def served(self, server: str, life: int, epoch_number: int) -> None:
        """A worker is given what a server holds: where contributions are applied as they arrive, all that were accepted are in it."""
        era = life, epoch_number
        lacking = self._accepted_in.get(era, set()) - self._arrived.get((era, server), set()) - self._forged
        if self.rules.spec.applies_on_arrival and lacking:
            raise BrokenPromise(f"3: {server} is read from in epoch {epoch_number}, and lacks {lacking}, which were accepted")

    def copied(self, server: str, life: int, tag: str, epoch_number: int) -> None:
        """A shard has been asked to save what it holds, and may have copied it just now."""
        era = life, epoch_number
        epoch = self._epochs.get(era)
        if self.rules.spec.applies_on_arrival and epoch is not None and server in epoch.at:
            now = epoch.states[server, epoch.at[server]], set(self._arrived.get((era, server), ()))
            self._saved.setdefault((tag, era, index_of(server)), []).append(now)

    def restored(self, server: str, life: int, request: RestoreRequest, step: int | None, held: Array) -> None:
        """A shard was brought back to a checkpoint."""
        spec, era = request.spec, (life, request.spec.epoch)
        if step != spec.initial_step:
            return  # the answer to a repetition; it has gone on since
        epoch = self._epochs.get(era) or self._begin_epoch(era, spec, request.tag)
        is_back = self.committed.get(request.tag) == (era, step) and server in self._without and len(self._servers_of(server)) > 1
        if epoch.first_step != spec.initial_step and not is_back:
            raise BrokenPromise(f"2: epoch {epoch.number} begins at step {epoch.first_step} and, on {server}, at {spec.initial_step}")
        if epoch.at.get(server, step) != step and not is_back:
            raise BrokenPromise(f"2: {server} was restored to step {step} of epoch {epoch.number} after it had gone on")
        if self.rules.spec.applies_on_arrival:
            saved = self._saved[request.tag, self.committed[request.tag][0], index_of(server)]
            state, made = next((one for one in saved if self._readable(one[0], step) == held.tobytes()), saved[-1])
            self._arrived[era, server] = set(made)
        else:
            state = self._state_at(epoch, server, step, is_back=is_back, held=held)
        if self._readable(state, step) != held.tobytes():
            raise BrokenPromise(f"5: {server} restored to {request.tag} has {held}, it had {state}")
        self._without.discard(server)
        epoch.at[server] = epoch.since[server] = step
        epoch.states[server, step] = replace(state, value=state.value.copy(), momentum=state.momentum.copy())

    # -- what the chief says, and what a worker concludes from it

    def told_step(self, era: Era, step: int, *, to: str, servers: Sequence[str], is_finished: bool = False) -> None:
        """Somebody was told that so many steps are applied. `servers`: those that the chief counts on.

        `is_finished`: training is; then what was promised is applied, and is not saved step by step.
        """
        known = self._epochs.get(era)
        if known is not None:
            behind = [server for server in servers if known.at.get(server, known.first_step) < step]
            if self.rules.spec.applies_on_arrival:
                # Some may not have arrived everywhere, and of what was committed and never given the chief does not know.
                most = max((known.at.get(server, known.first_step) for server in servers), default=step)
                behind = behind if step > most + len(self._forged) else []
            if behind:
                raise BrokenPromise(f"2: {to} was told of step {step} of epoch {era[1]}, which {behind} have not applied")
            self._check_twins(known, step, servers, to=to)
        if step > self._told_step.get(era, 0):
            self._told_step[era] = step
            first = 0 if known is None or known.parent is None else known.first_step
            if self._is_durable_at_once and not is_finished and step > first and (era, step) not in self.committed.values():
                raise BrokenPromise(
                    f"4: {to} was told of step {step} of epoch {era[1]} before a checkpoint of it was whole: {self.committed}"
                )

    def _check_twins(self, epoch: Epoch, step: int, servers: Sequence[str], *, to: str) -> None:
        """Servers that hold one shard, and that a chief counts on, hold the same at the step that it tells of."""
        for server in servers:
            for twin in servers:
                if server >= twin or index_of(server) != index_of(twin) or step < max(epoch.since.get(server, 0), epoch.since.get(twin, 0)):
                    continue
                one, other = (epoch.states.get((name, step)) for name in (server, twin))
                if one is not None and other is not None and one.value.tobytes() != other.value.tobytes():
                    words = f"{server} and {twin} are counted on, and have not held the same then"
                    raise BrokenPromise(f"2: {to} was told of step {step} of epoch {epoch.number}: {words}")

    def told_commit(self, era: Era, push_id: PushId, result: CommitResult, *, by: str = "") -> None:
        """A worker was told what becomes of its contribution, `by` a chief, or takes it for granted."""
        outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE else result.outcome
        known, number = self._epochs.get(era), era[1]
        if outcome is PushOutcome.ACCEPTED and result.applied_step is not None:
            step = result.applied_step
            before = self._accepted.setdefault((era, push_id), step)
            self._accepted_in.setdefault(era, set()).add(push_id)
            if not self._may_be_in(era, push_id, step, by=by):
                raise BrokenPromise(f"3: {push_id} was said to be in step {before}, then in {step}")
            is_told_again = self.rules.spec.applies_on_arrival and result.outcome is PushOutcome.DUPLICATE
            if is_told_again:
                # Another chief knows that it is applied, and not as which the former one has counted it.
                self._check_arrived(era, push_id, step)
                return
            applied = known.steps.get(step) if known is not None else None
            if applied is not None and push_id not in applied:
                raise BrokenPromise(f"3: {push_id} was accepted for step {step} of epoch {number}, made of {applied}")
            self._promised.setdefault((era, step), set()).add(push_id)
            if self.rules.spec.applies_on_arrival:
                self._check_arrived(era, push_id, step)
                # A chief that does not know yet that it has a successor counts on; what it counts is applied all the same.
                if by and (other := self._counted_as.setdefault((era, by, step), push_id)) != push_id:
                    raise BrokenPromise(f"3: {by} has accepted both {other} and {push_id} for step {step} of epoch {number}")
            self._latest[era, push_id.worker, push_id.incarnation] = push_id
        elif outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self._refused.add((era, push_id))
            if known is not None and push_id in known.made:
                raise BrokenPromise(f"3: {push_id} was refused in epoch {number}, and is applied")
            if (era, push_id) in self._accepted:
                raise BrokenPromise(f"3: {push_id} was accepted, and then refused in the same epoch {number}")

    # -- what people order

    def rules_hold(self, chief: int, rules: PolicyRules) -> None:
        """At the chief of this incarnation these rules hold from now on."""
        self._rules_at[chief] = rules

    def asked_to_count(self, push_id: PushId, rules: PolicyRules) -> None:
        """A chief at which these rules hold was asked to count a contribution."""
        self._counted_under.setdefault(push_id, set()).add(rules)

    def asked_to_change(self, number: int, value: Setting) -> None:
        """Somebody wants another policy, or another learning rate: it may hold from now on."""
        self._asked[number] = value

    def told_change(self, era: Era, number: int, *, version: int, step: int, is_kept: bool) -> None:
        """Somebody was told that a change holds from a step on; `is_kept`: also at another chief."""
        value = self._asked.pop(number, None)
        if value is not None:
            told = self._policies if isinstance(value, PolicySpec) else self._rates
            told.setdefault(era, Changes()).told(value if is_kept else None, version=version, step=step)

    def told_saved(self, era: Era, tag: str, step: int) -> None:
        """Somebody was told that what was to be saved is in a checkpoint."""
        if self.committed.get(tag, (era, -1))[1] != step:
            raise BrokenPromise(f"4: {tag} of step {step} was said to be whole; whole are {self.committed}")
        self._told_saved[era] = max(step, self._told_saved.get(era, 0))

    def _check_changes(self, epoch: Epoch, step: int, policy: PolicySpec, rate: float) -> None:
        """What people were told that it holds, holds, until something else may that they have asked for."""
        for told, found in ((self._policies, policy), (self._rates, rate)):
            changes = told.get(epoch.era)
            wanted = changes.wanted_at(step) if changes is not None else None
            if wanted not in (None, found) and found not in self._asked.values():
                raise BrokenPromise(f"U: step {step} of epoch {epoch.number} is made with {found}; {wanted} was said to hold")

    def told_token(self, era: Era, worker: int, incarnation: int, *, local_step: int, step: int, rules: PolicyRules) -> None:
        """A worker that has asked at `local_step` may go on with the variables of a step. `rules`: those that hold at its chief."""
        push_id = self._latest.get((era, worker, incarnation))
        if push_id is not None and not all(former.has_own_steps for former in self._counted_under.get(push_id, ())):
            return  # the token is of the queue that a change has ended
        if push_id is None or not rules.has_own_steps or self._made_at[era[0]].get(push_id, step) > local_step:
            return  # asked before it gave that: the request has come twice, or late
        # The latest chief hands out the token. It has the lowest of several numbers, because a former chief may have counted further.
        promised = min([self._accepted[era, push_id], *self._numbers.get((era, push_id), {}).values()])
        if promised >= step:
            words = f"worker {worker} goes on with step {step} of epoch {era[1]}, and what it gave is to be in step {promised}"
            raise BrokenPromise(f"P: under {rules.spec.text} {words}")

    @property
    def has_forged(self) -> bool:
        """Whether a worker has committed what it has not given to all shards."""
        return bool(self._forged)

    def forged(self, push_id: PushId) -> None:
        """A worker is about to commit what it has not given to all shards."""
        self._forged.add(push_id)

    def staged(self, server: str, push_id: PushId, gradients: Array) -> None:
        """A server has taken up a contribution that has gradients: an honest one, or a lie."""
        lie = lie_of(push_id, shard=index_of(server), size=self._size)
        self._lies[server, push_id] = self._values(gradients).tobytes() == lie.tobytes()

    # -- memory

    def has_room(self, server: str, report: ShardReport, *, push_bytes: int, max_pushes: int) -> None:
        """A server has a model, and may stage so many contributions of each incarnation of a worker, of so many bytes."""
        if report.num_staged == 0:
            self._rooms[server] = Room(at_rest=report.allocated_bytes, push_bytes=push_bytes, max_pushes=max_pushes)

    def holds(self, server: str, push_id: PushId, report: ShardReport) -> None:
        """A server has been given a contribution, and has taken it or not."""
        room = self._rooms.get(server)
        if room is None:
            return
        room.givers.add((push_id.worker, push_id.incarnation))
        if report.num_staged > room.max_staged:
            raise BrokenPromise(
                f"7: {server} stages {report.num_staged} contributions of {len(room.givers)} workers, {room.max_staged} at most"
            )
        if report.allocated_bytes > room.max_bytes:
            raise BrokenPromise(f"7: {server} has allocated {report.allocated_bytes} bytes, {room.max_bytes} are enough")

    # -- training data

    def contributed(self, life: int, push_id: PushId, step: int, ranges: tuple[int, ...], user_state: str = "") -> None:
        """A worker has made a contribution from the variables of a step and these ranges of the data, with a state of its program."""
        self._brought[life, push_id] = user_state
        self._made_at.setdefault(life, {})[push_id] = step
        self._made_from[life, push_id] = ranges

    def contributed_nothing(self, life: int, push_id: PushId) -> None:
        """A worker makes a contribution that has no gradient."""
        self._empty.add((life, push_id))

    def told_exhausted(self, era: Era, data: DataSpec, *, to: str) -> None:
        """A worker was told that all of the training data is done."""
        known = self._epochs.get(era)
        left = [identity for identity in range(data.num_epochs * data.num_ranges) if known is None or identity not in known.used]
        if left:
            raise BrokenPromise(f"8: {to} was told that all data is done in epoch {era[1]}, and ranges {left} are in no step")

    @property
    def has_way_back(self) -> bool:
        """Whether something is whole that can be gone back to: not what a chief of a lost life made whole when another life had begun."""
        return any(era[0] == self._last_life or tag in self._whole_before for tag, (era, _) in self.committed.items())

    def is_lost(self, life: int) -> bool:
        """Whether a life of the cluster has ended with nothing saved: a worker that has its model may end with it in any case."""
        return life != self._last_life and not self._whole_before

    def committed_checkpoint(self, tag: str, era: Era, step: int, done: Set[int], user_states: Mapping[int, str]) -> None:
        """A checkpoint is whole; it says that these ranges of the training data are done, and that workers' programs have these states."""
        self.committed[tag] = era, step
        known = self._epochs.get(era)
        if known is not None:
            self._check_user_states(known, step, user_states)
            used = {identity for identity, in_step in known.used.items() if in_step < step}
            if used != done:
                words = f"of step {step} in epoch {era[1]}: it lacks ranges {used - done} and has {done - used}, which are in no step"
                raise BrokenPromise(f"8: the checkpoint {words}")

    def _check_user_states(self, epoch: Epoch, step: int, user_states: Mapping[int, str]) -> None:
        """Those of the last contribution of each worker that brought one, and no others; what forgers have is not looked at."""
        if self.rules.spec.applies_on_arrival:
            return
        made = sorted((epoch.made[push_id], push_id) for push_id in epoch.brought if epoch.made[push_id] < step)
        brought = {push_id.worker: epoch.brought[push_id] for _, push_id in made}
        for worker in {*brought, *user_states} - {push_id.worker for push_id in self._forged}:
            if (found := user_states.get(worker)) != (wanted := brought.get(worker)):
                raise BrokenPromise(
                    f"9: worker {worker}'s state at step {step} of epoch {epoch.number} is {found}, it had brought {wanted}"
                )

    # -- what workers see

    def read(self, era: Era, step: int, arenas: Mapping[int, Array], *, by: str) -> None:
        """A worker has read the variables of one step from all shards.

        Who reads names no life: who stems from a lost one may read what the next has in an epoch of this number. It contributes to none.
        """
        for shard, arena in arenas.items():
            servers = [server for server in self._servers if index_of(server) == shard]
            for server in servers:
                self._go_on(era, step, server)
            eras = [one for one in self._epochs if one[1] == era[1]]
            found = (self._epochs[one].states.get((server, step)) for one in eras for server in servers)
            states = [state for state in found if state is not None]
            if all(state.value[: self._size].tobytes() != self._values(arena).tobytes() for state in states):
                raise BrokenPromise(f"2: {by} read step {step} of epoch {era[1]} from ps {shard}: {self._values(arena)}, want {states}")

    # -- what follows

    def _epoch(self, era: Era, server: str) -> Epoch:
        epoch = self._epochs.get(era)
        if epoch is None or server not in epoch.at:
            raise BrokenPromise(f"2: {server} applied a step of epoch {era[1]}, in which it has no variables")
        return epoch

    def _servers_of(self, server: str) -> list[str]:
        return [one for one in self._servers if index_of(one) == index_of(server)]

    def _go_on(self, era: Era, step: int, server: str) -> None:
        """An epoch may begin with what a server has had in an earlier one: a chief has found all at one step, and nothing to go back to."""
        epoch = self._epochs.get(era)
        if epoch is not None and (server in epoch.at or epoch.first_step != step):
            return
        earlier = [one for one in self._epochs.values() if one.number <= era[1] and one.era != era and one.at.get(server) == step]
        if earlier:
            latest = max(earlier, key=lambda one: one.number)
            epoch = self._epochs.setdefault(era, latest.child(era, first_step=step))
            epoch.at[server], epoch.states[server, step] = step, latest.states[server, step]

    def _begin_epoch(self, era: Era, spec: ShardSpec, tag: str) -> Epoch:
        parent, step = self.committed.get(tag, (era, -1))
        if step != spec.initial_step:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins with {tag}, step {spec.initial_step}, of which no checkpoint was whole")
        lost = [(told, step) for told, step in self._told_step.items() if step > spec.initial_step and self._is_ancestor(told, parent)]
        if self._is_durable_at_once and lost and not self.is_rotten:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins at step {spec.initial_step}, but {lost} was told (epoch, step)")
        saved = [(told, step) for told, step in self._told_saved.items() if step > spec.initial_step and self._is_ancestor(told, parent)]
        if saved and not self.is_rotten:
            raise BrokenPromise(f"4: epoch {spec.epoch} begins at step {spec.initial_step}, but {saved} was said to be saved (epoch, step)")
        self.num_rollbacks += 1
        epoch = self._epochs[era] = self._epochs[parent].child(era, first_step=spec.initial_step)
        return epoch

    def _is_ancestor(self, era: Era, of: Era) -> bool:
        at: Era | None = of
        while at is not None:
            if at == era:
                return True
            at = self._epochs[at].parent if at in self._epochs else None
        return False

    def _state_at(self, epoch: Epoch, server: str, step: int, *, is_back: bool, held: Array) -> State:
        """Returns what a server, or its twin, had in an earlier epoch, or (`is_back`) in this one: that which is held, if one had it."""
        at = epoch if is_back else self._epochs.get(epoch.parent) if epoch.parent is not None else None
        while at is not None:
            states = [state for one in self._servers_of(server) if (state := at.states.get((one, step))) is not None]
            if states:
                return next((state for state in states if self._readable(state, step) == held.tobytes()), states[0])
            at = self._epochs.get(at.parent) if at.parent is not None else None
        raise BrokenPromise(f"4: epoch {epoch.number} begins at step {step}, which {server} never had")

    def _check_once(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        for push_id in contributors:
            if push_id in epoch.made:
                raise BrokenPromise(f"1: {push_id} in step {epoch.made[push_id]} and in step {step} of epoch {epoch.number}")
            for identity in self._made_from.get((epoch.era[0], push_id), ()):
                if identity in epoch.used:
                    raise BrokenPromise(f"8: range {identity} in step {epoch.used[identity]} and in step {step} of epoch {epoch.number}")

    def _check_said(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        for push_id in contributors:
            if (epoch.era, push_id) in self._refused:
                raise BrokenPromise(f"3: {push_id} was refused in epoch {epoch.number}, and applied in step {step}")
            said = self._accepted.get((epoch.era, push_id), step)
            if said != step:
                raise BrokenPromise(f"3: {push_id} was accepted for step {said} of epoch {epoch.number}, and applied in step {step}")
        left_out = self._promised.get((epoch.era, step), set()).difference(contributors)
        if left_out:
            raise BrokenPromise(f"3: {left_out} were accepted for step {step} of epoch {epoch.number}, made of {contributors}")

    def _count(self, epoch: Epoch, step: int, contributors: Contributors) -> None:
        epoch.steps[step] = contributors
        for push_id in contributors:
            epoch.made[push_id] = step
            if state := self._brought.get((epoch.era[0], push_id)):
                epoch.brought[push_id] = state
            for identity in self._made_from.get((epoch.era[0], push_id), ()):
                epoch.used[identity] = step

    def _note_without(self, epoch: Epoch, step: int, server: str, without: Iterable[PushId]) -> None:
        """The training data of a contribution that no shard has is in no step."""
        shards = {index_of(one) for one in self._servers}
        for push_id in without:
            lacking = epoch.lacking.setdefault((step, push_id), set())
            lacking.add(index_of(server))
            for identity in self._made_from.get((epoch.era[0], push_id), ()) if lacking == shards else ():
                if epoch.used.get(identity) == step:
                    del epoch.used[identity]

    def _next_state(
        self,
        state: State,
        step: int,
        life: int,
        server: str,
        contributions: Sequence[tuple[PushId, float]],
        *,
        rate: float,
        phase: int,
        merge: MergeSpec = MEAN,
    ) -> State:
        total: Array = np.zeros(self._size, np.float32)
        given = [one for one in sorted(contributions) if (life, one[0]) not in self._empty]
        if not given:
            return state
        scale = len(given) / sum(weight for _, weight in given) if len(contributions) > 1 else 1.0
        gradients = []
        for push_id, weight in given:
            of = lie_of if self._lies.get((server, push_id)) else gradient_of
            gradients.append(of(push_id, shard=index_of(server), size=self._size))
            total = total + gradients[-1] * np.float32(weight * scale)
        mean = total / np.float32(len(given))
        if num_trimmed := merge.num_trimmed(len(given)):
            mean = _trimmed_mean(gradients, [weight for _, weight in given], num_trimmed)
        before = np.zeros_like(state.momentum) if phase > state.phase else state.momentum
        is_there = self._is_there(state, step)
        gets_row = draws(state.keys, seed=0, step=step) < (self._admitted or 1.0)
        gets_row &= state.occurred >= self._admit_after - 1
        begins, counts = ~is_there & gets_row, is_there | gets_row
        begins, changes = (
            np.repeat(np.concatenate([[of_variable], some]), self._size) for of_variable, some in ((False, begins), (True, counts))
        )
        first = np.where(begins, np.float32(FIRST_VALUE), state.value)
        momentum = np.where(begins, np.float32(0), before) * np.float32(MOMENTUM) + np.tile(mean, 1 + state.keys.size)
        return State(
            np.where(changes, first - momentum * np.float32(rate), state.value),
            np.where(changes, momentum, before),
            state.keys,
            np.where(counts, step + 1, state.used),
            state.occurred + ~counts,
            max(phase, state.phase),
        )

    def _is_there(self, state: State, step: int) -> Array:
        """Whether each key has a row at a step."""
        return state.used > (step - self._max_age if self._max_age else _NEVER)

    def _readable(self, state: State, step: int) -> bytes:
        """Returns the values that readers find at a step: a key without a row has first values."""
        found = np.repeat(np.concatenate([[True], self._is_there(state, step)]), self._size)
        return np.where(found, state.value, np.float32(FIRST_VALUE)).tobytes()

    def _numbers_of(self, life: int, contributors: Sequence[PushId], rate_of_all: float) -> tuple[float, int]:
        """Returns the learning rate and the phase of training of a step of these contributions."""
        given = (one for one in sorted(contributors) if (life, one) not in self._empty)
        found = ((rate, phase_of(one.sequence)) for one in given if (rate := rate_of(one.worker, one.sequence)) is not None)
        return next(found, (rate_of_all, 0))

    def _may_be_in(self, era: Era, push_id: PushId, step: int, *, by: str) -> bool:
        """Whether this step contradicts nothing that was said before: each chief says one, and a worker what a chief has said.

        Only where contributions are applied as they arrive may two chiefs that live at one time count one as different steps.
        """
        if not self.rules.spec.applies_on_arrival:
            return self._accepted[era, push_id] == step
        said = self._numbers.setdefault((era, push_id), {})
        return said.setdefault(by, step) == step if by else step in said.values()

    def _check_arrived(self, era: Era, push_id: PushId, step: int) -> None:
        """What is accepted has been applied by all shards."""
        shards = {index_of(server) for server in self._servers}
        lacking = shards - {index_of(server) for server in self._servers if push_id in self._arrived.get((era, server), ())}
        if lacking and push_id not in self._forged:
            raise BrokenPromise(f"3: {push_id} was accepted for step {step} of epoch {era[1]}, and ps {lacking} have not applied it")

    def _values(self, arena: Array) -> Array:
        return arena[: self._size * 4].view(np.float32)
