"""What is done to make a checkpoint, and where that stands. Methods of the coordinator, whose decisions are in `checkpointing`."""

import math
from dataclasses import dataclass

from chief.checkpoint_requests import CheckpointRequests
from chief.cluster import Cluster, UnderWay
from chief.deadlines import Key
from chief.events import Instruction, Note
from chief.recovery_events import (
    SaveStep,
)
from chief.wording import seconds
from ps_protocol.checkpoint import Checkpoint, Durability, tag_of
from ps_protocol.chief import SavedCheckpoint
from ps_protocol.shard import PushId

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
