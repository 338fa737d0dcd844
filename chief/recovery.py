"""How a chief begins, takes over from another, and brings shards back to a checkpoint. Methods of the coordinator; knows no clock or wire.

A chief looks at all shards first. They are all empty: the newest whole checkpoint is restored, or training begins. All hold the model of
one epoch: training goes on there. Anything else, and a shard that is restarted later: all go back to a checkpoint, under a new epoch.
"""

import enum

from chief.checkpoint_choice import Branch, Search, gone_back, misfit, nothing_found
from chief.checkpointing import Checkpointing
from chief.cluster import Cluster
from chief.coordination import RESTORE_LATEST, RESTORE_NONE
from chief.ending import Ending
from chief.events import Instruction, Note, ShardAdopted, StepApplied, StepPrepared
from chief.model_calls import ModelCalls
from chief.recovery_events import (
    AdoptShards,
    CheckpointFound,
    FindCheckpoint,
    RecordFound,
    RestoreFailed,
    RestoreShards,
    ShardsFound,
    ShardsRestored,
)
from chief.settings import Settings
from chief.takeover import Takeover
from chief.wording import listed, printable
from ps_protocol.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.errors import LeaseExpired
from ps_protocol.shard import Adoption


class _Phase(enum.Enum):
    IDLE = 0
    SEEK = 1  # for a checkpoint
    RESTORE = 2
    TAKE_OVER = 3  # shards that hold a model
    BEGIN = 4  # with empty shards


