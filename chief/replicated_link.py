"""A shard that several processes hold: one that is asked, and standbys that do the same. Decides which of them count; knows no model.

All that changes a shard is done at all of its members at once. One that fails where another succeeds is dropped, and not counted on
before it has been brought back; if it was the first, the next one is asked from then on: the same values, the same step, the same epoch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from chief import recovery_events as rec
from chief.replica import Finding, Replica, ReplicaLink, are_equal, distrusted, judge, why_lost
from chief.replica_calls import Tasks, all_of, error_of, finished, goes_along, has_succeeded, once_more, order_of
from chief.shard_calls import CONTROL_TIMEOUT_S, TRANSIENT
from ps_protocol.errors import EpochMismatch, PsError, Superseded, Unavailable
from ps_protocol.handshake import HandshakeReply
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardStatus,
)

log = logging.getLogger("lockstep.chief")

Result = TypeVar("Result")


class ReplicatedLink:
    """Implements ShardLink over the replicas of one shard, in the order of preference. Belongs to one event loop.

    The process incarnation that it reports is the shard's: it stays the same for as long as one of the members does.
    """

    def __init__(self, links: Sequence[ReplicaLink], *, index: int) -> None:
        self.index = index
        self.replicas = [Replica(link) for link in links]
        self.members: list[Replica] = []  # the first is the one that is asked
        self.epoch = self.chief_incarnation = 0
        self._chief_address, self.life = "", 0
        self._first = self.replicas[0]
        self._finding: Finding | None = None
        self._identity = self._told = 0
        # Held while replicas are taken in or emptied.
        self.changing = asyncio.Lock()
        self._report: Callable[[rec.ReplicasChanged], None] = lambda event: None

    def attach(self, report: Callable[[rec.ReplicasChanged], None]) -> None:
        """Reports from now on who holds the shard, beginning now."""
        self._report = report
        self._say()

    @property
    def address(self) -> str:
        """Where the one is that is asked."""
        return self._first.address

    @property
    def is_proven(self) -> bool:
        """Whether what was found at the start is the newest that there is of the shard, as far as its own replicas can tell."""
        return self._finding is None or self._finding.is_proven

    def distrust(self) -> ShardStatus:
        """Nobody else can vouch for what was found: counts the shard as lost."""
        assert self._finding is not None
        self._finding = distrusted(self._finding)
        return self._note(self._finding.status())

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there: the first that answers. Raises if one of them is not this shard."""
        answers = await all_of(*(one.link.handshake(timeout_s=timeout_s) for one in self.members or self.replicas))
        failures = [answer for answer in answers if isinstance(answer, PsError)]
        wrong = [error for error in failures if not isinstance(error, TRANSIENT)]
        if wrong or len(failures) == len(answers):
            raise (wrong or failures)[0]
        reply: HandshakeReply = next(answer for answer in answers if not isinstance(answer, PsError))
        return reply

    async def status(self, *, timeout_s: float, chief_incarnation: int = 0) -> ShardStatus:
        """Returns the status of the one that is asked, if any member is the process that it was; and drops those that are not."""
        if not self.members:
            answers = await all_of(*(one.link.status(timeout_s=timeout_s) for one in self.replicas))
            found = {one: answer for one, answer in zip(self.replicas, answers, strict=True) if isinstance(answer, ShardStatus)}
            self._finding = judge(found, [answer for answer in answers if isinstance(answer, PsError)])
            return self._note(self._finding.status())
        asked = [*self.members]
        tasks: Tasks = {
            one: asyncio.ensure_future(one.link.status(timeout_s=timeout_s, chief_incarnation=chief_incarnation)) for one in asked
        }
        lost = await finished(tasks, chief_incarnation=chief_incarnation)
        statuses: dict[Replica, ShardStatus] = {one: task.result() for one, task in tasks.items() if has_succeeded(task)}
        intact = [one for one, status in statuses.items() if status.process_incarnation == one.process]
        for one in asked if intact else ():
            if one not in intact and (why := lost.get(one) or await why_lost(one, chief_incarnation=chief_incarnation)):
                await self._drop(one, why)
        if not statuses:
            raise next(error for task in tasks.values() if isinstance(error := error_of(task), PsError))
        status = statuses[next(iter(intact or statuses))]
        if intact:
            status = replace(status, process_incarnation=self._identity)
        return self._note(replace(status, chief_incarnation=max(one.chief_incarnation for one in statuses.values())))

    async def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", life: int = 0, timeout_s: float) -> Adoption:
        """Puts all replicas under a chief, and counts on those that hold the same; where a later epoch begins, on all."""
        async with self.changing:
            self.epoch, self.chief_incarnation, self._chief_address, self.life = epoch, chief_incarnation, chief_address, life
            return await self._take_over(epoch, chief_incarnation, timeout_s)

    async def _take_over(self, epoch: int, chief_incarnation: int, timeout_s: float) -> Adoption:
        finding = self._finding  # kept until this has succeeded: what is found later may be half of it
        wanted = [*finding.statuses] if finding is not None else self.replicas
        answers = await all_of(*(self._adopt(one, timeout_s) for one in wanted))
        failed = {one: answer for one, answer in zip(wanted, answers, strict=True) if isinstance(answer, PsError)}
        found = {one: answer for one, answer in zip(wanted, answers, strict=True) if one not in failed}
        adoptions: dict[Replica, Adoption] = {one: adoption for one, (_, adoption) in found.items()}
        for one, error in failed.items():
            one.missing = error.message
        if finding is not None and finding.is_known and finding.statuses[finding.best].epoch == epoch:
            best = finding.best
            self._check_adopted(failed, is_enough=best in adoptions)
            members = [
                one for one in adoptions if await goes_along(one, adoptions[one], adoptions[best], chief_incarnation=chief_incarnation)
            ]
        else:
            self._check_adopted(failed, is_enough=bool(adoptions))
            members = [*adoptions]
            best, before = members[0], {one: status.epoch for one, (status, _) in found.items()}
            if min(before.values()) < epoch and not are_equal(adoptions, before):
                # Whatever they had in an earlier epoch comes to nothing now, and must come to the same.
                adoptions = {one: await self.join(one, timeout_s=timeout_s, forgets=True) for one in members}
        self._identity = self._told or best.process
        self._count_on(members)
        await self.mark_alone()
        self._finding = None
        return adoptions[best]

    def _check_adopted(self, failed: Mapping[Replica, PsError], *, is_enough: bool) -> None:
        """Raises a failure if the replicas without it are not enough, or if another chief has them."""
        if failed and (not is_enough or any(isinstance(error, Superseded) for error in failed.values())):
            raise min(failed.values(), key=order_of)

    async def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes, timeout_s: float) -> None:
        """Has all members keep a record."""
        await self._at_members(
            lambda link: link.keep_record(
                epoch=epoch, chief_incarnation=chief_incarnation, version=version, record=record, timeout_s=timeout_s
            )
        )

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Has the one that is asked save a step; the others would write the same."""
        return await self._first.link.save(request, max_wait_s=max_wait_s, timeout_s=timeout_s)

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Has all members brought back to a checkpoint; done when all are."""
        await self._follow_mode(request.settings)
        progress = await self._at_members(lambda link: link.restore(request, max_wait_s=max_wait_s, timeout_s=timeout_s))
        return next((one for one in progress if not one.is_done), progress[0])

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how all members work."""
        await self._follow_mode(settings)
        await self._at_members(lambda link: link.configure(settings, timeout_s=timeout_s))

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares, which are the same at all members."""
        return (await self._at_members(lambda link: link.prepare_step(request, timeout_s=timeout_s)))[0]

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has all members make the next step."""
        return (await self._at_members(lambda link: link.apply_step(request, timeout_s=timeout_s)))[0]

    async def shutdown(self, *, epoch: int, reason: str, timeout_s: float) -> None:
        """Ends all replicas, also those that are not counted on."""

        async def shut_down(one: Replica) -> None:
            try:
                await one.link.shutdown(epoch=epoch, reason=reason, timeout_s=timeout_s)
            except EpochMismatch as error:
                if error.facts.get("epoch") != "0":
                    raise
                await one.link.shutdown(epoch=0, reason=reason, timeout_s=timeout_s)

        answers = await all_of(*(shut_down(one) for one in self.replicas))
        failures = [answer for one, answer in zip(self.replicas, answers, strict=True) if one in self.members and answer is not None]
        if failures:
            raise failures[0]

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(one.link.close() for one in self.replicas))

    # -- for whoever brings replicas back

    async def join(self, one: Replica, *, timeout_s: float = CONTROL_TIMEOUT_S, is_alone: bool = False, forgets: bool = False) -> Adoption:
        """Puts one replica under the chief that has the shard."""
        return await one.link.adopt(
            epoch=self.epoch,
            chief_incarnation=self.chief_incarnation,
            chief_address=self._chief_address,
            life=self.life,
            timeout_s=timeout_s,
            is_alone=is_alone,
            forgets=forgets,
        )

    async def mark_alone(self) -> None:
        """Has the only member, if there is only one, remember that it is that."""
        if len(self.members) == 1:
            await self.join(self.members[0], is_alone=True)

    def count_on_too(self, one: Replica) -> None:
        """A replica holds what the members hold: it is one of them."""
        self._count_on([*self.members, one])
        log.info("standby goes along again ps=%d address=%s", self.index, one.address)

    # -- inside

    async def _adopt(self, one: Replica, timeout_s: float) -> tuple[ShardStatus, Adoption]:
        status = await one.link.status(timeout_s=timeout_s)
        adoption = await self.join(one, timeout_s=timeout_s)
        one.process = status.process_incarnation
        return status, adoption

    async def _follow_mode(self, settings: ShardSettings) -> None:
        if settings.applies_on_arrival:
            for one in self.members[1:]:
                await self._drop(one, "contributions are applied as they arrive, in no order that two servers could share")

    async def _at_members(self, call: Callable[[ReplicaLink], Awaitable[Result]]) -> list[Result]:
        """Does something at all members at once, and returns what they answer; drops those that fail where another does not.

        Raises what the only one raises; and, if all fail, first of all what the caller may repeat.
        """
        members = [*self.members] or self.replicas[:1]
        if len(members) == 1:
            return [await call(members[0].link)]
        tasks: Tasks = {one: asyncio.ensure_future(call(one.link)) for one in members}
        lost = await finished(tasks, chief_incarnation=self.chief_incarnation)
        answers = {one: task.result() for one, task in tasks.items() if has_succeeded(task)}
        errors = {one: error for one, task in tasks.items() if one not in lost and isinstance(error := error_of(task), PsError)}
        if not answers:
            raise min(errors.values(), key=order_of)
        for one, error in errors.items():
            answer = await once_more(one, call, error, chief_incarnation=self.chief_incarnation)
            if isinstance(answer, PsError):
                lost[one] = answer.message
            else:
                answers[one] = answer
        for one, why in lost.items():
            await self._drop(one, why)
        if any(one not in answers for one in self.members):
            raise Unavailable(f"ps {self.index}: another of its replicas is asked now")
        return [answers[one] for one in self.members]

    async def _drop(self, one: Replica, why: str) -> None:
        if one not in self.members or len(self.members) == 1:
            return
        was_asked, one.missing = one is self._first, why
        self.members = [member for member in self.members if member is not one]
        what = f"its standby at {self.members[0].address} takes its place" if was_asked else "training goes on without it"
        log.warning("a replica is lost ps=%d address=%s cause=%s; %s", self.index, one.address, why, what)
        self._count_on(self.members)
        with suppress(PsError):  # a later chief is the more careful without it
            await self.mark_alone()

    def _count_on(self, members: Sequence[Replica]) -> None:
        self.members = [*members]
        self._first = self.members[0]
        for one in members:
            one.missing = ""
        self._say()

    def _say(self) -> None:
        others = [one for one in self.replicas if one is not self._first]
        along = next((one.address for one in others if one in self.members), "")
        missing = "" if along else "; ".join(f"{one.address}: {one.missing}" for one in others)
        self._report(rec.ReplicasChanged(shard=self.index, address=self.address, standby=along, missing=missing))

    def _note(self, status: ShardStatus) -> ShardStatus:
        self._told = status.process_incarnation
        return status
