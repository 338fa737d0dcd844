"""A shard held by two processes: one link to both, which of them is lost, and how it is brought back. Does not decide when."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from typing import Any, cast

from chief.core import messages
from chief.core.wording import workers_of
from chief.shards.calls import CONTROL_TIMEOUT_S, TRANSIENT
from chief.shards.link import ShardLink
from ps_protocol.errors import ContributionMissing, PsError, Superseded, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.contribution import PushId, contributions_named
from ps_protocol.roles.fence import NOBODY, Fence, joined_keys
from ps_protocol.roles.identity import HandshakeReply
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import (
    Adoption,
    AdoptRequest,
    ApplyReply,
    ApplyRequest,
    KeepRecordRequest,
    ReplicaState,
    RestoreRequest,
    SaveRequest,
    ShardSettings,
    ShardStatus,
    ShardStatusRequest,
    ShutdownRequest,
)

# A replica that does not answer within this, while its twin does, is lost.
GRACE_S = 0.7
_PAUSE_S = 0.1


@light_dataclass(slots=True, eq=False)
class Replica:
    """A process that holds a shard, or shall. `process`: its process incarnation when it was adopted, or met; 0: neither."""

    link: ShardLink
    process: int = 0
    missing: str = "it has not been reached yet"

    @property
    def address(self) -> str:
        """The address of the replica."""
        return self.link.address


@light_dataclass(slots=True, kw_only=True)
class Survey:
    """The reports of one shard's replicas before a chief has adopted them: `best` is the replica with the highest step.

    `is_proven`: no other can have continued without it. `is_known`: it holds a model.
    """

    best: Replica
    statuses: Mapping[Replica, ShardStatus] = field(default_factory=dict)
    is_proven: bool = True

    @property
    def is_known(self) -> bool:
        """Whether there is a model."""
        return self.statuses[self.best].step is not None

    def has_met(self, one: Replica, status: ShardStatus, adoption: Adoption) -> bool:
        """Whether a replica that a chief has adopted is the process seen before, or holds a model if none was."""
        before = self.statuses.get(one)
        return adoption.step is not None if before is None else before.process_incarnation == status.process_incarnation

    def status(self) -> ShardStatus:
        """Returns the status of the shard."""
        heard = [status for status in self.statuses.values() if status.fence.chief_incarnation and status.chief_heard_ago_s is not None]
        latest = min(heard, key=lambda status: status.chief_heard_ago_s or 0.0, default=self.statuses[self.best])
        return replace(
            self.statuses[self.best],
            fence=latest_fence(self.statuses[self.best].fence, self.statuses.values()),
            chief_address=latest.chief_address,
            chief_heard_ago_s=latest.chief_heard_ago_s,
        )


def latest_fence(fence: Fence, statuses: Iterable[ShardStatus]) -> Fence:
    """Returns a fence with the number of the latest chief that any replica obeys."""
    return replace(fence, chief_incarnation=max(status.fence.chief_incarnation for status in statuses))


def judge(statuses: Mapping[Replica, ShardStatus], failures: Sequence[PsError]) -> Survey:
    """Judges replicas that no chief has adopted yet. Raises a failure if the one that does not answer may have a later step.

    One that was counted on alone is enough, and is the one to believe: the others were left behind, however far they are. Else all must
    answer: the absent one might have continued without the others.
    """
    alone = [replica for replica, status in statuses.items() if status.is_alone and status.step is not None]
    if failures and not alone:
        raise failures[0]
    best = max(alone or statuses, key=lambda replica: _age_order(statuses[replica]))
    holders = [status for status in statuses.values() if status.step is not None]
    return Survey(best=best, statuses=statuses, is_proven=best in alone or len(holders) in (0, len(statuses)))


async def why_lost(replica: Replica, fence: Fence) -> str:
    """Returns why a replica that failed is lost: it does not answer for a while, or is another process; empty: it is there."""
    clock = asyncio.get_running_loop().time
    until = clock() + GRACE_S
    while True:
        left_s = max(_PAUSE_S, until - clock())
        try:
            status = await replica.link.call(ShardStatusRequest(fence=fence), timeout_s=left_s)
        except TRANSIENT as error:
            if clock() + _PAUSE_S >= until:
                return error.message
            await asyncio.sleep(_PAUSE_S)
        except PsError as error:
            return error.message
        else:
            return "" if status.process_incarnation == replica.process else "it was restarted"


def are_equal(adoptions: Mapping[Replica, Adoption], epochs: Mapping[Replica, int]) -> bool:
    """Whether replicas hold the same: nothing, or the same step of the same epoch."""
    held = {(None,) if one.step is None else (one.step, one.layout_hash, epochs[replica]) for replica, one in adoptions.items()}
    return len(held) <= 1


def _age_order(status: ShardStatus) -> tuple[int, int]:
    return status.fence.epoch, -1 if status.step is None else status.step


_MAX_REPETITIONS = 5
_APPLY_TIMEOUT_S = 60.0

Tasks = dict[Replica, "asyncio.Future[Any]"]


async def all_of(*calls: Awaitable[Any]) -> list[Any]:
    """Returns answers and PsErrors, in order; raises every other error."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, PsError):
            raise answer
    return answers


