"""A simulated chief's links to shards, and its pace: what the chief's own coroutines need to run in a simulated world. Decides nothing."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from chief.shards.side import gathered
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.roles.request import RPCS
from ps_protocol.roles.shard import AdoptRequest, RestoreRequest, SaveRequest, SaveState, ShardStatus, ShardStatusRequest
from tests.simulation.disk import Crash
from tests.simulation.loops import SimulatedLoop
from tests.simulation.tasks import Call, Life
from tests.simulation.world import World

_LOOK_AGAIN_S = 0.03
_LIMIT_S = 4.0
# Without a wait, a restore that has failed would be begun anew.
_A_MOMENT_S = 1e-9
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0

Result = TypeVar("Result")


class SimulatedPace:
    """Implements Pace by the world's clock, in the event loop of one chief, which is `loop`.

    `on_killed` is called when a write to storage is the end of this process.
    """

    def __init__(self, world: World, life: Life, *, on_killed: Callable[[], None]) -> None:
        self._world, self._on_killed = world, on_killed
        self._storage_free_at = 0.0
        self.loop = SimulatedLoop(world, life, at_storage=self.at_storage)

    def now(self) -> float:
        """Returns the time in the world."""
        return self._world.now

    def pauses(self) -> Iterator[float]:
        """Returns pauses that grow, by chance."""
        pause_s = _MIN_PAUSE_S
        while True:
            yield pause_s * self._world.between(0.5, 1.0)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        await asyncio.sleep(seconds)

    async def together(self, calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Does all at once."""
        return await gathered(calls)

    async def at_storage(self, work: Callable[[], Result]) -> Result:
        """Does it after a while, one thing after the other; it may be the end of this process."""
        begins_at = max(self._world.now, self._storage_free_at)
        self._storage_free_at = begins_at + self._world.between(0.005, 0.05)
        await self.sleep(self._storage_free_at - self._world.now)
        try:
            result = work()
        except Crash:
            self._on_killed()
            while True:
                await self.sleep(1.0)  # nothing goes on in a process that is gone
        await self.sleep(self._world.between(0.001, 0.02))
        return result


class SimulatedLink:
    """Implements ShardLink by calls through the world.

    What is asked with each step goes over a stream, which ends with its process.
    """

    def __init__(self, name: str, *, index: int, loop: SimulatedLoop, is_replica: bool = False) -> None:
        self._name, self._index, self._loop, self._is_replica = name, index, loop, is_replica
        self._last_seen = self._process = 0

    @property
    def address(self) -> str:
        """The shard's name in the world."""
        return self._name

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there, as far as anybody asks."""
        who = Identity(cluster="", role=Role.PARAMETER_SERVER, index=self._index, process_incarnation=1)
        return HandshakeReply(identity=who, version=PROTOCOL_VERSION, epoch=0, warning="")

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Asks, and returns the answer."""
        match request:
            case ShardStatusRequest():
                limit_s = timeout_s if self._is_replica else _LIMIT_S
                status: ShardStatus = await self._loop.call(Call(self._name, "ask", (request,), timeout_s=limit_s))
                self._last_seen = status.process_incarnation
                return status
            case AdoptRequest():
                process = self._last_seen  # of one that is started since, it is then seen that it is another one
                adoption = await self._ask(request)
                self._process = process
                return adoption
            case SaveRequest():
                return await self._look_until_over(request, 0.0, lambda found: found.state is not SaveState.WRITING)
            case RestoreRequest():
                return await self._look_until_over(request, _A_MOMENT_S, lambda found: found.is_done)
            case _ if RPCS[type(request)].field:
                return await self._loop.call(Call(self._name, "of process", (self._process, request)))
        return await self._ask(request)

    async def close(self) -> None:
        """Does nothing."""

    async def _ask(self, request: Any) -> Any:
        return await self._loop.call(Call(self._name, "ask", (request,)))

    async def _look_until_over(self, request: Any, wait_s: float, is_over: Callable[[Any], bool]) -> Any:
        """Asks as often as it takes, instead of having the server wait."""
        left_s = request.max_wait_s
        progress = await self._ask(replace(request, max_wait_s=wait_s))
        while left_s > 0 and not is_over(progress):
            await asyncio.sleep(_LOOK_AGAIN_S)
            left_s -= _LOOK_AGAIN_S
            progress = await self._ask(replace(request, max_wait_s=wait_s))
        return progress