class Recovery:
    """Decides what shards are to hold, and under which epoch."""

    def __init__(self, cluster: Cluster, settings: Settings, models: ModelCalls, ending: Ending, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._settings = settings
        self._models = models
        self._ending = ending
        self._checkpointing = checkpointing
        self._takeover = Takeover(cluster, settings)
        self._phase = _Phase.IDLE
        self._branch = Branch()
        self._search = Search()
        self._checkpoint: tuple[Checkpoint, str] | None = None
        self._adoptions: dict[int, Adoption | None] = {}
        self._record: ChiefRecord | None = None

    @property
    def has_nothing(self) -> bool:
        """Whether no shard holds anything, nor is about to."""
        registry = self._cluster.registry
        return self._phase in (_Phase.IDLE, _Phase.BEGIN) and registry.model is None and not registry.held

    # -- the beginning

    def found(self, event: ShardsFound, now: float) -> list[Instruction]:
        """All shards have been looked at: decides how this chief begins."""
        cluster, findings = self._cluster, event.findings
        if self._is_over or self._phase is not _Phase.IDLE:
            return []
        epochs = {finding.epoch for finding in findings}
        held = [finding.step is not None for finding in findings]
        cluster.chief_incarnation = 1 + max((finding.chief_incarnation for finding in findings), default=0)
        self._takeover.settings_versions = tuple(finding.settings_version for finding in findings)
        instructions = self._forget_provisional() if cluster.chief_incarnation > 1 else []
        self._rise(max(epochs, default=0), why="another chief has taken over" if cluster.chief_incarnation > 1 else "")
        if all(held) and len(epochs) == 1:
            return [*instructions, *self._take_over("another chief was here before")]
        lost = [name for name, holds in zip(cluster.shards.names, held, strict=True) if not holds]
        why = f"{listed(lost)} lost the variables while there was no chief" if lost else "the parameter servers are of several epochs"
        if cluster.config.checkpoints is not None:
            return [*instructions, *self._seek(why if any(held) else "the cluster starts", is_start=True, has_lost=any(held))]
        if any(held):
            return [*instructions, *self._take_over(why)]
        return [*instructions, *self._begin_anew()]

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
        if cluster.shards.are_adopted and self._phase is _Phase.TAKE_OVER:
            return self._look_at_adoptions(now)
        if cluster.shards.are_adopted and self._phase is _Phase.BEGIN:
            self._phase = _Phase.IDLE
        return self._models.settle()

    # -- going back

    def lost(self, shard: int, now: float) -> list[Instruction]:
        """Another process than before is at a shard's place: whatever was there is gone."""
        cluster = self._cluster
        why = f"{cluster.shards[shard].name} was restarted"
        if self._is_over or self._phase is _Phase.SEEK:
            return []
        if self._phase is _Phase.RESTORE and self._checkpoint is not None:
            note = Note(text=f"{why} while step {self._checkpoint[0].step} was being brought back: once more", is_warning=True)
            return [note, *self._restore(*self._checkpoint)]
        if self._phase is _Phase.BEGIN or (cluster.registry.model is not None and not cluster.registry.is_created):
            note = Note(text=f"{why} before the model was initialised: all begin anew", is_warning=True)
            return [note, *self._begin_anew(is_again=True)]
        if cluster.pending_finish:
            return self._ending.finish(cluster.pending_finish, now)
        if cluster.config.checkpoints is None:
            return self._ending.fail(f"{why} and has lost its variables (global_step {cluster.policy.step}); start the whole cluster again")
        is_start = self._phase is _Phase.TAKE_OVER
        self._leave_epoch("going back to a checkpoint")
        return [*self._refuse_all(), *self._seek(why, is_start=is_start, has_lost=True)]

    def checkpoint_found(self, event: CheckpointFound, now: float) -> list[Instruction]:
        """There is a whole checkpoint, or none."""
        cluster, search, config = self._cluster, self._search, self._cluster.config.checkpoints
        if self._phase is not _Phase.SEEK or self._is_over or config is None:
            return []
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
            instructions += self._forget_provisional()
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
        cluster.new_policy(step=checkpoint.step, is_start=True)
        self._checkpointing.restored(checkpoint, now)
        # Saved again, so that the number of the new epoch is on disk before another start could take it.
        return [note, *self._open(now, oldest_kept=checkpoint.step)]

    def restore_failed(self, event: RestoreFailed, now: float) -> list[Instruction]:
        """A checkpoint could not be brought back: an older one may do, if it is damaged."""
        if not self._is_restoring(event.epoch, event.tag):
            return []
        why = printable(event.why)
        if not event.is_damaged:
            return self._ending.fail(f"{self._search.why}; checkpoint {event.tag} could not be brought back: {why}")
        note = Note(text=f"checkpoint {event.tag} is damaged, an older one is tried: {why}", is_warning=True)
        return [note, *self._seek_another(event.tag, why)]

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
        return [Note(text=text), *self._open(now), *self._takeover.told()]

    # -- the moves

    def _begin_anew(self, *, is_again: bool = False) -> list[Instruction]:
        cluster, highest = self._cluster, self._search.highest_epoch
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
        self._phase = _Phase.BEGIN
        return [*instructions, AdoptShards(epoch=cluster.epoch, chief_incarnation=cluster.chief_incarnation)]

    def _take_over(self, why: str) -> list[Instruction]:
        cluster = self._cluster
        cluster.recovering, cluster.plan = why, "the parameter servers are asked where they are"
        self._phase = _Phase.TAKE_OVER
        return [AdoptShards(epoch=cluster.epoch, chief_incarnation=cluster.chief_incarnation)]

    def _seek(self, why: str, *, is_start: bool, has_lost: bool) -> list[Instruction]:
        cluster, config = self._cluster, self._cluster.config.checkpoints
        assert config is not None
        cluster.recovering, cluster.plan = why, "looking for the newest whole checkpoint"
        only = "" if has_lost or config.restore in (RESTORE_LATEST, RESTORE_NONE) else config.restore
        self._search = Search(why=why, is_start=is_start, has_lost=has_lost, only=only, has_looked=self._phase is _Phase.TAKE_OVER)
        self._phase = _Phase.SEEK
        return [Note(text=f"{why}; {cluster.plan}", is_warning=has_lost), FindCheckpoint(only=only)]

    def _seek_another(self, tag: str, why: str) -> list[Instruction]:
        search = self._search
        search.exclude(tag, why)
        self._phase, self._cluster.plan = _Phase.SEEK, "looking for an older checkpoint"
        return [FindCheckpoint(excluded=tuple(search.excluded), only=search.only)]

    def _without_checkpoint(self) -> list[Instruction]:
        search, config = self._search, self._cluster.config.checkpoints
        if search.has_lost and search.is_start and not search.has_looked:
            search.is_exhausted = True
            return self._take_over(search.why)  # perhaps nothing is lost
        if config is not None and (why := nothing_found(search, restore=config.restore, step=self._cluster.policy.step)):
            return self._ending.fail(why)
        return self._begin_anew()

    def _restore(self, checkpoint: Checkpoint, manifest_sha256: str) -> list[Instruction]:
        cluster, search = self._cluster, self._search
        least = cluster.epoch + 1 if search.is_start or search.has_tried else cluster.epoch
        self._rise(max(least, search.highest_epoch + 1), why=f"rolled back to step {checkpoint.step}", step=checkpoint.step)
        search.has_tried = True
        self._takeover.begin_with(checkpoint.record)
        cluster.shards.release_all()
        cluster.new_policy(step=checkpoint.step, is_start=True)
        self._checkpoint = checkpoint, manifest_sha256
        self._phase = _Phase.RESTORE
        cluster.recovering, cluster.plan = search.why, f"then step {checkpoint.step} of checkpoint {checkpoint.tag}"
        text = f"bringing back step {checkpoint.step} of checkpoint {checkpoint.tag} under epoch {cluster.epoch}: {search.why}"
        order = RestoreShards(
            epoch=cluster.epoch,
            chief_incarnation=cluster.chief_incarnation,
            tag=checkpoint.tag,
            manifest_sha256=manifest_sha256,
            specs=cluster.shard_specs(checkpoint.step),
            settings=self._settings.for_shards(step=checkpoint.step),
        )
        return [*self._refuse_all(), Note(text=text), order]

    def _open(self, now: float, *, oldest_kept: int = 0) -> list[Instruction]:
        cluster = self._cluster
        self._phase, self._checkpoint, self._search = _Phase.IDLE, None, Search()
        cluster.recovering = cluster.plan = ""
        cluster.under_way = None
        cluster.registry.open()
        cluster.oldest_kept = oldest_kept
        cluster.ledger.roll_back(cluster.policy.step, now=now)
        self._checkpointing.opened(now)
        instructions = [*self._models.settle(), cluster.keep_record(above=self._takeover.record_version)]
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
        return self._phase is _Phase.RESTORE and is_it and not self._is_over

    def _rise(self, epoch: int, *, why: str, step: int | None = None) -> None:
        cluster = self._cluster
        cluster.has_taken_over = cluster.has_taken_over and epoch <= cluster.epoch
        cluster.epoch = max(cluster.epoch, epoch)
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

    def _forget_provisional(self) -> list[Instruction]:
        cluster = self._cluster
        cluster.membership.succeed(chief_incarnation=cluster.chief_incarnation)
        return cluster.refuse_waiting(LeaseExpired("not registered here: another chief was here before. Register again"))
