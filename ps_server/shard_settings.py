"""How a shard works at present: its update rules with their numbers, and its mode."""

from collections.abc import Sequence

from ps_protocol.errors import InvalidSpec
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.shard import ShardSettings, ShardSpec
from ps_protocol.shared_memory import PushMode
from ps_server.update_rule import UpdateRule


class RuleSettings:
    """The rules of a layout, in the order of `layout.rules`, and the settings in force."""

    def __init__(self, spec: ShardSpec) -> None:
        self._needs_norms = spec.clip.needs_norms
        self._originals: tuple[OptimizerSpec, ...] = tuple(optimizer or spec.optimizer for optimizer in spec.layout.rules)
        self.rules: Sequence[UpdateRule] = [UpdateRule(optimizer) for optimizer in self._originals]
        self.current = ShardSettings(epoch=spec.epoch, chief_incarnation=0, version=0, step=spec.initial_step)

    def is_news(self, settings: ShardSettings) -> bool:
        """Whether they are newer than those in force: of a later epoch or chief, or of the same one with a higher version."""
        return _age(settings) > _age(self.current)

    def change(self, settings: ShardSettings) -> None:
        """Puts settings in force, all or nothing; raises InvalidSpec."""
        if settings.applies_on_arrival and self._needs_norms:
            raise InvalidSpec("applies_on_arrival: a limit on the norm needs the mean over all shards; use locking, or take the limit away")
        changes = {original.key: current for original, current in settings.optimizers}
        specs = [changes.get(original.key, original) for original in self._originals]
        before = [rule.spec for rule in self.rules]
        try:
            for rule, spec in zip(self.rules, specs, strict=True):
                rule.change(spec)
        except InvalidSpec:
            for rule, spec in zip(self.rules, before, strict=True):
                rule.change(spec)
            raise
        self.current = settings

    def begin(self, step: int) -> None:
        """Makes the rules' numbers for a step."""
        for rule in self.rules:
            rule.begin(step)

    def advance(self) -> None:
        """Ends a step for all rules, also for those that nobody had a gradient for."""
        for rule in self.rules:
            rule.advance()


def _age(settings: ShardSettings) -> tuple[int, int, int]:
    return settings.epoch, settings.chief_incarnation, settings.version


def push_mode(settings: ShardSettings) -> PushMode:
    """Returns what workers who share memory may do without a call."""
    if settings.applies_on_arrival:
        return PushMode.BY_CALL
    return PushMode.ANY_STEP if settings.accepts_stale else PushMode.OPEN_STEP_ONLY
