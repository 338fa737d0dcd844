"""How a chief begins, takes over from another, and brings shards back to a checkpoint. Knows no clock or wire.

A chief looks at all shards first. They are all empty: the newest whole checkpoint is restored, or training begins. All hold the model of
one epoch: training goes on there. Anything else, and a shard that is restarted later: all go back to a checkpoint, under a new epoch.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chief.core import replies
from chief.core.checkpoints import Checkpointing
from chief.core.cluster import Cluster, UnderWay
from chief.core.ending import Ending, ModelCalls
from chief.core.members import newest_pushes
from chief.core.messages import (
    AdoptShards,
    ApplyStep,
    CheckpointFound,
    FindCheckpoint,
    Instruction,
    Note,
    PrepareStep,
    RecordFound,
    RestoreFailed,
    RestoreShards,
    ShardAdopted,
    ShardFinding,
    ShardsFound,
    ShardsRestored,
    StepApplied,
    StepPrepared,
)
from chief.core.settings import Settings
from chief.core.training import RETURN_KEY
from chief.core.waiting import Key
from chief.core.wording import listed, printable, seconds
from chief.options import RESTORE_LATEST, RESTORE_NONE
from chief.policies.base import Counted
from ps_protocol.errors import LeaseExpired, PsError
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import scales
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord, ChosenPush
from ps_protocol.roles.shard import Adoption, ApplyRequest, PushId, WorkerPushes

# What a chief makes of shards that hold a model which an earlier chief had trained. Pure: looks at what the shards report.


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where training goes on: the open step, and, if only some shards have applied it, that step as it was asked for (`redo`)."""

    step: int
    redo: ApplyRequest | None = None


def resumption(adoptions: Sequence[Adoption | None], *, names: Sequence[str], applies_on_arrival: bool = False) -> Resumption | str:
    """Returns where to go on, or, in words, why that is not possible.

    All shards are at the same step, or some are one ahead: the step between was interrupted, and is repeated with what it was made of.
    Where shards apply on arrival there is no step that all have; the highest count holds.
    """
    steps = [adoption.step for adoption in adoptions if adoption is not None and adoption.step is not None]
    if len(steps) < len(adoptions):
        empty = [name for name, adoption in zip(names, adoptions, strict=True) if adoption is None or adoption.step is None]
        return f"{listed(empty)} {'has' if len(empty) == 1 else 'have'} lost the variables"
    low, high = min(steps), max(steps)
    if low == high or applies_on_arrival:
        return Resumption(step=high)
    where = listed([f"{name} is at step {step}" for name, step in zip(names, steps, strict=True)])
    if high - low > 1:
        return f"the parameter servers are too far apart: {where}"
    ahead = [adoption.last_apply for adoption in adoptions if adoption is not None and adoption.step == high]
    known = [request for request in ahead if request is not None and request.step == low]
    if not known or any(request.contributors != known[0].contributors for request in known):
        return f"it is not known what step {low} was made of: {where}"
    return Resumption(step=low, redo=known[0])


def has_applied(adoptions: Sequence[Adoption | None]) -> bool:
    """Whether anything would be lost if the shards' values were."""
    return any(adoption is not None and (adoption.last_apply is not None or adoption.pushes or adoption.step) for adoption in adoptions)


def mismatch(adoptions: Sequence[Adoption | None], layouts: Sequence[Layout], *, names: Sequence[str]) -> str:
    """Says which shards hold other variables than the model has there; empty: none."""
    other = [
        name
        for name, adoption, layout in zip(names, adoptions, layouts, strict=True)
        if adoption is not None and adoption.layout_hash != layout.hash
    ]
    return f"{listed(other)} {'holds' if len(other) == 1 else 'hold'} other variables than the model has there" if other else ""


# How a chief goes on with a model that an earlier chief had trained. Methods of the coordinator; knows no clock, thread or wire.
#
# If some shards have applied the open step and others have not, it is repeated at all of them, with what it was made of.


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


# Which checkpoint a cluster may begin with or go back to. Knows what was found and tried; no clock, wire or file.


