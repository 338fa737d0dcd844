"""Changes of the policy and of optimizers while training: checked, decided, and put into effect at all shards. Knows no thread or wire."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from chief.core import replies
from chief.core.cluster import Cluster, UnderWay
from chief.core.messages import ConfigureShards, Instruction, Note, Refuse, Reply, SetHyperparameters, SetPolicy
from chief.core.replies import grant
from chief.core.waiting import slice_s
from chief.core.wording import optimizers_words
from chief.policies.base import Counted, Grant
from chief.policies.factory import new_policy
from ps_protocol.errors import InvalidSpec, NotInitialized, PsError, TrainingFailed, VariableNotFound
from ps_protocol.model.optimizers import INITIAL_HYPERPARAMETERS, OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import HyperparameterChange, ParticipantKind, SettingsReply
from ps_protocol.roles.shard import ShardSettings

# Changes of a model's optimizers, checked. Knows what the model has and what was changed; decides nothing about when.


# By key, as the model has it and as it is: those that were changed.
Optimizers = dict[str, tuple[OptimizerSpec, OptimizerSpec]]


def changed_optimizers(cluster: Cluster, optimizers: Optimizers, change: HyperparameterChange) -> Optimizers:
    """Returns the optimizers as they are after a change. Raises InvalidSpec, VariableNotFound or NotInitialized."""
    original = _original(cluster, change.variable)
    fixed = sorted(INITIAL_HYPERPARAMETERS.intersection(change.hyperparameters))
    if fixed:
        raise InvalidSpec(
            f"optimizer {original.name!r}: {', '.join(fixed)} cannot be changed while training: the slots are made by it"
            " when the model is created; start the cluster again"
        )
    current = optimizers.get(original.key, (original, original))[1]
    learning_rate = current.learning_rate if change.learning_rate is None else change.learning_rate
    numbers = {**current.hyperparameters, **change.hyperparameters}
    new = OptimizerSpec(name=current.name, learning_rate=learning_rate, hyperparameters=numbers)
    return {**optimizers, original.key: (original, new)}


def _original(cluster: Cluster, name: str) -> OptimizerSpec:
    model = cluster.registry.model
    if model is None or not cluster.registry.is_ready:
        raise NotInitialized("there is no model yet whose optimizer could be changed; create the model first")
    if not name:
        return model.optimizer
    variable = next((variable for variable in model.variables if variable.name == name), None)
    if variable is None:
        known = ", ".join(repr(variable.name) for variable in model.variables[:5])
        close = get_close_matches(name, [variable.name for variable in model.variables], n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise VariableNotFound(f"the model has no variable {name!r}; it has {known}{', …' if len(model.variables) > 5 else ''}{meant}")
    if variable.optimizer is None:
        raise InvalidSpec(f"variable {name!r} has no optimizer of its own; change the model's, by naming no variable")
    return variable.optimizer


def words_of(cluster: Cluster, optimizers: Optimizers) -> str:
    """Says what the optimizers are."""
    model = cluster.registry.model
    assert model is not None
    return optimizers_words(model, {key: spec for key, (_, spec) in optimizers.items()})


# Changes of policy and optimizers while the cluster lives: methods of the coordinator. Knows the cluster; no clock, thread or wire.
#
# A change waits until no step is being applied. Then all shards are told, if it concerns them, and then it holds. One after another.


# Changes whose requests are remembered, so that a repeated one has its effect once.
_MAX_REMEMBERED = 1024

_Key = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class _Change:
    key: _Key
    asked: PolicySpec | HyperparameterChange
    calls: list[int] = field(default_factory=list)
    # What is being introduced: of a policy that needs two moves, first another one.
    policy: PolicySpec | None = None
    optimizers: Optimizers | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForShards:
    accepts_stale: bool = False
    applies_on_arrival: bool = False
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    rejects_nonfinite: bool = False


class Settings:
    """Takes changes in, has them carried out in order, and answers who waits for them. `version` grows with each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pending: list[_Change] = []
        self._done: dict[_Key, SettingsReply] = {}
        self._known = _ForShards()  # what the shards have been told
        # By key, as the model has it and as it is: those that were changed.
        self._optimizers: Optimizers = {}
        # Shards begin with 0; what they are to be told first needs a higher one.
        self.version = int(self._wanted(cluster.config.policy) != self._known)

    def set_policy(self, event: SetPolicy) -> list[Instruction]:
        """Takes a change of policy in. Raises InvalidSpec."""
        self._check_open()
        config = self._cluster.config.with_policy(event.policy)
        self._cluster.registry.check_policy(config.policy)
        return self._take_in(("policy", event.request_id), event.policy, event.call)

    def set_hyperparameters(self, event: SetHyperparameters) -> list[Instruction]:
        """Takes a change of an optimizer in. Raises InvalidSpec, VariableNotFound or NotInitialized."""
        self._check_open()
        changed_optimizers(self._cluster, self._optimizers, event.change)
        return self._take_in(("hyperparameters", event.request_id), event.change, event.call)

    def wait(self, call: int, *, max_wait_s: float, now: float) -> list[Instruction]:
        """Has the caller of a change wait that is not carried out yet, or tells it so at once if it has no time."""
        change = next((change for change in self._pending if call in change.calls), None)
        if change is None:
            return []
        if slice_s(max_wait_s):
            self._cluster.deadlines.set(("settings", call), now + slice_s(max_wait_s))
            return []
        return self.expire(call)

    def expire(self, call: int) -> list[Instruction]:
        """A caller has waited as long as it may; the change is carried out all the same."""
        return [Reply(call=call, value=None)] if self.cancel(call) else []

    def cancel(self, call: int) -> bool:
        """Forgets a caller; False if it does not wait here."""
        self._cluster.deadlines.clear(("settings", call))
        for change in self._pending:
            if call in change.calls:
                change.calls.remove(call)
                return True
        return False

    def refuse(self, error: PsError) -> list[Instruction]:
        """Training is over: nothing that is pending will be carried out."""
        pending, self._pending = self._pending, []
        calls = [call for change in pending for call in change.calls]
        for call in calls:
            self._cluster.deadlines.clear(("settings", call))
        return [Refuse(call=call, error=error) for call in calls]

    def restore(self, record: ChiefRecord, *, version: int) -> None:
        """Goes on with what an earlier chief has left; shards know of settings up to this version, perhaps others."""
        self._optimizers = {original.key: (original, new) for original, new in record.optimizers}
        self._cluster.optimizers = record.optimizers
        self._cluster.optimizer = words_of(self._cluster, self._optimizers) if record.optimizers else ""
        self._cluster.settings_version = record.settings_version
        self.version = max(record.settings_version, version)
        self._known = dataclasses.replace(self._wanted(self._cluster.config.policy), rejects_nonfinite=record.rejects_nonfinite)

    def for_shards(self, *, step: int) -> ShardSettings:
        """Returns how shards that are brought back to this step are to work: as is right now, and then they know."""
        cluster = self._cluster
        self._known = self._wanted(cluster.config.policy)
        return ShardSettings(
            epoch=cluster.epoch,
            chief_incarnation=cluster.chief_incarnation,
            version=self.version,
            step=step,
            accepts_stale=self._known.accepts_stale,
            applies_on_arrival=self._known.applies_on_arrival,
            optimizers=self._known.optimizers,
            rejects_nonfinite=self._known.rejects_nonfinite,
        )

    def begin_anew(self, *, is_again: bool) -> None:
        """The shards know of no settings; `is_again`: any more."""
        self._known = _ForShards()
        self.version += is_again

    def tell_again(self) -> Instruction:
        """Tells the shards what holds, since some may have heard of what does not."""
        self.version += 1
        return self._tell(self._wanted(self._cluster.config.policy))

    def open_model(self) -> list[Instruction]:
        """The shards hold their first values: tells them how to work, unless they know; returns nothing then."""
        wanted = self._wanted(self._cluster.config.policy)
        return [] if wanted == self._known else [self._tell(wanted)]

    def begin(self, now: float) -> list[Instruction]:
        """Begins the next changes, as long as that is possible now; those that do not concern the shards hold at once."""
        if not self._pending:
            return []
        instructions: list[Instruction] = []
        if isinstance(self._pending[0].asked, PolicySpec) and self._must_drain(self._pending[0].asked):
            self._cluster.policy.close()
        while self._pending and self._cluster.under_way is None:
            change = self._pending[0]
            if isinstance(change.asked, HyperparameterChange):
                change.optimizers = changed_optimizers(self._cluster, self._optimizers, change.asked)
            else:
                change.policy = self._next_move(change.asked)
                if change.policy is None:
                    break
            wanted = self._wanted(change.policy or self._cluster.config.policy, change.optimizers)
            if self._cluster.registry.is_ready and wanted != self._known:
                self.version += 1
                instructions.append(self._tell(wanted))
            else:
                self.version += 1
                instructions += self.configured(now)
        return instructions

    def configured(self, now: float) -> list[Instruction]:
        """The shards know: from now on the change holds, or its first move, if it needs two."""
        if not self._pending:
            return []  # training was finished meanwhile
        change = self._pending[0]
        instructions: list[Instruction] = []
        if change.optimizers is not None:
            self._optimizers = change.optimizers
            self._cluster.optimizers = tuple(change.optimizers.values())
            self._cluster.optimizer = words_of(self._cluster, self._optimizers)
        if change.policy is not None:
            instructions += self._install(change.policy, now)
            if change.policy != change.asked:
                return instructions
        del self._pending[0]
        reply = SettingsReply(version=self.version, step=self._cluster.policy.step)
        self._cluster.settings_version = self.version
        self._remember(change.key, reply)
        for call in change.calls:
            self._cluster.deadlines.clear(("settings", call))
            instructions.append(Reply(call=call, value=reply))
        kept = [replies.keep(self._cluster)] if self._cluster.registry.is_ready else []
        what = f"policy {self._cluster.policy.spec.text}" if change.policy is not None else f"optimizer {self._cluster.optimizer}"
        return [Note(text=f"settings version {self.version} hold from step {reply.step} on: {what}"), *instructions, *kept]

    def _take_in(self, key: _Key, asked: PolicySpec | HyperparameterChange, call: int) -> list[Instruction]:
        if key in self._done:
            return [Reply(call=call, value=self._done[key])]
        change = next((change for change in self._pending if change.key == key), None)
        if change is None:
            change = _Change(key=key, asked=asked)
            self._pending.append(change)
        change.calls.append(call)
        return []

    def _next_move(self, policy: PolicySpec) -> PolicySpec | None:
        """Returns the policy to introduce next on the way to `policy`; None: what is counted must be applied first."""
        old = self._cluster.policy
        if old.spec.applies_on_arrival:
            old.close()
            return policy
        if self._must_drain(policy):
            old.close()
            return None if old.num_contributions else policy
        if not policy.applies_on_arrival:
            return policy
        if old.num_contributions:
            # By way of one under which each is applied as a step by itself.
            return dataclasses.replace(policy, use_locking=True)
        old.close()
        return policy

    def _must_drain(self, policy: PolicySpec) -> bool:
        """Whether what waits for its turn cannot go over: it has been promised a step of its own, which not every policy can give."""
        old = self._cluster.policy.spec
        is_queue = old.accepts_stale and not old.applies_on_arrival
        return is_queue and (policy.applies_on_arrival or not policy.accepts_stale)

    def _install(self, policy: PolicySpec, now: float) -> list[Instruction]:
        cluster, old = self._cluster, self._cluster.policy
        cluster.config = cluster.membership.config = cluster.config.with_policy(policy)
        if not policy.accepts_stale:
            cluster.discards.clear()  # the shards drop by themselves what they cannot apply any more
        if not old.spec.accepts_stale:
            cluster.oldest_kept = old.step
            if policy.accepts_stale:
                self._spread(old.counted())
        live = [member.index for member in cluster.membership.workers() if member.is_live]
        cluster.policy = new_policy(
            cluster.config, step=old.step, counted=old.counted(), workers=live, is_start=not cluster.registry.is_ready
        )
        cluster.requota()
        granted = []
        for waiting in cluster.waiting.token_calls():
            local_step = min(waiting.local_step, old.step)
            step = cluster.ask(waiting.worker, local_step=local_step, request_id=waiting.request_id)
            if step is not None:
                granted.append(Grant(waiting.worker, step))
        return grant(cluster, granted, now)

    def _spread(self, counted: Sequence[Counted]) -> None:
        """What was counted for one step becomes a step each: tells those who have not been answered yet, and who asks again."""
        cluster = self._cluster
        for position, entry in enumerate(counted):
            member = cluster.membership.find(ParticipantKind.WORKER, entry.push_id.worker)
            if member is None or member.incarnation != entry.push_id.incarnation:
                continue
            result = member.outcomes.first_result(entry.push_id)
            if result is not None:
                step = cluster.policy.step + position
                result = dataclasses.replace(result, applied_step=step, staleness=step - entry.step)
                member.outcomes.revise(entry.push_id, result)
                cluster.waiting.revise_commit(entry.push_id, result)
                replies.revise(cluster, entry.push_id, result)
                cluster.ledger.max_staleness = max(cluster.ledger.max_staleness, result.staleness)

    def _tell(self, wanted: _ForShards) -> Instruction:
        self._known, self._cluster.under_way = wanted, UnderWay.CONFIGURE
        return ConfigureShards(
            epoch=self._cluster.epoch,
            version=self.version,
            step=self._cluster.policy.step,
            accepts_stale=wanted.accepts_stale,
            applies_on_arrival=wanted.applies_on_arrival,
            optimizers=wanted.optimizers,
            rejects_nonfinite=wanted.rejects_nonfinite,
        )

    def _wanted(self, policy: PolicySpec, optimizers: Optimizers | None = None) -> _ForShards:
        changed = self._optimizers if optimizers is None else optimizers
        return _ForShards(
            accepts_stale=policy.accepts_stale,
            applies_on_arrival=policy.applies_on_arrival,
            optimizers=tuple(changed.values()),
            rejects_nonfinite=self._cluster.config.reject_nonfinite,
        )

    def _remember(self, key: _Key, reply: SettingsReply) -> None:
        self._done[key] = reply
        if len(self._done) > _MAX_REMEMBERED:
            del self._done[next(iter(self._done))]

    def _check_open(self) -> None:
        cluster = self._cluster
        cluster.refuse_if_failed()
        if cluster.is_finished:
            raise TrainingFailed(f"training is finished ({cluster.finish_reason}); its settings cannot be changed any more")
