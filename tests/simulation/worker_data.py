"""A simulated worker's way through the training data, as the SDK goes: ranges leased a few ahead, named with what was made from them."""

import itertools
from collections import deque
from collections.abc import Callable

from ps_protocol.model.data import DataRange, DataSpec
from ps_protocol.roles.chief import LeaseReply, LeaseResult
from tests.simulation.oracle import Oracle
from tests.simulation.tasks import Sleep, Task
from tests.simulation.worker_calls import WorkerCalls
from tests.simulation.world import World

_NUM_AHEAD = 4


class WorkerData:
    """The ranges of one worker process. `keep_up`: does what others have gone on to, while this worker has nothing to contribute."""

    def __init__(self, world: World, calls: WorkerCalls, oracle: Oracle, spec: DataSpec, *, keep_up: Callable[[], Task]) -> None:
        self._world, self._calls, self._oracle, self._spec, self._keep_up = world, calls, oracle, spec, keep_up
        self._requests = itertools.count(int(world.now * 1000) * 100 + 1)
        self._request = next(self._requests)
        self._ahead: deque[DataRange] = deque()
        self._yielded: tuple[int, ...] = ()
        self._named: tuple[int, ...] = ()  # with a contribution that is not answered
        self._is_over = False

    def moved(self) -> None:
        """The worker is another one, or in another epoch: what was leased to it is leased anew."""
        self._ahead.clear()
        self._yielded = self._named = ()
        self._request = next(self._requests)

    def take(self) -> tuple[int, ...]:
        """Returns what the contribution that is made now is made from."""
        self._named, self._yielded = self._yielded, ()
        return self._named

    def answered(self) -> None:
        """The chief has said what becomes of the contribution that they went with."""
        self._named = ()

    def held(self) -> tuple[int, ...]:
        """Returns what this worker has."""
        return (*(one.id for one in self._ahead), *self._yielded, *self._named)

    def next(self) -> Task:
        """Has one range for the training loop, if there are any left; waits while the rest is leased to others."""
        while not self._yielded and not self._ahead and not self._is_over:
            wish = self._calls.me, self._spec, _NUM_AHEAD, self._request
            reply: LeaseReply = yield from self._calls.ask("lease", *wish)
            if reply.result is LeaseResult.GRANTED:  # while it waits it is one wish: two answers to two copies of it may cross
                self._request = next(self._requests)
            if reply.result is LeaseResult.EXHAUSTED:
                self._world.seen["training data gone through"] += 1
                self._is_over = True
            elif reply.result is LeaseResult.WAIT:
                self._world.seen["worker waited for training data"] += 1
                yield from self._keep_up()
                yield Sleep(0.02)
            self._ahead.extend(reply.ranges)
        if self._ahead and (not self._yielded or self._world.chance(0.1)):
            self._yielded += (self._ahead.popleft().id,)