async def finished(tasks: Tasks, fence: Fence) -> dict[Replica, str]:
    """Returns once all have ended but the lost ones, with the reasons. Lost ones are not waited for once another has succeeded."""
    lost: dict[Replica, str] = {}
    try:
        while pending := [task for one, task in tasks.items() if not task.done() and one not in lost]:
            has_one = any(map(has_succeeded, tasks.values()))
            await asyncio.wait(pending, timeout=GRACE_S / 2 if has_one else None, return_when=asyncio.FIRST_COMPLETED)
            if has_one:
                for one, task in tasks.items():
                    if not task.done() and one not in lost and (why := await why_lost(one, fence)):
                        lost[one] = why
    finally:
        for task in tasks.values():
            task.cancel()
    return lost


async def once_more(one: Replica, request: Request[Answer], error: PsError, fence: Fence, *, timeout_s: float) -> "Answer | PsError":
    """The failure of one replica where another has succeeded: a refusal is final, a broken connection may be opened again.

    Returns the answer, or the failure. Raises Superseded.
    """
    for _ in range(_MAX_REPETITIONS):
        if isinstance(error, Superseded):
            raise error
        if not isinstance(error, TRANSIENT) or await why_lost(one, fence):
            break
        try:
            return await one.link.call(request, timeout_s=timeout_s)
        except PsError as later:
            error = later
    return error


async def goes_along(one: Replica, found: Adoption, best: Replica, of_best: Adoption, fence: Fence) -> tuple[PushId, ...] | None:
    """Whether a replica that an earlier chief left has the same as the best, if need be by the one step that it lacks. Says why not.

    Returns the contributions to the last step of which the two were given different gradients; None: it cannot come to that step.
    """
    last = of_best.last_apply
    if (found.step, found.layout_hash) == (of_best.step, of_best.layout_hash):
        if last is None or found.last_apply is None:
            return ()  # both have begun here, or one of them was brought back to here
    else:
        one.missing = "it is empty" if found.step is None else f"it was at step {found.step}, and the other replica at step {of_best.step}"
        if last is None or found.step is None or found.step != last.step or of_best.step != last.step + 1:
            return None
    # The earlier chief may have ended before it compared the steps of both.
    request = replace(last, fence=fence, wants_checksums=True)
    try:
        reply: ApplyReply | PsError = await one.link.call(request, timeout_s=_APPLY_TIMEOUT_S)
    except PsError as error:
        reply = await once_more(one, request, error, fence, timeout_s=_APPLY_TIMEOUT_S)
    if isinstance(reply, PsError):
        one.missing = f"it was at step {found.step}, and could not follow the other replica to step {of_best.step}: {reply.message}"
        return None
    return different_contributions(request, await best.link.call(request, timeout_s=_APPLY_TIMEOUT_S), reply)


def different_contributions(request: ApplyRequest, one: ApplyReply, other: ApplyReply) -> tuple[PushId, ...]:
    """Returns the contributions of which two replicas that have applied a step have not been given the same, as far as they can tell."""
    if one.checksums == other.checksums or not one.checksums or not other.checksums:
        return ()
    contributors = sorted(request.contributors)
    if not len(one.checksums) == len(other.checksums) == len(contributors):
        return tuple(contributors)
    return tuple(push_id for push_id, mine, theirs in zip(contributors, one.checksums, other.checksums, strict=True) if mine != theirs)


