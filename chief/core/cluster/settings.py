"""Changes of the policy and of optimizers during training: requested ones, the one that shards are told of, and those in force.

Knows specifications and versions; no step, clock, thread or wire. `training` decides when a change can be carried out.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from chief.core.waiting import Blocked, slice_s
from chief.core.wording import optimizers_words
from chief.options import CoordinationConfig
from ps_protocol.errors import InvalidSpec, NotInitialized, PsError, VariableNotFound
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.misspelling import did_you_mean
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import ChangeSettingsRequest, HyperparameterChange, SettingsReply
from ps_protocol.roles.fence import Fence
from ps_protocol.roles.shard import ShardSettings

if TYPE_CHECKING:
    from chief.core.state import Cluster

# Changes whose requests are remembered, so that a repeated one has its effect once.
_MAX_REMEMBERED = 1024

_Key = tuple[str, int]
# The changed optimizers by key: as in the model, and at present.
Optimizers = dict[str, tuple[OptimizerSpec, OptimizerSpec]]


@light_dataclass(slots=True, eq=False, kw_only=True)
class Change:
    """A requested change."""

    key: _Key
    asked: PolicySpec | HyperparameterChange


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SettingsVersion:
    """The configuration, with the policy, the changed optimizers, and how many changes have led to them."""

    config: CoordinationConfig
    optimizers: Optimizers = field(default_factory=dict)
    number: int = 0

    def for_shards(self, fence: Fence) -> ShardSettings:
        """Returns the settings as shards get them."""
        policy = self.config.policy
        return ShardSettings(
            fence=fence,
            version=self.number + 1,  # shards begin with 0
            accepts_stale=policy.accepts_stale,
            applies_on_arrival=policy.applies_on_arrival,
            optimizers=tuple(self.optimizers.values()),
            rejects_nonfinite=self.config.reject_nonfinite,
        )


class Settings:
    """Queues changes, remembers the settings in force, and answers the calls that wait."""

    def __init__(self, cluster: "Cluster", config: CoordinationConfig) -> None:
        self._model, self._out = cluster.model, cluster.out
        self._pending: list[Change] = []
        self._calls = cluster.waiting.line(self._expire)
        self._done: dict[_Key, SettingsReply] = {}
        self._in_force = SettingsVersion(config=config)
        # The change that shards are told of, and the settings with it.
        self._introduced: tuple[Change, SettingsVersion] | None = None
        self._words = ""  # of the optimizers; empty: they have not been asked for yet, or are as the model has them

    # -- settings in force

    @property
    def config(self) -> CoordinationConfig:
        """The cluster's configuration, with the policy that holds."""
        return self._in_force.config

    @property
    def version(self) -> int:
        """Version of the latest change in force; 0 if there was none."""
        return self._in_force.number

    @property
    def newest(self) -> SettingsVersion:
        """The settings in force, or those with the change that shards are told of: another chief would continue with these."""
        return self._in_force if self._introduced is None else self._introduced[1]

    @property
    def optimizers(self) -> tuple[tuple[OptimizerSpec, OptimizerSpec], ...]:
        """The optimizers that were changed, as the model has them and as they are."""
        return tuple(self._in_force.optimizers.values())

    def optimizer_words(self) -> str:
        """Returns a description of the optimizers; empty: there is no model."""
        model = self._model.model
        if self._words or model is None:
            return self._words
        words = optimizers_words(model, {})
        if self._model.is_ready:
            self._words = words  # a model may have very many variables
        return words

    # -- changes

    def ask(self, call: int, request: ChangeSettingsRequest) -> None:
        """Takes a change in. Raises InvalidSpec, VariableNotFound or NotInitialized."""
        if request.policy is not None:
            self._check_policy(request.policy)
            self._take_in(("policy", request.request_id), request.policy, call)
        elif request.hyperparameters is not None:
            self._changed(request.hyperparameters)
            self._take_in(("hyperparameters", request.request_id), request.hyperparameters, call)

    def wait(self, call: int, *, max_wait_s: float, now: float) -> None:
        """Blocks the caller of a change that is not carried out yet, or answers it at once if it has no time left."""
        blocked = self._calls.take(call)
        if blocked is None:
            return
        if slice_s(max_wait_s):
            self._calls.block(call, blocked.ask, until=now + slice_s(max_wait_s))
        else:
            self._out.reply(call, None)

    @property
    def next_change(self) -> Change | None:
        """The change that is to be carried out next, if there is one; one that has become impossible since it was asked for is refused."""
        while self._pending:
            change = self._pending[0]
            try:
                if isinstance(change.asked, PolicySpec):
                    self._check_policy(change.asked)
                return change
            except InvalidSpec as error:
                self._pending.remove(change)
                for blocked in self._calls:
                    if blocked.ask is change:
                        self._calls.refuse(blocked.who, error)
        return None

    def introduce(self, change: Change) -> None:
        """Shards are told of a change from now on, which holds once they know."""
        new, asked = replace(self._in_force, number=self._in_force.number + 1), change.asked
        if isinstance(asked, HyperparameterChange):
            self._introduced = change, replace(new, optimizers=self._changed(asked))
        else:
            self._introduced = change, replace(new, config=new.config.with_policy(asked))

    def hold_back(self) -> None:
        """The shards are brought to another step: a change that they were told of, and that does not hold yet, is introduced later."""
        self._introduced = None

    def put_in_force(self, *, step: int) -> Change | None:
        """Puts the introduced change in force from a step on, answers its callers, and returns it; None: there is none."""
        if self._introduced is None:
            return None
        (change, self._in_force), self._introduced = self._introduced, None
        if isinstance(change.asked, HyperparameterChange):
            self._words = self._words_of(self._in_force.optimizers)
        self._pending.remove(change)
        reply = SettingsReply(version=self.version, step=step)
        self._done[change.key] = reply
        if len(self._done) > _MAX_REMEMBERED:
            del self._done[next(iter(self._done))]
        for blocked in self._calls:
            if blocked.ask is change:
                self._calls.answer(blocked.who, reply)
        return change

    def refuse(self, error: PsError) -> None:
        """Training is over: nothing that is pending will be carried out."""
        self._pending.clear()
        self._introduced = None
        self._calls.refuse_all(error)

    def restore(self, record: ChiefRecord) -> None:
        """Goes on with the settings that an earlier chief, or a checkpoint, has left; the model is known."""
        optimizers = {original.key: (original, new) for original, new in record.optimizers}
        config = self.config.with_former_policy(record.policy)
        self._in_force = SettingsVersion(config=config, optimizers=optimizers, number=record.settings_version)
        self._words = self._words_of(optimizers) if optimizers else ""

    # -- inside

    def _check_policy(self, policy: PolicySpec) -> None:
        """Raises InvalidSpec if this policy cannot follow the one that holds."""
        self._model.check_policy(self.config.with_policy(policy).policy)
        current = self.config.policy
        if self._model.is_created and policy.applies_on_arrival is not current.applies_on_arrival:
            raise InvalidSpec(
                f"policy {policy.text}: the cluster trains with {current.text}; whether parameter servers apply on arrival cannot change"
                " once there is a model: choose it when the cluster is started (--policy async --no-locking), or before there is a model"
            )

    def _take_in(self, key: _Key, asked: PolicySpec | HyperparameterChange, call: int) -> None:
        if key in self._done:
            self._out.reply(call, self._done[key])
            return
        change = next((change for change in self._pending if change.key == key), None)
        if change is None:
            change = Change(key=key, asked=asked)
            self._pending.append(change)
        self._calls.block(call, change)

    def _expire(self, blocked: Blocked[Change], now: float) -> None:
        """Answers a caller that has waited as long as it may; the change is carried out all the same."""
        self._calls.answer(blocked.who, None)

    def _words_of(self, optimizers: Optimizers) -> str:
        assert self._model.model is not None
        return optimizers_words(self._model.model, {key: spec for key, (_, spec) in optimizers.items()})

    def _changed(self, change: HyperparameterChange) -> Optimizers:
        """Returns the optimizers as they are after a change. Raises InvalidSpec, VariableNotFound or NotInitialized."""
        original = self._original(change.variable)
        fixed: Sequence[str] = sorted(original.fixed_hyperparameters.intersection(change.hyperparameters))
        if fixed:
            raise InvalidSpec(
                f"optimizer {original.name!r}: {', '.join(fixed)} cannot be changed while training: the slots are made by it"
                " when the model is created; start the cluster again"
            )
        current = self._in_force.optimizers.get(original.key, (original, original))[1]
        learning_rate = current.learning_rate if change.learning_rate is None else change.learning_rate
        numbers = {**current.hyperparameters, **change.hyperparameters}
        new = replace(current, learning_rate=learning_rate, hyperparameters=numbers)
        return {**self._in_force.optimizers, original.key: (original, new)}

    def _original(self, name: str) -> OptimizerSpec:
        model = self._model.model
        if model is None or not self._model.is_ready:
            raise NotInitialized("there is no model yet whose optimizer could be changed; create the model first")
        if not name:
            return model.optimizer
        variable = next((variable for variable in model.variables if variable.name == name), None)
        if variable is None:
            known = ", ".join(repr(variable.name) for variable in model.variables[:5])
            meant = did_you_mean(name, (variable.name for variable in model.variables))
            raise VariableNotFound(f"the model has no variable {name!r}; it has {known}{', …' if len(model.variables) > 5 else ''}{meant}")
        if variable.optimizer is None:
            raise InvalidSpec(f"variable {name!r} has no optimizer of its own; change the model's, by naming no variable")
        return variable.optimizer
