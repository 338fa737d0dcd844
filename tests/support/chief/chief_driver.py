"""Drives a Coordinator as the shell would, with a clock that is a number, and shards that answer at once or on request."""

import itertools
from typing import Any

from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.core.epoch.answers import LINGER_S
from chief.core.messages import ShardsFound
from chief.options import CoordinationConfig
from ps_protocol.errors import PsError
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    CommitPushRequest,
    CommitResult,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    HeartbeatRequest,
    HyperparameterChange,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    RegisterRequest,
    Registration,
    Request,
    SettingsReply,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import NO_ATTACHMENTS, Attachments, PushId
from ps_protocol.roles.shard import ShardReport, ShardSettings, ShardStatus
from tests.support.chief.eras import fence


def model_of(*shape: int, name: str = "w") -> ModelSpec:
    variable = VariableSpec(name=name, data_type=DataType.FLOAT32, shape=shape)
    return ModelSpec(variables=(variable,), optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)), placement=PlacementPolicy())


MODEL = model_of(3)


KEY = b"chief"


class Driver:
    """Answers by call in `answers`; what the shards are to do waits in `to_apply`, `to_configure`, … unless `applies_at_once`."""

    has_successors = False

    def new_life(self) -> int:
        """Lives have no names where no chief has a successor."""
        return 0

    def __init__(self, *, num_shards: int = 1, find: bool = True, adopt: bool = True, applies_at_once: bool = True, **config: Any) -> None:
        self.now = 100.0
        self.config = CoordinationConfig(**config)
        addresses = [f"host-p:{5000 + index}" for index in range(num_shards)]
        self.coordinator = Coordinator(
            config=self.config,
            shard_addresses=addresses,
            now=self.now,
            has_successors=self.has_successors,
            new_life=self.new_life,
            session_key=KEY,
        )
        self.applies_at_once = applies_at_once
        self.answers: dict[int, Any] = {}
        self.to_apply: list[ev.ApplyStep] = []
        self.applied: list[ev.ApplyStep] = []
        self.to_prepare: list[ev.PrepareStep] = []
        self.to_configure: list[ShardSettings] = []
        self.configured: list[ShardSettings] = []
        self.sums: tuple[tuple[float, ...], ...] = ()
        self.adoptions: list[int] = []
        self.ended: list[ev.EndProcesses] = []
        self.said: list[str] = []
        self._calls = itertools.count(1)
        self._requests = itertools.count(1)
        if find:
            empty = ShardStatus(shard=0, process_incarnation=7, fence=fence(0, 0, life=0), step=None, report=ShardReport())
            self.send(ShardsFound(statuses=(empty,) * num_shards))
        if adopt:
            for index in range(num_shards):
                self.send(ev.ShardAdopted(shard=index, process_incarnation=7))

    @property
    def step(self) -> int:
        return self.coordinator.global_step

    def send(self, event: ev.Event) -> None:
        for instruction in self.coordinator.handle(event, self.now):
            match instruction:
                case ev.Reply(call=call, value=value):
                    assert call not in self.answers, "a call was answered twice"
                    self.answers[call] = value
                case ev.Refuse(call=call, error=error):
                    assert call not in self.answers, "a call was answered twice"
                    self.answers[call] = error
                case ev.ApplyStep():
                    self.to_apply.append(instruction)
                case ev.PrepareStep():
                    self.to_prepare.append(instruction)
                case ev.ConfigureShards(settings=settings):
                    self.to_configure.append(settings)
                case ev.AdoptShard(shard=shard):
                    self.adoptions.append(shard)
                case ev.EndProcesses():
                    self.ended.append(instruction)
                case ev.Note(text=text):
                    self.said.append(text)
        assert len(self.to_apply) + len(self.to_prepare) + len(self.to_configure) <= 1, "two things are under way at the shards"
        if self.applies_at_once:
            self.work()

    def ask(self, request: Request[Any]) -> int:
        """Asks for something; returns the call, which may or may not be answered."""
        call = self.call()
        self.send(ev.Asked(call=call, request=request))
        return call

    def work(self) -> None:
        """Has the shards do what they were told, and what follows from that."""
        if self.to_configure:
            self.configure()
        if self.to_prepare:
            self.send(ev.StepPrepared(step=self.to_prepare.pop(0).step, sums=self.sums))
        if self.to_apply:
            self.apply()

    def configure(self) -> None:
        change = self.to_configure.pop(0)
        self.configured.append(change)
        self.send(ev.ShardsConfigured(version=change.version))

    def apply(self) -> None:
        step = self.to_apply.pop(0)
        self.applied.append(step)
        self.send(ev.StepApplied(step=step.step))

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
        """Has workers join and the first of them initialise the model."""
        workers = [Worker(self, index) for index in indices]
        call = self.ask_model(workers[0], model)
        reply = self.answers[call]
        assert isinstance(reply, ModelReply)
        assert reply.state is ModelState.INITIALIZE
        workers[0].complete(reply.attempt)
        return workers


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
