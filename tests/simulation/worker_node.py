"""A worker of a simulated cluster, as the SDK behaves: joins, reads, computes, pushes, commits, and goes on after whatever happens.

Knows the calls of chief and shards; decides nothing for others. It checks what it reads, and never stops of its own accord.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ps_protocol.chief import (
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
from ps_protocol.errors import (
    EpochMismatch,
    LayoutMismatch,
    LeaseExpired,
    NotInitialized,
    NotInitializer,
    PsError,
    ShuttingDown,
    StepAhead,
    StepGone,
    StepNotReady,
    Superseded,
    TrainingFailed,
    Unavailable,
    WorkerIndexTaken,
)
from ps_protocol.layout import Layout
from ps_protocol.model import ModelSpec
from ps_protocol.placement import layouts
from ps_protocol.shard import PushHeader, PushId, PushReply, PushResult, ShardSpec, ShardStatus
from ps_protocol.tensors import Array
from tests.simulation.arenas import arena_of
from tests.simulation.oracle import Oracle, gradient_of
from tests.simulation.world import All, Answer, Call, Life, Sleep, Task, World

# What another try is of use for, and what only a new registration is.
_TRANSIENT = (Unavailable, ShuttingDown)
_AWAY = (EpochMismatch, LeaseExpired)
_MOVED_S = 1.0
_LAST_CHANCE_S = 30.0


class WorkerNode:
    """One worker process. `on_end` is told why it ends, if it does."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        index: int,
        model: ModelSpec,
        shards: tuple[str, ...],
        chief: str,
        lease_s: float,
        oracle: Oracle,
        compute_s: float,
        takes_over: bool,
        on_end: Callable[[str], None],
    ) -> None:
        self._world, self._life, self._oracle = world, life, oracle
        self._index, self._model, self._shards, self._chief = index, model, shards, chief
        self._lease_s, self._compute_s, self._takes_over, self._on_end = lease_s, compute_s, takes_over, on_end
        self._requests = itertools.count(index * 1_000_000 + int(world.now * 1000) * 100 + 1)
        self._participant: Participant | None = None
        self._layouts: tuple[Layout, ...] = ()
        self._sequence = 0
        self._token_request = 0
        self._refused: list[int] = []
        self._is_over = False
        self.local_step = 0
        self.num_steps = 0
        world.spawn(life, self._run(), self._ended)
        world.spawn(life, self._beat())

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls a worker."""
        raise AssertionError(method)

    @property
    def _me(self) -> Participant:
        assert self._participant is not None
        return self._participant

    def _ended(self, value: object) -> None:
        self._is_over = True
        self._world.note(f"{self._life.name} ends: {value}")
        self._on_end(type(value).__name__ if isinstance(value, PsError) else str(value))

    # -- the loop

    def _run(self) -> Task:
        yield from self._register(None)
        while True:
            try:
                if not (yield from self._join()):
                    return "finished"
                while (yield from self._step()):
                    self.num_steps += 1
                return "finished"
            except _AWAY as error:
                self._world.seen[f"worker told {type(error).__name__}"] += 1
                yield from self._register(self._participant)

    def _register(self, former: Participant | None) -> Task:
        request = RegisterRequest(
            kind=ParticipantKind.WORKER,
            index=self._index,
            host="simulated",
            pid=self._index,
            request_id=next(self._requests),
            takeover=self._takes_over,
            former=former,
        )
        while True:
            try:
                registration: Registration = yield from self._ask("register", request)
            except (EpochMismatch, LeaseExpired) as error:
                # Its place is gone: a new incarnation of the same index.
                self._world.note(f"{self._life.name}: cannot come back: {error}")
                request = replace(request, former=None, request_id=next(self._requests))
                yield Sleep(0.05)
            except WorkerIndexTaken:
                if former is not None:
                    raise Superseded("another process has the index") from None
                yield Sleep(0.3)
            else:
                break
        before, self._participant = self._participant, registration.participant
        if before is None or before.incarnation != self._me.incarnation:
            self._sequence = self._token_request = 0
            self._refused.clear()
        elif before.epoch != self._me.epoch:
            self._world.seen["worker came back under a new epoch"] += 1
        self.local_step = registration.global_step
        self._may_contribute = registration.may_contribute

    def _join(self) -> Task:
        while True:
            reply: ModelReply = yield from self._ask("model", self._me, self._model)
            if reply.placement:
                self._layouts = layouts(reply.placement, num_shards=len(self._shards))
            if reply.state is ModelState.READY:
                break
            if reply.state is ModelState.INITIALIZE:
                yield from self._create(reply)
            else:
                yield Sleep(0.02)
        # Registered before the servers were brought back, it may have been told the step that was open then.
        self.local_step = min(self.local_step, reply.global_step)
        if self._may_contribute and reply.global_step == self.local_step:
            return True
        return (yield from self._take_token(None))

    def _create(self, reply: ModelReply) -> Task:
        specs = [
            ShardSpec(
                epoch=self._me.epoch,
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
        try:
            yield from self._ask("complete", self._me, reply.attempt)
        except NotInitializer:
            self._world.seen["first values came too late"] += 1

    def _step(self) -> Task:
        """One contribution, from reading to the token; False at the end of training."""
        step = self.local_step
        try:
            read = yield from self._at_all("read", [(self._me.epoch, step, one.hash, one.nbytes) for one in self._layouts])
        except StepGone:
            self._world.seen["step gone before it was read"] += 1
            return (yield from self._take_token(None))
        self._oracle.read(self._me.epoch, step, {index: arena for index, (_, arena) in enumerate(read)}, by=self._life.name)
        yield Sleep(self._compute_s * self._world.between(0.5, 1.5))
        self._sequence += 1
        push_id = PushId(worker=self._index, incarnation=self._me.incarnation, sequence=self._sequence)
        replies: list[PushReply] = yield from self._at_all(
            "push", [(self._header(push_id, step, one), self._gradient(push_id, index)) for index, one in enumerate(self._layouts)]
        )
        self._refused.clear()
        is_whole = all(reply.result is not PushResult.STALE for reply in replies)
        return (yield from self._take_token(PushCommit(push_id=push_id, step=step, staged=is_whole)))

    def _header(self, push_id: PushId, step: int, layout: Layout) -> PushHeader:
        return PushHeader(epoch=self._me.epoch, push_id=push_id, step=step, layout_hash=layout.hash, refused=tuple(self._refused))

    def _gradient(self, push_id: PushId, index: int) -> Array:
        return arena_of(self._layouts[index], lambda size: gradient_of(push_id, shard=index, size=size))

    def _take_token(self, commit: PushCommit | None) -> Task:
        self._token_request += 1
        while True:
            reply: TokenReply = yield from self._ask("token", self._me, self.local_step, self._token_request, commit)
            if reply.commit is not None:
                self._note(commit, reply.commit)
                commit = None
            if reply.result is TokenResult.FINISHED:
                return False
            if reply.result is TokenResult.TOKEN:
                self.local_step = reply.step
                return True
            self._world.seen["waited for a token longer than a call may block"] += 1

    def _note(self, commit: PushCommit | None, result: CommitResult) -> None:
        self._world.seen[f"contribution {result.outcome.name}"] += 1
        outcome = result.first_outcome if result.outcome is PushOutcome.DUPLICATE else result.outcome
        if commit is not None and outcome in (PushOutcome.STALE, PushOutcome.LATE):
            self._refused.append(commit.push_id.sequence)

    def _beat(self) -> Task:
        while not self._is_over:
            yield Sleep(self._lease_s / 3)
            if self._participant is not None:
                try:
                    yield Call(self._chief, "heartbeat", (self._participant,))
                except PsError:
                    self._world.seen["heartbeat failed"] += 1

    # -- calls

    def _ask(self, method: str, *arguments: Any) -> Task:
        """Asks the chief until it answers, wherever it is."""
        pause_s, since = 0.02, self._world.now
        while True:
            try:
                return (yield Call(self._chief, method, arguments, timeout_s=8.0))
            except _TRANSIENT:
                if self._world.now - since > _MOVED_S:
                    yield from self._look_for_chief()
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    def _look_for_chief(self) -> Task:
        found = yield All([_single(Call(shard, "status")) for shard in self._shards])
        statuses: list[ShardStatus] = [one for one in found if not isinstance(one, PsError) and one.chief_address]
        if statuses:
            newest = max(statuses, key=lambda one: one.chief_incarnation).chief_address
            if newest != self._chief:
                self._world.seen["worker found the chief at another address"] += 1
                self._chief = newest

    def _at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> Task:
        """Calls all shards; the first error is the caller's, after all have answered."""
        answers = yield All([self._at(index, method, arguments[index]) for index in range(len(self._shards))])
        for answer in answers:
            if isinstance(answer, PsError):
                raise answer
        return answers

    def _at(self, index: int, method: str, arguments: tuple[Any, ...]) -> Task:
        pause_s = 0.02
        while True:
            try:
                return (yield Call(self._shards[index], method, arguments))
            except (*_TRANSIENT, StepNotReady):
                # The chief may know that this shard's epoch is over.
                yield from self._check_epoch()
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)
            except (NotInitialized, LayoutMismatch, StepAhead) as error:
                yield from self._check_epoch()
                raise EpochMismatch(f"ps {index}: {error.message}") from None

    def _check_epoch(self) -> Task:
        try:
            yield Call(self._chief, "heartbeat", (self._me,))
        except _TRANSIENT:
            return
        except (EpochMismatch, LeaseExpired, Superseded, TrainingFailed):
            raise


def _single(call: Call) -> Task:
    return (yield call)


_FIRST = PushId(worker=0, incarnation=1, sequence=1)
