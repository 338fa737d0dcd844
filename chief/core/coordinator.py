"""The chief's decisions: events in, instructions out. Owns joining, leaving and the end of training; no clock, thread or wire.

Each kind of event has one method. It checks first, and raises a typed error with nothing changed. Then it changes the state, and puts
instructions into the outbox. A `Training` has the state of one epoch; `Recovery` has a new one made for the next. `now` is monotonic, in
seconds. Not thread-safe.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from chief.core import messages as ev
from chief.core.cluster.attachments import ContributedAttachments
from chief.core.cluster.checkpoints import Checkpoints
from chief.core.cluster.data import DataLeases
from chief.core.cluster.ledger import Ledger
from chief.core.cluster.members import Member, Membership, MemberState, gone_error, superseded_error
from chief.core.cluster.model import ModelCalls, ModelRegistry
from chief.core.cluster.parameter_servers import ShardTable
from chief.core.cluster.settings import Settings
from chief.core.epoch.answers import RecordVersions
from chief.core.epoch.training import Parts, Start, Training
from chief.core.recovery import Recovery
from chief.core.report import cluster_status, explain
from chief.core.situation import Situation
from chief.core.waiting import Blocked, Line, Outbox, Timers, Waiting, slice_s
from chief.core.wording import listed, printable, seconds, workers_of
from chief.options import CoordinationConfig
from ps_protocol.errors import (
    CheckpointStorageMissing,
    ContributionMissing,
    NotInitialized,
    PsError,
    TrainingFailed,
    Unavailable,
)
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    ClusterState,
    ClusterStatus,
    CommitPushRequest,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    End,
    FinishTrainingRequest,
    GetModelRequest,
    HeartbeatRequest,
    LeaseRangesRequest,
    Participant,
    ParticipantKind,
    RegisterModelRequest,
    RegisterRequest,
    Registration,
    SaveCheckpointRequest,
    StepTotals,
)

Instructions = list[ev.Instruction]

# A participant that waits for admission gets an answer with the reason within this time, and asks again.
_ARRIVAL_S = 1.0
# A step that is being applied when training is finished is the last one, if the shards manage it within this time.
_FINISH_GRACE_S = 1.0
# Workers that have not come yet when training is finished have so long to come and hear it: as long as `connect()` tries by default.
_LATECOMERS_S = 60.0
# Once this process is asked to end: how long participants of a training that is over may take to leave, and a checkpoint to become whole.
_LEAVE_GRACE_S = 1.5
_SAVE_GRACE_S = 7.0
_LOOK_AGAIN_S = 0.05
# Of those that a participant names.
_MAX_TRANSPORTS = 8
# A thousand callers whose time is up get one explanation, not each their own.
_SAME_WORDS_S = 0.25


class Coordinator:
    """The chief's core. `handle` is the only thing that changes it.

    `new_life` names, at random, a life of the cluster that begins: no shard has obeyed a chief before, or all begin anew since one is lost.
    `session_key`: random, and the shards are given it when they are adopted.
    """

    def __init__(
        self,
        *,
        config: CoordinationConfig,
        shard_addresses: Sequence[str],
        now: float,
        has_successors: bool = True,
        new_life: Callable[[], int],
        session_key: bytes,
    ) -> None:
        out, timers = Outbox(), Timers()
        waiting = Waiting(out, timers)
        model = ModelRegistry(num_shards=len(shard_addresses))
        self._settings = Settings(config, model=model, out=out, waiting=waiting)
        self._checkpoints = Checkpoints(
            config.checkpoints,
            out=out,
            waiting=waiting,
            timers=timers,
            saver=lambda: self._training,
            proceed=self.proceed,
            end_if_deserted=self._end_if_deserted,
            is_training=lambda: self.state is ClusterState.TRAINING,
            explain=self.explain,
        )
        self._parts = Parts(
            out=out,
            waiting=waiting,
            timers=timers,
            members=Membership(config=lambda: self._settings.config, epoch=1, session_key=session_key, timers=timers, on_lapse=self._lapse),
            model=model,
            data=DataLeases(),
            attachments=ContributedAttachments(lambda: model.model, out, has_successors=has_successors),
            servers=ShardTable(shard_addresses, now=now),
            ledger=Ledger(size=config.ledger_size, now=now),
            settings=self._settings,
            checkpoints=self._checkpoints,
            versions=RecordVersions(),
            has_successors=has_successors,
        )
        self._out, self._timers = out, timers
        self._members, self._model, self._servers = self._parts.members, model, self._parts.servers
        # The address where workers reach this chief, for messages to people; empty: unknown.
        self.address = ""
        self._failure = self._finish_reason = ""
        # Whether the cluster cannot continue, and whether training is finished: asked for several times with every contribution.
        self.is_failed = self.is_finished = False
        self._end = End.FINISHED  # once there is a reason
        # Set while a step is being applied that shall be the last one, with the calls that wait for that.
        self._pending_finish = ""
        self._finish_calls: Line[None] = waiting.line()
        self._finish_timer = timers.timer(self.finish_as_asked)
        # Set while workers may still come to a training that is finished.
        self._latecomers_timer = timers.timer(lambda now: self._end_if_deserted())
        self._is_asked = False
        self._ended: ev.EndProcesses | None = None
        # Set once this process is asked to end: no checkpoint holds it up beyond the one, no participant of a training that is over
        # beyond the other.
        self._save_by = self._leave_by = math.inf
        self._end_timer = timers.timer(self._end_in_time)
        self._arrivals = waiting.line(self._arrival_expired)
        self._words: tuple[float, int, int, str] = (-math.inf, 0, 0, "")
        self._recovery = Recovery(self._parts, self, new_life=new_life)
        self._training = Training(self._parts, Start(step=0), self)
        self._models = ModelCalls(
            model,
            host=self,
            config=lambda: self._settings.config,
            optimizers=lambda: self._settings.optimizers,
            members=self._members,
            servers=self._servers,
            attachments=self._parts.attachments,
            out=out,
            waiting=waiting,
        )
        # The handler of a request gets its call, too.
        self._requests: dict[type, Callable[[Any, Any, float], None]] = {
            RegisterRequest: self._register,
            HeartbeatRequest: self._heartbeat,
            DeregisterRequest: self._deregister,
            RegisterModelRequest: self._register_model,
            CompleteInitializationRequest: self._models.complete,
            GetModelRequest: self._models.get,
            CommitPushRequest: lambda call, request, now: self._training.commit_push(call, request, now),
            DequeueTokenRequest: lambda call, request, now: self._training.dequeue_token(call, request, now),
            ChangeSettingsRequest: lambda call, request, now: self._training.change_settings(call, request, now),
            SaveCheckpointRequest: self._want_checkpoint,
            LeaseRangesRequest: lambda call, request, now: self._training.lease_ranges(call, request, now),
            FinishTrainingRequest: self._finish_training,
        }
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.AskedToEnd: self._asked_to_end,
            ev.CallCancelled: lambda event, now: waiting.cancel(event.call),
            ev.TimerFired: lambda event, now: timers.fire(now),
            ev.ShardAdopted: self._recovery.adopted,
            ev.SessionKeysFound: lambda event, now: self._members.learn_keys(event.keys),
            ev.ShardSeen: self._see_shard,
            ev.ShardUnreachable: lambda event, now: self._servers.unreachable(event.shard, why=event.why, now=now),
            ev.ShardFailed: self._fail_shard,
            ev.ShardsFound: self._recovery.found,
            ev.RecordFound: self._recovery.record_found,
            ev.ShardRestoring: lambda event, now: self._servers.restoring(event.shard, event.num_bytes_read, event.num_bytes),
            ev.ReplicasChanged: self._replicas_changed,
            ev.ContributionsDiffer: self._contributions_differ,
            ev.ReplicaReady: lambda event, now: self._training.replica_ready(event),
            ev.Done: lambda event, now: self._when_done[type(event.work)](event, now),
            ev.Failed: lambda event, now: self._when_failed[type(event.work)](event, now),
        }
        # Whoever has given an instruction looks whether it is still this very one that it waits for.
        self._when_done: dict[type, Callable[[ev.Done, float], None]] = {
            ev.PrepareStep: self._prepared,
            ev.ApplyStep: self._applied,
            ev.ConfigureShards: lambda event, now: self._training.configured(event, now),
            ev.KeepRecord: self._kept,
            ev.FindCheckpoint: self._recovery.checkpoint_found,
            ev.RestoreShards: self._recovery.restored,
            ev.CopyStep: self._checkpoints.copied,
            ev.WriteStep: self._checkpoints.written,
            ev.CommitCheckpoint: self._committed,
            ev.BringReplicasBack: lambda event, now: self._training.replicas_back(event, now),
        }
        self._when_failed: dict[type, Callable[[ev.Failed, float], None]] = {
            ev.PrepareStep: self._refused,
            ev.ApplyStep: self._refused,
            ev.ConfigureShards: self._refused,
            ev.AdoptShard: lambda event, now: self.fail(printable(event.error.message)),
            ev.KeepRecord: self._kept,
            ev.FindCheckpoint: self._recovery.search_failed,
            ev.RestoreShards: self._recovery.restore_failed,
            ev.CopyStep: self._save_failed,
            ev.WriteStep: self._save_failed,
            ev.CommitCheckpoint: self._save_failed,
            ev.BringReplicasBack: lambda event, now: self._training.replicas_back(event, now),
        }

    def handle(self, event: ev.Event, now: float) -> Instructions:
        """Handles an event and returns the instructions that follow, in order. Raises PsError, and then nothing has changed."""
        try:
            if type(event) is ev.Asked:
                self._requests[type(event.request)](event.call, event.request, now)
            else:
                self._handlers[type(event)](event, now)
            return self._out.finish(now)
        except BaseException:
            self._out.discard()
            raise

    def next_deadline(self) -> float | None:
        """Returns the latest time for TimerFired; None: never. Call it again after each event."""
        return self._timers.next()

    # -- queries

    @property
    def epoch(self) -> int:
        """Epoch of the cluster: it rises whenever the cluster goes back to a checkpoint."""
        return self._members.epoch

    @property
    def chief_incarnation(self) -> int:
        """The chief's number among those of the cluster; 1 until it knows them."""
        return self._members.chief_incarnation

    @property
    def global_step(self) -> int:
        """The open step: the number of steps applied."""
        return self._training.step

    @property
    def state(self) -> ClusterState:
        """The state of the cluster."""
        if self._failure:
            return ClusterState.FAILED
        if self._finish_reason:
            return ClusterState.FINISHED
        if self._recovery.why:
            return ClusterState.RECOVERING
        if not self._servers.are_adopted:
            return ClusterState.CONNECTING
        return ClusterState.TRAINING if self._model.is_ready else ClusterState.WAITING_FOR_MODEL

    def explain(self, now: float, *, asking: int | None = None) -> str:
        """Returns words for the cluster's wait; `asking` is a worker that waits for a token although it does not block."""
        return explain(self._situation(asking), now=now)

    def explain_to_many(self, now: float) -> str:
        """As `explain`, up to a quarter of a second old."""
        at, step, num_contributions, text = self._words
        policy = self._training.policy
        if now - at > _SAME_WORDS_S or (step, num_contributions) != (policy.step, policy.num_contributions):
            text = self.explain(now)
            self._words = now, policy.step, policy.num_contributions, text
        return text

    def status(self, now: float, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster, without what only the chief's process knows."""
        return cluster_status(self._situation(), now=now, max_ledger_entries=max_ledger_entries)

    @property
    def totals(self) -> StepTotals:
        """All steps so far, together."""
        return self._parts.ledger.totals

    def _situation(self, asking: int | None = None) -> Situation:
        return Situation(
            state=self.state,
            end=self.end,
            reason=self.reason,
            parts=self._parts,
            training=self._training,
            recovery=self._recovery,
            asking=asking,
            address=self.address,
            awaited_workers=self._awaited_workers,
        )

    # -- for its parts

    @property
    def training(self) -> Training:
        """The training that there is now."""
        return self._training

    @property
    def step(self) -> int:
        """The open step."""
        return self._training.step

    @property
    def end(self) -> End:
        """Whether training is finished, and how it has ended."""
        return self._end if self._finish_reason else End.NOT_YET

    @property
    def is_over(self) -> bool:
        """Whether training is finished, or has failed."""
        return bool(self._failure or self._finish_reason)

    @property
    def is_finishing(self) -> bool:
        """Whether training is finished as soon as the step is applied that is being applied."""
        return bool(self._pending_finish)

    @property
    def is_recovering(self) -> bool:
        """Whether the shards are being brought to one step."""
        return bool(self._recovery.why)

    @property
    def reason(self) -> str:
        """Why training is over; empty: it is not."""
        return self._failure or self._finish_reason

    def record(self) -> ChiefRecord:
        """Returns the record for a successor of this chief, without the state that changes with every step."""
        return ChiefRecord(
            model=self._model.model,
            policy=self._settings.config.policy,
            settings_version=self._settings.version_that_holds,
            rejects_nonfinite=self._settings.config.reject_nonfinite,
            optimizers=self._settings.optimizers,
            num_rollbacks=self._recovery.num_rollbacks,
            last_rollback=self._recovery.last_rollback,
            earlier=self._members.earlier,
        )

    def worker(self, participant: Participant, what: str, now: float) -> Member:
        """Returns the live worker that calls. Raises InvalidSpec, TrainingFailed, EpochMismatch, Superseded or LeaseExpired."""
        if self.is_failed and participant.kind is ParticipantKind.WORKER:
            self.refuse_if_failed()
        return self._members.check_worker(participant, what, now=now)

    def refuse_if_failed(self) -> None:
        """Raises TrainingFailed once the cluster cannot continue."""
        if self._failure:
            raise TrainingFailed(self._failure)

    def refuse_if_recovering(self, now: float) -> None:
        """Raises Unavailable while nothing can be counted, so that the caller tries again."""
        if self._recovery.why:
            raise Unavailable(self.explain(now))

    def check_settings_may_change(self) -> None:
        """Raises TrainingFailed once training is over."""
        self.refuse_if_failed()
        if self._finish_reason:
            raise TrainingFailed(f"training is finished ({self._finish_reason}); its settings cannot be changed any more")

    def begin_training(self, start: Start) -> Training:
        """Replaces the present training by another."""
        self._training.end()
        self._training = Training(self._parts, start, self)
        return self._training

    def proceed(self, now: float) -> None:
        """Begins the next task of the shards."""
        self._training.proceed(now)

    def model_initialised(self, now: float) -> None:
        """The shards hold the model's first values: training begins as soon as they work as they shall."""
        self._training.begin_with_model(now)

    def model_ready(self, now: float) -> None:
        """Answers all that wait for the model: the shards hold its first values and their settings."""
        self._model.make_ready()
        self._checkpoints.training_begins(now)
        self._parts.ledger.open_step(self.step, now=now)
        self._models.model_ready()
        self._training.answers.keep()
        self._out.afterwards(self.proceed)

    def answer_about_model(self) -> None:
        """The shards, or the model, have changed: answers the calls that wait for that."""
        self._models.answer_waiting()

    def refuse_participants(self, error: PsError) -> None:
        """All calls that wait as participants get this error."""
        self._training.refuse_tokens(error)
        self._models.refuse_participants(error)
        self._training.refuse_the_rest(error)

    # -- participants that join and leave
    #
    # No participant is admitted before the chief knows its predecessors: a number that it gave earlier might be another process's,
    # whose contributions the shards or a checkpoint know. A call that comes earlier waits; its answer says what for.

    def welcome(self) -> None:
        """Participants that came before the chief knew its predecessors are admitted, or refused, once the event has been handled."""
        if self._arrivals:
            self._out.afterwards(self._take_in)

    def _register(self, call: int, request: RegisterRequest, now: float) -> None:
        """Admits a participant, once the chief knows the earlier ones. Raises the errors of Membership, and TrainingFailed."""
        members = self._members
        self.refuse_if_failed()
        if self._ended is not None:
            raise self._ended.refusal
        if not members.knows_predecessors:
            self._arrivals.block(call, request, until=now + _ARRIVAL_S)
            return
        is_new_here = request.former is not None and not members.knows(request.former)
        repeated = members.repeated(request)
        member = repeated or members.returned(request, now=now)
        if member is None:
            member, former = members.admit(request, now=now)
            again = ", in the place of an earlier process" if former is not None else ""
            self._out.note(f"{member.name} joined {member.where}{again}", kind=ev.NoteKind.JOINED)
            if former is not None:
                self._release(former, superseded_error(former.incarnation, by=member), now)
        if member.kind is ParticipantKind.WORKER:
            # A late copy names ranges that have been given back since.
            held = request.held if repeated is None and self._is_who_it_was(request, member) else None
            self._training.join(member, held=held, is_new_here=is_new_here, now=now)
        members.renew(member, now=now)
        self._out.reply(call, self._registration(member))

    def _is_who_it_was(self, request: RegisterRequest, member: Member) -> bool:
        return request.former == self._members.participant(member)

    def _registration(self, member: Member) -> Registration:
        training, is_worker = self._training, member.kind is ParticipantKind.WORKER
        return Registration(
            participant=self._members.participant(member),
            lease_s=member.lease_s,
            shard_addresses=self._servers.addresses,
            global_step=training.step,
            may_contribute=is_worker and not self.is_finished and training.policy.may_contribute(member.index),
            chief_incarnation=self.chief_incarnation,
            standby_addresses=self._servers.standby_addresses,
            shards_version=self._servers.version_under(self.chief_incarnation),
            rejects_nonfinite=self._settings.config.reject_nonfinite,
        )

    def _take_in(self, now: float) -> None:
        for blocked in self._arrivals:
            self._arrivals.take(blocked.who)
            try:
                self._register(blocked.call, blocked.ask, now)
            except PsError as error:
                self._out.refuse(blocked.call, error)

    def _arrival_expired(self, blocked: Blocked[RegisterRequest], now: float) -> None:
        """A call has waited for admission as long as one call may."""
        self._arrivals.refuse(blocked.who, Unavailable(self.explain(now)))

    def _heartbeat(self, call: int, request: HeartbeatRequest, now: float) -> None:
        """Renews a lease."""
        if not self.is_finished:
            self.refuse_if_failed()
            member = self._members.check(request.participant, now=now)
            member.travels(_transport(request.transports), request.traffic)
            self._members.renew(member, now=now)
        elif (member := self._members.look_up(request.participant)).is_live:
            self._members.renew(member, now=now)
        self._out.reply(call, self.end)

    def _deregister(self, call: int, request: DeregisterRequest, now: float) -> None:
        """A participant leaves."""
        member = self._members.look_up_leaver(request.participant)
        self._out.reply(call, None)
        if member.state is MemberState.LEFT:
            return
        self._members.leave(member, failure=request.failure, now=now)
        words = f"{member.name} failed {member.where}: {member.failure}" if member.failure else f"{member.name} left"
        kind = ev.NoteKind.LOST if member.failure else ev.NoteKind.LEFT
        self._out.note(words, kind=kind, is_warning=bool(member.failure))
        self._release(member, gone_error(member, now=now), now)
        self._after_loss(now)

    def _lapse(self, member: Member, now: float) -> None:
        """The time of a lease is over."""
        if not member.is_live:
            return
        self._members.lapse(member, now=now)
        words = f"the lease of {member.name} has ended: last seen {seconds(now - member.last_seen)} ago {member.where}"
        self._out.note(words, kind=ev.NoteKind.LOST, is_warning=True)
        self._release(member, gone_error(member, now=now), now)
        self._after_loss(now)

    def _release(self, gone: Member, error: PsError, now: float) -> None:
        """Releases the tokens and ranges of a lost incarnation, and refuses its blocked calls."""
        if gone.kind is ParticipantKind.WORKER:
            self._training.leave(gone, error, now)
            self._models.drop(self._members.participant(gone), error)

    def _register_model(self, call: int, request: RegisterModelRequest, now: float) -> None:
        self._models.register(call, request, now)
        self._recovery.presented(now)

    # -- how training ends

    def _finish_training(self, call: int | None, request: FinishTrainingRequest, now: float) -> None:
        """A client ends training."""
        if self.is_over:
            if call is not None:
                self._out.reply(call, self.step)
            self._latecomers_timer.clear()
            self._end_if_deserted()
            return
        self._is_asked = True
        if call is not None:
            self._finish_calls.block(call, None)
        if not self._pending_finish:
            self._end = End.INTERRUPTED if request.interrupts else End.FINISHED
        self._finish_when_applied(printable(request.reason) or "finished by request", now)

    def _finish_when_applied(self, reason: str, now: float) -> None:
        """Finishes at once, or as soon as the step is applied that is being applied now, or soon, if this chief has no servers yet."""
        policy = self._training.policy
        if not policy.is_complete and self.state is not ClusterState.CONNECTING:
            self.finish(reason, now)
        elif not self._pending_finish:
            self._pending_finish = reason
            if policy.is_complete:
                policy.finish()
            self._finish_timer.set(now + _FINISH_GRACE_S)  # servers that have not been adopted would take no order to end

    def finish_as_asked(self, now: float) -> None:
        """Ends training as requested."""
        self.finish(self._pending_finish, now)

    def finish(self, reason: str, now: float) -> None:
        """Finishes training: answers all that wait. Unless it was asked for, the processes stay for workers that have not come yet."""
        self._finish_reason, self._pending_finish, self.is_finished = reason, "", bool(reason)
        self._finish_timer.clear()
        self._checkpoints.finish(now, is_idle=self._training.is_idle)
        self._recovery.give_up()
        how = "was interrupted" if self._end is End.INTERRUPTED else "is finished"
        self._out.note(f"training {how} at step {self.step}: {reason}", kind=ev.NoteKind.FINISHED)
        self._finish_calls.answer_all(self.step)
        self._training.release()
        self._settings.refuse(TrainingFailed(f"training was finished ({reason}) before its settings were changed"))
        self._models.answer_waiting()
        if not self._is_asked:
            self._latecomers_timer.set(now + _LATECOMERS_S)
        if self._awaited_workers and not self._members.num_live:
            self._out.note(f"waiting for {self._awaited_workers} to come and hear it, for {_LATECOMERS_S:.0f} s")
        self._end_if_deserted()

    def fail(self, reason: str) -> None:
        """Fails the cluster, which cannot continue: all that wait get the reason."""
        if self.is_over:
            return
        self._failure, self._pending_finish, self.is_failed = reason, "", bool(reason)
        self._recovery.give_up()
        self._finish_timer.clear()
        error = TrainingFailed(reason)
        self._out.note(f"training has failed: {reason}", kind=ev.NoteKind.FINISHED, is_warning=True)
        self._finish_calls.refuse_all(error)
        self._training.refuse_tokens(error)
        self._settings.refuse(error)
        self._checkpoints.refuse(error)
        self._training.refuse_the_rest(error)
        self._models.refuse_completions(error)
        self._models.answer_waiting()
        self.welcome()
        self._end_if_deserted()

    def _after_loss(self, now: float) -> None:
        """Handles the loss of a participant: perhaps it was the last."""
        if self.state is ClusterState.TRAINING and not self._pending_finish and self._members.last_left_in_peace():
            self._finish_when_applied("all workers have left", now)
        else:
            self._end_if_deserted()

    def _end_if_deserted(self) -> None:
        """Ends the processes, once, if training is over and all participants have left."""
        if self.is_over and not (self._checkpoints.is_saving_last or self._members.num_live or self._awaited_workers):
            self._end_processes()

    def _end_processes(self) -> None:
        if self._ended is None:
            why = self.reason or f"asked to; training continues with another chief, at step {self.step}"
            self._ended = ev.EndProcesses(exit_code=1 if self._failure else 0, reason=why, has_successor=not self.is_over)
            self._out.add(self._ended)
            self.welcome()

    def _asked_to_end(self, event: ev.AskedToEnd, now: float) -> None:
        """Ends this process soon, and no training: a later chief continues it. Asked again, ends this process at once."""
        is_again = self._save_by < math.inf
        self._save_by = now if is_again else now + _SAVE_GRACE_S
        self._leave_by = now if is_again else math.inf
        if not self.is_over and not self.is_finishing:
            self._out.note(f"{event.why}: this chief ends, and leaves the training to its successor", kind=ev.NoteKind.CHIEF)
            if self._model.is_ready:
                self._checkpoints.save_before_end()
        self._end_in_time(now)

    def _end_in_time(self, now: float) -> None:
        """Ends this process, unless a checkpoint may become whole in time, or participants have had no time to hear that all is over."""
        if self.is_over:
            self._leave_by = min(self._leave_by, now + _LEAVE_GRACE_S)
        is_saving = (self._checkpoints.is_saving or self.is_finishing) and now < self._save_by
        if is_saving or (self.is_over and self._members.num_live and now < self._leave_by):
            self._end_timer.set(now + _LOOK_AGAIN_S)
        else:
            self._end_processes()

    @property
    def _awaited_workers(self) -> str:
        """A description of the workers that may still come to a training that is finished; empty: none."""
        num_awaited = (self._settings.config.num_workers or 1) - self._members.num_known_workers
        if self._latecomers_timer.due is None or num_awaited <= 0:
            return ""
        return "1 worker" if num_awaited == 1 else f"{num_awaited} workers"

    # -- shards

    def _prepared(self, event: ev.Done, now: float) -> None:
        if isinstance(event.result, ev.Lacking):
            self._lack(event, event.result, now)
        else:
            self._training.prepared(event, now)

    def _applied(self, event: ev.Done, now: float) -> None:
        if event.result is not None:
            self._lack(event, event.result, now)
        elif self._training.applied(event, now):
            self._recovery.repeated(now)

    def _refused(self, event: ev.Failed, now: float) -> None:
        """A shard refuses what all are told to do: it is not what it should be."""
        if self._training.awaits(event):
            self.fail(printable(event.error.message))

    def _lack(self, event: ev.Done, lacking: ev.Lacking, now: float) -> None:
        """Handles contributions that shards lack. Only their own worker can have committed them: it has forged them, or has a defect."""
        step = self._training.step
        lacked = self._training.lack(event, lacking, now)
        for push_id in lacked:
            shards = [self._servers[shard].name for shard, one in lacking.missing if one == push_id]
            what = f"it committed contribution {push_id} to step {step}, which {listed(shards)} never received"
            error = ContributionMissing(
                f"worker {push_id.worker}: {what}; push a contribution to every parameter server before it is committed",
                facts={"worker": str(push_id.worker), "step": str(step)},
            )
            self._training.answers.refuse_about((push_id,), error)
            member = self._members.find(ParticipantKind.WORKER, push_id.worker)
            if member is not None and member.incarnation == push_id.incarnation and member.is_live:
                self._members.expel(member, why=what, now=now)
                words = f"expelled {member.name} (incarnation {member.incarnation}) {member.where}: {what}"
                self._out.note(words, kind=ev.NoteKind.LOST, is_warning=True)
                self._release(member, error, now)
        if lacked:
            self._after_loss(now)

    def _see_shard(self, event: ev.ShardSeen, now: float) -> None:
        is_other = self._servers.seen(event.shard, process_incarnation=event.process_incarnation, report=event.report)
        if is_other and not self.is_over and self._recovery.has_nothing:
            self._out.add(ev.AdoptShard(shard=event.shard))
        elif is_other or event.damage:
            self._recovery.lost(event.shard, now, damage="" if is_other else event.damage)

    def _fail_shard(self, event: ev.ShardFailed, now: float) -> None:
        self.fail(f"{self._servers[event.shard].name}: {printable(event.why)}")

    def _kept(self, event: ev.Done | ev.Failed, now: float) -> None:
        self._training.answers.kept(event)
        self._recovery.kept(now)

    def _replicas_changed(self, event: ev.ReplicasChanged, now: float) -> None:
        """Notes other processes for a shard; participants get their addresses with their next token."""
        self._servers.held_by(event.shard, address=event.address, standby=event.standby, missing=printable(event.missing))
        if event.standby:
            self._training.replica_counts(event.shard)

    def _contributions_differ(self, event: ev.ContributionsDiffer, now: float) -> None:
        """Says which workers have given the two servers of a shard different gradients; they may be broken, or their network, or lie."""
        self._out.note(
            f"{workers_of(event.contributions)} had given the two servers of ps {event.shard} different gradients for step {event.step}"
            f" (contribution {listed([str(push_id) for push_id in event.contributions])}); the server that variables are read from is"
            " believed, and the other one is left out until it is brought back. If that happens again, replace the worker or its machine",
            is_warning=True,
        )

    # -- checkpoints

    def _want_checkpoint(self, call: int | None, request: SaveCheckpointRequest, now: float) -> None:
        """Handles a request for a checkpoint of this step or later. Raises CheckpointStorageMissing, NotInitialized or TrainingFailed."""
        if self._settings.config.checkpoints is None:
            raise CheckpointStorageMissing("the cluster has no place for checkpoints; start its roles with --checkpoint-dir")
        self.refuse_if_failed()
        fulfilled = self._checkpoints.fulfilled(request.request_id)
        if fulfilled is not None:
            if call is not None:
                self._out.reply(call, fulfilled)
            return
        if not self._model.is_ready and not self.is_recovering:
            raise NotInitialized(f"the variables have no values yet: {self.explain(now)}")
        if self.is_finished and not self._checkpoints.is_saving_last and not self._checkpoints.has_whole(self.step):
            why = self._checkpoints.failure
            raise TrainingFailed(f"training is finished ({self._finish_reason}), and its last step could not be saved: {why}")
        self._checkpoints.want(request.request_id, call, until=now + slice_s(request.max_wait_s))

    def _committed(self, event: ev.Done, now: float) -> None:
        self._checkpoints.committed(event, now)
        self._end_if_deserted()

    def _save_failed(self, event: ev.Failed, now: float) -> None:
        self._training.save_failed(event, now)
        self._end_if_deserted()


def _transport(names: Sequence[str]) -> str:
    """Returns a participant's transports in a few words."""
    return printable(", ".join(sorted({*names[:_MAX_TRANSPORTS]})))