def has_succeeded(task: "asyncio.Future[Any]") -> bool:
    """Whether a call has brought an answer."""
    return task.done() and not task.cancelled() and task.exception() is None


def error_of(task: "asyncio.Future[Any]") -> BaseException | None:
    """Returns the error of a call."""
    return task.exception() if task.done() and not task.cancelled() else None


def order_of(error: PsError) -> int:
    """Sorts failures: errors that end the chief come first, then errors that may be repeated, then refusals."""
    return 0 if isinstance(error, Superseded) else 1 if isinstance(error, TRANSIENT) else 2


def that_lack_more(errors: Mapping[Replica, PsError]) -> list[Replica]:
    """Returns those that lack other contributions than the one that lacks the fewest; empty if any has failed for another reason.

    A contribution was given to the shard if one replica has it: its worker may have known of that one only. So what the shard lacks is
    what the replica with the fewest gaps says, and the others lack what has been given to the shard.
    """
    lacked = {one: set(contributions_named(error.facts)) for one, error in errors.items() if isinstance(error, ContributionMissing)}
    if len(lacked) < len(errors) or not all(lacked.values()):
        return []
    fewest = min(lacked.values(), key=len)
    return [one for one, contributions in lacked.items() if contributions != fewest]


# All that changes a shard is done at all of its replicas at once. One that fails where another succeeds is dropped, and not counted on
# before it has been brought back; if it was the first, the next one is asked from then on: the same values, the same step, the same epoch.


log = logging.getLogger("lockstep.chief")


