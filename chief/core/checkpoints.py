"""The checkpoint that is being made, the newest whole one, and what waits for either. Knows no storage, clock or wire."""

import math
from dataclasses import dataclass, replace

from chief.core.cluster import Cluster, UnderWay
from chief.core.messages import (
    CheckpointCommitted,
    CommitCheckpoint,
    Instruction,
    Note,
    Reply,
    SaveCheckpoint,
    SaveFailed,
    SaveStep,
    StepCopied,
    StepSaved,
)
from chief.core.waiting import CheckpointRequests, Key, slice_s
from chief.core.wording import printable, seconds
from ps_protocol.errors import CheckpointStorageMissing, InternalError, NotInitialized, PsError, StorageFull, TrainingFailed
from ps_protocol.roles.checkpoint import Checkpoint, Durability, tag_of
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, SavedCheckpoint
from ps_protocol.roles.shard import PushId

# What is done to make a checkpoint, and where that stands. Methods of the coordinator, whose decisions are in `checkpointing`.


CHECKPOINT_KEY: Key = ("checkpoint", 0)
LAST_KEY: Key = ("last checkpoint", 0)
# A step that is held back is saved again after this time if that failed; the last checkpoint is given up after that one.
RETRY_S = 1.0
LAST_CHECKPOINT_S = 30.0
_SAY_EVERY_S = 10.0


@dataclass(slots=True, kw_only=True)
class Save:
    """A checkpoint under way, as its manifest will have it but for the files. `is_held`: its step is told once it is whole."""

    draft: Checkpoint
    is_held: bool
    is_copied: bool = False

    @property
    def tag(self) -> str:
        """Its name."""
        return self.draft.tag


