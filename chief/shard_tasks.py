"""What the chief keeps doing to its shards: adopts them, has steps applied, watches them, ends them. Reports events; decides nothing.

Everything is repeated, with jittered pauses, until the shard has answered: each of these calls may be sent twice.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from chief import events as ev
from chief.adoption import next_chief_incarnation
from chief.shard_links import ShardLink
from chief.shard_requests import apply_requests, prepare_request, settings_of
from chief.wording import seconds
from ps_protocol.backoff import delays_s
from ps_protocol.errors import Cancelled, DeadlineExceeded, EpochMismatch, PsError, ShuttingDown, Unavailable
from ps_protocol.shard import ApplyRequest, ShardStatus

log = logging.getLogger(__name__)

_TRANSIENT = (Unavailable, DeadlineExceeded, ShuttingDown, Cancelled)
# Short, so that the first thing said about an absent shard is said within 2 s.
_CONTROL_TIMEOUT_S = 1.5
# A shard that is alive applies a step of many GiB in less; keepalive finds out about one that is not.
_APPLY_TIMEOUT_S = 60.0
_FIRST_NOTICE_S = 1.0
_NOTICE_INTERVAL_S = 10.0
_WATCH_INTERVAL_S = 1.0
_MAX_PAUSE_S = 1.0

Result = TypeVar("Result")


class ShardTasks:
    """The shards of one chief. Belongs to one event loop; `report` takes the events, `clock` is monotonic."""

    def __init__(self, links: Sequence[ShardLink], *, epoch: int, report: Callable[[ev.Event], None], clock: Callable[[], float]) -> None:
        self._links = tuple(links)
        self._epoch = epoch
        self._report = report
        self._clock = clock
        self._rng = random.Random()
        self._incarnation = 0
        self._seen_at = [0.0] * len(self._links)
        self._is_adopted = [False] * len(self._links)

    async def adopt_all(self) -> None:
        """Waits until all shards have been reached, then adopts them. Raises PsError if they are not what they should be, or not free."""
        statuses = await asyncio.gather(*(self._look_at(index) for index in range(len(self._links))))
        self._incarnation = next_chief_incarnation(statuses, names=[self._name(index) for index in range(len(self._links))])
        await asyncio.gather(*(self.adopt(index) for index in range(len(self._links))))

    async def adopt(self, index: int) -> None:
        """Adopts one shard."""
        link = self._links[index]
        status = await self._look_at(index)
        next_chief_incarnation([status], names=[self._name(index)])
        await self._insist(index, lambda: link.adopt(epoch=self._epoch, chief_incarnation=self._incarnation, timeout_s=_CONTROL_TIMEOUT_S))
        self._is_adopted[index] = True
        log.info("adopted ps=%d address=%s chief_incarnation=%d", index, link.address, self._incarnation)
        self._report(ev.ShardAdopted(shard=index, process_incarnation=status.process_incarnation))

    async def prepare(self, step: ev.PrepareStep) -> None:
        """Asks all shards, at once, how large the mean of a step is, and reports StepPrepared, or ShardFailed."""
        request = prepare_request(step, chief_incarnation=self._incarnation)
        sums = await self._at_all(
            f"to prepare step {step.step}", lambda index: self._links[index].prepare_step(request, timeout_s=_APPLY_TIMEOUT_S)
        )
        if sums is not None:
            self._report(ev.StepPrepared(step=step.step, sums=tuple(tuple(shard_sums) for shard_sums in sums)))

    async def apply(self, step: ev.ApplyStep) -> None:
        """Has all shards apply a step, at once, and reports StepApplied, or ShardFailed."""
        requests = self.requests_of(step)
        replies = await self._at_all(
            f"to apply step {step.step}", lambda index: self._links[index].apply_step(requests[index], timeout_s=_APPLY_TIMEOUT_S)
        )
        if replies is not None:
            self._report(ev.StepApplied(step=step.step))

    def requests_of(self, step: ev.ApplyStep) -> tuple[ApplyRequest, ...]:
        """Returns what each shard is sent to apply a step, for who has another way. Thread-safe."""
        return apply_requests(step, chief_incarnation=self._incarnation, num_shards=len(self._links))

    def heard_all(self) -> None:
        """All shards have just answered to somebody else, so that nobody need look at them. Thread-safe."""
        self._seen_at[:] = [self._clock()] * len(self._links)

    async def configure(self, change: ev.ConfigureShards) -> None:
        """Tells all shards, at once, how to work from now on, and reports ShardsConfigured, or ShardFailed."""
        settings = settings_of(change, chief_incarnation=self._incarnation)
        replies = await self._at_all(
            f"settings version {change.version}", lambda index: self._links[index].configure(settings, timeout_s=_APPLY_TIMEOUT_S)
        )
        if replies is not None:
            self._report(ev.ShardsConfigured(version=change.version))

    async def watch(self, index: int) -> None:
        """Looks every second whether a shard that was not heard of meanwhile is still the same process. Does not end."""
        silent_since: float | None = None
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if self._clock() - self._seen_at[index] < _WATCH_INTERVAL_S:
                continue
            try:
                await self._check(index)
            except _TRANSIENT as error:
                if silent_since is None:
                    silent_since = self._clock()
                    log.warning("parameter server does not answer ps=%d cause=%s", index, error.message)
                self._report(ev.ShardUnreachable(shard=index, why=self._cause(index, error)))
            except PsError as error:
                self._report(ev.ShardFailed(shard=index, why=error.message))
            else:
                if silent_since is not None:
                    log.info("parameter server answers again ps=%d after_s=%.1f", index, self._clock() - silent_since)
                silent_since = None

    async def shut_down_all(self, *, reason: str, within_s: float) -> None:
        """Ends the shards that this chief adopted, also restarted ones; gives up on those that do not answer in time, saying so."""

        async def shut_down(index: int) -> None:
            try:
                await asyncio.wait_for(self._shut_down(index, reason), within_s)
            except Unavailable as error:
                # As a rule whoever ends all processes has ended this one too.
                log.info("parameter server is gone, or cannot be reached to be told to end ps=%d cause=%s", index, error.message)
            except (TimeoutError, PsError) as error:
                log.warning("parameter server could not be told to end; end it yourself ps=%d cause=%s", index, error or "no answer")

        await asyncio.gather(*(shut_down(index) for index, is_adopted in enumerate(self._is_adopted) if is_adopted))

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(link.close() for link in self._links))

    async def _look_at(self, index: int) -> ShardStatus:
        link = self._links[index]
        reply = await self._insist(index, lambda: link.handshake(timeout_s=_CONTROL_TIMEOUT_S))
        if reply.warning:
            log.warning("%s ps=%d", reply.warning, index)
        return await self._insist(index, lambda: link.status(timeout_s=_CONTROL_TIMEOUT_S))

    async def _at_all(self, what: str, call: Callable[[int], Awaitable[Result]]) -> list[Result] | None:
        """Calls all shards at once, each until it answers; returns their answers, or None if one refuses, which it reports."""
        if len(self._links) == 1:
            answers = [await self._at(0, what, call)]  # needs no task of its own
        else:
            answers = await asyncio.gather(*(self._at(index, what, call) for index in range(len(self._links))))
        known = [answer[0] for answer in answers if answer is not None]
        return known if len(known) == len(answers) else None

    async def _at(self, index: int, what: str, call: Callable[[int], Awaitable[Result]]) -> tuple[Result] | None:
        try:
            return (await self._insist(index, lambda: call(index)),)
        except PsError as error:
            log.error("parameter server refused ps=%d what=%s cause=%s", index, what, error.message)
            try:
                # If it is another process than before, that says more than its refusal.
                await self._check(index)
            except PsError as later:
                log.warning("parameter server does not answer ps=%d cause=%s", index, later.message)
            self._report(ev.ShardFailed(shard=index, why=error.message))
            return None

    async def _check(self, index: int) -> None:
        status = await self._links[index].status(timeout_s=2 * _CONTROL_TIMEOUT_S)
        self._seen_at[index] = self._clock()
        self._report(ev.ShardSeen(shard=index, process_incarnation=status.process_incarnation))
        if status.chief_incarnation > self._incarnation:
            self._report(ev.ShardFailed(shard=index, why=f"another chief (incarnation {status.chief_incarnation}) has taken it over"))

    async def _insist(self, index: int, call: Callable[[], Awaitable[Result]]) -> Result:
        """Calls until there is an answer; says after a while, and then every 10 s, that there is none."""
        start, notice_s = self._clock(), _FIRST_NOTICE_S
        pauses: Iterator[float] | None = None
        while True:
            try:
                result = await call()
            except _TRANSIENT as error:
                pauses = pauses or delays_s(self._rng, max_s=_MAX_PAUSE_S)
                waited_s = self._clock() - start
                self._report(ev.ShardUnreachable(shard=index, why=self._cause(index, error)))
                if waited_s >= notice_s:
                    notice_s = waited_s + _NOTICE_INTERVAL_S
                    log.warning("waiting for %s for %s cause=%s", self._name(index), seconds(waited_s), self._cause(index, error))
                await asyncio.sleep(next(pauses))
            else:
                self._seen_at[index] = self._clock()
                return result

    async def _shut_down(self, index: int, reason: str) -> None:
        link = self._links[index]
        try:
            await link.shutdown(epoch=self._epoch, reason=reason, timeout_s=_CONTROL_TIMEOUT_S)
        except EpochMismatch as error:
            # Restarted since this chief adopted it: nobody's, and empty, so of no use to anybody who is left.
            if error.facts.get("epoch") != "0":
                raise
            await link.shutdown(epoch=0, reason=reason, timeout_s=_CONTROL_TIMEOUT_S)

    def _cause(self, index: int, error: PsError) -> str:
        # Whoever is told knows already which shard cannot be reached.
        return error.message.removeprefix(f"cannot reach {self._name(index)}: ")

    def _name(self, index: int) -> str:
        return f"ps {index} at {self._links[index].address}"
