"""A worker of a simulated cluster, as the SDK behaves: joins, reads, computes, pushes, commits, and goes on after whatever happens.

Knows the calls of chief and shards; decides nothing for others. It checks what it reads, and never stops of its own accord.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ps_protocol.errors import (
    EpochMismatch,
    LeaseExpired,
    NotInitialized,
    NotInitializer,
    PsError,
    StepGone,
    Superseded,
    WorkerIndexTaken,
)
from ps_protocol.model.data import DataSpec
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ModelSpec, layouts
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import (
    CommitResult,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.shard import PushHeader, PushId, PushReply, ShardSpec
from tests.simulation.arenas import arena_of
from tests.simulation.epochs import era_of
from tests.simulation.oracle import Oracle, gradient_of
from tests.simulation.tasks import Answer, Life, Sleep, Task
from tests.simulation.worker_calls import WorkerCalls
from tests.simulation.worker_data import WorkerData
from tests.simulation.world import World
from worker_client.session.state import OpenCommits, WorkerState

# What only a new registration is of use for.
_AWAY = (EpochMismatch, LeaseExpired, NotInitialized)
_LAST_CHANCE_S = 30.0


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
        shards: tuple[str, ...],
        chief: str,
        lease_s: float,
        oracle: Oracle,
        compute_s: float,
        data: DataSpec | None,
        takes_over: bool,
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._oracle = world, life, oracle
        self._index, self._pid, self._model, self._shards = index, pid, model, shards
        self._calls = WorkerCalls(world, shards=shards, chief=chief)
        self._lease_s, self._compute_s, self._takes_over, self._on_end = lease_s, compute_s, takes_over, on_end
        self._data = WorkerData(world, self._calls, oracle, data, keep_up=self._keep_up) if data is not None else None
        self._requests = itertools.count(pid * 1_000_000 + 1)  # no other process has these
        self._layouts: tuple[Layout, ...] = ()
        # What production's sessions decide by, too; None until there is a model.
        self._state: WorkerState | None = None
        self._registration: Registration | None = None
        # The contribution that nothing final is known of: whose it is, and whether the chief had said that it counts when that one moved.
        self._given: tuple[Participant, PushCommit] | None = None
        self._was_accepted = False
        self._is_over = False
        self.num_steps = 0
        world.spawn(life, self._run(), self._ended)
        world.spawn(life, self._beat())

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls a worker."""
        raise AssertionError(method)

    def _ended(self, value: object) -> None:
        self._is_over = True
        self._world.note(f"{self._life.name} ends: {value}")
        self._on_end(type(value).__name__ if isinstance(value, PsError) else str(value))

    # -- the loop

    def _run(self) -> Task:
        yield from self._register(None)
        while True:
            place = self._calls.participant
            try:
                if not (yield from self._join()):
                    return "finished"
                yield from self._conclude()
                while (yield from self._step()):
                    self.num_steps += 1
                return "finished"
            except _AWAY as error:
                self._world.seen[f"worker told {type(error).__name__}"] += 1
                if self._calls.participant is place:
                    yield from self._register(place)

    def _register(self, former: Participant | None) -> Task:
        request = RegisterRequest(
            kind=ParticipantKind.WORKER,
            index=self._index,
            host="simulated",
            pid=self._pid,
            request_id=next(self._requests),
            takeover=self._takes_over,
            former=former,
            held=self._data.held() if self._data is not None and former is not None else (),
        )
        while True:
            try:
                registration: Registration = yield from self._calls.ask("register", request)
            except (EpochMismatch, LeaseExpired) as error:
                # Its place is gone: a new incarnation of the same index.
                self._world.note(f"{self._life.name}: cannot come back: {error}")
                request = replace(request, former=None, held=(), request_id=next(self._requests))
                yield Sleep(0.05)
            except WorkerIndexTaken:
                if former is not None:
                    raise Superseded("another process has the index") from None
                yield Sleep(0.3)
            else:
                break
        before, self._calls.participant = self._calls.participant, registration.participant
        if before == self._calls.participant:
            self._world.seen["worker came back as whom it was"] += 1
            return
        if before is not None and before.incarnation == self._calls.me.incarnation and before.epoch != self._calls.me.epoch:
            self._world.seen["worker came back under a new epoch"] += 1
        if self._state is not None and self._given is not None and self._given[0] is self._state.participant:
            self._was_accepted = self._state.commits.is_accepted(self._given[1])
        self._registration = registration
        if self._data is not None:
            self._data.moved()

    def _join(self) -> Task:
        while True:
            reply: ModelReply = yield from self._calls.ask("model", self._calls.me, self._model)
            if reply.placement:
                self._layouts = layouts(reply.placement, num_shards=len(self._shards))
            if reply.state is ModelState.READY:
                break
            if reply.state is ModelState.INITIALIZE:
                yield from self._create(reply)
            else:
                yield Sleep(0.02)
        me, registration, former = self._calls.me, self._registration, self._state
        assert registration is not None
        if former is None or former.participant != me:
            # Registered before the servers were brought back, it may have been told the step that was open then.
            step = min(registration.global_step, reply.global_step)
            self._state = WorkerState(me, step=step, global_step=reply.global_step, commits=OpenCommits(me), former=former)
        else:
            former.local_step = min(former.local_step, reply.global_step)
        if self._known.join(policy=reply.policy, global_step=reply.global_step, may_contribute=registration.may_contribute):
            return (yield from self._take_token(None))
        return True

    def _create(self, reply: ModelReply) -> Task:
        specs = [
            ShardSpec(
                epoch=self._calls.me.epoch,
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
        yield from self._calls.at_all("create", list(zip(specs, contents, strict=True)))
        try:
            yield from self._calls.ask("complete", self._calls.me, reply.attempt)
        except (NotInitializer, *_AWAY) as error:
            self._world.seen["first values came too late"] += 1
            if not isinstance(error, NotInitializer):
                raise

    def _step(self) -> Task:
        """One contribution, from reading to the token; False at the end of training."""
        if self._data is not None:
            yield from self._data.next()
        state = self._known
        step = state.local_step
        try:
            read = yield from self._calls.at_all("read", [(self._calls.me.epoch, step, one.hash, one.nbytes) for one in self._layouts])
        except StepGone:
            self._world.seen["step gone before it was read"] += 1
            return (yield from self._take_token(None))
        self._oracle.read(era_of(self._calls.me), step, {index: arena for index, (_, arena) in enumerate(read)}, by=self._life.name)
        yield Sleep(self._compute_s * self._world.between(0.5, 1.5))
        push_id = state.number_push()
        replies: list[PushReply] = yield from self._calls.at_all(
            "push", [(self._header(push_id, step, one), self._gradient(push_id, index)) for index, one in enumerate(self._layouts)]
        )
        state.refused.clear()
        ranges = self._data.take() if self._data is not None else ()
        self._oracle.contributed(self._calls.me.life, push_id, ranges)
        commit = state.pushed(push_id, [reply.result for reply in replies], step=step, ranges=ranges)
        self._given, self._was_accepted = (state.participant, commit), False
        state.commits.sent(commit)
        if self._index % 2:  # as push() and then wait(); the others as step()
            yield from self._commit(commit)
            return (yield from self._take_token(None))
        return (yield from self._take_token(commit))

    def _header(self, push_id: PushId, step: int, layout: Layout) -> PushHeader:
        me, refused = self._calls.me, tuple(self._known.refused)
        return PushHeader(epoch=me.epoch, life=me.life, push_id=push_id, step=step, layout_hash=layout.hash, refused=refused)

    def _gradient(self, push_id: PushId, index: int) -> Array:
        return arena_of(self._layouts[index], lambda size: gradient_of(push_id, shard=index, size=size))

    def _commit(self, commit: PushCommit) -> Task:
        while True:
            place = self._calls.me
            try:
                return self._note(commit, (yield from self._calls.ask("commit", place, commit)))
            except _AWAY:
                yield from self._register(place)
                if self._calls.me != place:
                    raise

    def _take_token(self, commit: PushCommit | None) -> Task:
        state = self._known
        while True:
            place = self._calls.me
            try:
                reply: TokenReply = yield from self._calls.ask("token", place, state.local_step, state.request_id, commit)
            except _AWAY:
                yield from self._register(place)
                if self._calls.me != place:
                    raise
                yield from self._retell()
                continue
            if reply.commit is not None and commit is not None:
                self._note(commit, reply.commit)
                commit = None
            if reply.result is not TokenResult.WAIT:
                state.granted(reply)  # the policy stays what it is
                state.move_on(reply)
                self._given = None
                return not state.is_finished
            self._world.seen["waited for a token longer than a call may block"] += 1

    def _retell(self) -> Task:
        """Another chief may know neither the model nor what its predecessor had counted and not applied."""
        try:
            yield from self._calls.ask("model again", self._calls.me, self._model)
            for commit in self._known.commits.all():
                self._note(commit, (yield from self._calls.ask("commit", self._calls.me, commit)))
        except _AWAY:
            return  # what is asked next ends in the same way

    def _keep_up(self) -> Task:
        """Others have gone on while this worker had nothing to contribute."""
        if (yield from self._calls.ask("step", self._calls.me)) > self._known.local_step and not (yield from self._take_token(None)):
            self._world.seen["training ended while a worker waited for data"] += 1

    def _note(self, commit: PushCommit, result: CommitResult) -> None:
        """Takes note of what becomes of a contribution."""
        self._world.seen[f"contribution {result.outcome.name}"] += 1
        if self._data is not None:
            self._data.answered()
        self._known.counted(commit, result)

    def _conclude(self) -> Task:
        """The worker goes on in another place: what does its user hear of the contribution that was under way?"""
        given, self._given = self._given, None
        if given is None:
            return
        giver, commit = given
        state = self._known
        found = state.outcome_at_move(commit, step=commit.step, giver=giver, is_accepted=self._was_accepted)
        if isinstance(found, PushCommit):
            self._world.seen["worker asked what had become of a contribution"] += 1
            yield from self._calls.ask("commit", state.participant, found)
        elif found.is_accepted:
            self._world.seen["what was said before holds in the new place"] += 1
            result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=state.local_step, applied_step=commit.step)
            self._oracle.told_commit(era_of(state.participant), commit.push_id, result)

    @property
    def local_step(self) -> int:
        """The step of its variables."""
        return 0 if self._state is None else self._state.local_step

    @property
    def _known(self) -> WorkerState:
        assert self._state is not None
        return self._state

    def _beat(self) -> Task:
        while not self._is_over:
            yield Sleep(self._lease_s / 3)
            if self._calls.participant is not None:
                try:
                    yield from self._calls.beat()
                except PsError:
                    self._world.seen["heartbeat failed"] += 1


_FIRST = PushId(worker=0, incarnation=1, sequence=1)
