"""What the chief has its shards do while it trains: prepare and apply steps, work otherwise; and it watches and ends them. Decides nothing.

What it reports of a step names the step's epoch. What brings shards back to a checkpoint is in `recovery_tasks`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chief import events as ev
from chief.authority import Authority
from chief.shard_calls import CONTROL_TIMEOUT_S, TRANSIENT, ShardCalls
from chief.shard_requests import apply_requests, prepare_request, settings_of
from ps_protocol.errors import Cancelled, EpochMismatch, PsError, Superseded, Unavailable
from ps_protocol.shard import ApplyRequest

log = logging.getLogger("lockstep.chief")

# A shard that is alive applies a step of many GiB in less; keepalive finds out about one that is not.
_APPLY_TIMEOUT_S = 60.0
# A shard that is killed is noticed within a second, and one that hears nothing for longer takes its chief for gone.
_WATCH_INTERVAL_S = 0.4

Result = TypeVar("Result")


class ShardTasks:
    """The shards of one chief. Belongs to one event loop. `on_superseded` is told, in words, that another chief has them."""

    def __init__(self, calls: ShardCalls, *, authority: Authority, on_superseded: Callable[[str], None]) -> None:
        self._calls = calls
        self._authority = authority
        self._on_superseded = on_superseded
        # Whoever ends all processes ends the parameter servers at the same time: no reason to warn anybody.
        self.is_ending = False

    async def prepare(self, step: ev.PrepareStep) -> None:
        """Asks all shards, at once, how large the mean of a step is, and reports StepPrepared, or ShardFailed."""
        request = prepare_request(step, chief_incarnation=self._authority.chief_incarnation)
        links = self._calls.links
        sums = await self._at_all(
            f"to prepare step {step.step}", step.epoch, lambda index: links[index].prepare_step(request, timeout_s=_APPLY_TIMEOUT_S)
        )
        if sums is not None:
            self._calls.report(ev.StepPrepared(step=step.step, sums=tuple(tuple(shard_sums) for shard_sums in sums), epoch=step.epoch))

    async def apply(self, step: ev.ApplyStep, *, is_again: bool = False) -> bool:
        """Has all shards apply a step, at once. Returns whether they have; if not, ShardFailed is reported. `is_again`: after a failure."""
        requests, links = self.requests_of(step), self._calls.links
        replies = await self._at_all(
            f"to apply step {step.step}",
            step.epoch,
            lambda index: links[index].apply_step(requests[index], timeout_s=_APPLY_TIMEOUT_S),
            is_again=is_again,
        )
        return replies is not None

    def requests_of(self, step: ev.ApplyStep) -> tuple[ApplyRequest, ...]:
        """Returns what each shard is sent to apply a step, for who has another way. Thread-safe."""
        return apply_requests(step, chief_incarnation=self._authority.chief_incarnation, num_shards=len(self._calls))

    async def configure(self, change: ev.ConfigureShards) -> None:
        """Tells all shards, at once, how to work from now on, and reports ShardsConfigured, or ShardFailed."""
        settings, links = settings_of(change, chief_incarnation=self._authority.chief_incarnation), self._calls.links
        replies = await self._at_all(
            f"settings version {change.version}",
            change.epoch,
            lambda index: links[index].configure(settings, timeout_s=_APPLY_TIMEOUT_S),
        )
        if replies is not None:
            self._calls.report(ev.ShardsConfigured(version=change.version, epoch=change.epoch))

    async def watch(self, index: int, *, is_paused: Callable[[], bool]) -> None:
        """Looks several times a second whether a shard that was not heard of meanwhile is still the same process. Does not end."""
        calls = self._calls
        silent_since: float | None = None
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if is_paused() or calls.silence_s(index) < _WATCH_INTERVAL_S:
                continue
            try:
                await self._check(index)
            except TRANSIENT as error:
                if silent_since is None:
                    silent_since = calls.clock()
                    level = logging.INFO if self.is_ending else logging.WARNING
                    log.log(level, "parameter server does not answer ps=%d cause=%s", index, error.message)
                calls.report(ev.ShardUnreachable(shard=index, why=calls.cause(index, error)))
            except PsError as error:
                calls.report(ev.ShardFailed(shard=index, why=error.message))
            else:
                if silent_since is not None:
                    log.info("parameter server answers again ps=%d after_s=%.1f", index, calls.clock() - silent_since)
                silent_since = None

    async def shut_down_all(self, *, reason: str, within_s: float) -> None:
        """Ends the shards that this chief adopted, also restarted ones; gives up on those that do not answer in time, saying so."""
        if not self._authority.chief_incarnation:
            return

        async def shut_down(index: int) -> None:
            try:
                await asyncio.wait_for(self._shut_down(index, reason), within_s)
            except (Unavailable, Cancelled) as error:
                # As a rule whoever ends all processes has ended this one too.
                log.info("parameter server is gone, or cannot be reached to be told to end ps=%d cause=%s", index, error.message)
            except (TimeoutError, PsError) as error:
                log.warning("parameter server could not be told to end; end it yourself ps=%d cause=%s", index, error or "no answer")

        await asyncio.gather(*(shut_down(index) for index in range(len(self._calls))))

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(link.close() for link in self._calls.links))

    async def _at_all(
        self, what: str, epoch: int, call: Callable[[int], Awaitable[Result]], *, is_again: bool = False
    ) -> list[Result] | None:
        """Calls all shards at once, each until it answers; returns their answers, or None if one refuses, which it reports."""
        answers = await self._calls.at_all(lambda index: self._at(index, what, epoch, call, is_again=is_again))
        known = [answer[0] for answer in answers if answer is not None]
        return known if len(known) == len(answers) else None

    async def _at(
        self, index: int, what: str, epoch: int, call: Callable[[int], Awaitable[Result]], *, is_again: bool
    ) -> tuple[Result] | None:
        async def attempt() -> Result:
            nonlocal is_again
            if is_again:
                await self._calls.check_process(index)
            is_again = True
            return await call(index)

        try:
            return (await self._calls.insist(index, attempt),)
        except PsError as error:
            log.error("parameter server refused ps=%d what=%s cause=%s", index, what, error.message)
            if isinstance(error, Superseded):
                self._on_superseded(f"{self._calls.name(index)}: {error.message}")
                return None
            try:
                # If it is another process than before, or another chief's, that says more than its refusal.
                await self._calls.insist(index, lambda: self._check(index))
            except PsError as later:
                log.warning("parameter server does not answer ps=%d cause=%s", index, later.message)
            self._calls.report(ev.ShardFailed(shard=index, why=error.message, epoch=epoch))
            return None

    async def _check(self, index: int) -> None:
        """Looks at one shard: what it says is reported, but for another chief's incarnation, which ends this one."""
        own, calls = self._authority.chief_incarnation, self._calls
        status = await calls.links[index].status(timeout_s=2 * CONTROL_TIMEOUT_S, chief_incarnation=own)
        calls.heard(index)
        if status.chief_incarnation > own:
            self._on_superseded(f"{calls.name(index)}: another chief (incarnation {status.chief_incarnation}) has taken it over")
        else:
            calls.report(ev.ShardSeen(shard=index, process_incarnation=status.process_incarnation))

    async def _shut_down(self, index: int, reason: str) -> None:
        link, authority = self._calls.links[index], self._authority
        status = await link.status(timeout_s=CONTROL_TIMEOUT_S)
        if status.chief_incarnation not in (0, authority.chief_incarnation):
            log.warning("parameter server is another chief's; it goes on ps=%d chief_incarnation=%d", index, status.chief_incarnation)
            return
        try:
            await link.shutdown(epoch=authority.epoch, reason=reason, timeout_s=CONTROL_TIMEOUT_S)
        except EpochMismatch as error:
            # Restarted since this chief adopted it: nobody's, and empty, so of no use to anybody who is left.
            if error.facts.get("epoch") != "0":
                raise
            await link.shutdown(epoch=0, reason=reason, timeout_s=CONTROL_TIMEOUT_S)
