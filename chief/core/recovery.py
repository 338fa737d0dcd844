"""How a chief begins, takes over from another, and brings shards back to a checkpoint. Knows no clock or wire.

A chief looks at all shards first, for its number, and adopts them. Then it decides: if all are empty, the newest whole checkpoint is
restored, or training begins. If all are at one step, training continues there. In any other case, and when a shard is restarted later,
all go back to a checkpoint under a new epoch.
The result is a `Start`, from which a new `Training` is made.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING

from chief.core.cluster.checkpoints import PASSING, HeldStep
from chief.core.cluster.members import newest_pushes
from chief.core.epoch.training import Start
from chief.core.messages import (
    Adopted,
    AdoptShards,
    Done,
    Failed,
    FindCheckpoint,
    NoteKind,
    RestoreShards,
    ShardsFound,
)
from chief.core.wording import listed, printable, seconds
from chief.options import RESTORE_LATEST, RESTORE_NONE, CoordinationConfig
from chief.policies.base import Policy
from chief.policies.factory import new_policy
from ps_protocol.errors import CheckpointNotFound, DataLoss, LeaseExpired, PsError, Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord, ChosenPush
from ps_protocol.roles.contribution import NO_ATTACHMENTS, NO_STEP_ATTACHMENTS
from ps_protocol.roles.shard import Adoption, ApplyRequest, ShardStatus, WorkerPushes

if TYPE_CHECKING:
    from chief.core.state import Cluster

# Storage that cannot be read is tried again after the first of these, then less and less often.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0
_ANOTHER = "another chief was here before"
# A checkpoint skipped for these reasons is no loss: it was never whole, or is not of this cluster.
_HARMLESS = ("incomplete", "it is of cluster")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The point at which training continues: the open step, and, if only some shards have applied it, the request for it (`redo`)."""

    step: int
    redo: ApplyRequest | None = None


def resumption(adoptions: Sequence[Adoption], *, names: Sequence[str], has_steps: bool = True) -> Resumption | str:
    """Returns the step to continue at, or the reason why that is not possible.

    All shards are at the same step, or some are one ahead: then that step was interrupted, and is repeated with the same contributions.
    Where shards apply on arrival there is no step that all have; the highest count holds.
    """
    steps = [adoption.step for adoption in adoptions if adoption.step is not None]
    if len(steps) < len(adoptions):
        empty = [name for name, adoption in zip(names, adoptions, strict=True) if adoption.step is None]
        return f"{listed(empty)} {'has' if len(empty) == 1 else 'have'} lost the variables"
    low, high = min(steps), max(steps)
    if low == high or not has_steps:
        return Resumption(step=high)
    where = listed([f"{name} is at step {step}" for name, step in zip(names, steps, strict=True)])
    if high - low > 1:
        return f"the parameter servers are too far apart: {where}"
    ahead = [adoption.last_apply for adoption in adoptions if adoption.step == high]
    known = [request for request in ahead if request is not None and request.step == low]
    if not known or any(request.contributors != known[0].contributors for request in known):
        return f"it is not known what step {low} was made of: {where}"
    return Resumption(step=low, redo=known[0])


def promised(record: ChiefRecord, found: Resumption, policy: PolicySpec) -> tuple[ChosenPush, ...]:
    """Returns the contributions that the record names, and that are in no step so far, a step that is repeated included.

    Where steps are common, all are of the record's. Else each is a step by itself, in their order: shards do not remember for ever which
    contributions they have applied.
    """
    num_since = found.step - record.step + (found.redo is not None)
    if policy.has_common_steps:
        return () if num_since else record.chosen
    return record.chosen[num_since:]


def has_applied(adoptions: Sequence[Adoption]) -> bool:
    """Whether anything would be lost if the shards' values were."""
    return any(adoption.last_apply is not None or adoption.pushes or adoption.step for adoption in adoptions)


def mismatch(adoptions: Sequence[Adoption], layouts: Sequence[Layout], *, names: Sequence[str]) -> str:
    """Returns words for the shards whose variables differ from the model's; empty if there are none."""
    other = [name for name, adoption, layout in zip(names, adoptions, layouts, strict=True) if adoption.layout_hash != layout.hash]
    return f"{listed(other)} {'holds' if len(other) == 1 else 'hold'} other variables than the model has there" if other else ""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The checkpoints that this run may go back to: those from `epoch` on, and `base`, the one that it went back to, and older ones.

    Checkpoints of steps that were given up since, or of an earlier run, are newer than `base` and of an earlier epoch.
    """

    epoch: int = 0
    base: tuple[int, int] = (0, -1)

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether this run made the checkpoint, or continues from it."""
        return checkpoint.fence.epoch >= self.epoch or checkpoint.age_order <= self.base