class CheckpointMoves:
    """The checkpoint that is being made, the latest whole one, and who wants one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._save: Save | None = None
        self._whole: SavedCheckpoint | None = None  # the latest
        self._whole_epoch, self._whole_at = 0, 0.0
        self._said_at = -math.inf
        self._due_step: int | None = None
        self._failure = ""
        self._num_attempts: dict[tuple[int, int], int] = {}  # by epoch and step
        self._requests = CheckpointRequests(cluster.deadlines)
        # Contributors of a step that is held back: it is to be saved as soon as the shards can.
        self._held: tuple[PushId, ...] | None = None
        # Whether the open step is to be saved before it is told, since an earlier chief may not have done so.
        self._is_securing = False

    def _begin(self, now: float) -> list[Instruction]:
        cluster, held = self._cluster, self._held
        step = cluster.policy.step + (held is not None)
        attempt = self._num_attempts[cluster.epoch, step] = self._num_attempts.get((cluster.epoch, step), 0) + 1
        tag = tag_of(step=step, epoch=cluster.epoch)
        if cluster.has_taken_over:
            tag += f"-chief-{cluster.chief_incarnation}"  # its predecessor may have saved the same step
        tag += f"-retry-{attempt - 1}" if attempt > 1 else ""
        draft = Checkpoint(
            tag=tag,
            cluster=cluster.config.cluster,
            epoch=cluster.epoch,
            step=step,
            chief_incarnation=cluster.chief_incarnation,
            life=cluster.membership.life,
            num_shards=len(cluster.shards),
            record=cluster.record(),
            placement=cluster.registry.placement,
            files=(),
            pushes=cluster.applied_pushes(extra=held or ()),
            data=cluster.data.progress(),
        )
        self._save = Save(draft=draft, is_held=held is not None)
        self._requests.bind(tag)
        cluster.under_way = UnderWay.SAVE
        if held is None:
            cluster.saving = f"the parameter servers are copying step {step} for checkpoint {tag}"
        else:
            self._explain_hold()
        return [SaveStep(epoch=cluster.epoch, step=step, tag=tag)]

    def _explain_hold(self) -> None:
        words = f"step {self._cluster.policy.step} is applied; it counts once it is saved"
        self._cluster.saving = words + (f" (failed: {self._failure}; trying again)" if self._failure else "")

    def _arm(self, now: float) -> None:
        config = self._cluster.config.checkpoints
        if config is None or config.durability is not Durability.INTERVAL:
            return
        self._cluster.deadlines.set(CHECKPOINT_KEY, now + config.interval_s)
        self._due_step = self._cluster.policy.step + config.every_steps if config.every_steps is not None else None

    def _what_next(self, save: Save) -> str:
        config = self._cluster.config.checkpoints
        if save.is_held or config is None:
            return f"step {save.draft.step} is not told before it is saved; trying again in {seconds(RETRY_S)}"
        if config.durability is Durability.INTERVAL and not self._cluster.is_finished:
            return f"training goes on; the next attempt follows in {seconds(config.interval_s)} at the latest"
        return "earlier ones stay"

    def _has_whole(self, step: int) -> bool:
        return self._whole is not None and (self._whole_epoch, self._whole.step) == (self._cluster.epoch, step)

    @property
    def failure(self) -> str:
        """Why the latest attempt failed; empty: it did not, or there was none."""
        return self._failure

    def _note_whole(self, save: Save, now: float) -> Note:
        """Says that a checkpoint is whole; where each step is saved, not for each of them."""
        is_detail = now - self._said_at < _SAY_EVERY_S
        self._said_at = self._said_at if is_detail else now
        return Note(text=f"checkpoint {save.tag} is whole: step {save.draft.step}", is_detail=is_detail)

    def _remember_whole(self, checkpoint: Checkpoint, now: float) -> SavedCheckpoint:
        self._whole = whole = SavedCheckpoint(tag=checkpoint.tag, step=checkpoint.step)
        self._whole_epoch, self._whole_at = checkpoint.epoch, now
        return whole

    def _settle_last(self, step: int) -> None:
        if self._cluster.is_saving_last and step == self._cluster.policy.step:
            self._end_last()

    def _end_last(self) -> None:
        self._cluster.is_saving_last = False
        self._cluster.deadlines.clear(LAST_KEY)


# When a step is saved as a checkpoint, and what becomes of that. Methods of the coordinator; knows no clock, thread, wire or file.
#
# One checkpoint is made at a time: all shards copy the same step (no other is applied meanwhile), then write; then the manifest is written.
# Under durability "step" a step that is applied is held back until it is saved: nobody hears of it before, so that it cannot be lost.


class Checkpointing(CheckpointMoves):
    """Makes checkpoints when they are due or wanted. Does nothing in a cluster that has no place for them."""

    # -- when

    def opened(self, now: float) -> None:
        """Training begins, or goes on, at the open step: it is saved, so that there is something of this epoch to go back to."""
        config = self._cluster.config.checkpoints
        if config is None:
            return
        self._arm(now)
        if config.durability is not Durability.NONE or self._requests.wait_for_next:
            self._cluster.is_save_due = True

    def stepped(self) -> None:
        """A step has been told: perhaps it is one that is to be saved."""
        if self._due_step is not None and self._cluster.policy.step >= self._due_step:
            self._cluster.is_save_due = True

    @property
    def holds_steps(self) -> bool:
        """Whether a step is to be told only once it is saved."""
        config = self._cluster.config.checkpoints
        return config is not None and config.durability is Durability.STEP

    def hold(self, contributors: tuple[PushId, ...], now: float) -> list[Instruction]:
        """All shards have applied the open step: saves it before anybody hears of it, as soon as no other save is under way."""
        self._held = contributors
        self._cluster.under_way = UnderWay.SAVE
        self._explain_hold()
        return self._begin(now) if self._save is None else []

    @property
    def is_holding(self) -> bool:
        """Whether a step is held back until it is saved."""
        return self._held is not None

    def let_go(self, now: float) -> None:
        """The step that is held back need not be saved after all."""
        self._held, self._cluster.saving = None, ""
        self._cluster.deadlines.clear(CHECKPOINT_KEY)
        self._arm(now)

    def secure(self, now: float) -> list[Instruction]:
        """Saves the step that another chief has left, before it is told; `committed` says when that is done."""
        self._is_securing = True
        return self._begin(now)

    @property
    def is_securing(self) -> bool:
        """Whether the open step must be saved before it is told."""
        return self._is_securing

    def begin(self, now: float) -> list[Instruction]:
        """Begins what is due, if that is possible now: nothing else is under way at the shards."""
        cluster = self._cluster
        if self._save is not None or not cluster.registry.is_ready or cluster.config.checkpoints is None:
            return []
        cluster.is_save_due = False
        self._arm(now)
        if self._has_whole(cluster.policy.step):
            assert self._whole is not None
            return self._requests.fulfil(self._whole, tag="")
        return self._begin(now)

    def fire(self, now: float) -> list[Instruction]:
        """The interval is over, or the pause after a failure."""
        if self._held is not None or self._is_securing:
            return self._begin(now) if self._save is None else []
        if self._cluster.state is ClusterState.TRAINING:
            self._arm(now)
            self._cluster.is_save_due = True
        return []

    def finish(self, now: float) -> None:
        """Training is finished: its last step is saved before the processes end, if that can be done in reasonable time."""
        cluster = self._cluster
        cluster.deadlines.clear(CHECKPOINT_KEY)
        if cluster.config.checkpoints is None or not cluster.registry.is_ready or cluster.recovering:
            return
        if self._save is None and self._has_whole(cluster.policy.step) and cluster.under_way is None:
            return
        cluster.is_saving_last = cluster.is_save_due = True
        cluster.deadlines.set(LAST_KEY, now + LAST_CHECKPOINT_S)

    def give_up_last(self) -> list[Instruction]:
        """The last checkpoint takes too long, or cannot be made."""
        cluster = self._cluster
        if not cluster.is_saving_last:
            return []
        self._end_last()
        why = self._failure or "it was not whole in time"
        return [Note(text=f"there is no checkpoint of the last step {cluster.policy.step}: {why}", is_warning=True)]

    def roll_back(self) -> None:
        """What is under way comes to nothing: the shards go back to an earlier step."""
        self._save = self._held = None
        self._is_securing, self._cluster.saving = False, ""
        self._cluster.replicas_due.clear()
        self._requests.release()

    def restored(self, checkpoint: Checkpoint, now: float) -> None:
        """The shards hold this checkpoint's values: it is the latest."""
        self._remember_whole(checkpoint, now)
        self._cluster.deadlines.clear(CHECKPOINT_KEY)

    # -- what becomes of it

    def copied(self, event: StepCopied) -> bool:
        """All shards have copied the step; True if steps may go on."""
        if self._save is None or event.tag != self._save.tag or self._save.is_copied:
            return False
        self._save.is_copied = True
        if self._save.is_held or self._held is not None or self._cluster.under_way is not UnderWay.SAVE:
            return False
        self._cluster.under_way, self._cluster.saving = None, ""
        return True

    def saved(self, event: StepSaved) -> list[Instruction]:
        """All shards have written: the manifest makes it whole."""
        config = self._cluster.config.checkpoints
        if self._save is None or event.tag != self._save.tag or config is None:
            return []
        is_awaited = self._save.is_held or self._is_securing
        return [CommitCheckpoint(checkpoint=replace(self._save.draft, files=event.files), keep=config.keep, is_awaited=is_awaited)]

    def committed(self, event: CheckpointCommitted, now: float) -> tuple[list[Instruction], bool]:
        """A checkpoint is whole. Returns also whether the step that was held back for it may be told now."""
        save = self._save
        if save is None or event.tag != save.tag:
            return [], False
        self._save, self._failure = None, ""
        self._num_attempts.clear()
        self._is_securing = False
        instructions = [self._note_whole(save, now), *self._requests.fulfil(self._remember_whole(save.draft, now), tag=save.tag)]
        if save.is_held:
            self._held, self._cluster.saving = None, ""
            return instructions, True
        if self._held is not None:
            instructions += self._begin(now)
        elif self._requests.wait_for_next:
            self._cluster.is_save_due = True
        self._settle_last(save.draft.step)
        return instructions, False

    def failed(self, event: SaveFailed, now: float) -> tuple[list[Instruction], bool]:
        """A checkpoint has come to nothing; training goes on. Returns also whether steps that waited for the copies may go on."""
        save, cluster = self._save, self._cluster
        if save is None or event.tag != save.tag:
            return [], False
        why = printable(event.why)
        # What becomes of the training follows, or is said by who asks for the failure.
        self._save, self._failure = None, why.removesuffix("training continues").rstrip(" ,;")
        error: PsError = StorageFull(why) if event.is_full else InternalError(f"checkpoint {save.tag}: {why}")
        refusals = self._requests.refuse(error, tag=save.tag)
        text = f"checkpoint {save.tag} failed: {self._failure}; {self._what_next(save)}"
        instructions: list[Instruction] = [Note(text=text, is_warning=True), *refusals]
        if self._held is not None or self._is_securing:
            cluster.deadlines.set(CHECKPOINT_KEY, now + RETRY_S)
            self._explain_hold()
            return instructions, False
        goes_on = not save.is_copied and cluster.under_way is UnderWay.SAVE
        if goes_on:
            cluster.under_way, cluster.saving = None, ""
        if cluster.is_saving_last:
            instructions += self.give_up_last()
        elif self._requests.wait_for_next:
            cluster.is_save_due = True
        return instructions, goes_on

    # -- who wants one

    def wanted(self, event: SaveCheckpoint, now: float) -> list[Instruction]:
        """Somebody wants a checkpoint of the open step, or a later one. Raises CheckpointStorageMissing, NotInitialized, TrainingFailed."""
        cluster, call = self._cluster, event.call
        if cluster.config.checkpoints is None:
            raise CheckpointStorageMissing("the cluster has no place for checkpoints; start its roles with --checkpoint-dir")
        cluster.refuse_if_failed()
        fulfilled = self._requests.fulfilled(event.request_id)
        if fulfilled is not None:
            return [Reply(call=call, value=fulfilled)] if call is not None else []
        if not cluster.registry.is_ready and not cluster.recovering:
            raise NotInitialized(f"the variables have no values yet: {cluster.explain(now)}")
        if cluster.is_finished and not cluster.is_saving_last and not self._has_whole(cluster.policy.step):
            raise TrainingFailed(f"training is finished ({cluster.finish_reason}), and its last step could not be saved: {self._failure}")
        tag = self._save.tag if self._save is not None and self._save.draft.step >= cluster.policy.step else ""
        if self._requests.add(event.request_id, call, tag=tag, until=now + slice_s(event.max_wait_s)):
            cluster.is_save_due = True
        return []

    def expire(self, call: int, now: float) -> list[Instruction]:
        """A caller has waited as long as it may; the checkpoint is made all the same."""
        if not self.cancel(call):
            return []
        words = self._cluster.saving or (f"checkpoint {self._save.tag} is being written" if self._save else self._cluster.explain(now))
        return [Reply(call=call, value=SavedCheckpoint(tag="", step=self._cluster.policy.step, waiting_for=words))]

    def cancel(self, call: int) -> bool:
        """Forgets a caller; False if it does not wait here."""
        return self._requests.cancel(call)

    def refuse(self, error: PsError) -> list[Instruction]:
        """The cluster cannot go on: there will be no more checkpoints."""
        self._save = self._held = None
        return self._requests.refuse(error)

    def status(self, now: float) -> CheckpointStatus | None:
        """Returns what is to be known of checkpoints; None: there is no place for them."""
        config = self._cluster.config.checkpoints
        if config is None:
            return None
        return CheckpointStatus(
            durability=config.durability.value,
            tag=self._whole.tag if self._whole else "",
            step=self._whole.step if self._whole else 0,
            age_s=max(0.0, now - self._whole_at) if self._whole else 0.0,
            saving=self._save.tag if self._save else "",
            failure=self._failure,
        )
