"""A chief for shards that are objects of this process: calls block in the threads that make them. Knows no network."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from chief.core import messages
from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.core.messages import LeaseRanges, SaveCheckpoint, SaveStep
from chief.options import CoordinationConfig
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.requests import (
    Authority,
    apply_requests,
    finding,
    prepare_request,
    record_found,
    restore_failure,
    restore_requests,
    save_failure,
    settings_of,
)
from ps_protocol.errors import InternalError, PsError
from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.process.waiting import QuickCondition
from ps_protocol.roles.chief import (
    MAX_WAIT_SLICE_S,
    AgreedModel,
    ClusterStatus,
    CommitResult,
    HyperparameterChange,
    LeaseReply,
    ModelReply,
    Participant,
    PushCommit,
    RegisterRequest,
    Registration,
    SavedCheckpoint,
    SettingsReply,
    TokenReply,
)
from ps_protocol.roles.shard import Adoption, CheckpointFile, RestoreProgress, RestoreRequest, SaveProgress, SaveRequest, SaveState, Shard
from ps_protocol.wire.codec import pack_record

# Does what a coordinator wants done at shards that are objects of this process, one after the other. Knows no network, no lock.
#
# What has come of it are events; a refusal of a shard is one, too. A Ctrl-C meanwhile is kept for after it: half a step would be the end of
# training for all threads.


Work = messages.ShardWork | messages.AdoptShard | messages.RecoveryInstruction
WORK = (messages.PrepareStep, messages.ApplyStep, messages.ConfigureShards, messages.AdoptShard, *messages.RecoveryInstruction.__args__)

Request = TypeVar("Request")
Result = TypeVar("Result")


def look_at(shards: Sequence[Shard]) -> messages.ShardsFound:
    """Looks at all shards, and does nothing to them."""
    return messages.ShardsFound(findings=tuple(finding(shard.status()) for shard in shards))


class AtShards:
    """Does one thing at all shards. `store` is None if there is no place for checkpoints; `authority` is that of the chief, not of this."""

    def __init__(self, shards: Sequence[Shard], *, store: CheckpointStore | None, authority: Authority) -> None:
        self.num_done = 0
        self.interrupt: KeyboardInterrupt | None = None
        self._shards = tuple(shards)
        self._store = store
        self._authority = authority

    def carry_out(self, work: Work) -> Iterator[messages.Event]:
        """Yields the events that report what comes of it, as it comes."""
        match work:
            case messages.SaveStep():
                yield from self._save(work)
            case messages.RestoreShards():
                self._obey(work)
                yield self._restore(work)
            case messages.FindCheckpoint():
                yield messages.CheckpointFound(checkpoint=None) if self._store is None else self._store.find(work)
            case messages.KeepRecord():
                yield self._keep(work)
            case messages.CommitCheckpoint():
                assert self._store is not None
                done = self._store.commit(work)
                if not isinstance(done, messages.SaveFailed):
                    self._store.prune(work.keep)
                yield done
            case _:
                try:
                    yield from self._at_all(work)
                except PsError as error:
                    yield messages.ShardFailed(shard=self.num_done, why=error.message, epoch=self._authority.epoch)

    def _at_all(self, work: Work) -> Iterator[messages.Event]:
        incarnation = self._authority.chief_incarnation
        match work:
            case messages.PrepareStep():
                request = prepare_request(work, chief_incarnation=incarnation)
                sums = [self._whole(shard.prepare_step, request) for shard in self._shards]
                yield messages.StepPrepared(step=work.step, sums=tuple(tuple(part) for part in sums), epoch=work.epoch)
            case messages.ApplyStep():
                requests = apply_requests(work, chief_incarnation=incarnation, num_shards=len(self._shards))
                for shard, step in zip(self._shards, requests, strict=True):
                    self._whole(shard.apply_step, step)
                yield messages.StepApplied(step=work.step, epoch=work.epoch)
            case messages.ConfigureShards():
                settings = settings_of(work, chief_incarnation=incarnation)
                for shard in self._shards:
                    self._whole(shard.configure, settings)
                yield messages.ShardsConfigured(version=work.version, epoch=work.epoch)
            case messages.AdoptShard():
                yield self._adopted(work.shard, self._adopt(work.shard))
            case messages.AdoptShards():
                self._obey(work)
                adoptions = [self._adopt(index) for index in range(len(self._shards))]
                yield from record_found(adoptions)
                for index, adoption in enumerate(adoptions):
                    yield self._adopted(index, adoption)

    def _obey(self, work: messages.AdoptShards | messages.RestoreShards) -> None:
        self._authority.obey(epoch=work.epoch, chief_incarnation=work.chief_incarnation, life=work.life)

    def _keep(self, work: messages.KeepRecord) -> messages.Event:
        record, incarnation, failure = pack_record(work.record), self._authority.chief_incarnation, ""
        for shard in self._shards if work.is_for_all else self._shards[:1]:
            try:
                shard.keep_record(epoch=work.epoch, chief_incarnation=incarnation, version=work.version, record=record)
            except PsError as error:
                failure = failure or error.message
        return messages.RecordKept(epoch=work.epoch, version=work.version, failure=failure)

    def _adopt(self, index: int) -> Adoption:
        authority = self._authority
        return self._shards[index].adopt(epoch=authority.epoch, chief_incarnation=authority.chief_incarnation, life=authority.life)

    def _adopted(self, index: int, adoption: Adoption) -> messages.ShardAdopted:
        process_incarnation = self._shards[index].status().process_incarnation
        return messages.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption)

    def _save(self, work: messages.SaveStep) -> Iterator[messages.Event]:
        request = SaveRequest(
            epoch=work.epoch,
            chief_incarnation=self._authority.chief_incarnation,
            step=work.step,
            tag=work.tag,
            num_shards=len(self._shards),
        )
        try:
            progress = [shard.save(request) for shard in self._shards]
            yield messages.StepCopied(tag=work.tag)
            files = tuple(_saved(shard, request, done) for shard, done in zip(self._shards, progress, strict=True))
        except PsError as error:
            if self._store is not None:
                self._store.abandon(work.tag)
            yield save_failure(work.tag, error)
        else:
            yield messages.StepSaved(tag=work.tag, files=files)

    def _restore(self, work: messages.RestoreShards) -> messages.Event:
        try:
            for index in range(len(self._shards)):
                self._adopt(index)
            for shard, request in zip(self._shards, restore_requests(work), strict=True):
                _restored(shard, request)
        except PsError as error:
            return restore_failure(work, error)
        incarnations = tuple(shard.status().process_incarnation for shard in self._shards)
        return messages.ShardsRestored(epoch=work.epoch, tag=work.tag, process_incarnations=incarnations)

    def _whole(self, call: Callable[[Request], Result], request: Request) -> Result:
        """Makes one call, and once more if a Ctrl-C breaks it off."""
        try:
            result = call(request)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            result = call(request)
        self.num_done += 1
        return result


def _saved(shard: Shard, request: SaveRequest, progress: SaveProgress) -> CheckpointFile:
    while progress.state is SaveState.WRITING:
        progress = shard.save(request, max_wait_s=MAX_WAIT_SLICE_S)
    if progress.file is None:
        raise progress.failure or InternalError("a save ended without a file")
    return progress.file


def _restored(shard: Shard, request: RestoreRequest) -> RestoreProgress:
    while not (progress := shard.restore(request, max_wait_s=MAX_WAIT_SLICE_S)).is_done:
        pass
    return progress


# A chief in this process: the `Chief` Protocol over the same coordinator, with shards that are objects. Owns the lock; knows no network.
#
# The thread whose call completes a step has it applied before its call returns, outside the lock.


Kind = TypeVar("Kind")


class InProcessChief:
    """Implements Chief over shards in this process, all of which it adopts at once. Thread-safe. Its time is `clock`, in seconds.

    `store`: its place for checkpoints, which the shards must have, too; None: none.
    """

    def __init__(
        self, shards: Sequence[Shard], *, config: CoordinationConfig, clock: Callable[[], float], store: CheckpointStore | None = None
    ) -> None:
        self._shards = tuple(shards)
        self._clock = clock
        names = [f"in-process:{index}" for index in range(len(self._shards))]
        self._coordinator = Coordinator(config=config, shard_addresses=names, now=clock(), has_successors=False)
        self._store, self._authority = store, Authority()
        self._changed = QuickCondition()
        self._calls = itertools.count(1)
        self._answers: dict[int, ev.Reply | ev.Refuse | None] = {}  # None: not answered yet
        self._to_do: deque[Work] = deque()
        self._num_waiting = 0
        self._report(look_at(self._shards))

    def register_worker(self, request: RegisterRequest) -> Registration:
        """Takes a participant in."""
        return self._call(Registration, lambda call: ev.RegisterWorker(call=call, request=request))

    def heartbeat(self, participant: Participant) -> bool:
        """Renews the lease; True once training is finished."""
        return self._call(bool, lambda call: ev.Heartbeat(call=call, participant=participant))

    def deregister_worker(self, participant: Participant, *, failure: str = "") -> None:
        """Ends the lease."""
        self._call(type(None), lambda call: ev.DeregisterWorker(call=call, participant=participant, failure=failure))

    def register_model(self, participant: Participant, model: ModelSpec, *, max_wait_s: float, may_initialize: bool = True) -> ModelReply:
        """Agrees on the model; blocks at most `max_wait_s` (and 20 s)."""
        return self._call(
            ModelReply,
            lambda call: ev.RegisterModel(
                call=call, participant=participant, model=model, max_wait_s=max_wait_s, may_initialize=may_initialize
            ),
        )

    def complete_initialization(self, participant: Participant, *, attempt: int) -> None:
        """Tells that the shards hold their initial values."""
        self._call(type(None), lambda call: ev.CompleteInitialization(call=call, participant=participant, attempt=attempt))

    def get_model(self, *, max_wait_s: float) -> AgreedModel:
        """Returns the agreed model; blocks at most `max_wait_s` (and 20 s) for it to be initialised."""
        return self._call(AgreedModel, lambda call: ev.GetModel(call=call, max_wait_s=max_wait_s))

    def commit_push(self, participant: Participant, commit: PushCommit) -> CommitResult:
        """Counts a contribution, and has the step applied that it completes."""
        return self._call(CommitResult, lambda call: ev.CommitPush(call=call, participant=participant, commit=commit))

    def dequeue_token(
        self, participant: Participant, *, local_step: int, request_id: int, max_wait_s: float, commit: PushCommit | None = None
    ) -> TokenReply:
        """Waits for a token, at most `max_wait_s` (and 20 s); counts `commit` first."""
        return self._call(
            TokenReply,
            lambda call: ev.DequeueToken(
                call=call, participant=participant, local_step=local_step, request_id=request_id, max_wait_s=max_wait_s, commit=commit
            ),
        )

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Reports the cluster."""
        with self._changed:
            work = self._tick_locked()
            status = self._coordinator.status(self._clock(), max_ledger_entries=max_ledger_entries)
        self._carry_out(work)
        return status

    def set_policy(self, policy: PolicySpec, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes how workers are coordinated, when no step is being applied; None if that has not come in time."""
        return self._change(lambda call: ev.SetPolicy(call=call, policy=policy, request_id=request_id, max_wait_s=max_wait_s))

    def set_hyperparameters(self, change: HyperparameterChange, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes an optimizer, when no step is being applied; None if that has not come in time."""
        return self._change(lambda call: ev.SetHyperparameters(call=call, change=change, request_id=request_id, max_wait_s=max_wait_s))

    def save_checkpoint(self, *, request_id: int, max_wait_s: float) -> SavedCheckpoint:
        """Saves a checkpoint, and waits until it is whole, at most `max_wait_s` (and 20 s)."""
        return self._call(SavedCheckpoint, lambda call: SaveCheckpoint(call=call, request_id=request_id, max_wait_s=max_wait_s))

    def lease_ranges(
        self,
        participant: Participant,
        data: DataSpec,
        *,
        max_ranges: int,
        request_id: int,
        max_wait_s: float,
        returned: tuple[int, ...] = (),
    ) -> LeaseReply:
        """Leases ranges of the training data; blocks at most `max_wait_s` (and 20 s)."""
        return self._call(
            LeaseReply,
            lambda call: LeaseRanges(
                call=call,
                participant=participant,
                data=data,
                max_ranges=max_ranges,
                request_id=request_id,
                max_wait_s=max_wait_s,
                returned=returned,
            ),
        )

    def finish(self, *, reason: str) -> int:
        """Ends training; returns the last step."""
        return self._call(int, lambda call: ev.FinishTraining(call=call, reason=reason))

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def _change(self, make_event: Callable[[int], ev.Event]) -> SettingsReply | None:
        value = self._answer(make_event)
        assert value is None or isinstance(value, SettingsReply)
        return value

    def _call(self, kind: type[Kind], make_event: Callable[[int], ev.Event]) -> Kind:
        value = self._answer(make_event)
        assert isinstance(value, kind)
        return value

    def _answer(self, make_event: Callable[[int], ev.Event]) -> ev.Answer:
        with self._changed:
            call = next(self._calls)
            self._answers[call] = None
        try:
            self._report(make_event(call))
            answer = self._wait_for_answer(call)
        finally:
            with self._changed:
                del self._answers[call]
        if isinstance(answer, ev.Refuse):
            raise answer.error
        return answer.value

    def _wait_for_answer(self, call: int) -> ev.Reply | ev.Refuse:
        is_waiting = False
        try:
            while True:
                with self._changed:
                    if not is_waiting:
                        self._num_waiting += 1
                        is_waiting = True
                    self._to_do.extend(self._tick_locked())
                    answer = self._answers[call]
                    # What others have caused is left to those who must wait anyway.
                    if answer is not None and (not self._to_do or self._num_waiting > 1):
                        self._num_waiting -= 1
                        is_waiting = False
                        return answer
                    work = [self._to_do.popleft()] if self._to_do else []
                    if not work:
                        due = self._coordinator.next_deadline()
                        self._changed.wait(None if due is None else max(0.001, min(due - self._clock(), threading.TIMEOUT_MAX)))
                self._carry_out(work)
        except BaseException:
            # Ctrl-C in a wait: the coordinator must not keep a place for somebody who is gone.
            self._report(ev.CallCancelled(call=call))
            raise
        finally:
            if is_waiting:
                with self._changed:
                    self._num_waiting -= 1

    def _report(self, event: ev.Event) -> None:
        with self._changed:
            work = self._tick_locked()
        self._carry_out(work)
        with self._changed:
            work = self._handle_locked(event)
        self._carry_out(work)

    def _tick_locked(self) -> list[Work]:
        now, due = self._clock(), self._coordinator.next_deadline()
        return self._handle_locked(ev.TimerFired()) if due is not None and due <= now else []

    def _handle_locked(self, event: ev.Event) -> list[Work]:
        """Tells the coordinator and hands out its answers; returns what must be done without the lock.

        There is nothing to end when all have left: the shards are memory, and live as long as somebody holds them.
        """
        work = []
        for instruction in self._coordinator.handle(event, self._clock()):
            if isinstance(instruction, WORK):
                work.append(instruction)
            elif isinstance(instruction, (ev.Reply, ev.Refuse)) and instruction.call in self._answers:
                self._answers[instruction.call] = instruction
        self._changed.notify_all()
        return work

    def _carry_out(self, work: Sequence[Work]) -> None:
        """Does what is to be done at the shards. What follows from a step, another contribution's turn, is for whoever waits."""
        if not work:
            return
        own, interrupt = deque(work), None
        while own:
            item, at_shards = own.popleft(), AtShards(self._shards, store=self._store, authority=self._authority)
            # A checkpoint is written while steps go on, so what follows from a copied step must not wait for the writing.
            following = self._to_do if isinstance(item, (ev.ApplyStep, SaveStep)) else own
            try:
                for event in at_shards.carry_out(item):
                    with self._changed:
                        following.extend(self._handle_locked(event))
            except Exception as error:
                # A defect: the other threads must not wait for a step that nobody will finish.
                self._report(ev.ShardFailed(shard=at_shards.num_done, why=f"it broke off: {error!r}"))
                raise
            interrupt = at_shards.interrupt or interrupt
        if interrupt is not None:
            raise interrupt