@light_dataclass(slots=True, kw_only=True)
class Search:
    """A search for a checkpoint: its reason, the rejected ones, the other ones. `has_lost`: shards had a model, or a part of it."""

    why: str = ""
    is_start: bool = True
    has_lost: bool = False
    has_tried: bool = False  # to restore one
    is_again: bool = False  # this chief had begun before, with nothing
    num_failures: int = 0  # of storage, one after the other
    only: str = ""
    excluded: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    highest_epoch: int = 0
    reached: int = 0  # the step that training had come to, as far as this chief knows

    def note_skipped(self, skipped: Iterable[tuple[str, str]]) -> list[str]:
        """Notes the skipped checkpoints, and returns words for the new ones."""
        fresh = [(tag, why) for tag, why in skipped if tag not in self.excluded and tag not in self.damaged]
        self.damaged.update((printable(tag), printable(why)) for tag, why in fresh if not why.startswith(_HARMLESS))
        return [f"checkpoint {printable(tag)} is skipped: {printable(why)}" for tag, why in fresh]

    def exclude(self, tag: str, why: str) -> None:
        """An attempt that failed."""
        self.excluded.append(tag)
        self.damaged[tag] = why

    @property
    def damage(self) -> str:
        """Words for the checkpoints that cannot be restored, to be appended to a message; empty: none."""
        words = [f"{tag}: {why}" for tag, why in self.damaged.items()]
        return f" ({listed(words, limit=3, separator='; ')})" if words else ""


def nothing_found(search: Search, *, restore: str, step: int, failure: str = "") -> str:
    """Says why a cluster cannot continue without a checkpoint; empty: it may begin anew. `failure`: of the latest attempt to make one."""
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
        return f"there are checkpoints, and none of them can be restored{there}; repair them, or begin anew with --restore none"
    return ""


@light_dataclass(slots=True, kw_only=True)
class _Begun:
    """Shards that hold nothing are put under another epoch by `work`; then a worker brings the model."""

    work: AdoptShards


@light_dataclass(slots=True, kw_only=True)
class _Seeking:
    """A checkpoint is looked for by `work`."""

    search: Search
    work: FindCheckpoint


@light_dataclass(slots=True, kw_only=True)
class _Restoring:
    """The stage in which shards go back to a checkpoint, by `work`."""

    search: Search
    checkpoint: Checkpoint
    work: RestoreShards


@light_dataclass(slots=True, kw_only=True)
class _TakingOver:
    """The stage in which a chief takes over what there is: by `work` shards report; the record that they keep, and what follows.

    `step_seen`: the highest that a shard was at when they were looked at; None: none had a model. `found`: training can continue, perhaps
    once an interrupted step is repeated; `pushes` have been applied, and `chosen` are promised.
    """

    work: AdoptShards
    step_seen: int | None
    record: ChiefRecord | None = None
    found: Resumption | None = None
    pushes: tuple[WorkerPushes, ...] = ()
    chosen: tuple[ChosenPush, ...] = ()
    start: Start = field(default_factory=lambda: Start(step=0))
    is_waiting_for_model: bool = False


