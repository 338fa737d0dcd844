"""How a chief goes on with a model that an earlier chief had trained. Methods of the coordinator; knows no clock, thread or wire.

If some shards have applied the open step and others have not, it is repeated at all of them, with what it was made of.
"""

from collections.abc import Sequence

from chief.cluster import Cluster, UnderWay
from chief.events import ApplyStep, Instruction, PrepareStep, StepApplied, StepPrepared
from chief.pushes import newest_pushes
from chief.resuming import Resumption, has_applied, mismatch, resumption
from chief.settings import Settings
from ps_protocol.checkpoint import ChiefRecord
from ps_protocol.clipping import scales
from ps_protocol.shard import Adoption, ApplyRequest


class Takeover:
    """Looks at what shards report, and has them brought to one step."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._resumption: Resumption | None = None
        self._redo: ApplyRequest | None = None
        self._must_tell = False
        self.is_waiting_for_model = False
        # Whether nothing would be lost if all began anew.
        self.is_untrained = False
        # What shards have been told by the earlier chief: settings, by shard, and the latest record.
        self.settings_versions: tuple[int, ...] = ()
        self.record_version = 0

    @property
    def is_repeating(self) -> bool:
        """Whether the open step is being repeated."""
        return self._redo is not None

    @property
    def is_done(self) -> bool:
        """Whether all shards are at one step, and the model is known."""
        return self._resumption is not None and not self.is_waiting_for_model and self._redo is None

    def look(self, adoptions: Sequence[Adoption | None], record: ChiefRecord | None) -> str:
        """Takes note of where the shards are. Returns why training cannot go on there, in words; empty: it can."""
        cluster, names = self._cluster, self._cluster.shards.names
        self.record_version = max((adoption.record_version for adoption in adoptions if adoption is not None), default=0)
        model = record.model if record is not None else None
        self.is_untrained = model is None and not has_applied(adoptions)
        policy = record.policy if record is not None else cluster.config.policy
        found = resumption(adoptions, names=names, applies_on_arrival=policy.applies_on_arrival)
        if isinstance(found, str):
            return found
        held = [adoption for adoption in adoptions if adoption is not None]
        if record is None or model is None:
            cluster.registry.held = tuple(adoption.layout_hash for adoption in held)
            self._settings.version = max(self._settings.version, max(self.settings_versions, default=0))
            self.is_waiting_for_model = True
        else:
            cluster.config = cluster.membership.config = cluster.config.with_policy(record.policy)
            cluster.registry.restore(model)
            problem = mismatch(held, cluster.registry.layouts, names=names)
            if problem:
                cluster.registry.restart()
                return problem
            self._take_settings(record)
        cluster.membership.remember(newest_pushes(adoption.pushes for adoption in held))
        self._resumption = found
        return ""

    def begin(self, now: float) -> list[Instruction]:
        """Has the interrupted step repeated, if there is one and the model is known."""
        cluster, found, model = self._cluster, self._resumption, self._cluster.registry.model
        assert found is not None
        if model is None:
            cluster.recovering = cluster.plan = ""  # waits for a worker that knows it
            return []
        if self.is_waiting_for_model:
            self.is_waiting_for_model, self._must_tell = False, True
        cluster.new_policy(step=found.step, is_start=False)
        redo = self._redo = found.redo
        if redo is None:
            return []
        cluster.recovering = cluster.recovering or "another chief was here before"
        cluster.plan = f"step {redo.step} is repeated with its {len(redo.contributors)} contributions, since not all have applied it"
        cluster.ledger.roll_back(redo.step, now=now)
        cluster.ledger.complete_step(redo.contributors, last_worker=redo.contributors[-1].worker if redo.contributors else 0, now=now)
        if not model.clip.needs_norms:
            return [self._apply(redo, ())]
        cluster.under_way = UnderWay.PREPARE
        return [PrepareStep(epoch=cluster.epoch, step=redo.step, contributors=redo.contributors, weights=redo.weights)]

    def prepared(self, event: StepPrepared) -> list[Instruction]:
        """The size of the mean is known."""
        cluster, registry, redo = self._cluster, self._cluster.registry, self._redo
        if redo is None or registry.model is None or not self._is_of(event.step, event.epoch) or cluster.under_way is not UnderWay.PREPARE:
            return []
        return [self._apply(redo, scales(registry.model.clip, layouts=registry.layouts, sums=event.sums))]

    def applied(self, event: StepApplied, now: float) -> list[Instruction]:
        """All shards have applied the step."""
        cluster, redo = self._cluster, self._redo
        if redo is None or not self._is_of(event.step, event.epoch) or cluster.under_way is not UnderWay.APPLY:
            return []
        cluster.membership.remember(cluster.applied_pushes(extra=redo.contributors))
        cluster.ledger.close_step(now=now)
        self._redo = None
        cluster.new_policy(step=event.step + 1, is_start=False)
        return []

    def told(self) -> list[Instruction]:
        """Tells the shards what holds, if some may have heard of something else."""
        must_tell, self._must_tell, self._resumption = self._must_tell, False, None
        return [self._settings.tell_again()] if must_tell else []

    def begin_with(self, record: ChiefRecord) -> None:
        """A chief that starts goes on with the settings of a checkpoint; one that has trained goes on with those that hold now."""
        cluster = self._cluster
        if cluster.registry.model is None and record.model is not None:
            cluster.config = cluster.membership.config = cluster.config.with_policy(record.policy)
            cluster.registry.restore(record.model)
            cluster.num_rollbacks, cluster.last_rollback = record.num_rollbacks, record.last_rollback
            self._settings.restore(record, version=max(self.settings_versions, default=0) + 1)

    def give_up(self) -> None:
        """The shards go back to a checkpoint instead, or begin anew."""
        self._resumption = self._redo = None
        self.is_waiting_for_model = self._must_tell = False
        self._cluster.registry.held = ()

    def _take_settings(self, record: ChiefRecord) -> None:
        cluster = self._cluster
        cluster.num_rollbacks, cluster.last_rollback = record.num_rollbacks, record.last_rollback
        self._settings.restore(record, version=max(self.settings_versions, default=0))
        self._must_tell = any(version != record.settings_version for version in self.settings_versions)

    def _is_of(self, step: int, epoch: int | None) -> bool:
        return self._redo is not None and step == self._redo.step and epoch in (None, self._cluster.epoch)

    def _apply(self, redo: ApplyRequest, factors: tuple[tuple[float, ...], ...]) -> ApplyStep:
        cluster = self._cluster
        cluster.under_way = UnderWay.APPLY
        return ApplyStep(epoch=cluster.epoch, step=redo.step, contributors=redo.contributors, weights=redo.weights, scales=factors)
