"""What is done to the shards, one thing after another: settings, then steps. Methods of the coordinator; knows no clock, thread or wire.

At most one thing is under way at all shards. When it is done everywhere, the next is begun.
"""

from chief import assurance
from chief.checkpointing import Checkpointing
from chief.cluster import Cluster, UnderWay
from chief.ending import Ending
from chief.events import ApplyStep, Instruction, PrepareStep, ShardsConfigured, StepApplied, StepPrepared
from chief.model_calls import ModelCalls
from chief.policy import Grant
from chief.settings import Settings
from chief.token_replies import grant
from ps_protocol.clipping import scales
from ps_protocol.shard import PushId


class ShardSequence:
    """Begins what is due as soon as nothing else is under way."""

    def __init__(self, cluster: Cluster, settings: Settings, models: ModelCalls, ending: Ending, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._checkpointing = checkpointing
        self._settings = settings
        self._models = models
        self._ending = ending

    def proceed(self, now: float) -> list[Instruction]:
        """Begins the next thing, if there is one and nothing is under way."""
        cluster = self._cluster
        if cluster.failure or cluster.recovering:
            return []
        instructions = self._settings.begin(now)
        if cluster.is_save_due and cluster.under_way is None:
            instructions += self._checkpointing.begin(now)
        if cluster.under_way is None and cluster.registry.is_ready and cluster.policy.is_complete:
            instructions.append(self._begin_step(now))
        return instructions

    def configured(self, event: ShardsConfigured, now: float) -> list[Instruction]:
        """All shards work by new settings: what waited for that goes on."""
        cluster = self._cluster
        if cluster.under_way is not UnderWay.CONFIGURE or event.version != self._settings.version or not self._is_current(event.epoch):
            return []  # reported again, or too late to matter
        cluster.under_way = None
        done = self._settings.configured(now) if cluster.registry.is_ready else self._models.open(now)
        return [*done, *self.proceed(now)]

    def prepared(self, event: StepPrepared, now: float) -> list[Instruction]:
        """The size of the mean is known: it is applied, scaled down if it is too large."""
        cluster, registry = self._cluster, self._cluster.registry
        if cluster.under_way is not UnderWay.PREPARE or event.step != cluster.policy.step or not self._is_current(event.epoch):
            return []
        for index, (sums, layout) in enumerate(zip(event.sums, registry.layouts, strict=True)):
            num_slices = len(layout.slices) + len(layout.tables)
            if len(sums) != num_slices:
                return self._ending.fail(f"{cluster.shards[index].name}: reported {len(sums)} sums of squares of {num_slices} slices")
        assert registry.model is not None
        return [self._apply(scales(registry.model.clip, layouts=registry.layouts, sums=event.sums))]

    def applied(self, event: StepApplied, now: float) -> list[Instruction]:
        """All shards have applied the step: the next one is open."""
        cluster = self._cluster
        if cluster.under_way is not UnderWay.APPLY or event.step != cluster.policy.step or not self._is_current(event.epoch):
            return []
        is_held = (self._checkpointing.holds_steps or cluster.holds_for_replicas) and not cluster.is_finished
        is_of_interest = cluster.data.has_counted or is_held or cluster.told.waiting or cluster.told.sure
        contributors = cluster.policy.contributors if is_of_interest else ()
        if cluster.data.has_counted:
            cluster.told.unkept += cluster.data.applied(contributors)
        instructions = assurance.applied(cluster, contributors, is_held=is_held)
        if is_held:
            return [*instructions, *self._checkpointing.hold(contributors, now)]
        return [*instructions, *self.tell(now)]

    def tell(self, now: float) -> list[Instruction]:
        """The step that all shards have applied is made known: the next one is open."""
        cluster = self._cluster
        cluster.under_way = None
        cluster.ledger.close_step(now=now)
        granted = cluster.policy.advance()
        if cluster.is_quorum_lowered:
            cluster.requota()
        self._checkpointing.stepped()
        if cluster.pending_finish and not cluster.policy.is_complete:
            return self._ending.finish(cluster.pending_finish, now)
        return self._end_or(granted, now)

    def counted(self, push_id: PushId, now: float) -> list[Instruction]:
        """A contribution that the shards had applied on arrival has been counted as a step."""
        ledger = self._cluster.ledger
        ledger.complete_step((push_id,), last_worker=push_id.worker, now=now)
        ledger.close_step(now=now)
        self._cluster.told.unkept += self._cluster.data.applied((push_id,))
        self._checkpointing.stepped()
        return self._end_or([], now)

    def _is_current(self, epoch: int | None) -> bool:
        return epoch in (None, self._cluster.epoch) and not self._cluster.failure

    def _end_or(self, granted: list[Grant], now: float) -> list[Instruction]:
        cluster = self._cluster
        max_steps = cluster.config.max_steps
        if max_steps is not None and cluster.policy.step >= max_steps and not cluster.is_finished:
            return self._ending.finish(f"max_steps {max_steps} reached", now)
        return [*grant(cluster, granted, now), *self.proceed(now)]

    def _begin_step(self, now: float) -> Instruction:
        cluster, policy, model = self._cluster, self._cluster.policy, self._cluster.registry.model
        cluster.ledger.complete_step(policy.contributors, last_worker=policy.last_worker, now=now)
        if model is None or not model.clip.needs_norms:
            return self._apply(())
        cluster.under_way = UnderWay.PREPARE
        return PrepareStep(epoch=cluster.epoch, step=policy.step, contributors=policy.contributors, weights=policy.weights)

    def _apply(self, factors: tuple[tuple[float, ...], ...]) -> ApplyStep:
        cluster, policy = self._cluster, self._cluster.policy
        cluster.under_way = UnderWay.APPLY
        return ApplyStep(
            epoch=cluster.epoch,
            step=policy.step,
            contributors=policy.contributors,
            weights=policy.weights,
            scales=factors,
            discards=cluster.take_discards(),
            ranges=cluster.ranges_of_step(),
        )
