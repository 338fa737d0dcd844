"""How a simulated worker calls chief and shards: again until they answer, wherever the chief is. Knows no step and no model."""

from typing import Any

from ps_protocol.errors import EpochMismatch, LayoutMismatch, NotInitialized, PsError, ShuttingDown, StepAhead, StepNotReady, Unavailable
from ps_protocol.roles.chief import Participant
from ps_protocol.roles.shard import ShardStatus
from tests.simulation.tasks import All, Call, Sleep, Task
from tests.simulation.world import World

# What another try is of use for.
_TRANSIENT = (Unavailable, ShuttingDown)
_MOVED_S = 1.0
_ASK_S = 8.0
_BEAT_S = 4.0


class WorkerCalls:
    """The calls of one worker process, which is this participant since it has registered."""

    def __init__(self, world: World, *, shards: tuple[str, ...], chief: str) -> None:
        self.participant: Participant | None = None
        self._world, self._shards, self._chief = world, shards, chief
        self._away_since: float | None = None

    @property
    def me(self) -> Participant:
        """The participant, which must be there."""
        assert self.participant is not None
        return self.participant

    def ask(self, method: str, *arguments: Any) -> Task:
        """Asks the chief until it answers, wherever it is."""
        pause_s = 0.02
        while True:
            try:
                return (yield from self._ask_once(method, arguments, timeout_s=_ASK_S))
            except _TRANSIENT:
                yield Sleep(pause_s * self._world.between(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)

    def at_all(self, method: str, arguments: list[tuple[Any, ...]]) -> Task:
        """Calls all shards; the first error is the caller's, after all have answered."""
        answers = yield All([self._at(index, method, arguments[index]) for index in range(len(self._shards))])
        for answer in answers:
            if isinstance(answer, PsError):
                raise answer
        return answers

    def beat(self) -> Task:
        """Renews the lease, once. Raises what the chief says."""
        yield from self._ask_once("heartbeat", (self.me,), timeout_s=_BEAT_S)

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
            newest = max(statuses, key=lambda one: one.chief_incarnation).chief_address
            if newest != self._chief:
                self._world.seen["worker found the chief at another address"] += 1
                self._chief = newest

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
            yield from self.beat()
        except _TRANSIENT:
            return


def _single(call: Call) -> Task:
    return (yield call)
