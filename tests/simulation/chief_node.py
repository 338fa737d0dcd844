"""A chief of a simulated cluster: the real coordinator, and the real coroutines that carry out its instructions, at simulated shards."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

from chief.core import messages
from chief.core.coordinator import Coordinator
from chief.options import CoordinationConfig
from chief.shards.calls import ShardCalls
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.link import ShardLink
from chief.shards.standby import ReplicaReturn, ReplicatedLink, replicated
from chief.shards.work import Authority, ShardWork
from ps_protocol.errors import PsError, ShuttingDown
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    ClusterState,
    ClusterStatusRequest,
    CommitPushRequest,
    CommitResult,
    DequeueTokenRequest,
    FinishTrainingRequest,
    LeaseReply,
    LeaseResult,
    ParticipantKind,
    Registration,
    SavedCheckpoint,
    SettingsReply,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.history import History
from ps_protocol.roles.request import Request
from tests.simulation.chief_links import SimulatedLink, SimulatedPace
from tests.simulation.epochs import Era, era_of
from tests.simulation.oracle import BrokenPromise, Oracle
from tests.simulation.rules import Leads
from tests.simulation.tasks import Answer, Life
from tests.simulation.world import World


class ChiefNode:
    """One chief. `takes_over`: it was started with --takeover, because the chief before it is known to be dead."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        config: CoordinationConfig,
        shards: tuple[str, ...],
        standbys: tuple[str, ...],
        store: CheckpointStore | None,
        oracle: Oracle,
        takes_over: bool,
        history: History | None,
        on_change: Callable[["ChiefNode"], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._oracle = world, life, oracle
        self._on_change, self._on_end = on_change, on_end
        session_key = world.new_session_key()
        self.coordinator = Coordinator(
            config=config, shard_addresses=shards, now=world.now, new_life=world.new_life, session_key=session_key
        )
        self._calls = itertools.count(1)
        self._blocked: dict[int, tuple[Any, Answer, float]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Those that another epoch ends.
        self._of_epoch: set[asyncio.Task[Any]] = set()
        self._keeping: asyncio.Task[Any] | None = None
        self._is_watching = False
        self._timer = 0
        self.is_ended = False
        self._told_whole = ""
        self._authority = Authority(session_key=session_key, chief_address=life.name)
        pace = SimulatedPace(world, life, on_killed=self._killed)
        self._loop = pace.loop
        self._leads: dict[Era, Leads] = {}
        self._max_steps = config.max_steps
        self._rules, self._has_changed, self._version = oracle.rules, False, 0
        # The era in which each version of the settings came to hold here.
        self._held_since: dict[int, Era] = {}
        # The policies that were asked for and do not hold yet, as far as one knows, by the number of the request.
        self._wanted_policies: dict[int, PolicySpec] = {}
        # What it was asked to count, and had been when training was finished; the latest step that it has begun; and whether it may finish.
        self._given: set[PushId] = set()
        self._given_in_time: frozenset[PushId] | None = None
        self._begun_step = -1
        self._is_asked_to_finish = False
        links: list[ShardLink] = [SimulatedLink(name, index=index, loop=pace.loop) for index, name in enumerate(shards)]
        if standbys:
            links = [
                ReplicatedLink([SimulatedLink(name, index=index, loop=pace.loop, is_replica=True) for name in pair], index=index)
                for index, pair in enumerate(zip(shards, standbys, strict=True))
            ]
        self._shards = ShardCalls(links, report=self.report, pace=pace)
        self._work = ShardWork(self._shards, authority=self._authority, store=store, on_superseded=self._superseded, history=history)
        self._replicas = ReplicaReturn(replicated(links), report=self.report, manifest_of=self._work.manifest_of, clock=pace.now)
        # The servers that it counts on, by shard.
        self._members: dict[int, tuple[str, ...]] = {index: (name,) for index, name in enumerate(shards)}
        for link in self._replicas.links.values():
            link.attach(self.report)
        self._spawn(self._begin(takes_over))

    # -- callers

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Takes up a request, which is the only argument."""
        (request,) = arguments
        if isinstance(request, ClusterStatusRequest):
            answer(self.coordinator.status(self._world.now))
            return
        number = next(self._calls)
        self._blocked[number] = request, answer, self._world.now
        if isinstance(request, CommitPushRequest | DequeueTokenRequest) and request.commit is not None:
            self._look_who_lives(era_of(request.participant))
            self._leads_of(era_of(request.participant)).gave(request.commit.push_id)
            self._given.add(request.commit.push_id)
            self._oracle.asked_to_count(request.commit.push_id, self._rules)
        self._note_order(request)
        try:
            self.report(messages.Asked(call=number, request=request))
        except PsError as error:
            self._answer(messages.Refuse(call=number, error=error))

    def overdue(self, limit_s: float) -> list[str]:
        """Returns the calls that have been blocked for longer than any may."""
        return [f"{request}" for request, _, since in self._blocked.values() if self._world.now - since > limit_s]

    def _answer(self, instruction: messages.Reply | messages.Refuse) -> None:
        blocked = self._blocked.pop(instruction.call, None)
        if blocked is None:
            return
        request, answer, _ = blocked
        if isinstance(instruction, messages.Refuse):
            answer(instruction.error)
            return
        self._tell_oracle(request, instruction.value)
        answer(instruction.value)

    def _tell_oracle(self, request: Any, value: object) -> None:
        who = f"{type(request).__name__} of {getattr(request, 'participant', request)}"
        is_training = self.coordinator.cluster.state is ClusterState.TRAINING
        if isinstance(value, TokenReply):
            caller, era = request.participant, era_of(request.participant)
            if value.result is TokenResult.TOKEN:
                self._told_step(era, value.step, to=who)
            self._told_step(era, value.global_step, to=who)
            if value.commit is not None:
                self._oracle.told_commit(era, request.commit.push_id, value.commit, by=self._name)
                self._leads_of(era).told(request.commit.push_id, value.commit)
            # One that is given in the midst of several changes is of a policy that held for no time.
            if value.result is TokenResult.TOKEN and value.settings_version == self._version:
                self._oracle.told_token(
                    era, caller.index, caller.incarnation, local_step=request.local_step, step=value.step, rules=self._rules
                )
                self._check_lead(era, caller.index, caller.incarnation, value.step)
        elif isinstance(value, CommitResult):
            self._oracle.told_commit(era_of(request.participant), request.commit.push_id, value, by=self._name)
            self._leads_of(era_of(request.participant)).told(request.commit.push_id, value)
            self._told_step(era_of(request.participant), value.global_step, to=who)
        elif isinstance(value, SettingsReply):
            self._wanted_policies.pop(request.request_id, None)
            # Before there is a model, servers keep nothing: another chief begins with its own options.
            is_kept = self.coordinator.cluster.model.is_created
            era = self._held_since[value.version]  # it may be told again in a later one, where another holds
            self._oracle.told_change(era, request.request_id, version=value.version, step=value.step, is_kept=is_kept)
        elif isinstance(value, SavedCheckpoint) and value.tag:
            self._oracle.told_saved(self._era, value.tag, value.step)
        elif isinstance(value, LeaseReply) and value.result is LeaseResult.EXHAUSTED and is_training:
            self._oracle.told_exhausted(era_of(request.participant), request.data, to=who)
        elif isinstance(value, Registration) and is_training:
            self._told_step(era_of(value.participant), value.global_step, to=who)
            self._look_who_lives(era_of(value.participant))

    @property
    def _name(self) -> str:
        """Which chief this is: one that is started again under a name is another, and counts anew."""
        return f"{self._life.name} {self.coordinator.cluster.members.chief_incarnation}"

    def _told_step(self, era: Era, step: int, *, to: str) -> None:
        servers = [name for names in self._members.values() for name in names]
        self._oracle.told_step(era, step, to=to, servers=servers, is_finished=self._given_in_time is not None)

    # -- how far workers are ahead of each other

    def _leads_of(self, era: Era) -> Leads:
        return self._leads.setdefault(era, Leads())

    def _look_who_lives(self, era: Era) -> None:
        if self._rules.max_lead is not None:
            found = self.coordinator.status(self._world.now).participants
            live = [one for one in found if one.state == "live" and one.kind is ParticipantKind.WORKER]
            self._leads_of(era).live([(one.index, one.incarnation) for one in live])

    def _check_lead(self, era: Era, worker: int, incarnation: int, step: int) -> None:
        rules = self._rules
        is_changing = self._has_changed or self.coordinator.cluster.policy.spec != rules.spec
        if rules.max_lead is None or is_changing:
            return  # a change begins the counts anew, and nobody here is sure what counts for whom since
        self._look_who_lives(era)
        lead = self._leads_of(era).least_lead((worker, incarnation), step=step)
        self._world.seen[f"worker {min(lead, 3)} ahead of the slowest"] += lead > 0
        if lead > rules.max_lead:
            raise BrokenPromise(f"P: under {rules.spec.text} worker {worker} goes on with step {step}, {lead} ahead of the slowest")

    # -- what people order

    @property
    def _era(self) -> Era:
        fence = self.coordinator.cluster.training.fence
        return fence.life, fence.epoch

    def _note_order(self, request: Request[Any]) -> None:
        if isinstance(request, FinishTrainingRequest):
            self._is_asked_to_finish = True
        elif isinstance(request, ChangeSettingsRequest) and request.policy is not None:
            self._wanted_policies[request.request_id] = request.policy
            self._oracle.asked_to_change(request.request_id, request.policy)
        elif isinstance(request, ChangeSettingsRequest) and request.hyperparameters is not None:
            rate = request.hyperparameters.learning_rate
            assert rate is not None
            self._oracle.asked_to_change(request.request_id, rate.arguments["value"])

    def _look_which_policy_holds(self) -> None:
        spec, version = self.coordinator.cluster.policy.spec, self.coordinator.cluster.settings.version
        self._held_since |= dict.fromkeys(range(self._version + 1, version + 1), self._era)
        self._version = version
        if spec != self._rules.spec:
            self._world.seen["another policy holds"] += 1
            self._has_changed = True
        is_closing = any(
            not wanted.has_common_steps or spec.accepts_stale > wanted.accepts_stale for wanted in self._wanted_policies.values()
        )
        self._rules = self._oracle.rules.under(spec, is_closing=is_closing)

    def _look_whether_it_is_finished(self) -> None:
        if self._given_in_time is None and self.coordinator.cluster.state is ClusterState.FINISHED:
            self._world.seen["training finished"] += 1
            self._given_in_time = frozenset(self._given)
            is_at_end = self._max_steps is not None and self.coordinator.cluster.step >= self._max_steps
            if not (self._is_asked_to_finish or is_at_end):
                raise BrokenPromise("E: a training is finished that nobody finished")

    def _check_that_it_goes_on(self, told: messages.PrepareStep | messages.ApplyStep) -> None:
        """A finished training takes no further step, but those that were promised before."""
        work = (told.of if isinstance(told, messages.PrepareStep) else told).request
        if self._max_steps is not None and work.step >= self._max_steps:
            raise BrokenPromise(f"F: step {work.step} is begun, and the last is {self._max_steps - 1}")
        if self._given_in_time is not None and work.step > self._begun_step:
            is_promised = not self._rules.spec.has_common_steps and self._given_in_time.issuperset(work.contributors)
            if not is_promised:
                raise BrokenPromise(f"F: step {work.step} of {work.contributors} is begun, and training was finished before")
        self._begun_step = work.step
        self._oracle.rules_hold(work.fence.chief_incarnation, self._rules)

    # -- the coordinator

    def report(self, event: messages.Event) -> None:
        """Takes note of what has happened, and does what follows from it."""
        if self.is_ended:
            raise ShuttingDown("the chief is shutting down")
        self._note(event)
        instructions = self.coordinator.handle(event, self._world.now)
        self._look_which_policy_holds()
        for instruction in instructions:
            self._carry_out(instruction)
        self._look_whether_it_is_finished()
        self._set_timer()
        self._on_change(self)

    def _set_timer(self) -> None:
        due = self.coordinator.next_deadline()
        if due is None:
            return
        self._timer += 1
        number = self._timer

        def fire() -> None:
            if number == self._timer and not self.is_ended:
                self.report(messages.TimerFired())

        self._world.later(self._life, max(0.0, due - self._world.now), fire)

    def _carry_out(self, instruction: messages.Instruction) -> None:
        if isinstance(instruction, messages.PrepareStep | messages.ApplyStep):
            self._check_that_it_goes_on(instruction)
        match instruction:
            case messages.Reply() | messages.Refuse():
                self._answer(instruction)
            case messages.Note():
                self._world.note(f"{self._life.name}: {instruction.text}")
            case messages.EndProcesses():
                if not instruction.has_successor and self.coordinator.cluster.state not in (ClusterState.FAILED, ClusterState.FINISHED):
                    raise BrokenPromise(f"E: a training ends that nobody finished: {instruction.reason}")
                self.end(instruction.reason)
            case messages.AdoptShards() | messages.RestoreShards():
                self._authority.obey(instruction.fence)
                for task in [*self._of_epoch]:
                    task.cancel()
                self._spawn_in_epoch(self._take(instruction))
            case messages.FindCheckpoint():
                self._spawn(self._work.carry_out(instruction))
            case messages.CommitCheckpoint():
                self._spawn(self._commit(instruction))
            case messages.KeepRecord():
                if self._keeping is not None:
                    self._keeping.cancel()
                self._keeping = self._spawn_in_epoch(self._work.carry_out(instruction))
            case messages.BringReplicasBack():
                self._world.seen["a standby was brought back between two steps"] += 1
                self._spawn_in_epoch(self._replicas.bring_back(instruction))
            case _:
                self._spawn_in_epoch(self._work.carry_out(instruction))

    async def _begin(self, takes_over: bool) -> None:
        try:
            await self._work.look_at_all(is_takeover=takes_over)
        except PsError as error:
            self.end(error.message)

    async def _take(self, work: messages.AdoptShards | messages.RestoreShards) -> None:
        await self._work.carry_out(work)
        if not self._is_watching:
            self._is_watching = True
            for index in range(len(self._shards)):
                self._spawn(self._work.watch(index, is_paused=lambda: self._work.is_restoring))
            if self._replicas.links:
                self._spawn(self._replicas.watch(is_paused=lambda: self._work.is_restoring))

    async def _commit(self, work: messages.CommitCheckpoint) -> None:
        self._told_whole = ""
        await self._work.carry_out(work)
        self._world.seen["a checkpoint became whole too late to be told"] += work.is_awaited and self._told_whole != work.checkpoint.tag

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _spawn_in_epoch(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[Any]":
        """Begins what another epoch ends."""
        task = self._spawn(work)
        self._of_epoch.add(task)
        task.add_done_callback(self._of_epoch.discard)
        return task

    def _over(self, task: "asyncio.Task[Any]") -> None:
        """A task has ended; in an error only if there is a defect."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PsError):
            raise error
        if not self.is_ended:
            self.end(f"a task broke off: {error}")

    def _superseded(self, why: str) -> None:
        if not self.is_ended:
            self._world.seen["a chief found itself superseded"] += 1
            self.end("superseded")

    def _note(self, event: messages.Event) -> None:
        """Counts what runs are to reach."""
        if isinstance(event, messages.Done | messages.Failed) and isinstance(event.work, messages.CommitCheckpoint):
            self._told_whole = event.work.checkpoint.tag
        elif isinstance(event, messages.ReplicasChanged):
            self._members[event.shard] = (event.address, event.standby) if event.standby else (event.address,)
            self._world.note(f"{self._life.name}: ps {event.shard} is held by {event.address}, {event.standby or event.missing}")
        elif isinstance(event, messages.Done) and isinstance(event.work, messages.AdoptShards):
            steps = {one.step for one in event.result.adoptions}
            self._world.seen["a chief found what another had trained"] += steps != {None}
            self._world.seen["a chief found an interrupted step"] += len(steps) > 1 and None not in steps

    def ask_to_end(self) -> None:
        """As SIGTERM does."""
        if not self.is_ended:
            self._world.seen["chief asked to end"] += 1
            self.report(messages.AskedToEnd(why="SIGTERM"))

    def end(self, reason: str) -> None:
        """Acts no more, and is gone a moment later."""
        if not self.is_ended:
            self.is_ended = True
            self._world.note(f"{self._life.name} ends: {reason}")
            self._world.later(self._life, 0.5, lambda: self._on_end(reason))

    def _killed(self) -> None:
        self._world.seen["chief killed while it made a checkpoint whole"] += 1
        self._world.kill(self._life.name)
        self._on_end("killed")