class Recovery:
    """Decides the values of the shards, and their epoch. `new_life` names a life of the cluster that begins."""

    def __init__(self, cluster: "Cluster", *, new_life: Callable[[], int]) -> None:
        self._cluster, self._ending, self._new_life = cluster, cluster.ending, new_life
        self._out, self._members, self._model, self._servers = cluster.out, cluster.members, cluster.model, cluster.servers
        self._settings, self._checkpoints = cluster.settings, cluster.checkpoints
        self._data, self._versions = cluster.data, cluster.versions
        self._stage: _Begun | _Seeking | _Restoring | _TakingOver | None = None  # None: training continues, or there was no look yet
        # The reason of a rollback or a takeover that is under way, and its plan; empty: there is none.
        self.why = self.plan = ""
        self._pause = cluster.timers.timer(self._try_again)
        self._branch = Branch()
        # How often the cluster has gone back to a checkpoint, and why the last time.
        self.num_rollbacks, self.last_rollback = 0, ""
        # The step that training had reached before the latest rollback.
        self.reached = 0

    @property
    def _has_begun(self) -> bool:
        """Whether a worker is to bring the model, or does: nothing is lost with what shards hold."""
        is_unknown = self._stage is None and self._model.model is None and not self._model.held
        return isinstance(self._stage, _Begun) or is_unknown or (self._model.model is not None and not self._model.is_created)

    def refuse_if_under_way(self, now: float) -> None:
        """Raises Unavailable while nothing can be counted, so that the caller tries again."""
        if self.why:
            raise Unavailable(self._cluster.explain(now))

    def give_up(self) -> None:
        """Training is over: the values of the last step are in its checkpoint."""
        self.why = ""

    # -- the beginning

    def found(self, event: ShardsFound, now: float) -> None:
        """Takes a number and has all shards adopted, once their statuses are known."""
        if self._ending.is_over or self._stage is not None:
            return
        statuses = event.statuses
        epochs = {status.fence.epoch for status in statuses}
        chief_incarnation = 1 + max((status.fence.chief_incarnation for status in statuses), default=0)
        step = max((status.step for status in statuses if status.step is not None), default=None)
        self._servers.looked_at([status.process_incarnation for status in statuses])
        self._members.succeed(chief_incarnation=chief_incarnation, life=self._life_of(statuses))
        self._rise(max(epochs, default=0), why="another chief has taken over" if chief_incarnation > 1 else "")
        self._cluster.begin_training(Start(step=0, replicas_due=self._cluster.training.replicas_due))
        if step is not None:
            self.why, self.plan = _ANOTHER, "the parameter servers are asked where they are"
        self._stage = _TakingOver(work=self._adopt(), step_seen=step)

    def adopted(self, event: Done, now: float) -> None:
        """All shards obey this chief: decides how training continues."""
        found: Adopted = event.result
        others = [
            server
            for server, incarnation in zip(self._servers, found.process_incarnations, strict=True)
            if server.process_incarnation not in (0, incarnation)
        ]
        for index, incarnation in enumerate(found.process_incarnations):
            self._servers.adopted(index, process_incarnation=incarnation)
        stage = self._stage
        if not self._ending.is_over and isinstance(stage, _TakingOver) and event.work is stage.work:
            stage.record = found.record
            self._look_at_adoptions(stage, found.adoptions, now)
            return
        if not self._ending.is_over and isinstance(stage, _Begun) and event.work is stage.work:
            if has_applied(found.adoptions):
                self._lose_what_another_had()
            elif others and self._config.checkpoints is not None:
                # Then there may be new checkpoints.
                self._begin_again(f"{others[0].name} was restarted before anything was trained")
            else:
                self._await_model()
        self._cluster.model_calls.answer_waiting()

    def _await_model(self) -> None:
        """All shards obey this chief and hold nothing: a worker brings the model."""
        # Only now: a chief that is lost before has left no trace at the shards, and the next one has its number.
        self._meet_predecessors()
        self._stage = None
        self._out.afterwards(self._cluster.proceed)
        self._cluster.model_calls.answer_waiting()

    def _lose_what_another_had(self) -> None:
        """Notes that the cluster began again while this chief was cut off, and that it has taken another chief's training over."""
        why = "another chief had trained meanwhile on the parameter servers that this one found empty"
        if self._config.checkpoints is None:
            self._ending.fail(f"{why}; start the whole cluster again")
        else:
            self._leave_epoch()
            self._branch = Branch()  # the other chief's checkpoints are the only training
            self._seek(Search(why=why, is_start=False, has_lost=True))

    def _begin_again(self, why: str) -> None:
        """A shard that was empty is another process now. A chief that this one knows nothing of may have trained on the former meanwhile.

        So all begin anew, in another life: that chief may have used the epochs that come next in this one.
        """
        if self._config.checkpoints is None:
            self._out.note(f"{why}: all begin anew", is_warning=True)
            self._begin_anew(is_again=True)
            return
        self._model.restart()
        self._servers.release_all()
        # This chief has trained nothing: checkpoints that it finds now are another chief's. The epochs of another life may be lower.
        self._branch = Branch()
        self._seek(Search(why=why, is_again=True))

    def _begin_anew(self, *, is_again: bool = False, highest_epoch: int = 0) -> None:
        before = self._members.fence
        if is_again or not self._servers.have_witness:
            self._change_life()
        if is_again or highest_epoch or self._members.chief_incarnation > 1:
            self._rise(max(self._members.epoch, highest_epoch) + 1, why="nothing was trained yet")
            self._refuse_participants()
            self._data.resume(None)
        self._model.restart()
        self._cluster.attachments.resume(NO_STEP_ATTACHMENTS)
        self._cluster.begin_training(Start(step=0, replicas_due=self._cluster.training.replicas_due))
        self.why = self.plan = ""
        # Not from the epoch of this chief on: after the loss of all servers, another one may have begun again in epoch 1.
        self._branch = Branch(epoch=highest_epoch + 1)
        if self._members.fence == before and self._servers.are_adopted:
            self._await_model()
        else:
            self._servers.release_all()
            self._stage = _Begun(work=self._adopt())

    # -- going back

    def lost(self, shard: int, now: float, *, damage: str = "") -> None:
        """Notes that a shard's values are lost: another process is at its place, or it has said what `damage` it has."""
        why, stage = printable(damage) or f"{self._servers[shard].name} was restarted", self._stage
        if self._ending.is_over or isinstance(stage, _Seeking):
            return
        if isinstance(stage, _Restoring):
            text = f"{why} while step {stage.checkpoint.step} was being brought back: once more"
            self._out.note(text, is_warning=True)
            self._servers.doubt()
            self._restore(stage.search, stage.checkpoint, stage.work.manifest_sha256)
        elif self._has_begun:
            self._begin_again(f"{why} before the model was initialised")
        elif self._ending.is_finishing:
            self._ending.finish_as_asked(now)
        elif self._config.checkpoints is None:
            step = self._cluster.training.step
            self._ending.fail(f"{why} and has lost its variables (global_step {step}); start the whole cluster again")
        else:
            self._leave_epoch()
            self._seek(Search(why=why, is_start=isinstance(stage, _TakingOver), has_lost=True))

    def search_failed(self, event: Failed, now: float) -> None:
        """Storage cannot be read now, so that it is unknown which checkpoints there are."""
        stage = self._stage
        if isinstance(stage, _Seeking) and event.work is stage.work and not self._ending.is_over:
            self._try_again_later(stage.search, event.error.message, now)

    def checkpoint_found(self, event: Done, now: float) -> None:
        """Handles the result of a search: a whole checkpoint, or none."""
        stage, config, found = self._stage, self._config.checkpoints, event.result
        if not isinstance(stage, _Seeking) or event.work is not stage.work or self._ending.is_over or config is None:
            return
        search, checkpoint = stage.search, found.checkpoint
        search.num_failures = 0
        search.highest_epoch = max(search.highest_epoch, found.highest_epoch)
        for text in search.note_skipped(found.skipped):
            self._out.note(text, is_warning=True)
        if checkpoint is not None:
            search.highest_epoch = max(search.highest_epoch, checkpoint.fence.epoch)
        if checkpoint is None or (not search.has_lost and config.restore == RESTORE_NONE):
            self._continue_without_checkpoint(search)
        elif why := self._misfit(checkpoint):
            self._out.note(f"checkpoint {checkpoint.tag} is skipped: {printable(why)}", is_warning=True)
            self._seek_another(search, checkpoint.tag, why)
        else:
            own, saved = self._members.fence, checkpoint.fence
            if own.is_overtaken_by(saved) or (search.is_start and saved.chief_incarnation == own.chief_incarnation):
                # Another chief's numbers have come as far, or farther: numbers that this one has given, or would give, may be that one's.
                self._members.succeed(chief_incarnation=checkpoint.fence.chief_incarnation + 1, life=self._new_life())
                self._servers.begin_life()
                error = LeaseExpired("not registered here: another chief was here before. Register again")
                self._cluster.refuse_participants(error)
            self._restore(search, checkpoint, found.manifest_sha256)

    def restored(self, event: Done, now: float) -> None:
        """All shards hold the checkpoint's values: training continues there."""
        stage = self._restoring(event)
        if stage is None:
            return
        checkpoint = stage.checkpoint
        for index, incarnation in enumerate(event.result):
            self._servers.adopted(index, process_incarnation=incarnation)
        if not self._servers.have_witness:
            why = f"all parameter servers were restarted while step {checkpoint.step} was being brought back: once more"
            self._out.note(why, is_warning=True)
            self._restore(stage.search, checkpoint, stage.work.manifest_sha256)
            return
        self._note_rollback(stage.search, checkpoint)
        self._branch = Branch(epoch=self._members.epoch, base=checkpoint.age_order)
        self._members.remember(checkpoint.pushes)
        self._data.resume(checkpoint.record.data)
        self._cluster.attachments.resume(checkpoint.record.attached)
        training = self._cluster.begin_training(Start(step=checkpoint.step, oldest_kept=checkpoint.step))
        self._checkpoints.restored(checkpoint, now)
        # A chief that came after this one could not tell otherwise which training data these values have.
        self._stage = None
        training.begin()

    def restore_failed(self, event: Failed, now: float) -> None:
        """A checkpoint could not be brought back: an older one may do, if it is damaged; the same later, if storage cannot be read now."""
        stage = self._restoring(event)
        if stage is None:
            return
        tag, why = stage.checkpoint.tag, printable(event.error.message)
        self._servers.doubt()
        if isinstance(event.error, PASSING):
            self._try_again_later(stage.search, f"checkpoint {tag} could not be brought back: {why}", now)
        elif isinstance(event.error, DataLoss | CheckpointNotFound):
            self._out.note(f"checkpoint {tag} is damaged, an older one is tried: {why}", is_warning=True)
            self._seek_another(stage.search, tag, why)
        else:
            self._ending.fail(f"{stage.search.why}; checkpoint {tag} could not be brought back: {why}")

    def _seek(self, search: Search) -> None:
        config = self._config.checkpoints
        assert config is not None
        self.why, self.plan = search.why, "looking for the newest whole checkpoint"
        search.only = "" if search.has_lost or config.restore in (RESTORE_LATEST, RESTORE_NONE) else config.restore
        self._out.note(f"{search.why}; {self.plan}", kind=NoteKind.LOST if search.has_lost else NoteKind.OTHER, is_warning=search.has_lost)
        self._find(search)

    def _find(self, search: Search) -> None:
        work = FindCheckpoint(excluded=tuple(search.excluded), only=search.only)
        self._stage = _Seeking(search=search, work=work)
        self._out.add(work)

    def _seek_another(self, search: Search, tag: str, why: str) -> None:
        search.exclude(tag, why)
        self.plan = "looking for an older checkpoint"
        self._find(search)

    def _try_again_later(self, search: Search, why: str, now: float) -> None:
        """Storage cannot be read for now; an operator may repair it."""
        search.num_failures += 1
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** (search.num_failures - 1))
        self._pause.set(now + pause_s)
        self.plan = f"{printable(why)}; it is tried again every {seconds(pause_s)}"
        if pause_s < _MAX_PAUSE_S:
            self._out.note(f"{search.why}; {self.plan}", is_warning=True)

    def _try_again(self, now: float) -> None:
        """The pause after a failure of storage is over."""
        stage = self._stage
        if self._ending.is_over:
            return
        if isinstance(stage, _Seeking):
            self._find(stage.search)
        elif isinstance(stage, _Restoring):
            self._restore(stage.search, stage.checkpoint, stage.work.manifest_sha256)

    def _continue_without_checkpoint(self, search: Search) -> None:
        config = self._config.checkpoints
        assert config is not None
        if why := nothing_found(search, restore=config.restore, step=self._cluster.training.step, failure=self._checkpoints.failure):
            self._ending.fail(why)
        else:
            self._begin_anew(is_again=search.is_again, highest_epoch=search.highest_epoch)

    def _restore(self, search: Search, checkpoint: Checkpoint, manifest_sha256: str) -> None:
        members = self._members
        is_other_life = not self._servers.have_witness
        if is_other_life:
            self._change_life()
        least = members.epoch + 1 if search.is_start or search.has_tried or is_other_life else members.epoch
        self._rise(max(least, search.highest_epoch + 1), why=f"rolled back to step {checkpoint.step}", step=checkpoint.step)
        search.has_tried = True
        self._meet_predecessors()
        is_of_this_life = checkpoint.fence.life == members.fence.life
        members.stem_from(checkpoint.record.earlier if is_of_this_life else checkpoint.fence)
        self._take_settings_of(checkpoint.record)
        self._model.lose()
        self._servers.release_all()
        self._refuse_participants()
        search.reached = max(search.reached, self._cluster.training.step)
        training = self._cluster.begin_training(Start(step=checkpoint.step))
        self.why, self.plan = search.why, f"then step {checkpoint.step} of checkpoint {checkpoint.tag}"
        self._out.note(f"bringing back step {checkpoint.step} of checkpoint {checkpoint.tag} under epoch {members.epoch}: {search.why}")
        work = RestoreShards(
            fence=members.fence,
            tag=checkpoint.tag,
            manifest_sha256=manifest_sha256,
            specs=training.shard_specs(checkpoint.step),
            settings=self._settings.newest.for_shards(members.fence),
        )
        self._stage = _Restoring(search=search, checkpoint=checkpoint, work=work)
        self._out.add(work)

    def _restoring(self, event: Done | Failed) -> _Restoring | None:
        """Returns the present stage, if the event belongs to it."""
        stage = self._stage
        return stage if isinstance(stage, _Restoring) and event.work is stage.work and not self._ending.is_over else None

    def _take_settings_of(self, record: ChiefRecord) -> None:
        """A chief that starts continues with the settings of a checkpoint; one that has trained continues with those that hold now."""
        # A worker may have presented its model already; only what a chief has initialised or taken over has settings of its own.
        if not self._model.is_created and record.model is not None:
            self._model.restore(record.model)
            self.num_rollbacks, self.last_rollback = record.num_rollbacks, record.last_rollback
            self._settings.restore(record)

    def _misfit(self, checkpoint: Checkpoint) -> str:
        """Says why a whole checkpoint is not one to go back to; empty: it is."""
        model, own = checkpoint.record.model, self._model.model
        if checkpoint.cluster != self._config.cluster:
            return f"it is of cluster {checkpoint.cluster!r}, this is {self._config.cluster!r}"
        if model is None:
            return "it has no model"
        if not self._branch.has(checkpoint):
            return f"it is of epoch {checkpoint.fence.epoch}, of steps that were given up since"
        if own is not None:
            differences = own.differences(model)
            return f"it is of another model: {listed(differences, limit=3, separator='; ')}" if differences else ""
        try:
            self._model.check_placeable(model)
        except PsError as error:
            return error.message
        return ""

    def _note_rollback(self, search: Search, checkpoint: Checkpoint) -> None:
        """Counts a rollback, if it is one, and says so; loudly, since steps are done again."""
        epoch = self._members.epoch
        if not search.has_lost:
            self._out.note(f"training continues at step {checkpoint.step} of checkpoint {checkpoint.tag}, under epoch {epoch}")
            return
        self.num_rollbacks += 1
        self.reached = search.reached
        self.last_rollback = f"rolled back to step {checkpoint.step} (epoch {epoch}): {search.why}"
        num_lost = search.reached - checkpoint.step
        again = f"{num_lost} step{'s are' if num_lost > 1 else ' is'} computed again" if num_lost > 0 else "no step is lost"
        self.last_rollback += f"; {again}"
        self._out.note(self.last_rollback, kind=NoteKind.ROLLED_BACK, is_warning=True)

    # -- continuing where another chief ended

    def presented(self, now: float) -> None:
        """A worker has presented a model: if it is the one that shards hold, training continues."""
        stage = self._stage
        if isinstance(stage, _TakingOver) and stage.is_waiting_for_model and self._model.model is not None:
            stage.is_waiting_for_model = False
            stage.start = replace(stage.start, awaited=self._cluster.training.awaited)  # others have come back meanwhile
            self._begin_where_they_are(stage, now)

    def repeated(self, now: float) -> None:
        """All shards have applied the step that the earlier chief did not complete."""
        if isinstance(self._stage, _TakingOver) and not self._ending.is_over:
            self._secure()

    def adoption_failed(self, event: Failed, now: float) -> None:
        """A shard has refused this chief. One that holds a model has lost it, for example by an apply that broke off half-way."""
        stage, why = self._stage, printable(event.error.message)
        if self._ending.is_over or not isinstance(stage, _Begun | _TakingOver) or event.work is not stage.work:
            return
        self._servers.doubt()
        if isinstance(stage, _Begun):
            self._ending.fail(why)
        else:
            self._go_back(why)

    def _look_at_adoptions(self, stage: _TakingOver, adoptions: Sequence[Adoption], now: float) -> None:
        problem = self._look(stage, adoptions)
        # The shards may have been restarted since they were looked at: what they had applied then is lost, too.
        had_model = stage.step_seen is not None and stage.record is not None and stage.record.model is not None
        has_trained = has_applied(adoptions) or bool(stage.step_seen) or had_model
        if not problem:
            self._meet_predecessors()
            stage.start = replace(stage.start, wait_until=now + self._config.lease_s / 2)
            self._begin_where_they_are(stage, now)
        elif has_trained:
            self._meet_predecessors()
            self._go_back(problem)
        elif any(adoption.step is not None for adoption in adoptions):
            self._begin_again(f"{problem}, before anything was trained")
        elif self._config.checkpoints is not None:
            self._seek(Search(why="the cluster starts"))
        else:
            self._begin_anew()

    def _go_back(self, why: str) -> None:
        """Training cannot continue where the shards are."""
        if self._config.checkpoints is None:
            self._ending.fail(f"{why}, and there is no whole checkpoint to go back to; start the whole cluster again")
            return
        self._leave_epoch()
        self._seek(Search(why=why, has_lost=True))

    def _look(self, stage: _TakingOver, adoptions: Sequence[Adoption]) -> str:
        """Takes note of where the shards are. Returns the reason why training cannot continue there; empty: it can."""
        record, names = stage.record, self._servers.names
        # At once: a record may have to be kept for the data that is leased while the model is unknown.
        self._versions.skip_to(max(adoption.record_version for adoption in adoptions))
        policy = new_policy(self._config if record is None else self._config.with_former_policy(record.policy))
        found = resumption(adoptions, names=names, has_steps=not policy.spec.applies_on_arrival)
        if isinstance(found, str):
            return found
        if self._lacks_its_record(record, adoptions, policy):
            return "the chief before this one ended while it brought the parameter servers back to a checkpoint"
        if record is None or record.model is None:
            self._model.hold(tuple(adoption.layout_hash for adoption in adoptions))
            stage.is_waiting_for_model = True
        else:
            self._model.restore(record.model)
            problem = mismatch(adoptions, self._model.layouts, names=names)
            if problem:
                self._model.restart()
                return problem
            self.num_rollbacks, self.last_rollback = record.num_rollbacks, record.last_rollback
            self._settings.restore(record)
        if record is not None:
            self._members.stem_from(record.earlier)
        stage.pushes = newest_pushes(adoption.pushes for adoption in adoptions)
        self._data.resume(None)
        self._cluster.attachments.resume(NO_STEP_ATTACHMENTS)
        if record is None or record.epoch == self._members.epoch:
            self._take_attachments(record, adoptions)
        if record is not None and record.epoch == self._members.epoch:
            self._take_data(stage, record, adoptions)
            stage.chosen = promised(record, found, policy.spec)
        self._members.remember(stage.pushes)
        for adoption in adoptions:
            self._members.give_up(adoption.given_up)
        stage.found = found
        return ""

    def _lacks_its_record(self, record: ChiefRecord | None, adoptions: Sequence[Adoption], policy: Policy) -> bool:
        """Whether restored shards lack a part of their step's state, such as the training data that is done."""
        if any(adoption.last_apply is not None for adoption in adoptions):
            return False
        if record is not None:
            return record.epoch not in (0, self._members.epoch)
        has_steps = not policy.spec.applies_on_arrival
        return self._config.checkpoints is not None and has_steps and any(adoption.step for adoption in adoptions)

    def _take_data(self, stage: _TakingOver, record: ChiefRecord, adoptions: Sequence[Adoption]) -> None:
        """Takes over the training data that is done. Workers that contributed to it may still hold ranges of it."""
        self._data.resume(record.data)
        if record.data is None:
            return
        done = {identity for adoption in adoptions if adoption.last_apply is not None for identity in adoption.last_apply.ranges}
        self._data.finish(done)
        awaited = frozenset({one.worker for one in stage.pushes} | {one.push_id.worker for one in record.chosen})
        stage.start = replace(stage.start, done=tuple(sorted(done)), is_data_kept=True, awaited=awaited)

    def _take_attachments(self, record: ChiefRecord | None, adoptions: Sequence[Adoption]) -> None:
        """Takes over the lasting attachments: those of the record, if one was kept, and those that changed with steps since."""
        applies = sorted((one.last_apply for one in adoptions if one.last_apply is not None), key=lambda request: request.step)
        self._cluster.attachments.resume(
            NO_STEP_ATTACHMENTS if record is None else record.attached, (request.attached for request in applies)
        )

    def _begin_where_they_are(self, stage: _TakingOver, now: float) -> None:
        """Training begins where the shards are, repeating an interrupted step. If the model is unknown, a worker must present it first."""
        found, before = stage.found, self._cluster.training
        assert found is not None
        start = replace(stage.start, replicas_due=before.replicas_due)
        if self._model.model is None:
            self.why = self.plan = ""  # waits for a worker that knows it; data is leased meanwhile
            self._cluster.begin_training(replace(start, step=before.step))
            return
        start = replace(
            start,
            step=found.step,
            is_start=False,
            oldest_kept=0 if stage.record is None else stage.record.oldest_kept,
            counted=self._counted(stage, found.step + (found.redo is not None)),
            tag_suffix=f"-chief-{self._members.chief_incarnation}",  # its predecessor may have saved the same step
        )
        training = self._cluster.begin_training(start)
        self.why = self.why or _ANOTHER
        redo = found.redo
        if redo is None:
            self._secure()
            return
        self.plan = f"step {redo.step} is repeated with its {len(redo.contributors)} contributions, since not all have applied it"
        training.redo(redo, now)

    def _counted(self, stage: _TakingOver, step: int) -> tuple[ChosenPush, ...]:
        """Counts the contributions that the earlier chief had counted, in its order: a worker may have been answered already.

        `step`: the first that is made of them.
        """
        policy = new_policy(self._config)
        for one in stage.chosen:
            self._data.count(one.push_id, one.ranges)
            if one.attached != NO_ATTACHMENTS:
                self._cluster.attachments.count(one.push_id, one.attached)
        steps = {one.push_id: step if policy.spec.has_common_steps else step + position for position, one in enumerate(stage.chosen)}
        self._members.remember(stage.pushes, chosen=steps)
        return stage.chosen

    def _secure(self) -> None:
        """The shards are at one step. If steps are announced only once saved, saves this one too: the earlier chief may not have."""
        training = self._cluster.training
        if not self._checkpoints.holds_steps:
            self._continue()
            return
        self.plan = f"step {training.step} is saved before it is announced"
        self._checkpoints.hold(HeldStep(step=training.step, contributors=(), then=self._secured))

    def _secured(self, tag: str, now: float) -> None:
        if not self._ending.is_over:
            self._continue()

    def _continue(self) -> None:
        training = self._cluster.training
        words = f"a new chief (number {self._members.chief_incarnation}) took over at step {training.step}"
        self._out.note(words, kind=NoteKind.CHIEF)
        self._stage, self.plan = None, "the parameter servers are told how to work"
        training.begin()

    # -- inside

    @property
    def _config(self) -> CoordinationConfig:
        return self._settings.config

    def complete(self, now: float) -> None:
        """All shards work by the settings that hold: training begins, or continues."""
        training = self._cluster.training
        self.why = self.plan = ""
        self._model.make_ready()
        self._cluster.ledger.roll_back(training.step, now=now)
        self._checkpoints.training_begins(now)
        self._cluster.model_calls.model_ready()
        # The contributions that an earlier chief had counted may complete the step.
        self._out.afterwards(self._cluster.proceed)
        max_steps = self._config.max_steps
        if max_steps is not None and training.step >= max_steps:
            self._ending.finish(f"max_steps {max_steps} reached", now)

    def _leave_epoch(self) -> None:
        """Discards all work under way. Participants are not served before there is a step again."""
        self._checkpoints.roll_back()
        self._model.make_unready()
        self._model.lose()
        if not self._servers.have_witness:
            self._change_life()
        self._rise(self._members.epoch + 1, why="going back to a checkpoint")
        self._refuse_participants()
        self._cluster.begin_training(Start(step=self._cluster.training.step))

    def _change_life(self) -> None:
        """Begins another life: a later chief may have used the next epochs of this one, at servers that are lost now."""
        self._members.change_life(life=self._new_life())
        self._servers.begin_life()

    def _rise(self, epoch: int, *, why: str, step: int | None = None) -> None:
        epoch = max(self._members.epoch, epoch)
        self._versions.begin_epoch(epoch)
        self._members.begin_epoch(epoch, why=why, step=step)

    def _meet_predecessors(self) -> None:
        self._members.meet_predecessors()
        self._cluster.joining.welcome()

    def _refuse_participants(self) -> None:
        self._cluster.refuse_participants(self._members.other_epoch(max(1, self._members.epoch - 1)))

    def _adopt(self) -> AdoptShards:
        work = AdoptShards(fence=self._members.fence)
        self._out.add(work)
        return work

    def _life_of(self, statuses: Sequence[ShardStatus]) -> int:
        """The life that the shards are in, as long as one of them has been in any: epochs and incarnations continue there. Else another."""
        lives = {status.fence.life for status in statuses if status.fence.epoch}
        return lives.pop() if len(lives) == 1 else self._new_life()
