"""Checkpoints: when to save a step, the save under way, the newest whole checkpoint, requests for one. Knows no storage, clock or wire.

One checkpoint is made at a time: all shards copy the same step (no other is applied meanwhile), then write; then the manifest is written.
A step may be held back: it is announced only once it is saved, so that it cannot be lost.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from chief.core.messages import CommitCheckpoint, CopyStep, Done, Failed, NoteKind, WriteStep
from chief.core.waiting import Blocked, slice_s
from chief.core.wording import printable, seconds, without_socket
from chief.options import CheckpointConfig
from ps_protocol.errors import (
    CheckpointStorageMissing,
    InternalError,
    LimitExceeded,
    NotInitialized,
    PermissionDenied,
    PsError,
    StorageFailed,
    StorageFull,
    TrainingFailed,
)
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.checkpoint import Checkpoint, Durability, tag_of
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, SaveCheckpointRequest, SavedCheckpoint
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import CheckpointFile

if TYPE_CHECKING:
    from chief.core.state import Cluster

# Errors of storage that cannot be read for now, or until permissions change.
PASSING = (StorageFailed, PermissionDenied)
# A step that is held back is saved again after this time if that failed.
RETRY_S = 1.0
# The last checkpoint is given up after this time, and so much longer as the variables take at this rate: a storage may hang.
LAST_CHECKPOINT_S = 30.0
_LEAST_BYTES_PER_S = 8 << 20
_SAY_EVERY_S = 10.0
# Fulfilled requests that are remembered, so that a repeated one has its effect once; and requests that wait.
_MAX_REMEMBERED = 64
_MAX_WAITING = 1024
# The request of this process itself, before it ends; callers choose numbers >= 0.
_BEFORE_END = -1


@light_dataclass(frozen=True, slots=True, kw_only=True)
class HeldStep:
    """A step that is announced only once it is saved: its contributions, unless they are known already, and the action that follows."""

    step: int
    contributors: tuple[PushId, ...]
    then: Callable[[str, float], None]  # is given the checkpoint's name


@light_dataclass(slots=True, kw_only=True)
class _Save:
    """A checkpoint under way, as its manifest will have it but for the files. `is_held`: its step is announced once it is whole."""

    draft: Checkpoint
    is_held: bool
    work: CopyStep | WriteStep | CommitCheckpoint

    @property
    def tag(self) -> str:
        """Its name."""
        return self.draft.tag


@light_dataclass(slots=True, eq=False)
class _Wish:
    """A request for a checkpoint, and the one that answers it (empty: the next)."""

    tag: str = ""


class Checkpoints:
    """Makes checkpoints when they are due or requested. Does nothing in a cluster without a place for them (`config` None)."""

    def __init__(self, cluster: "Cluster", config: CheckpointConfig | None) -> None:
        self._cluster, self._config, self._out = cluster, config, cluster.out
        self._timer, self._last_timer = cluster.timers.timer(self._fire), cluster.timers.timer(self._give_up_in_time)
        self._save: _Save | None = None
        self._held: HeldStep | None = None
        # The reason why steps wait for a save, as text; empty: they do not wait.
        self.saving = ""
        # Whether one is to be begun as soon as nothing else is under way at the shards, and whether the processes wait for the last step's.
        self.is_due = self.is_saving_last = False
        # The latest, as a whole and (None: the next one is full) as what a delta may rest on.
        self._whole: SavedCheckpoint | None = None
        self._base: Checkpoint | None = None
        self._whole_epoch, self._whole_at = 0, 0.0
        self._said_at = -math.inf
        self._due_step: int | None = None
        # The reason why the latest attempt failed; empty: it did not fail, or there was none.
        self.failure = ""
        self._num_attempts: dict[tuple[int, int], int] = {}  # by epoch and step
        # By the number that their callers have given them; each may come again, in several calls.
        self._wishes: dict[int, _Wish] = {}
        self._fulfilled: dict[int, SavedCheckpoint] = {}
        self._calls = cluster.waiting.line(self._expire)
        # The processes of parameter servers that were asked to end, and for which a step has been saved.
        self._leaving: set[int] = set()

    # -- queries

    @property
    def holds_steps(self) -> bool:
        """Whether a step is announced only once it is saved."""
        return self._config is not None and self._config.durability is Durability.STEP

    @property
    def is_holding(self) -> bool:
        """Whether a step is held back until it is saved."""
        return self._held is not None

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being made, or is to be made before this process ends."""
        return self._save is not None or self.is_saving_last or _BEFORE_END in self._wishes

    def has_whole(self, step: int) -> bool:
        """Whether this step of this epoch is saved."""
        return self._whole is not None and (self._whole_epoch, self._whole.step) == (self._cluster.training.fence.epoch, step)

    def status(self, now: float) -> CheckpointStatus | None:
        """Returns the status of checkpoints; None: there is no place for them."""
        if self._config is None:
            return None
        return CheckpointStatus(
            durability=self._config.durability.value,
            tag=self._whole.tag if self._whole else "",
            step=self._whole.step if self._whole else 0,
            age_s=max(0.0, now - self._whole_at) if self._whole else 0.0,
            saving=self._save.tag if self._save else f"step {self._cluster.step}" if self.is_saving_last else "",
            failure=self.failure,
        )

    # -- when

    def training_begins(self, now: float) -> None:
        """Notes that training begins, or continues, at the open step, which is saved: this epoch then has a checkpoint to go back to."""
        if self._config is None:
            return
        self._arm(now)
        if self._config.durability is not Durability.NONE or self._waits_for_next:
            self._become_due()

    def stepped(self, step: int) -> None:
        """Another step is open, and those before it are announced: perhaps it is to be saved."""
        if self._due_step is not None and step >= self._due_step:
            self._become_due()

    def begin(self, now: float) -> None:
        """Begins a save that is due, if possible; the shards must have no other task."""
        if self._save is not None or not self._cluster.model.is_ready or self._config is None:
            return
        self.is_due = False
        self._arm(now)
        if self.has_whole(self._cluster.step):
            assert self._whole is not None
            self._fulfil(self._whole, tag="")
            if self.is_saving_last:
                self._end_last()
                self._cluster.ending.end_if_deserted()
        else:
            self._begin()

    def hold(self, held: HeldStep) -> None:
        """Saves a step before it is announced, as soon as no other save is under way; nothing else may be under way at the shards."""
        self._held = held
        self._explain_hold()
        if self._save is None:
            self._begin()

    def let_go(self, now: float) -> None:
        """The step that is held back need not be saved after all."""
        self._held, self.saving = None, ""
        self._timer.clear()
        self._arm(now)

    def finish(self, now: float, *, is_idle: bool) -> None:
        """Training is finished: its last step is saved before the processes end, if that can be done in reasonable time.

        `is_idle`: nothing is under way at the shards.
        """
        self._timer.clear()
        if self._held is not None and self._save is None:
            self._begin()  # the pause after a failure ends here: its step is applied, and nothing else would save it
        cluster = self._cluster
        if self._config is None or not cluster.model.is_ready or (self._save is None and is_idle and self.has_whole(cluster.step)):
            return
        self.is_saving_last = True
        self._become_due()
        self._last_timer.set(now + LAST_CHECKPOINT_S + cluster.training.num_bytes / _LEAST_BYTES_PER_S)

    def roll_back(self) -> None:
        """Gives up the save under way: the shards go back to an earlier step."""
        self._save = self._held = None
        self.saving = ""
        for wish in self._wishes.values():
            wish.tag = ""

    def restored(self, checkpoint: Checkpoint, now: float) -> None:
        """The shards hold this checkpoint's values: it is the latest."""
        self._remember_whole(checkpoint, now)
        self._timer.clear()

    # -- its outcome

    def copied(self, event: Done, now: float) -> None:
        """All shards have copied the step: others may be applied while they write, unless it is held back."""
        save = self._awaited(event)
        if save is None:
            return
        self._tell(save, WriteStep(fence=save.draft.fence, step=save.draft.step, tag=save.tag, since=self._since))
        if not save.is_held and self._held is None:
            self.saving = ""
            self._cluster.proceed(now)

    def written(self, event: Done, now: float) -> None:
        """All shards have written: the manifest makes it whole."""
        save = self._awaited(event)
        if save is not None and self._config is not None:
            checkpoint = save.draft = self._on_base(replace(save.draft, files=event.result))
            self._tell(save, CommitCheckpoint(checkpoint=checkpoint, keep=self._config.keep, is_awaited=save.is_held))

    def committed(self, event: Done, now: float) -> None:
        """A checkpoint is whole: announces the step that was held back for it."""
        save = self._awaited(event)
        if save is None:
            return
        self._save, self.failure = None, ""
        self._base = save.draft
        self._num_attempts.clear()
        is_detail = now - self._said_at < _SAY_EVERY_S  # if each step is saved, not for each of them
        self._said_at = self._said_at if is_detail else now
        self._out.note(f"checkpoint {save.tag} is whole: step {save.draft.step}", kind=NoteKind.CHECKPOINT, is_detail=is_detail)
        self._fulfil(self._remember_whole(save.draft, now), tag=save.tag)
        if save.is_held and self._held is not None:
            held, self._held, self.saving = self._held, None, ""
            held.then(save.tag, now)
        elif self._held is not None:
            self._begin()
        else:
            if self._waits_for_next:
                self.is_due = True
            if self.is_saving_last and save.draft.step == self._cluster.step:
                self._end_last()
        if self.is_due:
            self._out.afterwards(self._cluster.proceed)
        self._cluster.ending.end_if_deserted()

    def failed(self, event: Failed, now: float) -> None:
        """A checkpoint could not be saved, and what follows is said. Steps that waited for the copies continue."""
        save = self._awaited(event)
        if save is None:
            return
        why = without_socket(printable(event.error.message))
        self._save, self.failure = None, why
        if isinstance(save.work, CommitCheckpoint):
            # Perhaps what it rests on is not there any more.
            self._base = None
        self._out.note(f"checkpoint {save.tag} failed: {self.failure}; {self._what_next(save)}", kind=NoteKind.NOT_SAVED, is_warning=True)
        error = StorageFull(why) if isinstance(event.error, StorageFull) else InternalError(f"checkpoint {save.tag}: {why}")
        for request in self._requests_of(save.tag):
            wish = self._wishes.pop(request)
            for blocked in self._calls:
                if blocked.ask is wish:
                    self._calls.refuse(blocked.who, error)
        if self._held is not None:
            self._timer.set(now + RETRY_S)
            self._explain_hold()
            self._cluster.training.hold_failed(why, now)
        else:
            is_copying = isinstance(save.work, CopyStep)
            if is_copying:
                self.saving = ""
            if self.is_saving_last:
                self._give_up_last()
            elif self._waits_for_next:
                self.is_due = True
            if self.is_due or is_copying:
                self._out.afterwards(self._cluster.proceed)
        self._cluster.ending.end_if_deserted()

    # -- requests for one

    def ask(self, call: int | None, asked: SaveCheckpointRequest, now: float) -> None:
        """Handles a request for a checkpoint of the open step, or a later one.

        Raises CheckpointStorageMissing, NotInitialized, TrainingFailed or LimitExceeded.
        """
        if self._config is None:
            raise CheckpointStorageMissing("the cluster has no place for checkpoints; start its roles with --checkpoint-dir")
        cluster, request = self._cluster, asked.request_id
        cluster.ending.refuse_if_failed()
        if request in self._fulfilled:
            if call is not None:
                self._out.reply(call, self._fulfilled[request])
            return
        if not cluster.model.is_ready and not cluster.recovery.why:
            raise NotInitialized(f"the variables have no values yet: {cluster.explain(now)}")
        if cluster.ending.is_finished and not self.is_saving_last and not self.has_whole(cluster.step):
            raise TrainingFailed(f"training is finished ({cluster.ending.reason}), and its last step could not be saved: {self.failure}")
        if request not in self._wishes and len(self._wishes) >= _MAX_WAITING:
            raise LimitExceeded(f"{_MAX_WAITING} requests for a checkpoint are waiting already; try again when one is done")
        wish = self._wishes.setdefault(request, _Wish())
        if not wish.tag and self._save is not None and self._save.draft.step >= cluster.step:
            wish.tag = self._save.tag
        if call is not None:
            self._calls.block(call, wish, until=now + slice_s(asked.max_wait_s))
        if not wish.tag:
            self._become_due()

    def save_before_end(self) -> None:
        """Saves the open step, or a later one, before this process ends, if there is a place for checkpoints."""
        if self._config is not None:
            self._wishes.setdefault(_BEFORE_END, _Wish())
            self._become_due()

    def server_leaves(self, index: int) -> None:
        """A parameter server is about to end, and waits for its variables to be saved, unless another server has them, too."""
        server, cluster = self._cluster.servers[index], self._cluster
        if self._config is None or not cluster.model.is_ready or cluster.ending.is_over or server.standby:
            return
        if server.process_incarnation not in self._leaving:
            self._leaving.add(server.process_incarnation)
            self._out.note(f"{server.name} was asked to end: saving step {cluster.step} first", kind=NoteKind.CHECKPOINT)
            self._become_due()

    def refuse(self, error: PsError) -> None:
        """The cluster cannot continue: there will be no more checkpoints."""
        self._save = self._held = None
        self.is_saving_last = False
        self._wishes.clear()
        self._calls.refuse_all(error)

    # -- inside

    def _begin(self) -> None:
        held, training = self._held, self._cluster.training
        step, fence = training.step if held is None else held.step, training.fence
        attempt = self._num_attempts[fence.epoch, step] = self._num_attempts.get((fence.epoch, step), 0) + 1
        tag = tag_of(step=step, epoch=fence.epoch) + training.tag_suffix + (f"-retry-{attempt - 1}" if attempt > 1 else "")
        draft = training.draft(tag=tag, step=step, extra=() if held is None else held.contributors)
        work = CopyStep(fence=fence, step=step, tag=tag, since=self._since)
        self._save = _Save(draft=draft, is_held=held is not None, work=work)
        for wish in self._wishes.values():
            wish.tag = wish.tag or tag
        if held is None:
            self.saving = f"the parameter servers are copying step {step} for checkpoint {tag}"
        else:
            self._explain_hold()
        self._out.add(work)

    @property
    def _since(self) -> int | None:
        """The step of the checkpoint that the next one rests on as a delta; -1: it is full, None: so are all."""
        base = self._base
        if self._config is None or self._config.full_every == 1:
            return None
        # Only what this chief saved of the present epoch is known to be what the shards count changes from.
        if base is None or base.fence != self._cluster.training.fence or len(base.base_tags) + 2 > self._config.full_every:
            return -1
        return base.step

    def _on_base(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the files that those of shards which have written a delta rest on."""
        base, bases = self._base, list[CheckpointFile]()
        for file in checkpoint.files if base is not None else ():
            assert base is not None
            if file.is_delta:
                bases += [replace(one, tag=one.tag or base.tag) for one in base.files_of(file.shard)]
        return replace(checkpoint, bases=tuple(bases))

    def _tell(self, save: _Save, work: WriteStep | CommitCheckpoint) -> None:
        save.work = work
        self._out.add(work)

    def _awaited(self, event: Done | Failed) -> _Save | None:
        """Returns the checkpoint under way, if the event is what it waits for."""
        return self._save if self._save is not None and self._save.work is event.work else None

    def _become_due(self) -> None:
        self.is_due = True
        self._out.afterwards(self._cluster.proceed)

    def _fire(self, now: float) -> None:
        """The interval is over, or the pause after a failure."""
        if self._held is not None:
            if self._save is None:
                self._begin()
        elif self._cluster.state is ClusterState.TRAINING:
            self._arm(now)
            self._become_due()

    def _arm(self, now: float) -> None:
        if self._config is not None and self._config.durability is Durability.INTERVAL:
            self._timer.set(now + self._config.interval_s)
            self._due_step = self._cluster.step + self._config.every_steps if self._config.every_steps is not None else None

    def _explain_hold(self) -> None:
        words = f"step {self._cluster.step} is applied; it counts once it is saved"
        self.saving = words + (f" (failed: {self.failure}; trying again)" if self.failure else "")

    def _what_next(self, save: _Save) -> str:
        if save.is_held or self._config is None:
            return f"step {save.draft.step} is not announced before it is saved; trying again in {seconds(RETRY_S)}"
        if self._config.durability is Durability.INTERVAL and self._cluster.state is ClusterState.TRAINING:
            return f"training continues; the next attempt follows in {seconds(self._config.interval_s)} at the latest"
        return "earlier ones stay"

    def _remember_whole(self, checkpoint: Checkpoint, now: float) -> SavedCheckpoint:
        self._whole = whole = SavedCheckpoint(tag=checkpoint.tag, step=checkpoint.step)
        self._whole_epoch, self._whole_at = checkpoint.fence.epoch, now
        return whole

    def _give_up_in_time(self, now: float) -> None:
        self._give_up_last()
        self._cluster.ending.end_if_deserted()

    def _give_up_last(self) -> None:
        """The last checkpoint takes too long, or cannot be made."""
        if self.is_saving_last:
            self._end_last()
            why = self.failure or "it was not whole in time"
            self._out.note(f"there is no checkpoint of the last step {self._cluster.step}: {why}", is_warning=True)

    def _end_last(self) -> None:
        self.is_saving_last = False
        self._last_timer.clear()

    @property
    def _waits_for_next(self) -> bool:
        """Whether some request waits for a checkpoint that has not begun."""
        return any(not wish.tag for wish in self._wishes.values())

    def _requests_of(self, tag: str) -> list[int]:
        return [request for request, wish in self._wishes.items() if wish.tag == tag]

    def _fulfil(self, saved: SavedCheckpoint, *, tag: str) -> None:
        """Answers the requests for `tag`, whose checkpoint is whole."""
        for request in self._requests_of(tag):
            wish = self._wishes.pop(request)
            self._fulfilled[request] = saved
            if len(self._fulfilled) > _MAX_REMEMBERED:
                del self._fulfilled[next(iter(self._fulfilled))]
            for blocked in self._calls:
                if blocked.ask is wish:
                    self._calls.answer(blocked.who, saved)

    def _expire(self, blocked: Blocked[_Wish], now: float) -> None:
        """Answers a caller that has waited as long as it may; the checkpoint is made all the same."""
        words = self.saving or (f"checkpoint {self._save.tag} is being written" if self._save else self._cluster.explain(now))
        self._calls.answer(blocked.who, SavedCheckpoint(tag="", step=self._cluster.step, waiting_for=words))
