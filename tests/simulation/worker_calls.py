"""How a simulated worker calls chief and shards: again until they answer, wherever the chief is. Knows no step and no model."""

from collections.abc import Callable
from typing import Any

from ps_protocol.errors import Cancelled, PsError, ShuttingDown, Unavailable
from ps_protocol.roles.shard import ShardStatus
from tests.simulation.tasks import All, Call, Sleep, Task
from tests.simulation.world import World

# What another try is of use for.
_TRANSIENT = (Unavailable, ShuttingDown)
_MOVED_S = 1.0
_ASK_S = 8.0
_BEAT_S = 4.0


class WorkerCalls:
    """The calls of one worker process."""

    def __init__(self, world: World, *, shards: tuple[str, ...], chief: str) -> None:
        self._world, self._shards, self._chief = world, shards, chief
        self._away_since: float | None = None

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
        """Calls all shards until they answer, or it is over; the first error is the caller's, after all have answered."""
        answers = yield All([self._at(index, method, arguments[index], is_over) for index in range(len(self._shards))])
        for answer in answers:
            if isinstance(answer, PsError):
                raise answer
        return answers

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
        found = yield All([_single(Call(shard, "status")) for shard in self._shards])
        statuses: list[ShardStatus] = [one for one in found if not isinstance(one, PsError) and one.chief_address]
        if statuses:
            newest = max(statuses, key=lambda one: one.fence.chief_incarnation).chief_address
            if newest != self._chief:
                self._world.seen["worker found the chief at another address"] += 1
                self._chief = newest

    def _at(self, index: int, method: str, arguments: tuple[Any, ...], is_over: Callable[[], bool]) -> Task:
        pause_s = 0.02
        while True:
            try:
                return (yield Call(self._shards[index], method, arguments))
            except _TRANSIENT as error:
                if is_over():
                    raise Cancelled(f"ps {index}: given up: {error.message}") from None
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)


def _single(call: Call) -> Task:
    return (yield call)
