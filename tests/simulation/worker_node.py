"""A worker of a simulated cluster: the SDK's own core, whose requests are carried out in a simulated world. It checks what it reads.

Knows the calls of chief and shards; decides nothing that a session decides. It never stops by itself.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import (
    NotInitializer,
    PsError,
    StepGone,
    Unavailable,
    WorkerIndexTaken,
)
from ps_protocol.model.data import DataSpec
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import PHASE, RATE, StepHyperparameter
from ps_protocol.model.spec import ModelSpec, layouts
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import (
    CommitResult,
    LeaseReply,
    LeaseResult,
    Participant,
    ParticipantKind,
    PushCommit,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import Attachments, PushId
from ps_protocol.roles.history import Answered, History, contributed
from ps_protocol.roles.shard import PushHeader, PushReply, PushResult, ShardSpec
from tests.simulation.arenas import arena_of
from tests.simulation.epochs import era_of
from tests.simulation.oracle import Oracle, gradient_of, index_of, lie_of, phase_of, rate_of
from tests.simulation.tasks import Answer, Life, Sleep, Task
from tests.simulation.worker_calls import WorkerCalls
from tests.simulation.world import World
from worker_client.core import requests as ask
from worker_client.core.data import NUM_AHEAD, WorkerData
from worker_client.core.outcomes import Push as Outcome
from worker_client.core.place import Place
from worker_client.core.worker import Worker

_NO_LIMIT_S = 1e9
# More than any server stages for one worker.
_MANY = 12
_NOTHING = np.empty(0, np.uint8)
_LOOK_AGAIN_S = 0.01
# How long a call to the chief may block.
_SLICE_S = 1.0


class WorkerNode:
    """One worker process. `on_end` is told why it ends, if it does."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        index: int,
        pid: int,
        model: ModelSpec,
        servers: tuple[str, ...],
        num_shards: int,
        chief: str,
        lease_s: float,
        oracle: Oracle,
        compute_s: float,
        data: DataSpec | None,
        takes_over: bool,
        history: History | None,
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._oracle = world, life, oracle
        self._index, self._pid, self._model, self._num_shards = index, pid, model, num_shards
        self._calls = WorkerCalls(world, servers=servers, chief=chief, ask_again=self._ask_again)
        self._lease_s, self._compute_s, self._takes_over, self._on_end = lease_s, compute_s, takes_over, on_end
        self._data, self._history = data, history
        self._requests = itertools.count(pid * 1_000_000 + 1)  # no other process has these
        self._worker: Worker | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._held_step: int | None = None
        self._is_renewing = self._is_over = False
        # What the next commit or token is asked with.
        self._commit: PushCommit | None = None
        self.num_steps = 0
        # The life of the cluster whose model it holds; 0: none yet.
        self.life_of_model = 0
        # The next contribution is committed and not given to all shards; and whether one has been.
        self.forges = self.forges_nowhere = self.has_forged = False
        # The servers that it gives other gradients with the next contribution than it gives their twins.
        self.lies_to: tuple[str, ...] = ()
        # After the next contribution it gives as many more as shards take, and commits none of them.
        self.hoards = False
        self._acts: dict[type, Callable[[Any], Task]] = {
            ask.Register: lambda request: self._register(request.former, request.held),
            ask.Agree: self._agree,
            ask.Complete: self._complete,
            ask.Count: self._count,
            ask.AwaitToken: self._await_token,
            ask.Lease: self._lease,
            ask.Beat: lambda request: self._ask("heartbeat", request.participant),
            ask.Status: lambda _: self._ask("status"),
            ask.Renew: self._renew,
            ask.AwaitRenewal: lambda _: self._await_renewal(),
            ask.Create: self._create,
            ask.Open: self._open,
            ask.Stage: self._stage,
            ask.HearShards: self._hear_shards,
            ask.PushParts: self._push,
            ask.Fetch: self._fetch,
            ask.FetchNewest: self._fetch_newest,
            ask.Pause: lambda request: _sleep(request.seconds),
        }
        # What is asked in taking the place again does not wait for that.
        self._acts_of_renewal: dict[type, Callable[[Any], Task]] = {
            ask.Register: self._acts[ask.Register],
            ask.Agree: lambda asked: self._calls.ask("model", asked.participant, asked.model, 0.0, False),
            ask.Count: lambda asked: self._calls.ask("commit", asked.participant, asked.commit),
        }
        world.spawn(life, self._run(), self._ended)

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls a worker."""
        raise AssertionError(method)

    def _ended(self, value: object) -> None:
        self._is_over = True
        self._world.note(f"{self._life.name} ends: {value}")
        self._on_end(type(value).__name__ if isinstance(value, PsError) else str(value))

    @property
    def local_step(self) -> int:
        """The step of its variables."""
        return 0 if self._worker is None else self._worker.state.local_step

    @property
    def is_joined(self) -> bool:
        """Whether it has a place and knows the model."""
        return self._worker is not None and bool(self._layouts)

    @property
    def participant(self) -> Participant:
        """Whom the chief has made it."""
        who: Participant = self._participant
        return who

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the shards."""
        return self._layouts

    # -- the program

    def _run(self) -> Task:
        registration = yield from self._enter()
        self._worker = worker = Worker(Place(registration), begin_wait=self._begin_wait, timeout_s=_NO_LIMIT_S)
        self._world.spawn(self._life, self._beat())
        yield from self._do(worker.join(self._model, may_create=True, timeout_s=None))
        data = None
        if self._data is not None:
            data = WorkerData(self._data, worker, begin_wait=self._begin_wait)
        while not worker.state.is_finished:
            while data is not None:
                if (yield from self._do(data.next(timeout_s=None))) is None:
                    data = None
                elif not self._world.chance(0.1):
                    break
            yield from self._do(worker.read(is_copied=False))
            yield Sleep(self._compute_s * self._world.between(0.5, 1.5))
            # As push() and then wait(); the others as step().
            is_step = self._index % 2 == 0
            attached = Attachments(hyperparameters=self._hyperparameters(worker))
            worker.user_state["made"] = [self._pid, worker.state.participant.incarnation, worker.state.num_pushes + 1]
            outcome: Outcome = yield from self._do(worker.contribute((), is_waited_for=is_step, attached=attached))
            self._heard(outcome)
            if not is_step:
                yield from self._do(worker.wait(timeout_s=None))
            self.num_steps += 1
        return "finished"

    def _hyperparameters(self, worker: Worker) -> tuple[StepHyperparameter, ...]:
        """What the contribution that is made now has its step use."""
        sequence = worker.state.num_pushes + 1
        rate, phase = rate_of(self._index, sequence), phase_of(sequence)
        if rate is None or worker.state.policy.applies_on_arrival:
            return ()
        phases = (StepHyperparameter(group="", name=PHASE, value=float(phase)),) if phase else ()
        return (StepHyperparameter(group="", name=RATE, value=rate), *phases)

    def _heard(self, outcome: Outcome) -> None:
        """What the program is told must hold where it is now."""
        self._world.seen[f"program told {outcome.outcome.name}"] += 1
        commit, worker = self._commit, self._worker
        assert worker is not None
        if outcome.is_accepted and commit is not None:
            result = CommitResult(outcome=outcome.outcome, global_step=outcome.global_step, applied_step=outcome.applied_step)
            self._oracle.told_commit(era_of(worker.state.participant), commit.push_id, result)

    def _enter(self) -> Task:
        while True:
            try:
                return (yield from self._register(None, ()))
            except WorkerIndexTaken:
                yield Sleep(0.3)

    def _beat(self) -> Task:
        worker = self._worker
        assert worker is not None
        acts = {**self._acts, ask.Beat: lambda request: self._calls.once("heartbeat", request.participant)}
        while not self._is_over:
            yield Sleep(self._lease_s / 3)
            try:
                yield from _run(worker.place.beat(), acts)
            except PsError:
                self._world.seen["heartbeat failed"] += 1

    # -- carrying out what the worker asks for

    def _do(self, steps: ask.Asking[Any]) -> Task:
        return _run(steps, self._acts)

    def _begin_wait(self, what: str, timeout_s: float | None) -> ask.Deadline:
        return _NoDeadline()

    def _ask(self, method: str, *arguments: Any) -> Task:
        yield from self._await_renewal()
        return (yield from self._calls.ask(method, *arguments))

    def _register(self, former: Any, held: tuple[int, ...]) -> Task:
        request = RegisterRequest(
            kind=ParticipantKind.WORKER,
            index=self._index,
            host="simulated",
            pid=self._pid,
            request_id=next(self._requests),
            takeover=self._takes_over and former is None,
            former=former,
            held=held,
        )
        registration: Registration = yield from self._calls.ask("register", request)
        self._calls.found(registration)
        if registration.participant == former:
            self._world.seen["worker came back as whom it was"] += 1
        elif former is not None and registration.participant.incarnation == former.incarnation:
            self._world.seen["worker came back under a new epoch"] += 1
        return registration

    def _await_renewal(self) -> Task:
        while self._is_renewing:
            yield Sleep(_LOOK_AGAIN_S)

    def _renew(self, request: ask.Renew) -> Task:
        worker = self._worker
        assert worker is not None
        self._world.seen[f"worker told {type(request.cause).__name__}"] += 1
        yield from self._await_renewal()
        if worker.place.generation != request.generation:
            return
        self._is_renewing = True
        try:
            yield from _run(worker.place.take_again(request.cause), self._acts_of_renewal)
            worker.place.generation += 1
        finally:
            self._is_renewing = False

    def _ask_again(self) -> Task:
        """As a session's: hears which servers hold the shards by registering once more, unless that is under way."""
        worker, version = self._worker, self._calls.shards_version
        if worker is None:
            return
        yield from self._await_renewal()
        if self._calls.shards_version != version:
            return
        self._is_renewing = True
        try:
            cause = Unavailable("a parameter server does not answer")
            worker.place.generation += yield from _run(worker.place.take_again(cause, is_question=True), self._acts_of_renewal)
        finally:
            self._is_renewing = False

    def _hear_shards(self, request: ask.HearShards) -> Task:
        if self._calls.shards_version != request.version:
            yield from self._calls.hear()

    def _agree(self, request: ask.Agree) -> Task:
        max_wait_s = 0.0 if request.wait is None else _SLICE_S
        return (yield from self._ask("model", request.participant, request.model, max_wait_s, request.may_create))

    def _complete(self, request: ask.Complete) -> Task:
        try:
            yield from self._ask("complete", request.participant, request.attempt)
        except NotInitializer:
            self._world.seen["first values came too late"] += 1
            raise

    def _count(self, request: ask.Count) -> Task:
        if request.is_question:
            self._world.seen["worker asked what had become of a contribution"] += 1
        else:
            self._commits(request.commit)
        result: CommitResult = yield from self._ask("commit", request.participant, request.commit)
        self._world.seen[f"contribution {result.outcome.name}"] += 1
        self._note_outcome(request.participant, request.commit, result)
        return result

    def _note_outcome(self, participant: Participant, commit: PushCommit, result: CommitResult) -> None:
        """As a session does."""
        if self._history is not None:
            outcome = result.original_outcome.name
            self._history.write(
                Answered(push_id=commit.push_id, epoch=participant.era.epoch, outcome=outcome, applied_step=result.applied_step)
            )

    def _await_token(self, request: ask.AwaitToken) -> Task:
        if request.commit is not None:
            self._commits(request.commit)
        reply: TokenReply = yield from self._ask("token", *request[:4], _SLICE_S)
        if request.commit is not None and reply.commit is not None:
            self._world.seen[f"contribution {reply.commit.outcome.name}"] += 1
            self._note_outcome(request.participant, request.commit, reply.commit)
        if reply.result is TokenResult.WAIT:
            self._world.seen["waited for a token longer than a call may block"] += 1
        return reply

    def _commits(self, commit: PushCommit) -> None:
        self._commit = commit
        assert self._worker is not None
        life, state = self._worker.state.participant.era.life, commit.attached.user_state
        self._oracle.contributed(life, commit.push_id, commit.step, commit.ranges, state)

    def _lease(self, request: ask.Lease) -> Task:
        wanted = request.participant, request.spec, NUM_AHEAD, request.request_id
        reply: LeaseReply = yield from self._ask("lease", *wanted, _SLICE_S, request.held)
        if reply.result is LeaseResult.EXHAUSTED:
            self._world.seen["training data gone through"] += 1
        elif reply.result is LeaseResult.WAIT:
            self._world.seen["worker waited for training data"] += 1
        return reply

    def _create(self, request: ask.Create) -> Task:
        reply, participant = request.reply, self._participant
        self._layouts = layouts(reply.placement, num_shards=self._num_shards)
        specs = [
            ShardSpec(
                epoch=participant.era.epoch,
                shard=index,
                layout=layout,
                optimizer=self._model.optimizer,
                initial_step=reply.global_step,
                attempt=reply.attempt,
                max_staged_per_worker=reply.max_staged_per_worker,
                clip=self._model.clip,
            )
            for index, layout in enumerate(self._layouts)
        ]
        contents = [self._gradient(_FIRST, index) for index in range(len(self._layouts))]
        yield from self._at_all("create", list(zip(specs, contents, strict=True)))

    def _open(self, request: ask.Open) -> Task:
        self._layouts = layouts(request.reply.placement, num_shards=self._num_shards)
        self._held_step, self.life_of_model = None, self._participant.era.life
        yield from ()

    def _stage(self, request: ask.Stage) -> Task:
        yield from ()
        return request.content

    def _push(self, request: ask.PushParts) -> Task:
        me, has_gradient = self._participant, request.staged is not None
        if not has_gradient:
            self._world.seen["contribution without a gradient"] += 1
            self._oracle.contributed_nothing(me.era.life, request.push_id)
        calls = []
        for index, layout in enumerate(self._layouts):
            header = PushHeader(
                era=me.era,
                push_id=request.push_id,
                step=request.step,
                layout_hash=layout.hash,
                absent=() if has_gradient else tuple(range(len(layout.slices))),
                refused=request.refused,
                secret=me.secret,
            )
            content = self._gradient(request.push_id, index) if has_gradient else _NOTHING
            if self._history is not None:
                self._history.write(contributed(header, shard=index), [content])
            calls.append((header, content))
        num_given = len(calls)
        if self.forges:
            self.forges, self.has_forged = False, True
            num_given = int(self._world.between(0 if self._data is None or self.forges_nowhere else 1, len(calls)))
            if num_given < len(calls):
                self._oracle.forged(request.push_id)
        if self.lies_to and has_gradient:
            self._lie(request.push_id)
        replies: list[PushReply] = (yield from self._at_all("push", calls[:num_given])) if num_given else []
        if self.hoards:
            self.hoards = False
            yield from self._hoard(calls)
        results: list[PushResult] = [reply.result for reply in replies]
        return results + [PushResult.STAGED] * (len(calls) - num_given)

    def _lie(self, push_id: PushId) -> None:
        """Has some servers get, however often it is sent, something else as this contribution."""
        lies_to, self.lies_to = self.lies_to, ()
        self._world.seen["worker gave two servers different gradients"] += 1
        self._oracle.has_heard_lies = True
        for name in lies_to:
            layout, shard = self._layouts[index_of(name)], index_of(name)
            self._calls.lies[name, push_id] = arena_of(layout, lambda size, shard=shard: lie_of(push_id, shard=shard, size=size))  # type: ignore[misc]

    def _hoard(self, calls: list[tuple[PushHeader, Array]]) -> Task:
        """Gives more contributions than any server may take, commits none and says nothing of them."""
        worker = self._worker
        assert worker is not None
        for _ in range(_MANY):
            push_id = worker.state.number_push()
            for index, (header, content) in enumerate(calls):
                for error in (yield from self._calls.once_at(index, "push", (replace(header, push_id=push_id, refused=()), content))):
                    self._world.seen[f"hoarder told {type(error).__name__}"] += 1

    def _fetch(self, request: ask.Fetch) -> Task:
        if self._held_step == request.step:
            return
        me = self._participant
        try:
            read = yield from self._at_all("read", [(me.era.epoch, request.step, one.hash, one.nbytes) for one in self._layouts])
        except StepGone:
            self._world.seen["step gone before it was read"] += 1
            raise
        self._oracle.read(era_of(me), request.step, {index: arena for index, (_, arena) in enumerate(read)}, by=self._life.name)
        self._held_step = request.step

    def _fetch_newest(self, request: ask.FetchNewest) -> Task:
        """Reads the newest variables; those of shards that have gone ahead once more, at the step of the others, if they keep that."""
        me = self._participant
        read = yield from self._at_all("read", [(me.era.epoch, None, one.hash, one.nbytes) for one in self._layouts])
        least = min(step for step, _ in read)
        if request.is_aligned and any(step > least for step, _ in read):
            self._world.seen["shards were read at two steps"] += 1
            try:
                read = yield from self._at_all("read", [(me.era.epoch, least, one.hash, one.nbytes) for one in self._layouts])
            except StepGone:
                self._world.seen["the newest were not of one step"] += 1
        for index, (step, arena) in enumerate(read):
            self._oracle.read(era_of(me), step, {index: arena}, by=self._life.name)
        self._held_step = None
        return min(step for step, _ in read)

    def _at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> Task:
        worker, me = self._worker, self._participant
        assert worker is not None
        # As connections are given up when the heartbeat has heard that the epoch is over.
        return self._calls.at_all(method, arguments, is_over=lambda: worker.place.participant is not me)

    @property
    def _participant(self) -> Any:
        assert self._worker is not None
        return self._worker.place.participant

    def _gradient(self, push_id: PushId, index: int) -> Array:
        return arena_of(self._layouts[index], lambda size: gradient_of(push_id, shard=index, size=size))


class _NoDeadline:
    def left_s(self) -> float | None:
        return _NO_LIMIT_S

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Nobody listens, and it has no end."""


def _run(steps: ask.Asking[Any], acts: dict[type, Callable[[Any], Task]]) -> Task:
    """Does as `run` does in the world's time; what needs no act is answered with None."""
    try:
        request = next(steps)
        while True:
            act = acts.get(type(request))
            try:
                answer = None if act is None else (yield from act(request))
            except PsError as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return end.value


def _sleep(seconds: float) -> Task:
    yield Sleep(seconds)


_FIRST = PushId(worker=0, incarnation=1, sequence=1)
