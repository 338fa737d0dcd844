"""How a chief goes on with a model that an earlier chief had trained. Methods of the coordinator; knows no clock, thread or wire.

If some shards have applied the open step and others have not, it is repeated at all of them, with what it was made of.
"""

from collections.abc import Sequence

from chief.cluster import Cluster, UnderWay
from chief.data_calls import RETURN_KEY
from chief.events import ApplyStep, Instruction, PrepareStep, StepApplied, StepPrepared
from chief.policy import Counted
from chief.pushes import newest_pushes
from chief.resuming import Resumption, has_applied, mismatch, resumption
from chief.settings import Settings
from ps_protocol.checkpoint import ChiefRecord, ChosenPush
from ps_protocol.clipping import scales
from ps_protocol.shard import Adoption, ApplyRequest, PushId, WorkerPushes


class Takeover:
    """Looks at what shards report, and has them brought to one step."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._resumption: Resumption | None = None
        self._redo: ApplyRequest | None = None
        self._pushes: tuple[WorkerPushes, ...] = ()
        self._chosen: tuple[ChosenPush, ...] = ()
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
        if self._lacks_its_record(record, held):
            return "the chief before this one ended while it brought the parameter servers back to a checkpoint"
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
        if record is not None:
            cluster.membership.earlier = record.earlier
        self._pushes = newest_pushes(adoption.pushes for adoption in held)
        self._chosen = ()
        cluster.data.restart(None)
        if record is not None and record.epoch == cluster.epoch:
            self._take_data(record, held)
            if found.redo is None:
                applied = {
                    PushId(worker=one.worker, incarnation=one.incarnation, sequence=push.sequence)
                    for one in self._pushes
                    for push in one.applied
                }
                is_open = policy.accepts_stale or record.step == found.step
                self._chosen = tuple(one for one in record.chosen if is_open and one.push_id not in applied)
        cluster.membership.remember(self._pushes)
        self._resumption = found
        return ""

    def _lacks_its_record(self, record: ChiefRecord | None, held: Sequence[Adoption]) -> bool:
        """Whether shards that were brought back have not been told what holds there: which training data is done, for one."""
        if any(adoption.last_apply is not None for adoption in held):
            return False
        if record is not None:
            return record.epoch not in (0, self._cluster.epoch)
        config = self._cluster.config
        return config.checkpoints is not None and not config.policy.applies_on_arrival and any(adoption.step for adoption in held)

    def begin(self, now: float) -> list[Instruction]:
        """Has the interrupted step repeated, if there is one and the model is known."""
        cluster, found, model = self._cluster, self._resumption, self._cluster.registry.model
        assert found is not None
        if model is None:
            cluster.recovering = cluster.plan = ""  # waits for a worker that knows it
            return []
        if self.is_waiting_for_model:
            self.is_waiting_for_model, self._must_tell = False, True
        redo = self._redo = found.redo
        if cluster.awaited:
            cluster.deadlines.set(RETURN_KEY, now + cluster.config.lease_s / 2)
        if redo is None:
            self._count_chosen(found.step)
            return []
        cluster.new_policy(step=found.step, is_start=False)
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

    def _take_data(self, record: ChiefRecord, held: Sequence[Adoption]) -> None:
        """What is done of the training data; and whoever contributed to it may have some of it still."""
        cluster = self._cluster
        cluster.data.resume(record.data)
        if record.data is None:
            return
        done = {identity for adoption in held if adoption.last_apply is not None for identity in adoption.last_apply.ranges}
        cluster.data.finish(done)
        cluster.told.is_data_kept, cluster.told.unkept = True, sorted(done)
        cluster.awaited = {one.worker for one in self._pushes} | {one.push_id.worker for one in record.chosen}

    def _count_chosen(self, step: int) -> None:
        """What the earlier chief had counted is counted, in its order: somebody may have been told so."""
        cluster, chosen = self._cluster, self._chosen
        is_queue = cluster.config.policy.accepts_stale
        counted = [Counted(push_id=one.push_id, step=one.step, weight=one.weight) for one in chosen]
        cluster.new_policy(step=step, is_start=False, counted=() if cluster.config.policy.applies_on_arrival else counted)
        for one in chosen:
            cluster.data.count(one.push_id, one.ranges)
        cluster.told.sure.update(one.push_id for one in chosen)
        steps = {one.push_id: step + position if is_queue else step for position, one in enumerate(chosen)}
        cluster.membership.remember(self._pushes, chosen=steps)

    def told(self) -> list[Instruction]:
        """Tells the shards what holds, if some may have heard of something else."""
        must_tell, self._must_tell, self._resumption = self._must_tell, False, None
        return [self._settings.tell_again()] if must_tell else []

    def begin_with(self, record: ChiefRecord) -> None:
        """A chief that starts goes on with the settings of a checkpoint; one that has trained goes on with those that hold now."""
        cluster = self._cluster
        # A worker may have presented its model already; only what a chief has initialised or taken over has settings of its own.
        if not cluster.registry.is_created and record.model is not None:
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
        is_other = record.rejects_nonfinite is not cluster.config.reject_nonfinite
        self._must_tell = is_other or any(version != record.settings_version for version in self.settings_versions)

    def _is_of(self, step: int, epoch: int | None) -> bool:
        return self._redo is not None and step == self._redo.step and epoch in (None, self._cluster.epoch)

    def _apply(self, redo: ApplyRequest, factors: tuple[tuple[float, ...], ...]) -> ApplyStep:
        cluster = self._cluster
        cluster.under_way = UnderWay.APPLY
        return ApplyStep(
            epoch=cluster.epoch,
            step=redo.step,
            contributors=redo.contributors,
            weights=redo.weights,
            scales=factors,
            ranges=redo.ranges,
        )
