"""How a chief begins, takes over from another, and brings shards back to a checkpoint. Methods of the coordinator; knows no clock or wire.

A chief looks at all shards first. They are all empty: the newest whole checkpoint is restored, or training begins. All hold the model of
one epoch: training goes on there. Anything else, and a shard that is restarted later: all go back to a checkpoint, under a new epoch.
"""

from collections.abc import Sequence

from chief import assurance
from chief.checkpoint_choice import Branch, gone_back, misfit
from chief.coordination import RESTORE_NONE
from chief.events import Instruction, Note, ShardAdopted, StepApplied, StepPrepared
from chief.recovery_events import (
    CheckpointFound,
    FindCheckpoint,
    RecordFound,
    RestoreFailed,
    ShardFinding,
    ShardsFound,
    ShardsRestored,
)
from chief.recovery_moves import Phase, RecoveryMoves
from chief.wording import listed, printable


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
        instructions: list[Instruction] = [note, assurance.keep(cluster)]
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
