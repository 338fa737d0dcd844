"""Calls of a simulated worker to chief and shards: repeated until an answer comes, at any address of the chief. Knows no step or model."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import zip_longest
from typing import Any

from ps_protocol.errors import Cancelled, NotInitializer, PsError, ShuttingDown, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import (
    ClusterStatusRequest,
    CommitResult,
    End,
    HeartbeatRequest,
    LeaseRangesRequest,
    LeaseReply,
    LeaseResult,
    Participant,
    ParticipantKind,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.request import Request
from ps_protocol.roles.shard import PushReply, ShardStatus, ShardStatusRequest
from tests.simulation.tasks import All, Call, Sleep
from tests.simulation.world import World
from worker_client.cluster.chief import other_addresses
from worker_client.core.place import Place
from worker_client.core.sides import Deadline
from worker_client.shards.standbys import DOUBTFUL, in_one, lasting

# What another try is of use for.
_TRANSIENT = (Unavailable, ShuttingDown)
_TO_ALL = ("create", "push")
_MOVED_S = 1.0
_ASK_S = 8.0
_BEAT_S = 4.0
_LOOK_AGAIN_S = 0.01
_NO_LIMIT_S = 1e9
# How long a call to the chief may block.
_SLICE_S = 1.0


class WorkerCalls:
    """The calls of one worker process, of this index; implements ChiefSide. `takes_over`: from a process that had the index before."""

    def __init__(self, world: World, *, index: int, pid: int, servers: tuple[str, ...], chief: str, takes_over: bool) -> None:
        self._world, self._servers, self._chief = world, servers, chief
        self._index, self._pid, self._takes_over = index, pid, takes_over
        self._requests = itertools.count(pid * 1_000_000 + 1)  # no other process has these
        self._away_since: float | None = None
        self._places: tuple[tuple[str, ...], ...] = ()
        self._is_taken = False  # whether a task is taking the place again
        self.place: Place | None = None
        self.shards_version = 0
        # What some servers are given instead of the gradients of a contribution.
        self.lies: dict[tuple[str, PushId], Array] = {}

    # -- the chief

    async def ask(self, request: Request[Any], *, what: str = "", wait: Deadline | None = None, takes_place: bool = False) -> Any:
        """Asks the chief until it answers, wherever it is."""
        if not takes_place:
            await self.await_turn()
        try:
            answer = await self._until_answered(request)
        except NotInitializer:
            self._world.seen["first values came too late"] += 1
            raise
        self._note(answer)
        return answer

    async def enter(self) -> Registration:
        """Registers as a new process."""
        return await self._register(None, ())

    async def register(self, known: Registration, held: tuple[int, ...]) -> Registration:
        """Registers again."""
        former = known.participant
        registration = await self._register(former, held)
        if registration.participant == former:
            self._world.seen["worker came back as whom it was"] += 1
        elif registration.participant.incarnation == former.incarnation:
            self._world.seen["worker came back under a new epoch"] += 1
        return registration

    async def beat(self, participant: Participant) -> End:
        """Renews the lease in one attempt."""
        end: End = await self._ask_once(HeartbeatRequest(participant=participant), timeout_s=_BEAT_S)
        return end

    async def lease(self, request: LeaseRangesRequest, wait: Deadline) -> LeaseReply:
        """Leases ranges of the training data."""
        reply: LeaseReply = await self.ask(request)
        return reply

    def lease_ahead(self, request: LeaseRangesRequest) -> None:
        """Begins nothing."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Returns one task's turn to take the place again."""
        await self.await_turn()
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False

    async def await_turn(self) -> None:
        """Waits for the task that is taking the place again."""
        while self._is_taken:
            await Sleep(_LOOK_AGAIN_S)

    def moved(self) -> None:
        """Does nothing: calls to shards look whether it has."""

    def begin_wait(self, what: str, timeout_s: float | None) -> Deadline:
        """Returns a wait without an end."""
        return _NoDeadline()

    async def pause(self, wait: Deadline, seconds: float) -> None:
        """Lets time pass."""
        await Sleep(seconds)

    def _note(self, answer: object) -> None:
        seen = self._world.seen
        if isinstance(answer, TokenReply):
            if answer.commit is not None:
                seen[f"contribution {answer.commit.outcome.name}"] += 1
            seen["waited for a token longer than a call may block"] += answer.result is TokenResult.WAIT
        elif isinstance(answer, CommitResult):
            seen[f"contribution {answer.outcome.name}"] += 1
        elif isinstance(answer, LeaseReply):
            seen["training data gone through"] += answer.result is LeaseResult.EXHAUSTED
            seen["worker waited for training data"] += answer.result is LeaseResult.WAIT

    async def _register(self, former: Participant | None, held: tuple[int, ...]) -> Registration:
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
        registration: Registration = await self._until_answered(request)
        self.shards_version = registration.shards_version
        pairs = zip_longest(registration.shard_addresses, registration.standby_addresses, fillvalue="")
        self._places = tuple((first, *([other] if other else ())) for first, other in pairs)
        return registration

    async def _until_answered(self, request: Request[Any]) -> Any:
        pause_s = 0.02
        while True:
            try:
                return await self._ask_once(request, timeout_s=_ASK_S)
            except _TRANSIENT:
                await Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    # -- the shards

    async def at_all(self, method: str, arguments: list[tuple[Any, ...]], *, is_over: Callable[[], bool]) -> list[Any]:
        """Calls all shards that there are arguments for until they answer, or it is over; the first error is the caller's, after that."""
        answers: list[Any] = await All([self._at(index, method, arguments[index], is_over) for index in range(len(arguments))])
        for answer in answers:
            if isinstance(answer, PsError):
                raise answer
        return answers

    async def once_at(self, index: int, method: str, arguments: tuple[Any, ...]) -> list[PsError]:
        """Calls all servers that hold a shard, once; returns the errors."""
        answers = await All([_single(Call(name, method, arguments)) for name in self._places[index]])
        return [answer for answer in answers if isinstance(answer, PsError)]

    async def _ask_once(self, request: Request[Any], *, timeout_s: float) -> Any:
        """One attempt; whichever of the worker's calls fails once the chief has been silent for a while, looks for it elsewhere."""
        try:
            answer = await Call(self._chief, "ask", (request,), timeout_s=timeout_s)
        except _TRANSIENT:
            if self._away_since is None:
                self._away_since = self._world.now
            elif self._world.now - self._away_since > _MOVED_S:
                await self._look_for_chief()
                self._away_since = self._world.now  # the next search comes after another while
            raise
        self._away_since = None
        return answer

    async def _look_for_chief(self) -> None:
        found = await All([_single(Call(shard, "ask", (ShardStatusRequest(),))) for shard in self._servers])
        statuses: list[ShardStatus] = [one for one in found if not isinstance(one, PsError) and one.chief_address]
        named = [(one.fence.chief_incarnation, one.chief_address) for one in statuses]
        for address in other_addresses(named, than=self._chief):
            try:
                await Call(address, "ask", (ClusterStatusRequest(),))
            except PsError:
                continue
            self._world.seen["worker found the chief at another address"] += 1
            self._chief = address
            return

    async def _at(self, index: int, method: str, arguments: tuple[Any, ...], is_over: Callable[[], bool]) -> Any:
        pause_s = 0.02
        while True:
            try:
                return await self._at_servers(index, method, arguments)
            except _TRANSIENT as error:
                if is_over():
                    raise Cancelled(f"ps {index}: given up: {error.message}") from None
                await Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    async def _at_servers(self, index: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """As ReplicatedShard: writes go to all that hold a shard, reads to the first; if that fails, the chief is asked who they are."""
        while True:
            names = self._places[index]
            try:
                if method not in _TO_ALL or len(names) == 1:
                    answer = await Call(names[0], method, self._told(names[0], method, arguments))
                    answers = [answer]
                else:
                    answers = await All([_single(Call(name, method, self._told(name, method, arguments))) for name in names])
                    for answer in answers:
                        if isinstance(answer, PsError):
                            raise answer
            except DOUBTFUL as error:
                if not self.shards_version:
                    raise
                if self.place is not None:
                    await self.place.hear_shards(self.shards_version)
                if self._places[index][: len(names)] != names:
                    self._world.seen["worker went over to another server"] += 1
                    continue
                raise lasting(error) from None
            if method not in _TO_ALL or set(self._places[index]) <= set(names):
                return _of_all(answers)

    def _told(self, name: str, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if method != "push" or not self.lies:
            return arguments
        header, content = arguments
        return header, self.lies.get((name, header.push_id), content)


def _of_all(answers: list[Any]) -> Any:
    if len(answers) == 1:
        return answers[0]
    if isinstance(answers[0], PushReply):
        return in_one(answers)
    return any(answers)


async def _single(call: Call) -> Any:
    return await call


class _NoDeadline:
    def left_s(self) -> float | None:
        return _NO_LIMIT_S

    def slice_s(self) -> float:
        return _SLICE_S

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Nobody listens, and it has no end."""
