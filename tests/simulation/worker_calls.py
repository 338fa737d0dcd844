"""Calls of a simulated worker to chief and shards: repeated until an answer comes, at any address of the chief. Knows no step or model."""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from ps_protocol.errors import Cancelled, PsError, ShuttingDown, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import Registration
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushReply, ShardStatus, ShardStatusRequest
from tests.simulation.tasks import All, Call, Sleep, Task
from tests.simulation.world import World
from worker_client.cluster.chief import other_addresses
from worker_client.shards.standbys import DOUBTFUL, in_one, lasting

# What another try is of use for.
_TRANSIENT = (Unavailable, ShuttingDown)
_TO_ALL = ("create", "push")
_MOVED_S = 1.0
_ASK_S = 8.0
_BEAT_S = 4.0


class WorkerCalls:
    """The calls of one worker process."""

    def __init__(self, world: World, *, servers: tuple[str, ...], chief: str, ask_again: Callable[[], Task]) -> None:
        self._world, self._servers, self._chief, self._ask_again = world, servers, chief, ask_again
        self._away_since: float | None = None
        self._places: tuple[tuple[str, ...], ...] = ()
        self.shards_version = 0
        # What some servers are given instead of the gradients of a contribution.
        self.lies: dict[tuple[str, PushId], Array] = {}

    def found(self, registration: Registration) -> None:
        """The chief has said which servers hold the shards."""
        self.shards_version = registration.shards_version
        pairs = zip_longest(registration.shard_addresses, registration.standby_addresses, fillvalue="")
        self._places = tuple((first, *([other] if other else ())) for first, other in pairs)

    def hear(self) -> Task:
        """Asks the chief which servers hold the shards, where there are standbys; returns whether they are others."""
        before = self.shards_version
        if before:
            yield from self._ask_again()
        return self.shards_version != before

    def ask(self, method: str, *arguments: Any) -> Task:
        """Asks the chief until it answers, wherever it is."""
        pause_s = 0.02
        while True:
            try:
                return (yield from self._ask_once(method, arguments, timeout_s=_ASK_S))
            except _TRANSIENT:
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    def once(self, method: str, *arguments: Any) -> Task:
        """Asks the chief once."""
        return self._ask_once(method, arguments, timeout_s=_BEAT_S)

    def at_all(self, method: str, arguments: list[tuple[Any, ...]], *, is_over: Callable[[], bool]) -> Task:
        """Calls all shards that there are arguments for until they answer, or it is over; the first error is the caller's, after that."""
        answers = yield All([self._at(index, method, arguments[index], is_over) for index in range(len(arguments))])
        for answer in answers:
            if isinstance(answer, PsError):
                raise answer
        return answers

    def once_at(self, index: int, method: str, arguments: tuple[Any, ...]) -> Task:
        """Calls all servers that hold a shard, once; returns the errors."""
        answers = yield All([_single(Call(name, method, arguments)) for name in self._places[index]])
        return [answer for answer in answers if isinstance(answer, PsError)]

    def _ask_once(self, method: str, arguments: tuple[Any, ...], *, timeout_s: float) -> Task:
        """One attempt; whichever of the worker's calls fails once the chief has been silent for a while, looks for it elsewhere."""
        try:
            answer = yield Call(self._chief, method, arguments, timeout_s=timeout_s)
        except _TRANSIENT:
            if self._away_since is None:
                self._away_since = self._world.now
            elif self._world.now - self._away_since > _MOVED_S:
                yield from self._look_for_chief()
                self._away_since = self._world.now  # the next search comes after another while
            raise
        self._away_since = None
        return answer

    def _look_for_chief(self) -> Task:
        found = yield All([_single(Call(shard, "ask", (ShardStatusRequest(),))) for shard in self._servers])
        statuses: list[ShardStatus] = [one for one in found if not isinstance(one, PsError) and one.chief_address]
        named = [(one.fence.chief_incarnation, one.chief_address) for one in statuses]
        for address in other_addresses(named, than=self._chief):
            try:
                yield Call(address, "status")
            except PsError:
                continue
            self._world.seen["worker found the chief at another address"] += 1
            self._chief = address
            return

    def _at(self, index: int, method: str, arguments: tuple[Any, ...], is_over: Callable[[], bool]) -> Task:
        pause_s = 0.02
        while True:
            try:
                return (yield from self._at_servers(index, method, arguments))
            except _TRANSIENT as error:
                if is_over():
                    raise Cancelled(f"ps {index}: given up: {error.message}") from None
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    def _at_servers(self, index: int, method: str, arguments: tuple[Any, ...]) -> Task:
        """As ReplicatedShard: writes go to all that hold a shard, reads to the first; if that fails, the chief is asked who they are."""
        while True:
            names = self._places[index]
            try:
                if method not in _TO_ALL or len(names) == 1:
                    answer = yield Call(names[0], method, self._told(names[0], method, arguments))
                    answers = [answer]
                else:
                    answers = yield All([_single(Call(name, method, self._told(name, method, arguments))) for name in names])
                    for answer in answers:
                        if isinstance(answer, PsError):
                            raise answer
            except DOUBTFUL as error:
                if not self.shards_version:
                    raise
                yield from self.hear()
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


def _single(call: Call) -> Task:
    return (yield call)