# What is skipped for these reasons has lost nothing: it was never whole, or is not of this cluster.
_HARMLESS = ("incomplete", "it is of cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What checkpoints this run may go back to: those of its epochs, and the one that it began from or went back to, and older ones.

    What was saved of steps that were given up since, or by an earlier run, is newer than that and of an earlier epoch.
    """

    epoch: int = 0
    base: tuple[int, int] = (0, -1)

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint belongs to what this run has made or comes from."""
        return checkpoint.epoch >= self.epoch or checkpoint.age_order <= self.base


@dataclass(slots=True, kw_only=True)
class Search:
    """A search for a checkpoint: why, what did not do so far, and what else is there. `has_lost`: shards had a model, or some of it."""

    why: str = ""
    is_start: bool = True
    has_lost: bool = False
    has_looked: bool = False  # at what shards hold
    is_exhausted: bool = False  # there is none
    has_tried: bool = False  # to restore one
    num_failures: int = 0  # of storage, one after the other
    only: str = ""
    excluded: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    highest_epoch: int = 0

    def note_skipped(self, skipped: Iterable[tuple[str, str]]) -> list[str]:
        """Takes note of what was left out, and returns what is news, in words."""
        fresh = [(tag, why) for tag, why in skipped if tag not in self.excluded and tag not in self.damaged]
        self.damaged.update((printable(tag), printable(why)) for tag, why in fresh if not why.startswith(_HARMLESS))
        return [f"checkpoint {printable(tag)} is skipped: {printable(why)}" for tag, why in fresh]

    def exclude(self, tag: str, why: str) -> None:
        """One did not do."""
        self.excluded.append(tag)
        self.damaged[tag] = why

    @property
    def damage(self) -> str:
        """What is there and cannot be restored, to be put behind other words; empty: nothing."""
        words = [f"{tag}: {why}" for tag, why in self.damaged.items()]
        return f" ({listed(words, limit=3, separator='; ')})" if words else ""


def misfit(checkpoint: Checkpoint, *, cluster: Cluster, branch: Branch) -> str:
    """Says why a whole checkpoint is not one to go back to; empty: it is."""
    model = checkpoint.record.model
    if checkpoint.cluster != cluster.config.cluster:
        return f"it is of cluster {checkpoint.cluster!r}, this is {cluster.config.cluster!r}"
    if model is None:
        return "it has no model"
    if not branch.has(checkpoint):
        return f"it is of epoch {checkpoint.epoch}, of steps that were given up since"
    if cluster.registry.model is not None:
        differences = cluster.registry.model.differences(model)
        return f"it is of another model: {listed(differences, limit=3, separator='; ')}" if differences else ""
    try:
        cluster.config.with_policy(checkpoint.record.policy)
        cluster.registry.check_placeable(model)
    except PsError as error:
        return error.message
    return ""


def nothing_found(search: Search, *, restore: str, step: int, failure: str = "") -> str:
    """Says why a cluster cannot go on without a checkpoint; empty: it may begin anew. `failure`: of the latest attempt to make one."""
    there = search.damage
    last = f" (the last attempt failed: {failure})" if failure else ""
    if search.has_lost:
        return (
            f"{search.why}{'' if ' lost the variables' in search.why else ' and has lost its variables'} (global_step {step}),"
            f" and there is no whole checkpoint to go back to{there}{last}; start the whole cluster again"
        )
    if search.only:
        return f"there is no whole checkpoint {search.only!r} to begin with{there}; see `lockstep checkpoint ls`"
    if there and restore != RESTORE_NONE:
        return f"there are checkpoints, and none of them can be restored{there}; mend them, or begin anew with --restore none"
    return ""


def gone_back(checkpoint: Checkpoint, *, cluster: Cluster, search: Search) -> Note:
    """Counts a rollback, if it is one, and says so; loudly, since steps are done again."""
    if not search.has_lost:
        return Note(text=f"training goes on at step {checkpoint.step} of checkpoint {checkpoint.tag}, under epoch {cluster.epoch}")
    words = f"rolled back to step {checkpoint.step} (epoch {cluster.epoch}): {search.why}"
    cluster.num_rollbacks += 1
    cluster.last_rollback = words
    return Note(text=words, is_warning=True)


# What a chief can do about what its shards hold: begin anew, take over, look for a checkpoint, bring it back. Methods of the coordinator.
#
# When it does which is decided in `recovery`. Knows no clock or wire.


# Storage that cannot be read is tried again after the first of these, then less and less often.
SEARCH_KEY: Key = ("search", 0)
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0
# Records of one epoch, as a power of two.
_BITS_OF_AN_EPOCH = 32
_MAX_EPOCH = 1 << 30  # beyond it, which nobody reaches by training, versions only count on


class Phase(enum.Enum):
    """What the chief is at with its shards."""

    IDLE = 0
    SEEK = 1  # for a checkpoint
    RESTORE = 2
    TAKE_OVER = 3  # shards that hold a model
    BEGIN = 4  # with empty shards
    RECORD = 5  # what is known is being kept at shards that were brought back


class RecoveryMoves:
    """What is done, and where that stands."""

    def __init__(self, cluster: Cluster, settings: Settings, models: ModelCalls, ending: Ending, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._settings = settings
        self._models = models
        self._ending = ending
        self._checkpointing = checkpointing
        self._takeover = Takeover(cluster, settings)
        self._phase = Phase.IDLE
        self._branch = Branch()
        self._search = Search()
        self._checkpoint: tuple[Checkpoint, str] | None = None
        self._adoptions: dict[int, Adoption | None] = {}
        self._record: ChiefRecord | None = None

    def _begin_anew(self, *, is_again: bool = False) -> list[Instruction]:
        cluster = self._cluster
        highest = self._search.highest_epoch
        instructions: list[Instruction] = []
        if is_again or highest or cluster.chief_incarnation > 1:
            self._rise(max(cluster.epoch, highest) + 1, why="nothing was trained yet")
            instructions = self._refuse_all()
        self._takeover.give_up()
        cluster.registry.restart()
        self._settings.begin_anew(is_again=is_again)
        cluster.new_policy(step=0, is_start=True)
        cluster.shards.release_all()
        cluster.recovering = cluster.plan = ""
        self._adoptions.clear()
        self._branch = Branch(epoch=cluster.epoch)
        self._phase = Phase.BEGIN
        return [*instructions, self._adoption()]

    def _take_over(self, why: str) -> list[Instruction]:
        cluster = self._cluster
        cluster.recovering, cluster.plan = why, "the parameter servers are asked where they are"
        self._phase = Phase.TAKE_OVER
        return [self._adoption()]

    def _seek(self, why: str, *, is_start: bool, has_lost: bool) -> list[Instruction]:
        cluster, config = self._cluster, self._cluster.config.checkpoints
        assert config is not None
        cluster.recovering, cluster.plan = why, "looking for the newest whole checkpoint"
        only = "" if has_lost or config.restore in (RESTORE_LATEST, RESTORE_NONE) else config.restore
        has_looked = self._phase is Phase.TAKE_OVER
        self._search = Search(why=why, is_start=is_start, has_lost=has_lost, only=only, has_looked=has_looked)
        self._phase = Phase.SEEK
        # An earlier chief may be alive: what it tells from now on must be in what is found.
        is_first = is_start and not has_looked
        fence = self._adoption() if is_first else None
        return [Note(text=f"{why}; {cluster.plan}", is_warning=has_lost), FindCheckpoint(only=only, fence=fence)]

    def _try_again_later(self, why: str, now: float) -> list[Instruction]:
        """Storage cannot be read, for now: whoever runs it may mend that."""
        cluster, search = self._cluster, self._search
        search.num_failures += 1
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** (search.num_failures - 1))
        cluster.deadlines.set(SEARCH_KEY, now + pause_s)
        cluster.plan = f"{printable(why)}; it is tried again every {seconds(pause_s)}"
        return [Note(text=f"{search.why}; {cluster.plan}", is_warning=True)] if pause_s < _MAX_PAUSE_S else []

    def _seek_another(self, tag: str, why: str) -> list[Instruction]:
        search = self._search
        search.exclude(tag, why)
        self._phase, self._cluster.plan = Phase.SEEK, "looking for an older checkpoint"
        return [FindCheckpoint(excluded=tuple(search.excluded), only=search.only)]

    def _without_checkpoint(self) -> list[Instruction]:
        search, config = self._search, self._cluster.config.checkpoints
        if search.has_lost and search.is_start and not search.has_looked:
            search.is_exhausted = True
            return self._take_over(search.why)  # perhaps nothing is lost
        step, failure = self._cluster.policy.step, self._checkpointing.failure
        if config is not None and (why := nothing_found(search, restore=config.restore, step=step, failure=failure)):
            return self._ending.fail(why)
        return self._begin_anew()

    def _restore(self, checkpoint: Checkpoint, manifest_sha256: str) -> list[Instruction]:
        cluster, search = self._cluster, self._search
        least = cluster.epoch + 1 if search.is_start or search.has_tried else cluster.epoch
        self._rise(max(least, search.highest_epoch + 1), why=f"rolled back to step {checkpoint.step}", step=checkpoint.step)
        search.has_tried = cluster.membership.knows_predecessors = True
        is_of_this_life = checkpoint.life == cluster.membership.life
        cluster.membership.earlier = checkpoint.record.earlier if is_of_this_life else (checkpoint.life, checkpoint.chief_incarnation)
        self._takeover.begin_with(checkpoint.record)
        cluster.shards.release_all()
        cluster.new_policy(step=checkpoint.step, is_start=True)
        self._checkpoint = checkpoint, manifest_sha256
        self._phase = Phase.RESTORE
        cluster.recovering, cluster.plan = search.why, f"then step {checkpoint.step} of checkpoint {checkpoint.tag}"
        text = f"bringing back step {checkpoint.step} of checkpoint {checkpoint.tag} under epoch {cluster.epoch}: {search.why}"
        order = RestoreShards(
            epoch=cluster.epoch,
            chief_incarnation=cluster.chief_incarnation,
            life=cluster.membership.life,
            tag=checkpoint.tag,
            manifest_sha256=manifest_sha256,
            specs=cluster.shard_specs(checkpoint.step),
            settings=self._settings.for_shards(step=checkpoint.step),
        )
        return [*self._refuse_all(), Note(text=text), order]

    def _open(self, now: float, *, oldest_kept: int = 0) -> list[Instruction]:
        cluster = self._cluster
        self._phase, self._checkpoint, self._search = Phase.IDLE, None, Search()
        cluster.recovering = cluster.plan = ""
        cluster.under_way = None
        cluster.registry.open()
        cluster.oldest_kept = oldest_kept
        cluster.ledger.roll_back(cluster.policy.step, now=now)
        self._checkpointing.opened(now)
        cluster.told.version = max(cluster.told.version, self._takeover.record_version)
        instructions = [*self._models.settle(), replies.keep(cluster)]
        max_steps = cluster.config.max_steps
        if max_steps is not None and cluster.policy.step >= max_steps:
            instructions += self._ending.finish(f"max_steps {max_steps} reached", now)
        return instructions

    # -- inside

    @property
    def _is_over(self) -> bool:
        return bool(self._cluster.failure) or self._cluster.is_finished

    def _is_restoring(self, epoch: int, tag: str) -> bool:
        is_it = self._checkpoint is not None and (epoch, tag) == (self._cluster.epoch, self._checkpoint[0].tag)
        return self._phase is Phase.RESTORE and is_it and not self._is_over

    def _adoption(self) -> AdoptShards:
        cluster = self._cluster
        return AdoptShards(epoch=cluster.epoch, chief_incarnation=cluster.chief_incarnation, life=cluster.membership.life)

    def _rise(self, epoch: int, *, why: str, step: int | None = None) -> None:
        cluster = self._cluster
        cluster.has_taken_over = cluster.has_taken_over and epoch <= cluster.epoch
        if epoch > cluster.epoch:
            cluster.told.restart()
        cluster.epoch = max(cluster.epoch, epoch)
        # Shards keep the record of the highest version: one of a later epoch is later.
        cluster.told.version = max(cluster.told.version, min(cluster.epoch, _MAX_EPOCH) << _BITS_OF_AN_EPOCH)
        cluster.membership.begin_epoch(cluster.epoch, why=why, step=step)

    def _leave_epoch(self, why: str) -> None:
        """What is under way comes to nothing, and nobody is served before there is a step again."""
        cluster = self._cluster
        self._takeover.give_up()
        self._checkpointing.roll_back()
        cluster.under_way = None
        cluster.registry.is_ready = False
        cluster.new_policy(step=cluster.policy.step, is_start=True)
        self._rise(cluster.epoch + 1, why=why)

    def _refuse_all(self) -> list[Instruction]:
        cluster = self._cluster
        return cluster.refuse_waiting(cluster.membership.other_epoch(max(1, cluster.epoch - 1)))

    def _renumber(self) -> list[Instruction]:
        """The checkpoint is of another life, in which chiefs' numbers had come farther: numbers given meanwhile mean nothing any more."""
        cluster = self._cluster
        cluster.membership.succeed(chief_incarnation=cluster.chief_incarnation, life=cluster.new_life())
        return cluster.refuse_waiting(LeaseExpired("not registered here: another chief was here before. Register again"))


# How a chief begins, takes over from another, and brings shards back to a checkpoint. Methods of the coordinator; knows no clock or wire.
#
# A chief looks at all shards first. They are all empty: the newest whole checkpoint is restored, or training begins. All hold the model of
# one epoch: training goes on there. Anything else, and a shard that is restarted later: all go back to a checkpoint, under a new epoch.


class Recovery(RecoveryMoves):
    """Decides what shards are to hold, and under which epoch."""

    @property
    def has_nothing(self) -> bool:
        """Whether no shard holds anything, nor is about to."""
        registry = self._cluster.registry
        return self._phase in (Phase.IDLE, Phase.BEGIN) and registry.model is None and not registry.held

    # -- the beginning

    def found(self, event: ShardsFound, now: float) -> list[Instruction]:
        """All shards have been looked at: decides how this chief begins."""
        cluster, findings = self._cluster, event.findings
        if self._is_over or self._phase is not Phase.IDLE:
            return []
        epochs = {finding.epoch for finding in findings}
        held = [finding.step is not None for finding in findings]
        cluster.chief_incarnation = 1 + max((finding.chief_incarnation for finding in findings), default=0)
        self._takeover.settings_versions = tuple(finding.settings_version for finding in findings)
        cluster.membership.succeed(chief_incarnation=cluster.chief_incarnation, life=self._life_of(findings))
        why = "another chief has taken over" if cluster.chief_incarnation > 1 else ""
        self._rise(max(epochs, default=0), why=why)
        if all(held) and len(epochs) == 1:
            return self._take_over("another chief was here before")
        lost = [name for name, holds in zip(cluster.shards.names, held, strict=True) if not holds]
        why = f"{listed(lost)} lost the variables while there was no chief" if lost else "the parameter servers are of several epochs"
        if cluster.config.checkpoints is not None:
            return self._seek(why if any(held) else "the cluster starts", is_start=True, has_lost=any(held))
        if any(held):
            return self._take_over(why)
        return self._begin_anew()

    def _life_of(self, findings: Sequence[ShardFinding]) -> int:
        """The life that the shards are in, as long as one of them has been in any: epochs and incarnations go on there. Else another."""
        lives = {finding.life for finding in findings if finding.epoch}
        return lives.pop() if len(lives) == 1 else self._cluster.new_life()

    def record_found(self, event: RecordFound, now: float) -> list[Instruction]:
        """What the earlier chief has left."""
        self._record = event.record
        return []

    def adopted(self, event: ShardAdopted, now: float) -> list[Instruction]:
        """A shard obeys this chief; once all do, training goes on where they are."""
        cluster = self._cluster
        cluster.shards.adopted(event.shard, process_incarnation=event.process_incarnation)
        if self._is_over:
            return self._models.settle()
        self._adoptions[event.shard] = event.adoption
        if cluster.shards.are_adopted and self._phase is Phase.TAKE_OVER:
            return self._look_at_adoptions(now)
        if cluster.shards.are_adopted and self._phase is Phase.BEGIN:
            # Only now: one that is lost before has left no trace at the shards, and the next one has its number.
            cluster.membership.knows_predecessors = True
            self._phase = Phase.IDLE
        return self._models.settle()

    # -- going back

    def lost(self, shard: int, now: float) -> list[Instruction]:
        """Another process than before is at a shard's place: whatever was there is gone."""
        cluster = self._cluster
        why = f"{cluster.shards[shard].name} was restarted"
        if self._is_over or self._phase is Phase.SEEK:
            return []
        if self._phase is Phase.RESTORE and self._checkpoint is not None:
            note = Note(text=f"{why} while step {self._checkpoint[0].step} was being brought back: once more", is_warning=True)
            return [note, *self._restore(*self._checkpoint)]
        if self._phase is Phase.BEGIN or (cluster.registry.model is not None and not cluster.registry.is_created):
            note = Note(text=f"{why} before the model was initialised: all begin anew", is_warning=True)
            return [note, *self._begin_anew(is_again=True)]
        if cluster.pending_finish:
            return self._ending.finish(cluster.pending_finish, now)
        if cluster.config.checkpoints is None:
            return self._ending.fail(f"{why} and has lost its variables (global_step {cluster.policy.step}); start the whole cluster again")
        is_start = self._phase is Phase.TAKE_OVER
        self._leave_epoch("going back to a checkpoint")
        return [*self._refuse_all(), *self._seek(why, is_start=is_start, has_lost=True)]

    def checkpoint_found(self, event: CheckpointFound, now: float) -> list[Instruction]:
        """There is a whole checkpoint, or none."""
        cluster, search, config = self._cluster, self._search, self._cluster.config.checkpoints
        if self._phase is not Phase.SEEK or self._is_over or config is None:
            return []
        if event.failure:
            return self._try_again_later(f"{event.failure}", now)
        search.num_failures = 0
        search.highest_epoch = max(search.highest_epoch, event.highest_epoch)
        instructions: list[Instruction] = [Note(text=text, is_warning=True) for text in search.note_skipped(event.skipped)]
        checkpoint = event.checkpoint
        if checkpoint is not None:
            search.highest_epoch = max(search.highest_epoch, checkpoint.epoch)
        if checkpoint is None or (not search.has_lost and config.restore == RESTORE_NONE):
            return [*instructions, *self._without_checkpoint()]
        if why := misfit(checkpoint, cluster=cluster, branch=self._branch):
            instructions.append(Note(text=f"checkpoint {checkpoint.tag} is skipped: {printable(why)}", is_warning=True))
            return [*instructions, *self._seek_another(checkpoint.tag, why)]
        if search.is_start and checkpoint.chief_incarnation >= cluster.chief_incarnation:
            cluster.chief_incarnation = checkpoint.chief_incarnation + 1
            instructions += self._renumber()
        return [*instructions, *self._restore(checkpoint, event.manifest_sha256)]

    def restored(self, event: ShardsRestored, now: float) -> list[Instruction]:
        """All shards hold the checkpoint's values: training goes on there."""
        cluster = self._cluster
        if not self._is_restoring(event.epoch, event.tag) or self._checkpoint is None:
            return []
        checkpoint, _ = self._checkpoint
        for index, incarnation in enumerate(event.process_incarnations):
            cluster.shards.adopted(index, process_incarnation=incarnation)
        note = gone_back(checkpoint, cluster=cluster, search=self._search)
        self._branch = Branch(epoch=cluster.epoch, base=checkpoint.age_order)
        cluster.membership.remember(checkpoint.pushes)
        cluster.data.restart(checkpoint.data)
        cluster.awaited.clear()
        cluster.new_policy(step=checkpoint.step, is_start=True)
        self._checkpointing.restored(checkpoint, now)
        # A chief that came after this one could not tell otherwise which training data these values have.
        self._phase = Phase.RECORD
        cluster.told.version = max(cluster.told.version, self._takeover.record_version)
        instructions: list[Instruction] = [note, replies.keep(cluster)]
        return instructions if cluster.told.is_needed else [*instructions, *self.kept(now)]

    def kept(self, now: float) -> list[Instruction]:
        """The shards keep a record: if they were brought back, training goes on now."""
        if self._phase is not Phase.RECORD or self._is_over or (self._cluster.told.is_needed and self._cluster.told.in_flight is not None):
            return []
        # Saved again, so that the number of the new epoch is on disk before another start could take it.
        return self._open(now, oldest_kept=self._cluster.policy.step)

    def restore_failed(self, event: RestoreFailed, now: float) -> list[Instruction]:
        """A checkpoint could not be brought back: an older one may do, if it is damaged."""
        if not self._is_restoring(event.epoch, event.tag):
            return []
        why = printable(event.why)
        if event.is_passing:
            return self._try_again_later(f"checkpoint {event.tag} could not be brought back: {why}", now)
        if not event.is_damaged:
            return self._ending.fail(f"{self._search.why}; checkpoint {event.tag} could not be brought back: {why}")
        note = Note(text=f"checkpoint {event.tag} is damaged, an older one is tried: {why}", is_warning=True)
        return [note, *self._seek_another(event.tag, why)]

    def try_again(self, now: float) -> list[Instruction]:
        """The pause after a failure of storage is over."""
        if self._is_over:
            return []
        if self._phase is Phase.SEEK:
            return [FindCheckpoint(excluded=tuple(self._search.excluded), only=self._search.only)]
        return self._restore(*self._checkpoint) if self._phase is Phase.RESTORE and self._checkpoint is not None else []

    # -- going on where another chief was

    def presented(self, now: float) -> list[Instruction]:
        """A worker has presented a model: if it is the one that shards hold, training goes on."""
        if not self._takeover.is_waiting_for_model or self._cluster.registry.model is None:
            return []
        return self._after_takeover(self._takeover.begin(now), now)

    def prepared(self, event: StepPrepared) -> list[Instruction] | None:
        """As ShardSequence.prepared, for a step that the earlier chief did not complete; None: it is no such step."""
        return self._takeover.prepared(event) if self._takeover.is_repeating else None

    def applied(self, event: StepApplied, now: float) -> list[Instruction] | None:
        """As ShardSequence.applied, for a step that the earlier chief did not complete; None: it is no such step."""
        if not self._takeover.is_repeating:
            return None
        return self._after_takeover(self._takeover.applied(event, now), now)

    def _look_at_adoptions(self, now: float) -> list[Instruction]:
        cluster = self._cluster
        adoptions = [self._adoptions.get(index) for index in range(len(cluster.shards))]
        record, self._record = self._record, None
        cluster.membership.knows_predecessors = True
        problem = self._takeover.look(adoptions, record)
        if not problem:
            return self._after_takeover(self._takeover.begin(now), now)
        if self._takeover.is_untrained:
            return [Note(text=f"{problem}, before anything was trained: all begin anew", is_warning=True), *self._begin_anew(is_again=True)]
        if cluster.config.checkpoints is None or self._search.is_exhausted:
            return self._ending.fail(f"{problem}, and there is no whole checkpoint to go back to; start the whole cluster again")
        self._leave_epoch("going back to a checkpoint")
        return self._seek(problem, is_start=True, has_lost=True)

    def _after_takeover(self, instructions: list[Instruction], now: float) -> list[Instruction]:
        if not self._takeover.is_done:
            return instructions
        cluster = self._cluster
        cluster.has_taken_over = True
        if not self._checkpointing.holds_steps:
            return [*instructions, *self._go_on(now)]
        cluster.recovering = cluster.recovering or "another chief was here before"
        cluster.plan = f"step {cluster.policy.step} is saved before it is told"
        return [*instructions, *self._checkpointing.secure(now)]

    def secured(self, now: float) -> list[Instruction]:
        """A checkpoint is whole: if it is the one that a takeover waits for, training goes on."""
        return self._go_on(now) if self._takeover.is_done and not self._checkpointing.is_securing and not self._is_over else []

    def _go_on(self, now: float) -> list[Instruction]:
        text = f"took over at step {self._cluster.policy.step}, as chief incarnation {self._cluster.chief_incarnation}"
        opened = self._open(now)
        # What the earlier chief had counted may be all that the step needs.
        self._cluster.is_quorum_changed = self._cluster.policy.is_complete
        return [Note(text=text), *opened, *self._takeover.told()]