class ReplicatedLink:
    """Implements ShardLink over the replicas of one shard, in the order of preference. Belongs to one event loop.

    The process incarnation that it reports is the shard's: it stays the same for as long as one of the members does.
    """

    def __init__(self, links: Sequence[ShardLink], *, index: int) -> None:
        self.index = index
        self.replicas = [Replica(link) for link in links]
        self.members: list[Replica] = []  # the first is the primary
        self.fence = NOBODY
        self._chief_address = ""
        self._session_keys: tuple[bytes, ...] = ()
        self._first = self.replicas[0]
        self._survey: Survey | None = None
        # Those that obey this chief, so that no earlier one can continue with them; and those that were counted on alone until then.
        self._obeying: set[Replica] = set()
        self._were_alone: set[Replica] = set()
        self._is_proven = True
        # Processes whose model may be out of date: they count as empty, and drop it when they are adopted.
        self._distrusted: set[int] = set()
        self._identity = self._told = 0
        self._num_states = 0  # that replicas have been told, all together
        # Held while replicas are taken in or emptied; and while one is dropped.
        self.changing, self._dropping = asyncio.Lock(), asyncio.Lock()
        self._report: Callable[[messages.ReplicasChanged | messages.ContributionsDiffer], None] = lambda event: None

    def attach(self, report: Callable[[messages.ReplicasChanged | messages.ContributionsDiffer], None]) -> None:
        """Reports from now on which processes hold the shard, beginning now, and which contributions differed at its replicas."""
        self._report = report
        self._say()

    @property
    def address(self) -> str:
        """The address of the primary."""
        return self._first.address

    @property
    def is_proven(self) -> bool:
        """Whether the state found at the start is the newest of the shard, as far as its own replicas can tell."""
        return self._survey.is_proven if self._survey is not None else self._is_proven

    def distrust(self) -> None:
        """Nothing confirms that the model that was found is the newest: the shard counts as lost, and its next adoption drops it."""
        if self._survey is None:
            self._distrusted.update(one.process for one in self.members)
        else:
            self._distrusted.update(status.process_incarnation for status in self._survey.statuses.values())
            self._survey = None

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the identity of the first that answers. Raises if one of them is not this shard."""
        answers = await all_of(*(one.link.handshake(timeout_s=timeout_s) for one in self.members or self.replicas))
        failures = [answer for answer in answers if isinstance(answer, PsError)]
        wrong = [error for error in failures if not isinstance(error, TRANSIENT)]
        if wrong or len(failures) == len(answers):
            raise (wrong or failures)[0]
        reply: HandshakeReply = next(answer for answer in answers if not isinstance(answer, PsError))
        return reply

    async def call(self, request: Request[Answer], *, timeout_s: float) -> Answer:
        """Asks all members, but for what concerns all replicas, or one; returns the answer of the shard."""
        answer: Any
        match request:
            case ShardStatusRequest():
                answer = await self._status(request, timeout_s)
            case AdoptRequest():
                answer = await self._adopt_all(request, timeout_s)
            case SaveRequest():  # the others would write the same
                answer = await self._first.link.call(request, timeout_s=timeout_s)
            case RestoreRequest():
                await self._follow_mode(request.settings)
                progress = await self._at_members(self.numbered(request), timeout_s)
                answer = next((one for one in progress if not one.is_done), progress[0])
            case KeepRecordRequest():
                await self._follow_mode(request.settings)
                answer = (await self._at_members(request, timeout_s))[0]
            case ApplyRequest():
                answer = await self._apply(request, timeout_s)
            case ShutdownRequest():
                answer = await self._shut_down(request, timeout_s)
            case _:
                answer = (await self._at_members(request, timeout_s))[0]
        return cast("Answer", answer)

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(one.link.close() for one in self.replicas))

    # -- calls that differ

    async def _status(self, request: ShardStatusRequest, timeout_s: float) -> ShardStatus:
        """Returns the primary's status, if any member is the process that it was; and drops those that are not."""
        fence = request.fence
        if not self.members:
            answers = await all_of(*(one.link.call(ShardStatusRequest(), timeout_s=timeout_s) for one in self.replicas))
            both = zip(self.replicas, answers, strict=True)
            found = {one: self._met(one, answer) for one, answer in both if isinstance(answer, ShardStatus)}
            self._survey = judge(found, [answer for answer in answers if isinstance(answer, PsError)])
            return self._note(self._survey.status())
        asked = [*self.members]
        tasks: Tasks = {one: asyncio.ensure_future(one.link.call(request, timeout_s=timeout_s)) for one in asked}
        lost = await finished(tasks, fence)
        statuses: dict[Replica, ShardStatus] = {one: task.result() for one, task in tasks.items() if has_succeeded(task)}
        intact = [one for one, status in statuses.items() if status.process_incarnation == one.process]
        for one in asked if intact else ():
            if one not in intact and (why := lost.get(one) or await why_lost(one, fence)):
                with suppress(Superseded):  # the status says that
                    await self._drop(one, why)
        if not statuses:
            raise next(error for task in tasks.values() if isinstance(error := error_of(task), PsError))
        status = statuses[next(iter(intact or statuses))]
        if intact:
            status = replace(status, process_incarnation=self._identity)
        used = replace(status.report, cpu_s=sum(one.report.cpu_s for one in statuses.values()))
        return self._note(replace(status, fence=latest_fence(status.fence, statuses.values()), report=used))

    async def _adopt_all(self, request: AdoptRequest, timeout_s: float) -> Adoption:
        """Puts all replicas under a chief, and counts on those that hold the same; where a later epoch begins, on all."""
        async with self.changing:
            is_again = bool(self.members) and self.fence.era == request.fence.era
            self.fence, self._chief_address, self._session_keys = request.fence, request.chief_address, request.session_keys
            return await self._take_over(request.fence, timeout_s, is_again=is_again)

    async def _take_over(self, fence: Fence, timeout_s: float, *, is_again: bool) -> Adoption:
        survey = self._survey  # kept until this has succeeded: a later look may find half of it
        wanted = [*survey.statuses] if survey is not None else [*self.replicas]
        answers = await all_of(*(self._adopt(one, timeout_s) for one in wanted))
        if rest := self._taken_in_since(wanted):
            wanted += rest
            answers += await all_of(*(self._adopt(one, timeout_s) for one in rest))
        failed = {one: answer for one, answer in zip(wanted, answers, strict=True) if isinstance(answer, PsError)}
        found = {one: answer for one, answer in zip(wanted, answers, strict=True) if one not in failed}
        adoptions: dict[Replica, Adoption] = {one: adoption for one, (_, adoption) in found.items()}
        for one, error in failed.items():
            one.missing = error.message
        self._check_adopted(failed)
        if survey is not None and survey.is_known and survey.statuses[survey.best].fence.epoch == fence.epoch:
            if survey.best not in adoptions:
                raise failed[survey.best]
            best = self._best_of(survey, found)
            members = [one for one in adoptions if one is best or await self._goes_along(one, found, best)]
            is_same = all(survey.has_met(one, status, adoption) for one, (status, adoption) in found.items())
            self._is_proven = survey.is_proven and (best in self._were_alone or is_same)
        elif not adoptions:
            raise min(failed.values(), key=order_of)
        elif is_again:
            # A replica that was not counted on has older values, unless there are none.
            is_empty = all(adoption.step is None for adoption in adoptions.values())
            members = [one for one in adoptions if one in self.members or is_empty]
            if not members:
                raise min(failed.values(), key=order_of)
            best = members[0]
        else:
            members, epochs = [*adoptions], {one: status.fence.epoch for one, (status, _) in found.items()}
            best, self._is_proven = members[0], True
            if min(epochs.values()) < fence.epoch and not are_equal(adoptions, epochs):
                # They drop their state of an earlier epoch, so that all have the same state.
                adoptions = {one: await self.join(one, timeout_s=timeout_s, forgets=True) for one in members}
        for one in tuple(adoptions):
            # Another replica has reported a key since. Workers may also call replicas that are not counted on, until they hear of that.
            if set(adoptions[one].session_keys) != set(self._session_keys):
                adoptions[one] = await self.join(one, timeout_s=timeout_s)
        self._identity = self._told or best.process
        self._count_on(members)
        await self.mark_alone()
        self._survey = None
        return self._joined(adoptions[best], [adoptions[one] for one in members])

    def _joined(self, best: Adoption, members: Sequence[Adoption]) -> Adoption:
        """Returns what the replicas know together.

        One that was brought back has the values, not the request that made them, and perhaps not yet the record that the other one keeps.
        """
        newest = max(members, key=lambda one: one.record_version)
        last = next((one.last_apply for one in (best, *members) if one.last_apply is not None), None)
        return replace(
            best,
            session_keys=self._session_keys,
            record=newest.record,
            record_version=newest.record_version,
            last_apply=last,
            given_up=tuple(dict.fromkeys(gone for one in members for gone in one.given_up)),
        )

    def _met(self, one: Replica, status: ShardStatus) -> ShardStatus:
        """Returns a replica's report, and whether it was counted on alone before it obeyed this chief, which then forgets that."""
        own = self.fence
        if status.process_incarnation in self._distrusted:
            status = replace(status, step=None)
        if (status.fence.life, status.fence.chief_incarnation) != (own.life, own.chief_incarnation):
            (self._were_alone.add if status.is_alone and status.step is not None else self._were_alone.discard)(one)
        return replace(status, is_alone=one in self._were_alone)

    def _taken_in_since(self, wanted: Sequence[Replica]) -> list[Replica]:
        """Returns the replicas that were not looked at, unless another is counted on alone.

        The earlier chief has counted on them since, and may continue with them.
        """
        return [] if not self._were_alone.isdisjoint(wanted) else [one for one in self.replicas if one not in wanted]

    def _check_adopted(self, failed: Mapping[Replica, PsError]) -> None:
        """Raises a failure if another chief has that replica, or an earlier one may continue with it: then both would report steps.

        None may continue with one that obeys this chief; nor with any other, if it counted on that one alone.
        """
        is_alone = not self._were_alone.isdisjoint(self._obeying)
        errors = [error for one, error in failed.items() if isinstance(error, Superseded) or not (is_alone or one in self._obeying)]
        if errors:
            raise min(errors, key=order_of)

    def _best_of(self, survey: Survey, found: Mapping[Replica, tuple[ShardStatus, Adoption]]) -> Replica:
        """Returns the one to believe. An earlier chief may have had one apply a step since the look, and cannot any more."""
        if survey.best in self._were_alone:
            return survey.best
        steps = {one: adoption.step for one, (status, adoption) in found.items() if status.fence.epoch == self.fence.epoch}
        return max([survey.best, *steps], key=lambda one: -1 if (step := steps.get(one)) is None else step)

    async def _goes_along(self, one: Replica, found: Mapping[Replica, tuple[ShardStatus, Adoption]], best: Replica) -> bool:
        """Whether a replica is counted on beside the one to believe: not if the chief before had left it behind."""
        status, adoption = found[one]
        if best in self._were_alone or status.fence.epoch != self.fence.epoch:
            where = f"at step {adoption.step} of epoch {status.fence.epoch}"
            one.missing = f"it was left behind {where}" if adoption.step is not None else "it is empty"
            return False
        of_best = found[best][1]
        others = await goes_along(one, adoption, best, of_best, self.fence)
        if others and of_best.last_apply is not None:
            one.missing = self._say_different(of_best.last_apply.step, others)
        return others == ()

    async def _apply(self, request: ApplyRequest, timeout_s: float) -> ApplyReply:
        """Has all members make the next step; drops those that have applied other gradients than the primary.

        The last member keeps what it holds, whatever it was given.
        """
        if len(self.members) > 1:
            request = replace(request, wants_checksums=True)
        replies = await self._at_members(request, timeout_s)
        for one, reply in zip(self.members[1:], replies[1:], strict=True):
            if others := different_contributions(request, replies[0], reply):
                why, first = self._say_different(request.step, others), self._first
                if lost := await why_lost(first, self.fence):
                    await self._drop(first, lost)
                await self._drop(one, why)
                if one not in self.members:  # else the others were lost meanwhile
                    # At once: as long as no step follows, its step does not show a later chief that it was left behind.
                    with suppress(PsError):
                        await self.join(one, forgets=True)
        return replies[0]

    async def _shut_down(self, request: ShutdownRequest, timeout_s: float) -> None:
        """Ends all replicas, also those that are not counted on."""
        answers = await all_of(*(one.link.call(request, timeout_s=timeout_s) for one in self.replicas))
        failures = [answer for one, answer in zip(self.replicas, answers, strict=True) if one in self.members and answer is not None]
        if failures:
            raise failures[0]

    # -- for bringing replicas back

    async def join(self, one: Replica, *, timeout_s: float = CONTROL_TIMEOUT_S, is_alone: bool = False, forgets: bool = False) -> Adoption:
        """Puts one replica under the chief that has the shard."""
        self._num_states += 1
        request = AdoptRequest(
            fence=self.fence,
            chief_address=self._chief_address,
            session_keys=self._session_keys,
            replica=ReplicaState(version=self._num_states, is_alone=is_alone, forgets=forgets),
        )
        adoption = await one.link.call(request, timeout_s=timeout_s)
        self._obeying.add(one)
        # Another replica, or this shard's chief, may not know them all.
        self._session_keys = joined_keys(self._session_keys, adoption.session_keys)
        return adoption

    def numbered(self, request: RestoreRequest) -> RestoreRequest:
        """Returns a request that a replica obeys until it gets another."""
        return replace(request, replica_version=self._num_states)

    async def mark_alone(self) -> None:
        """Has the only member, if there is only one, remember that it is that."""
        if len(self.members) == 1:
            await self.join(self.members[0], is_alone=True)

    def count_on_too(self, one: Replica) -> None:
        """Adds a replica that has the members' state."""
        self._count_on([*self.members, one])
        log.info("standby is up to date again ps=%d address=%s", self.index, one.address)

    def note_missing(self, one: Replica, why: str) -> None:
        """Notes why a replica that is not counted on cannot be brought back."""
        if one not in self.members and one.missing != why:
            one.missing = why
            log.warning("a replica cannot be brought back ps=%d address=%s cause=%s", self.index, one.address, why)
            self._say()

    # -- inside

    async def _adopt(self, one: Replica, timeout_s: float) -> tuple[ShardStatus, Adoption]:
        status = self._met(one, await one.link.call(ShardStatusRequest(), timeout_s=timeout_s))
        adoption = await self.join(one, timeout_s=timeout_s, forgets=status.process_incarnation in self._distrusted)
        if not adoption.was_alone:
            # The chief before has taken in another one between the two calls.
            self._were_alone.discard(one)
        self._distrusted.discard(status.process_incarnation)
        one.process = status.process_incarnation
        return status, adoption

    async def _follow_mode(self, settings: ShardSettings) -> None:
        if settings.applies_on_arrival:
            for one in self.members[1:]:
                await self._drop(one, "contributions are applied as they arrive, in no order that two servers could share")

    async def _at_members(self, request: Request[Answer], timeout_s: float) -> list[Answer]:
        """Asks all members at once, and returns what they answer; drops those that fail where another does not.

        Raises what the only one raises; and, if all fail, first of all what the caller may repeat. If all lack contributions, raises what
        the one that lacks the fewest lacks, and drops those that lack more.
        """
        members = [*self.members] or self.replicas[:1]
        if len(members) == 1:
            return [await members[0].link.call(request, timeout_s=timeout_s)]
        tasks: Tasks = {one: asyncio.ensure_future(one.link.call(request, timeout_s=timeout_s)) for one in members}
        lost = await finished(tasks, self.fence)
        answers = {one: task.result() for one, task in tasks.items() if has_succeeded(task)}
        errors = {one: error for one, task in tasks.items() if one not in lost and isinstance(error := error_of(task), PsError)}
        if not answers:
            behind = that_lack_more(errors)
            for one in behind:
                await self._drop(one, errors[one].message)
            raise min((error for one, error in errors.items() if one not in behind), key=order_of)
        for one, error in errors.items():
            answer = await once_more(one, request, error, self.fence, timeout_s=timeout_s)
            # Also one that lacks a contribution: its worker may not have heard yet that there is another replica to give it to.
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
        """Counts on a replica no more, once the other one knows that it is alone. Raises Superseded if a later chief has the other one."""
        async with self._dropping:
            if one not in self.members or len(self.members) == 1:
                return
            others = [member for member in self.members if member is not one]
            what = f"its standby at {others[0].address} takes its place" if one is self._first else "training continues without it"
            log.warning("a replica is lost; %s ps=%d address=%s cause=%s", what, self.index, one.address, why)
            is_superseded = False
            try:
                if len(others) == 1:
                    await self.join(others[0], is_alone=True)
            except Superseded:
                # That chief may count on both: contributions that workers are told to give to this one alone could be missing there.
                is_superseded = True
                raise
            except PsError:
                pass  # a later chief is the more careful without it
            finally:
                if not is_superseded:
                    one.missing = why
                    self._count_on(others)

    def _say_different(self, step: int, contributions: tuple[PushId, ...]) -> str:
        """Reports that replicas had been given different contributions, and returns that as the reason why one is not counted on."""
        self._report(messages.ContributionsDiffer(shard=self.index, step=step, contributions=contributions))
        return f"{workers_of(contributions)} had given it other gradients for step {step} than the other replica"

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
        self._report(messages.ReplicasChanged(shard=self.index, address=self.address, standby=along, missing=missing))

    def _note(self, status: ShardStatus) -> ShardStatus:
        self._told = status.process_incarnation
        return status


