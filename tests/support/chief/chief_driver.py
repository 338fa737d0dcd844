"""Drives a Coordinator as the shell would, with a clock that is a number, and shards that are values here, which outlive their chief."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.core.epoch.answers import LINGER_S
from chief.options import CheckpointConfig, CoordinationConfig
from ps_protocol.errors import DataLoss, InternalError, PsError, StorageFailed, StorageFull
from ps_protocol.model.data import DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    CommitPushRequest,
    CommitResult,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    HeartbeatRequest,
    HyperparameterChange,
    LeaseRangesRequest,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    RegisterRequest,
    Registration,
    SettingsReply,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId
from ps_protocol.roles.fence import NOBODY, joined_keys
from ps_protocol.roles.request import Request
from ps_protocol.roles.shard import (
    Adoption,
    AppliedPush,
    ApplyRequest,
    CheckpointFile,
    ShardReport,
    ShardSettings,
    ShardStatus,
    WorkerPushes,
)
from ps_server.contributions.inbox import PUSHES_KEPT
from tests.support.chief.eras import fence


def model_of(*shape: int, name: str = "w") -> ModelSpec:
    variable = VariableSpec(name=name, data_type=DataType.FLOAT32, shape=shape)
    return ModelSpec(variables=(variable,), optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)), placement=PlacementPolicy())


MODEL = model_of(3)


KEY = b"chief"


@dataclass(slots=True)
class FakeShard:
    """What one parameter server has: which process, whose, and at what step; `applied` are the contributions of each step."""

    process: int = 7
    epoch: int = 0
    chief: int = 0
    step: int | None = None
    applied: dict[int, tuple[PushId, ...]] = field(default_factory=dict)
    last_apply: ApplyRequest | None = None
    record: ChiefRecord | None = None
    record_version: int = 0
    life: int = 0
    session_keys: tuple[bytes, ...] = ()
    given_up: tuple[PushId, ...] = ()

    def status(self, index: int) -> ShardStatus:
        return ShardStatus(
            shard=index,
            report=ShardReport(),
            process_incarnation=self.process,
            fence=fence(self.epoch, self.chief, life=self.life),
            step=self.step,
        )

    def pushes(self) -> tuple[WorkerPushes, ...]:
        by_worker: dict[tuple[int, int], list[AppliedPush]] = {}
        for step, contributors in self.applied.items():
            for push in contributors:
                by_worker.setdefault((push.worker, push.incarnation), []).append(AppliedPush(sequence=push.sequence, step=step))
        newest = {worker: max(i for w, i in by_worker if w == worker) for worker, _ in by_worker}
        return tuple(WorkerPushes(worker=w, incarnation=i, applied=tuple(by_worker[w, i][-PUSHES_KEPT:])) for w, i in newest.items())


class Driver:
    """Answers by call in `answers`. What the shards are to do together, a change of settings too, waits in `to_apply`, `to_configure`, …
    unless `applies_at_once`; what else the chief wants waits in `orders` if the driver `is_manual`. The storage outlives chief and shards.

    `adopt` False: the test reports the adoptions.
    """

    lives = itertools.count(1)
    chiefs = itertools.count(2)

    def __init__(
        self,
        *,
        num_shards: int = 1,
        has_successors: bool = False,
        storage: dict[str, Checkpoint] | None = None,
        begin: bool = True,
        adopt: bool = True,
        applies_at_once: bool = True,
        **config: Any,
    ) -> None:
        self.now = 100.0
        self.config = CoordinationConfig(**config)
        self.has_successors = has_successors
        self.session_key = KEY
        self.applies_at_once = applies_at_once
        self.is_manual = not adopt
        self.storage: dict[str, Checkpoint] = {} if storage is None else storage
        self.damaged: set[str] = set()
        self.full = self.has_deltas = False
        self.since: list[int | None] = []
        self.unreadable = ""  # why storage cannot be read
        self.model: ModelSpec = MODEL
        self.shards = [FakeShard() for _ in range(num_shards)]
        self.answers: dict[int, Any] = {}
        self.orders: list[Any] = []
        self.notes: list[ev.Note] = []
        self.to_apply: list[ev.ApplyStep] = []
        self.applied: list[ev.ApplyStep] = []
        self.to_prepare: list[ev.PrepareStep] = []
        self.to_configure: list[ev.KeepRecord] = []
        # Those that were news to the shards.
        self.configured: list[ShardSettings] = []
        self._plain_settings = ShardSettings(fence=NOBODY, version=0)
        self.sums: tuple[tuple[float, ...], ...] = ()
        self.ended: list[ev.EndProcesses] = []
        self._calls = itertools.count(1)
        self._requests = itertools.count(1)
        self.coordinator = self._coordinator()
        if begin:
            self.begin()
        if not adopt:
            self.orders.clear()
            self.is_manual = False

    @classmethod
    def outlived(cls, *, num_shards: int = 2, **config: Any) -> "Driver":
        """Returns a driver whose chief may have successors, with two shards and a place for checkpoints unless others are named."""
        config.setdefault("checkpoints", CheckpointConfig(restore="latest"))
        return cls(num_shards=num_shards, has_successors=True, **config)

    def _coordinator(self) -> Coordinator:
        return Coordinator(
            config=self.config,
            shard_addresses=[f"host-p:{5000 + index}" for index in range(len(self.shards))],
            now=self.now,
            has_successors=self.has_successors,
            # No two drivers have one. Where no chief has a successor, they have no names.
            new_life=lambda: next(self.lives) if self.has_successors else 0,
            session_key=self.session_key,
        )

    def look(self) -> tuple[ShardStatus, ...]:
        return tuple(shard.status(index) for index, shard in enumerate(self.shards))

    def begin(self, found: tuple[ShardStatus, ...] = ()) -> None:
        self.send(ev.ShardsFound(statuses=found or self.look()))

    def new_chief(self, found: tuple[ShardStatus, ...] = (), **config: Any) -> None:
        """Another chief process takes the place of the old one, which never says anything again. It has `found` what the shards said."""
        self.config = replace(self.config, **config)
        self.session_key = b"chief %d" % next(self.chiefs)
        self.coordinator = self._coordinator()
        self.orders.clear()
        self._give_up_work()
        self.begin(found)

    def kill(self, shard: int) -> None:
        """A shard's process is replaced by an empty one."""
        self.shards[shard] = FakeShard(process=self.shards[shard].process + 100)

    def restart(self, shard: int) -> None:
        """As `kill`, and the chief sees it."""
        self.kill(shard)
        self.send(ev.ShardSeen(shard=shard, process_incarnation=self.shards[shard].process))

    @property
    def step(self) -> int:
        return self.coordinator.cluster.step

    @property
    def said(self) -> list[str]:
        return [note.text for note in self.notes]

    # -- events, and what follows from them

    def send(self, event: ev.Event) -> None:
        for instruction in self.coordinator.handle(event, self.now):
            match instruction:
                case ev.Reply(call=call, value=answer) | ev.Refuse(call=call, error=answer):
                    assert call not in self.answers, "a call was answered twice"
                    self.answers[call] = answer
                case ev.ApplyStep():
                    self.to_apply.append(instruction)
                case ev.PrepareStep():
                    self.to_prepare.append(instruction)
                case ev.KeepRecord() if self.coordinator.cluster.model.is_ready and self.coordinator.cluster.training.is_configuring:
                    self.to_configure.append(instruction)
                case ev.EndProcesses():
                    self.ended.append(instruction)
                case ev.Note():
                    self.notes.append(instruction)
                case _:
                    if isinstance(instruction, ev.AdoptShards | ev.RestoreShards):
                        self._give_up_work(before=instruction.fence.epoch)
                    self.orders.append(instruction)
        assert len(self.to_apply) + len(self.to_prepare) + len(self.to_configure) <= 1, "two things are under way at the shards"
        if not self.is_manual:
            self.work_off()
        if self.applies_at_once:
            self.work()

    def ask(self, request: Request[Any]) -> int:
        """Asks for something; returns the call, which may or may not be answered."""
        call = self.call()
        self.send(ev.Asked(call=call, request=request))
        return call

    def done(self, work: ev.Work, result: object = None) -> None:
        self.send(ev.Done(work=work, result=result))

    def fail(self, work: ev.Work, error: PsError) -> None:
        self.send(ev.Failed(work=work, error=error))

    def _give_up_work(self, *, before: int | None = None) -> None:
        """Work for an earlier epoch is given up, as the shell does; None: all is."""
        under_way: tuple[list[Any], ...] = self.to_apply, self.to_prepare, self.to_configure
        for works in under_way:
            works[:] = [work for work in works if before is not None and work.fence.epoch >= before]

    # -- what all shards do

    def work(self) -> None:
        """Has the shards do what they were told, and what follows from that."""
        if self.to_configure:
            self.configure()
        if self.to_prepare:
            self.prepare()
        if self.to_apply:
            self.apply()

    def configure(self) -> None:
        self._keep(self.to_configure.pop(0))

    def prepare(self) -> None:
        self.done(self.to_prepare.pop(0), self.sums)

    def apply(self) -> None:
        self.apply_at(*range(len(self.shards)))
        step = self.to_apply.pop(0)
        self.applied.append(step)
        self.done(step)

    def apply_at(self, *shards: int) -> None:
        """Has only these shards apply the step that is to be applied; the chief does not hear of it."""
        order = self.to_apply[0].request
        for index in shards:
            shard = self.shards[index]
            if shard.step != order.step:
                assert shard.last_apply is not None
                assert (shard.step, shard.last_apply.contributors) == (order.step + 1, order.contributors), "not what was applied before"
                continue
            shard.applied[order.step] = order.contributors
            shard.last_apply = replace(order, fence=replace(order.fence, chief_incarnation=shard.chief))
            shard.step = order.step + 1

    # -- what else the chief wants

    def work_off(self) -> None:
        """Does what is ordered, and what follows from that."""
        while self.orders:
            self.do(self.orders.pop(0))

    def do(self, order: Any) -> None:
        match order:
            case ev.AdoptShards():
                self._adopt(order)
            case ev.KeepRecord():
                self._keep(order)
            case ev.FindCheckpoint():
                self._find(order)
            case ev.RestoreShards():
                self._restore(order)
            case ev.CopyStep() if any(shard.epoch != order.fence.epoch for shard in self.shards):
                self.fail(order, InternalError("a process that has begun meanwhile refuses"))
            case ev.CopyStep(step=step, since=since):
                assert all(shard.step == step for shard in self.shards), "a step is saved that not all shards have"
                self.since.append(since)
                self.done(order)
            case ev.WriteStep() if self.full:
                self.fail(order, StorageFull("no space left on device"))
            case ev.WriteStep(since=since):
                file = CheckpointFile(name="", shard=0, num_bytes=8, sha256="0" * 64, is_delta=self.has_deltas and since not in (None, -1))
                self.done(order, tuple(replace(file, name=f"ps-{i}", shard=i) for i in range(len(self.shards))))
            case ev.CommitCheckpoint(checkpoint=checkpoint, keep=keep):
                self.storage[checkpoint.tag] = checkpoint
                for old in sorted(self.storage.values(), key=lambda c: c.age_order)[:-keep]:
                    del self.storage[old.tag]
                self.done(order)

    def _keep(self, order: ev.KeepRecord) -> None:
        for shard in self.shards if order.is_for_all else self.shards[:1]:
            if order.version > shard.record_version:
                shard.record, shard.record_version = order.record, order.version
        plain = replace(order.settings, fence=NOBODY, version=0)
        if plain != self._plain_settings:
            self._plain_settings = plain
            self.configured.append(order.settings)
        self.done(order)

    def _tell_keys(self) -> None:
        """All shards get the keys of their life that any of them knows, and so does the chief."""
        life = max(self.shards, key=lambda shard: shard.chief).life
        keys = joined_keys((self.session_key,), tuple(key for shard in self.shards if shard.life == life for key in shard.session_keys))
        for shard in self.shards:
            shard.session_keys = keys
        self.send(ev.SessionKeysFound(keys=keys))

    def _adopt(self, order: ev.AdoptShards) -> None:
        fence = order.fence
        hashes = [layout.hash for layout in layouts(place(self.model, num_shards=len(self.shards)), num_shards=len(self.shards))]
        for shard in self.shards:
            if fence.epoch > shard.epoch:
                shard.last_apply = None
            earlier = shard.session_keys if shard.life == fence.life else ()
            shard.session_keys = joined_keys((self.session_key,), earlier)
            shard.epoch, shard.chief, shard.life = fence.epoch, fence.chief_incarnation, fence.life
        self._tell_keys()
        kept = max(self.shards, key=lambda shard: shard.record_version)
        adoptions = tuple(
            Adoption(
                step=shard.step,
                layout_hash=layout_hash if shard.step is not None else "",
                record_version=shard.record_version,
                last_apply=shard.last_apply,
                pushes=shard.pushes(),
                session_keys=shard.session_keys,
                given_up=shard.given_up,
            )
            for shard, layout_hash in zip(self.shards, hashes, strict=True)
        )
        incarnations = tuple(shard.process for shard in self.shards)
        self.done(order, ev.Adopted(process_incarnations=incarnations, adoptions=adoptions, record=kept.record))

    def _find(self, order: ev.FindCheckpoint) -> None:
        if self.unreadable:
            self.fail(order, StorageFailed(self.unreadable))
            return
        there = sorted(self.storage.values(), key=lambda checkpoint: checkpoint.age_order)
        found = [c for c in there if c.tag not in order.excluded and (not order.only or c.tag == order.only)]
        highest_epoch = max((c.fence.epoch for c in there), default=0)
        self.done(order, ev.Found(checkpoint=found[-1] if found else None, manifest_sha256="ab" * 32, highest_epoch=highest_epoch))

    def _restore(self, order: ev.RestoreShards) -> None:
        if self.unreadable:
            self.fail(order, StorageFailed(self.unreadable))
            return
        if order.tag in self.damaged:
            self.fail(order, DataLoss("ps-0 is not what was written"))
            return
        step = self.storage[order.tag].step
        for shard in self.shards:
            assert order.fence.epoch > shard.epoch, "restored under an epoch that the shard has had"
            shard.epoch, shard.chief, shard.step, shard.last_apply = order.fence.epoch, order.fence.chief_incarnation, step, None
            if shard.life != order.fence.life:
                shard.session_keys = ()
            shard.life = order.fence.life
            shard.applied = {number: made_of for number, made_of in shard.applied.items() if number < step}
        self._tell_keys()
        self.done(order, tuple(shard.process for shard in self.shards))

    # -- callers

    def set_policy(self, policy: PolicySpec, *, request_id: int | None = None, max_wait_s: float = 10.0) -> int:
        """Asks for another policy; returns the call."""
        request = next(self._requests) if request_id is None else request_id
        return self.ask(ChangeSettingsRequest(policy=policy, request_id=request, max_wait_s=max_wait_s))

    def set_hyperparameters(self, change: HyperparameterChange, *, max_wait_s: float = 10.0) -> int:
        """Asks for other numbers of an optimizer; returns the call."""
        return self.ask(ChangeSettingsRequest(hyperparameters=change, request_id=next(self._requests), max_wait_s=max_wait_s))

    def settings(self, call: int) -> SettingsReply:
        reply = self.answers[call]
        assert isinstance(reply, SettingsReply)
        return reply

    def pass_time(self, duration_s: float) -> None:
        """Lets time pass, firing the timer whenever it is due."""
        end = self.now + duration_s
        while (due := self.coordinator.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.send(ev.TimerFired())
        self.now = end

    def call(self) -> int:
        return next(self._calls)

    def register(self, index: int | None = None, **fields: Any) -> Registration:
        request = {"kind": ParticipantKind.WORKER, "host": "host-b", "pid": 912, "request_id": next(self._requests), **fields}
        registration = self.answers[self.ask(RegisterRequest(index=index, **request))]
        assert isinstance(registration, Registration)
        return registration

    def ask_model(self, worker: "Worker", model: ModelSpec = MODEL, *, max_wait_s: float = 20.0, **fields: Any) -> int:
        return self.ask(RegisterModelRequest(participant=worker.participant, model=model, max_wait_s=max_wait_s, **fields))

    def train(self, *indices: int, model: ModelSpec = MODEL) -> "list[Worker]":
        """Has workers join, and the first of them initialise the model, which the shards hold then."""
        self.model = model
        workers = [Worker(self, index) for index in indices]
        self.initialise(workers[0])
        return workers

    def initialise(self, worker: "Worker") -> None:
        """Has a worker initialise the model, which the shards hold then."""
        reply = self.answers[self.ask_model(worker, self.model)]
        assert isinstance(reply, ModelReply)
        assert reply.state is ModelState.INITIALIZE
        for shard in self.shards:
            shard.step = 0
        worker.complete(reply.attempt)

    def come_back(self, worker: "Worker", **fields: Any) -> Registration:
        """A worker registers again, as whom it was, and continues with what it is given."""
        registration = self.register(worker.index, former=worker.participant, **fields)
        worker.registration, worker.participant = registration, registration.participant
        worker.local_step = registration.global_step
        return registration

    def lease(
        self,
        worker: "Worker",
        data: DataSpec,
        *,
        max_ranges: int = 1,
        request_id: int = 1,
        max_wait_s: float = 0.0,
        held: Iterable[int] = range(100),  # whatever it was given
    ) -> int:
        request = LeaseRangesRequest(
            participant=worker.participant, data=data, max_ranges=max_ranges, request_id=request_id, max_wait_s=max_wait_s, held=tuple(held)
        )
        return self.ask(request)


class Worker:
    """One incarnation of a worker; answers of blocked calls are found in the driver."""

    def __init__(self, driver: Driver, index: int | None = None, **fields: Any) -> None:
        self.driver = driver
        self.registration = driver.register(index, **fields)
        self.participant: Participant = self.registration.participant
        self.index = self.participant.index
        self.local_step = self.registration.global_step
        self.sequence = 0
        self.request_id = 0

    def complete(self, attempt: int) -> None:
        """Says that the shards hold the first values; they do, if they did not."""
        for shard in self.driver.shards:
            shard.step = 0 if shard.step is None else shard.step
        self.driver.ask(CompleteInitializationRequest(participant=self.participant, attempt=attempt))

    def next_push(self) -> PushId:
        self.sequence += 1
        return PushId(worker=self.index, incarnation=self.participant.incarnation, sequence=self.sequence)

    def next_commit(self, step: int | None = None, *, push_id: PushId | None = None, **fields: Any) -> PushCommit:
        """A commit; what is attached to it is given by name as its own fields are."""
        step = self.local_step if step is None else step
        brought = {name: fields.pop(name) for name in ("hyperparameters", "user_state") if name in fields}
        attached = Attachments(**brought) if any(brought.values()) else NO_ATTACHMENTS
        return PushCommit(push_id=push_id or self.next_push(), step=step, attached=attached, **({"staged": True} | fields))

    def send_commit(self, step: int | None = None, *, push_id: PushId | None = None, **fields: Any) -> int:
        """Commits, and returns the call: it is answered once the answer is sure."""
        commit = self.next_commit(step, push_id=push_id, **fields)
        call = self.driver.ask(CommitPushRequest(participant=self.participant, commit=commit))
        if call not in self.driver.answers and self.driver.applies_at_once:
            self.driver.pass_time(2 * LINGER_S)
        return call

    def commit(self, step: int | None = None, *, push_id: PushId | None = None, **fields: Any) -> CommitResult:
        result = self.driver.answers[self.send_commit(step, push_id=push_id, **fields)]
        assert isinstance(result, CommitResult)
        return result

    def push(self) -> PushOutcome:
        return self.commit().outcome

    def ask(self, *, repeat: bool = False, max_wait_s: float = 20.0, commit: PushCommit | None = None) -> int:
        """Asks for a token; returns the call, which may or may not be answered."""
        self.request_id += not repeat
        request = DequeueTokenRequest(
            participant=self.participant, local_step=self.local_step, request_id=self.request_id, max_wait_s=max_wait_s, commit=commit
        )
        return self.driver.ask(request)

    def answer(self, call: int) -> TokenReply:
        reply = self.driver.answers[call]
        assert isinstance(reply, TokenReply)
        return reply

    def has_token(self, call: int) -> bool:
        """Whether the call is answered with a token; takes it."""
        reply = self.driver.answers.get(call)
        if not isinstance(reply, TokenReply) or reply.result is not TokenResult.TOKEN:
            return False
        self.local_step = reply.step
        return True

    def heartbeat(self, *transports: str) -> bool:
        return bool(self.driver.answers[self.driver.ask(HeartbeatRequest(participant=self.participant, transports=transports))])

    def leave(self, failure: str = "") -> None:
        self.driver.ask(DeregisterRequest(participant=self.participant, failure=failure))

    def error(self, call: int) -> PsError:
        error = self.driver.answers[call]
        assert isinstance(error, PsError)
        return error
