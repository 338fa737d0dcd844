"""Changes of the policy and of optimizers during training: requested ones, those in force, and those that the shards have.

Knows specifications and versions; no step, clock, thread or wire. `training` decides when a change can be carried out.
"""

from collections.abc import Sequence
from dataclasses import replace
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
    """A requested change; `optimizers`: as they are with it, once it is being introduced, if it is about them."""

    key: _Key
    asked: PolicySpec | HyperparameterChange
    optimizers: Optimizers | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ForShards:
    """The settings as shards get them."""

    accepts_stale: bool = False
    applies_on_arrival: bool = False
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    rejects_nonfinite: bool = False


class Settings:
    """Queues changes, remembers the settings in force, and answers the calls that wait. `version` grows with each change for shards."""

    def __init__(self, cluster: "Cluster", config: CoordinationConfig) -> None:
        self._config, self._model, self._out = config, cluster.model, cluster.out
        self._pending: list[Change] = []
        self._calls = cluster.waiting.line(self._expire)
        self._done: dict[_Key, SettingsReply] = {}
        self._known = ForShards()  # the settings that the shards have
        self._optimizers: Optimizers = {}
        self._words = ""  # of the optimizers; empty: they have not been asked for yet, or are as the model has them
        self._version_that_holds = 0
        # Shards begin with 0; their first settings need a higher version.
        self._version = int(self._wanted(config.policy, self._optimizers) != self._known)

    # -- settings in force

    @property
    def config(self) -> CoordinationConfig:
        """The cluster's configuration, with the policy that holds."""
        return self._config

    @property
    def version(self) -> int:
        """Version of the latest settings sent to the shards."""
        return self._version

    @property
    def version_that_holds(self) -> int:
        """Version of the latest change in force; 0 if there was none."""
        return self._version_that_holds

    @property
    def optimizers(self) -> tuple[tuple[OptimizerSpec, OptimizerSpec], ...]:
        """The optimizers that were changed, as the model has them and as they are."""
        return tuple(self._optimizers.values())

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

    def prepare(self, change: Change) -> ForShards:
        """Returns the shards' settings once a change is in force."""
        if isinstance(change.asked, HyperparameterChange):
            change.optimizers = self._changed(change.asked)
            return self._wanted(self._config.policy, change.optimizers)
        return self._wanted(change.asked, self._optimizers)

    def next_version(self) -> None:
        """Another change is about to be made."""
        self._version += 1

    def apply(self, change: Change) -> None:
        """Puts the prepared change in force."""
        if change.optimizers is not None:
            self._optimizers = change.optimizers
            self._words = self._words_of(change.optimizers)
        if isinstance(change.asked, PolicySpec):
            self._config = self._config.with_policy(change.asked)

    def complete(self, change: Change, *, step: int) -> None:
        """Answers the caller whose change has been carried out."""
        self._pending.remove(change)
        self._version_that_holds = self._version
        reply = SettingsReply(version=self._version, step=step)
        self._done[change.key] = reply
        if len(self._done) > _MAX_REMEMBERED:
            del self._done[next(iter(self._done))]
        for blocked in self._calls:
            if blocked.ask is change:
                self._calls.answer(blocked.who, reply)

    def refuse(self, error: PsError) -> None:
        """Training is over: nothing that is pending will be carried out."""
        self._pending.clear()
        self._calls.refuse_all(error)

    # -- the shards' settings

    def is_known(self, wanted: ForShards) -> bool:
        """Whether the shards have these settings."""
        return wanted == self._known

    def as_they_are(self) -> ForShards:
        """The settings in force as shards get them."""
        return self._wanted(self._config.policy, self._optimizers)

    def tell(self, wanted: ForShards, fence: Fence) -> ShardSettings:
        """Returns the settings of all shards from now on, and counts them as known to the shards."""
        self._known = wanted
        return ShardSettings(
            fence=fence,
            version=self._version,
            accepts_stale=wanted.accepts_stale,
            applies_on_arrival=wanted.applies_on_arrival,
            optimizers=wanted.optimizers,
            rejects_nonfinite=wanted.rejects_nonfinite,
        )

    # -- when an epoch begins

    def begin_anew(self, *, is_again: bool) -> None:
        """The shards know of no settings; `is_again`: any more."""
        self._known = ForShards()
        self._version += is_again

    def take_policy(self, policy: PolicySpec) -> None:
        """Goes on with the policy that an earlier chief, or a checkpoint, has left."""
        self._config = self._config.with_former_policy(policy)

    def restore(self, record: ChiefRecord, *, version: int) -> None:
        """Takes over an earlier chief's settings; shards have settings up to this version, perhaps other ones."""
        self._optimizers = {original.key: (original, new) for original, new in record.optimizers}
        self._words = self._words_of(self._optimizers) if self._optimizers else ""
        self._version_that_holds = record.settings_version
        self._version = max(record.settings_version, version)
        self._known = replace(self.as_they_are(), rejects_nonfinite=record.rejects_nonfinite)

    def skip_to(self, version: int) -> None:
        """Skips versions up to this one: shards have settings of an earlier chief that are not known here."""
        self._version = max(self._version, version)

    # -- inside

    def _check_policy(self, policy: PolicySpec) -> None:
        """Raises InvalidSpec if this policy cannot follow the one that holds."""
        self._model.check_policy(self._config.with_policy(policy).policy)
        current = self._config.policy
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

    def _wanted(self, policy: PolicySpec, optimizers: Optimizers) -> ForShards:
        return ForShards(
            accepts_stale=policy.accepts_stale,
            applies_on_arrival=policy.applies_on_arrival,
            optimizers=tuple(optimizers.values()),
            rejects_nonfinite=self._config.reject_nonfinite,
        )

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
        current = self._optimizers.get(original.key, (original, original))[1]
        learning_rate = current.learning_rate if change.learning_rate is None else change.learning_rate
        numbers = {**current.hyperparameters, **change.hyperparameters}
        new = replace(current, learning_rate=learning_rate, hyperparameters=numbers)
        return {**self._optimizers, original.key: (original, new)}

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