_LOOK_INTERVAL_S = 0.5
# How often the coordinator is reminded of one that waits.
_REMIND_S = 5.0
_POLL_S = 5.0
_RESTORE_TIMEOUT_S = 60.0


class ReplicaReturn:
    """The replicated shards of one chief, by index. Belongs to one event loop.

    `manifest_of` returns the SHA-256 of the manifest of a whole checkpoint.
    """

    def __init__(
        self,
        links: Mapping[int, ReplicatedLink],
        *,
        report: Callable[[messages.Event], None],
        manifest_of: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self.links = links
        self._report = report
        self._manifest_of = manifest_of
        self._clock = clock

    async def watch(self, *, is_paused: Callable[[], bool]) -> None:
        """Looks again and again for replicas that are not counted on, and reports ReplicaReady for those that could be. Does not end."""
        told: dict[Replica, float] = {}
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for link in self.links.values():
                for one in [one for one in link.replicas if link.members and one not in link.members]:
                    if is_paused() or link.changing.locked():
                        continue
                    if await self._is_there(link, one) and self._clock() >= told.get(one, 0.0):
                        told[one] = self._clock() + _REMIND_S
                        self._report(messages.ReplicaReady(shard=link.index))

    async def bring_back(self, work: messages.BringReplicasBack) -> None:
        """Restores the lost replicas of some shards, at once, and reports the end of that."""
        try:
            sha256 = await asyncio.to_thread(self._manifest_of, work.tag)
        except PsError as error:
            self._report(messages.Failed(work=work, error=error))
            return
        requests = restore_requests(work, sha256=sha256)
        whys = await asyncio.gather(*(self._bring_back(self.links[request.spec.shard], request) for request in requests))
        failures = tuple((shard, why) for shard, why in zip(work.shards, whys, strict=True) if why)
        self._report(messages.Done(work=work, result=failures))

    async def _is_there(self, link: ReplicatedLink, one: Replica) -> bool:
        """Whether a process is there that can be brought back; it is empty then: what it held may be older than what the others hold."""
        try:
            status = await one.link.call(ShardStatusRequest(), timeout_s=CONTROL_TIMEOUT_S)
            async with link.changing:
                if one in link.members:
                    return False
                is_new, is_empty = status.process_incarnation != one.process, status.step is None
                if is_new:
                    await one.link.handshake(timeout_s=CONTROL_TIMEOUT_S)
                # With each look, as the sign of this chief's life: it asks the replica nothing else until it counts on it. A status does
                # not do: it has the fence alone, which another chief of the same number has too, and would keep that one's hold on it.
                await link.join(one, forgets=is_new or not is_empty)
                if is_new:
                    one.process = status.process_incarnation
                    log.info("a lost replica runs again, without a model ps=%d address=%s", link.index, one.address)
        except Superseded as error:
            # It has obeyed another chief, which began when this one did. Once that one is gone, the server lets this one have it.
            link.note_missing(one, error.message.removesuffix("; end this chief"))
            return False
        except PsError as error:
            log.debug("a lost replica does not answer ps=%d address=%s cause=%s", link.index, one.address, error.message)
            return False
        return one not in link.members

    async def _bring_back(self, link: ReplicatedLink, request: RestoreRequest) -> str:
        """Returns why it did not succeed; empty: it did."""
        for one in [one for one in link.replicas if one not in link.members]:
            try:
                async with link.changing:
                    await self._restore(link, one, request)
            except PsError as error:
                with contextlib.suppress(PsError):
                    await link.mark_alone()
                log.warning("a replica could not be brought back ps=%d address=%s cause=%s", link.index, one.address, error.message)
                return error.message
        return ""

    async def _restore(self, link: ReplicatedLink, one: Replica, request: RestoreRequest) -> None:
        status = await one.link.call(ShardStatusRequest(), timeout_s=CONTROL_TIMEOUT_S)
        await link.join(one, forgets=True)
        one.process = status.process_incarnation
        request, until = replace(link.numbered(request), max_wait_s=_POLL_S), self._clock() + _RESTORE_TIMEOUT_S
        while not (await one.link.call(request, timeout_s=_POLL_S + CONTROL_TIMEOUT_S)).is_done:
            if self._clock() > until:
                raise Unavailable(f"it was not brought back within {_RESTORE_TIMEOUT_S:g} s")
        # From here on the others are not counted on alone; they must know before that is so.
        for member in link.members:
            await link.join(member)
        after = await one.link.call(ShardStatusRequest(), timeout_s=CONTROL_TIMEOUT_S)
        if (after.process_incarnation, after.step) != (one.process, request.spec.initial_step):
            raise Unavailable("it was restarted while it was brought back")
        link.count_on_too(one)


def restore_requests(work: messages.RestoreShards | messages.BringReplicasBack, *, sha256: str) -> list[RestoreRequest]:
    """Returns what each of the work's shards is sent to go back to a checkpoint whose manifest has this digest."""
    return [
        RestoreRequest(fence=work.fence, spec=spec, tag=work.tag, manifest_sha256=sha256, settings=work.settings) for spec in work.specs
    ]


def replicated(links: Sequence[object]) -> dict[int, ReplicatedLink]:
    """Returns those that have several replicas, by index."""
    return {index: link for index, link in enumerate(links) if isinstance(link, ReplicatedLink)}


def distrust_unconfirmed(links: Sequence[object], statuses: Sequence[ShardStatus]) -> list[int]:
    """Has the shards count as lost whose model may be out of date, and returns their indices: then they must be looked at again.

    A standby that holds a model while its other replica is empty may have been left behind long ago. It has not been if a shard that
    cannot have been left behind holds a model too, and has no later settings: whether they are at the same step is then looked at as ever.
    Where servers apply contributions as they arrive there is no such step, but standbys have been left out before those settings came.
    """
    doubted = {index: link for index, link in replicated(links).items() if not link.is_proven and statuses[index].step is not None}
    confirming = [status for index, status in enumerate(statuses) if index not in doubted and status.step is not None]
    latest = max((status.settings_version for status in confirming), default=0)
    lost = [index for index in doubted if not confirming or statuses[index].settings_version < latest]
    for index in lost:
        log.warning("ps %d: one replica is empty, and the model of the other one may be out of date; it is not used", index)
        doubted[index].distrust()
    return lost
