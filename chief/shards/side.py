"""The shards of a chief on an event loop: tasks, the fast path of steps, and watching the shards. Decides nothing.

Work that takes time is a task of the event loop, except steps: the thread that completes a step sends it, and a task takes over if that
fails. When an epoch begins, all work under the epoch before is given up, without a report.
"""

import asyncio
import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from chief.core import messages as ev
from chief.shards.calls import ShardCalls
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.link import DirectLink, DirectLinks, OwnWork, ShardLink
from chief.shards.standby import ReplicaReturn, replicated
from chief.shards.work import Authority, ShardWork, step_requests
from ps_protocol.errors import Cancelled, PsError, Unavailable
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.waiting import delays_s
from ps_protocol.roles.history import History

log = logging.getLogger("lockstep.chief")

# A restarted server is found within this.
_MAX_PAUSE_S = 0.5

Result = TypeVar("Result")


async def gathered(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns the results of calls that run at once, each in a task of the event loop. An error of one cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class LoopPace:
    """Implements Pace on the event loop that it was made in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rng = random.Random()
        # A search for a checkpoint must find the one that is just being completed.
        self._storage = asyncio.Lock()

    def now(self) -> float:
        """Returns the clock's time."""
        return self._clock()

    def pauses(self) -> Iterator[float]:
        """Returns jittered pauses that grow."""
        return delays_s(self._rng, max_s=_MAX_PAUSE_S)

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        await asyncio.sleep(seconds)

    async def together(self, calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Does each in a task of its own."""
        return await gathered(calls)

    async def at_storage(self, work: Callable[[], Result]) -> Result:
        """Does it in another thread."""
        async with self._storage:
            return await asyncio.to_thread(work)


class ShardSide:
    """The shards of one chief, and its place for checkpoints. To be made in the event loop; `carry_out` is for all threads.

    `report` takes what happens; `on_defect` what must not, and `on_superseded` that another chief has the shards, in words. `session_key`:
    see Coordinator.
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        *,
        store: CheckpointStore | None,
        report: Callable[[ev.Event], None],
        on_defect: Callable[[BaseException], None],
        on_superseded: Callable[[str], None],
        clock: Callable[[], float],
        session_key: bytes,
        history: History | None = None,
    ) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._report, self._on_defect = report, on_defect
        self.authority = Authority(session_key=session_key)
        self._calls = ShardCalls(links, report=report, pace=LoopPace(clock))
        self._work = ShardWork(self._calls, authority=self.authority, store=store, on_superseded=on_superseded, history=history)
        self._replicas = ReplicaReturn(replicated(links), report=report, manifest_of=self._work.manifest_of, clock=clock)
        direct = [link for link in links if isinstance(link, DirectLink)]
        self._direct = DirectLinks(direct) if len(direct) == len(links) else None
        # Work for the thread that completed a step, after it has reported every event.
        self.own_work: deque[OwnWork] = deque()
        self._working = threading.Lock()
        self._is_working = False
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that another epoch ends.
        self._of_epoch: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._is_watching = False

    def begin(self, *, chief_address: str, is_takeover: bool, on_failure: Callable[[PsError], None]) -> None:
        """Starts watching the shards; calls `on_failure` if they cannot be taken."""
        self.authority.chief_address = chief_address
        for link in self._replicas.links.values():
            link.attach(self._report)
        self._spawn(self._look_at_all(is_takeover, on_failure))

    def carry_out(self, work: ev.Work) -> None:
        """Begins an instruction. Never waits. Instructions must be given in the coordinator's order."""
        match work:
            case ev.ApplyStep():
                self._apply(work)
            case ev.PrepareStep() | ev.CopyStep() | ev.WriteStep():
                self.in_loop(self._begin, self._work.carry_out, work)
            case ev.AdoptShards() | ev.RestoreShards():
                self._begin_epoch(work)
            case ev.KeepRecord():
                self.in_loop(self._keep, work)
            case ev.FindCheckpoint() | ev.CommitCheckpoint():
                self.in_loop(self._begin_lasting, work)
            case ev.BringReplicasBack():
                self.in_loop(self._begin, self._replicas.bring_back, work)

    def do_own_work(self) -> None:
        """Does all work in the queue, also what is added meanwhile. One thread at a time does it; others return at once."""
        while True:
            with self._working:
                if self._is_working or not self.own_work:
                    return
                self._is_working, work = True, self.own_work.popleft()
            try:
                work()
            finally:
                with self._working:
                    self._is_working = False

    async def cancel_all(self) -> None:
        """Gives up everything that is under way."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def expect_end(self) -> None:
        """The chief has been asked to end, and perhaps the parameter servers too."""
        self._work.is_ending = True

    async def shut_down_all(self, *, reason: str, within_s: float) -> None:
        """Ends the shards that this chief adopted, also restarted ones; gives up on those that do not answer in time, saying so."""
        if not self.authority.fence.chief_incarnation:
            return

        async def shut_down(index: int) -> None:
            try:
                await asyncio.wait_for(self._work.shut_down(index, reason), within_s)
            except (Unavailable, Cancelled) as error:
                # Usually the launcher that ends all processes has ended this one too.
                log.info("parameter server has ended already, or cannot be reached ps=%d cause=%s", index, error.message)
            except (TimeoutError, PsError) as error:
                log.warning("parameter server did not take the order to end; end it yourself ps=%d cause=%s", index, error or "no answer")

        await asyncio.gather(*(shut_down(index) for index in range(len(self._calls))))

    async def close(self) -> None:
        """Closes the connections to the shards."""
        await asyncio.gather(*(link.close() for link in self._calls.links))

    # -- steps

    def _apply(self, step: ev.ApplyStep) -> None:
        failpoint("chief.apply.before")
        if self._direct is None:
            self.in_loop(self._begin, self._work.carry_out, step)
        else:
            self.own_work.extend(self._direct.apply(step_requests(step, num_shards=len(self._calls)), partial(self._ended_directly, step)))

    def _ended_directly(self, step: ev.ApplyStep, is_applied: bool) -> None:
        if not is_applied:
            self.in_loop(self._begin, partial(self._work.carry_out, is_again=True), step)
            return
        try:
            self._calls.heard_all()
            self._work.applied(step)
        except Exception as error:
            self.in_loop(self._on_defect, error)

    # -- shards that are taken over, saved and brought back

    async def _look_at_all(self, is_takeover: bool, on_failure: Callable[[PsError], None]) -> None:
        try:
            await self._work.look_at_all(is_takeover=is_takeover)
        except PsError as error:
            on_failure(error)

    async def _take(self, work: ev.AdoptShards | ev.RestoreShards) -> None:
        await self._work.carry_out(work)
        self._watch()

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            for index in range(len(self._calls)):
                self._spawn(self._work.watch(index, is_paused=lambda: self._work.is_restoring))
            if self._replicas.links:
                self._spawn(self._replicas.watch(is_paused=lambda: self._work.is_restoring))

    def _keep(self, work: ev.KeepRecord) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._keeping = self._begin(self._work.carry_out, work)

    # -- tasks

    def _begin_epoch(self, work: ev.AdoptShards | ev.RestoreShards) -> None:
        self.authority.obey(work.fence)

        def begin() -> None:
            for task in [*self._of_epoch]:
                task.cancel()
            self._begin(self._take, work)

        self.in_loop(begin)

    def _begin(self, carry_out: Callable[[Any], Coroutine[Any, Any, None]], work: Any) -> "asyncio.Task[None] | None":
        """Begins work that ends with its epoch, unless it has begun already."""
        if getattr(work, "fence", self.authority.fence).epoch != self.authority.fence.epoch:
            return None
        task = self._spawn(carry_out(work))
        self._of_epoch.add(task)
        task.add_done_callback(self._of_epoch.discard)
        return task

    def _begin_lasting(self, work: ev.Work) -> None:
        self._spawn(self._work.carry_out(work))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_defect(error)

    def in_loop(self, do: Callable[..., object], *arguments: Any) -> None:
        """Does something in the loop's thread: at once if this is it."""
        if threading.get_ident() == self._loop_thread:
            do(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all that it was for
            self._loop.call_soon_threadsafe(do, *arguments)
