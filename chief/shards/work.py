"""Carries out the coordinator's instructions at all shards: one coroutine for each, which reports its end. Decides nothing.

The coroutines know links and a `Pace`, no event loop and no thread. `side` runs them on a loop, `serving.in_process` in the process of the
shards, and the simulation in simulated time.
"""

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

from chief.core import messages as ev
from chief.core.wording import seconds
from chief.shards.calls import CONTROL_TIMEOUT_S, ShardCalls
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.standby import distrust_unconfirmed, restore_requests
from ps_protocol.errors import CheckpointNotFound, ContributionMissing, InternalError, LimitExceeded, PsError, Superseded, TrainingFailed
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.contribution import PushId, contributions_named
from ps_protocol.roles.fence import LIVING_CHIEF_S, NOBODY, Fence, joined_keys
from ps_protocol.roles.history import Counted, History
from ps_protocol.roles.request import Request
from ps_protocol.roles.shard import (
    Adoption,
    AdoptRequest,
    ApplyRequest,
    CheckpointFile,
    KeepRecordRequest,
    PrepareRequest,
    RestoreRequest,
    SaveRequest,
    SaveState,
    ShardStatus,
    ShardStatusRequest,
    ShutdownRequest,
)
from ps_protocol.wire.codec import RecordPacker, unpack_record

log = logging.getLogger("lockstep.chief")

# A shard that is alive applies a step of many GiB in less; keepalive finds out about one that is not.
_APPLY_TIMEOUT_S = 60.0
# A shard that is killed is noticed within a second, and one that hears nothing for longer takes its chief for gone.
_WATCH_INTERVAL_S = 0.4
# The status shows reports of shards, which are no older than this.
_REPORT_INTERVAL_S = 2.0
_LOOK_AGAIN_S = 0.5
_GIVE_UP_S = 10.0
# How long a shard may copy its values, or look into a checkpoint, before it answers.
_COPY_TIMEOUT_S = 60.0
_POLL_S = 5.0
# Callers that wait for a restoration learn its progress as often.
_SAY_EVERY_S = 1.0

Result = TypeVar("Result")


@light_dataclass(slots=True)
class Authority:
    """Of a chief's latest adoption; NOBODY: it has adopted nothing yet. `ShardWork` changes it in place.

    `session_key`: the chief's own. `session_keys`: that, and those of earlier chiefs of this life that shards have reported.
    """

    session_key: bytes = field(repr=False)
    fence: Fence = NOBODY
    chief_address: str = ""
    session_keys: tuple[bytes, ...] = field(default=(), repr=False)

    def obey(self, fence: Fence) -> None:
        """Everything is commanded by this from now on."""
        if fence.life != self.fence.life:
            self.session_keys = (self.session_key,)
        self.fence = fence

    def learn(self, session_keys: tuple[bytes, ...]) -> None:
        """A shard of this life knows these keys."""
        self.session_keys = joined_keys(self.session_keys, session_keys)


class ShardWork:
    """The shards of one chief, and its place for checkpoints (`store` None: there is none). `history` is kept if it is given.

    `on_superseded` is called with the reason when another chief has taken the shards; then nothing is reported.
    """

    def __init__(
        self,
        calls: ShardCalls,
        *,
        authority: Authority,
        store: CheckpointStore | None,
        on_superseded: Callable[[str], None],
        history: History | None = None,
    ) -> None:
        self._calls = calls
        self._authority = authority
        # The lives in which the shards were when they were looked at.
        self._found_lives: frozenset[int] = frozenset()
        self._store = store
        self._history = history
        self._on_superseded = on_superseded
        # A launcher that ends all processes ends the parameter servers at the same time: no reason for a warning.
        self.is_ending = False
        self._num_restoring = 0
        self._packer = RecordPacker()

    @property
    def is_restoring(self) -> bool:
        """Whether shards are being brought back."""
        return self._num_restoring > 0

    async def carry_out(self, work: ev.Work, *, is_again: bool = False) -> None:
        """Carries out an instruction at shards, or with checkpoints, and reports its end.

        `is_again`: a step has been sent before, and failed.
        """
        try:
            await self._do(work, is_again=is_again)
        except Superseded as error:
            self._on_superseded(error.message)  # no participant may learn what the other chief does not know
        except PsError as error:
            if isinstance(work, ev.CopyStep | ev.WriteStep) and (store := self._store) is not None:
                await self._calls.pace.at_storage(lambda: store.abandon(work.tag))
            self._calls.report(ev.Failed(work=work, error=error))

    async def _do(self, work: ev.Work, *, is_again: bool) -> None:
        result: object = None
        match work:
            case ev.ApplyStep():
                return await self._apply(work, is_again=is_again)
            case ev.PrepareStep():
                result = await self._prepare(work)
            case ev.KeepRecord():
                result = await self._keep_record(work)
            case ev.AdoptShards():
                result = await self._adopt_all()
            case ev.FindCheckpoint():
                result = await self._find(work)
            case ev.RestoreShards():
                result = await self._restore(work)
            case ev.CopyStep():
                await self._copy(work)
            case ev.WriteStep():
                result = await self._write(work)
            case ev.CommitCheckpoint():
                return await self._commit(work)
        self._done(work, result)

    def _done(self, work: ev.Work, result: object = None) -> None:
        self._calls.report(ev.Done(work=work, result=result))

    # -- steps

    async def _prepare(self, step: ev.PrepareStep) -> tuple[tuple[float, ...], ...] | ev.Lacking:
        """Asks all shards, at once, how large the mean of a step is."""
        links = self._calls.links
        requests = step_requests(step.of, num_shards=len(links))
        sums = await self._have_step(
            "to prepare", step.of, lambda index: links[index].call(PrepareRequest(of=requests[index]), timeout_s=_APPLY_TIMEOUT_S)
        )
        return sums if isinstance(sums, ev.Lacking) else tuple(sums)

    async def _apply(self, step: ev.ApplyStep, *, is_again: bool) -> None:
        """Has all shards apply a step, at once, and reports the end of that."""
        links = self._calls.links
        requests = step_requests(step, num_shards=len(links))
        replies = await self._have_step(
            "to apply",
            step,
            lambda index: links[index].call(requests[index], timeout_s=_APPLY_TIMEOUT_S),
            is_again=is_again,
        )
        if isinstance(replies, ev.Lacking):
            self._done(step, replies)
        else:
            self.applied(step)

    def applied(self, step: ev.ApplyStep) -> None:
        """Reports that all shards have applied a step, and notes it in the history, if there is one. Thread-safe."""
        failpoint("chief.apply.after")
        if self._history is not None:
            request = step.request
            self._history.write(Counted(epoch=request.fence.epoch, step=request.step, contributors=request.contributors))
        self._calls.report(ev.Done(work=step))

    async def _have_step(
        self,
        what: str,
        step: ev.ApplyStep,
        call: Callable[[int], Coroutine[Any, Any, Result]],
        *,
        is_again: bool = False,
    ) -> list[Result] | ev.Lacking:
        """As `_at_all`; returns the contributions that some shards lack, once all have answered."""
        missing: list[tuple[int, PushId]] = []

        async def attempt(index: int) -> Result | None:
            try:
                return await call(index)
            except ContributionMissing as error:
                named = contributions_named(error.facts)
                if not named:
                    raise
                missing.extend((index, push_id) for push_id in named)
                return None

        answers = await self._at_all(f"{what} step {step.request.step}", attempt, is_again=is_again)
        if missing:
            return ev.Lacking(missing=tuple(sorted(missing)))
        return [answer for answer in answers if answer is not None]

    # -- shards that are looked at, adopted and watched

    async def look_at_all(self, *, is_takeover: bool) -> None:
        """Waits until all shards have been reached and none is a living chief's, and reports ShardsFound.

        Raises PsError if they are not what they should be; TrainingFailed if their chief lives. `is_takeover`: whatever that one does.
        """
        start, is_said = self._calls.pace.now(), False
        before: list[ShardStatus] = []
        while True:
            statuses = await self._calls.at_all(self._calls.look_at)
            if distrust_unconfirmed(self._calls.links, statuses) or not _are_of_one_time(before, statuses):
                before = statuses
                continue
            words = "" if is_takeover else self._living_chief(statuses)
            if not words:
                break
            waited_s = self._calls.pace.now() - start
            if waited_s >= _GIVE_UP_S:
                raise TrainingFailed(f"{words}; end that chief first, or start this one with --takeover if it shall take its place")
            if not is_said:
                log.warning("waiting for the present chief to end, at most %s cause=%s", seconds(_GIVE_UP_S), words)
            is_said = True
            await self._calls.pace.sleep(_LOOK_AGAIN_S)
        self._found_lives = frozenset(status.fence.life for status in statuses)
        self._calls.report(ev.ShardsFound(statuses=tuple(statuses)))

    async def _adopt_all(self) -> ev.Adopted:
        """Puts all shards under this chief, and returns their answers."""
        answers = await self._calls.at_all(self._adopt_or_refusal)
        for refusal in answers:
            if isinstance(refusal, PsError):
                raise refusal
        adopted = [answer for answer in answers if not isinstance(answer, PsError)]
        # Another process may have a replica's place since they were looked at.
        for index in distrust_unconfirmed(self._calls.links, [status for status, _ in adopted]):
            adopted[index] = await self._adopt(index)
        for index, (_, adoption) in enumerate(adopted):
            # Secrets of workers that an earlier chief registered are made of its key, and only another shard may have known that key.
            if set(adoption.session_keys) != set(self._authority.session_keys):
                adopted[index] = await self._adopt(index)
        adoptions = tuple(adoption for _, adoption in adopted)
        incarnations = tuple(status.process_incarnation for status, _ in adopted)
        return ev.Adopted(process_incarnations=incarnations, adoptions=adoptions, record=_newest_record(adoptions))

    async def _adopt_or_refusal(self, index: int) -> tuple[ShardStatus, Adoption] | PsError:
        try:
            return await self._adopt(index)
        except Superseded:
            raise
        except PsError as error:
            return self._named(index, error)

    async def _keep_record(self, work: ev.KeepRecord) -> LimitExceeded | None:
        """Has shards work by settings, and keep a record; returns why one does not keep it, because it is too large."""
        record = self._packer.pack(work.record)
        request = KeepRecordRequest(fence=work.fence, version=work.version, settings=work.settings, record=record)

        async def keep(index: int) -> LimitExceeded | None:
            try:
                await self._calls.links[index].call(request, timeout_s=_COPY_TIMEOUT_S)
            except LimitExceeded as error:
                return error
            return None

        what = "to keep a record"
        refusals = await self._at_all(what, keep) if work.is_for_all else [await self._at(0, what, keep, is_again=False)]
        return next((error for error in refusals if error is not None), None)

    async def watch(self, index: int, *, is_paused: Callable[[], bool]) -> None:
        """Checks several times a second whether a silent shard is still the same process. Does not end.

        A shard that answers with every step is asked for its report at intervals.
        """
        calls = self._calls
        silent_since: float | None = None
        reported_at = -_REPORT_INTERVAL_S
        while True:
            await calls.pace.sleep(_WATCH_INTERVAL_S)
            is_heard = calls.silence_s(index) < _WATCH_INTERVAL_S and calls.pace.now() - reported_at < _REPORT_INTERVAL_S
            if is_paused() or is_heard:
                continue
            try:
                await self._check(index)
            except PsError as error:
                if not calls.may_pass(index, error):
                    calls.report(ev.ShardFailed(shard=index, why=error.message))
                    continue
                if silent_since is None:
                    silent_since = calls.pace.now()
                    # Servers end with their chief.
                    level = logging.DEBUG if self.is_ending else logging.WARNING
                    log.log(level, "parameter server does not answer ps=%d cause=%s", index, error.message)
                calls.report(ev.ShardUnreachable(shard=index, why=calls.cause(index, error)))
            else:
                if silent_since is not None:
                    log.info("parameter server answers again ps=%d after_s=%.1f", index, calls.pace.now() - silent_since)
                silent_since, reported_at = None, calls.pace.now()

    async def shut_down(self, index: int, reason: str) -> None:
        """Ends a shard that this chief adopted, also a restarted one. Raises PsError."""
        try:
            request = ShutdownRequest(fence=self._authority.fence, reason=reason)
            await self._calls.links[index].call(request, timeout_s=CONTROL_TIMEOUT_S)
        except Superseded as error:
            log.warning("parameter server belongs to another chief; left running ps=%d cause=%s", index, error.message)

    # -- checkpoints

    async def _find(self, work: ev.FindCheckpoint) -> ev.Found:
        """Looks for a checkpoint."""
        store = self._store
        return ev.Found(checkpoint=None) if store is None else await self._calls.pace.at_storage(lambda: store.find(work))

    async def _copy(self, work: ev.CopyStep) -> None:
        """Has all shards copy a step, and begin to write it."""
        if self._store is not None:
            self._store.expect(work.tag)
        await self._calls.at_all(lambda index: self._copied_at(index, self._save_request(work)))

    async def _write(self, work: ev.WriteStep) -> tuple[CheckpointFile, ...]:
        """Waits until all shards have written a step, and returns their files."""
        return tuple(await self._calls.at_all(lambda index: self._written_at(index, self._save_request(work))))

    def _save_request(self, work: ev.CopyStep | ev.WriteStep) -> SaveRequest:
        return SaveRequest(fence=work.fence, step=work.step, tag=work.tag, num_shards=len(self._calls), since=work.since)

    async def _commit(self, work: ev.CommitCheckpoint) -> None:
        """Makes a checkpoint whole, and reports that; then removes checkpoints that are too old."""
        store, pace = self._store, self._calls.pace
        assert store is not None
        await pace.at_storage(lambda: store.commit(work))
        if not work.is_awaited or await self._still_rules(work.checkpoint.fence):
            self._done(work)
            await pace.at_storage(lambda: store.prune(work.keep))

    async def _restore(self, work: ev.RestoreShards) -> tuple[int, ...]:
        """Brings all shards back to a checkpoint, and returns their process incarnations."""
        self._num_restoring += 1
        requests = restore_requests(work, sha256=work.manifest_sha256)
        try:
            return tuple(await self._calls.at_all(lambda index: self._restored_at(index, requests[index])))
        finally:
            self._num_restoring -= 1

    def manifest_of(self, tag: str) -> str:
        """Returns the SHA-256 of the manifest of a whole checkpoint; blocks on storage. Raises CheckpointNotFound."""
        found = None if self._store is None else self._store.find(ev.FindCheckpoint(only=tag))
        if found is None or found.checkpoint is None:
            why = "; ".join(why for _, why in found.skipped) if found else "there is no place for checkpoints"
            raise CheckpointNotFound(f"checkpoint {tag} cannot be read: {why}")
        return found.manifest_sha256

    # -- inside

    async def _at_all(self, what: str, call: Callable[[int], Coroutine[Any, Any, Result]], *, is_again: bool = False) -> list[Result]:
        """Calls all shards at once, each until it answers. Raises PsError, with the shard's name, if one refuses."""
        return await self._calls.at_all(lambda index: self._at(index, what, call, is_again=is_again))

    async def _at(self, index: int, what: str, call: Callable[[int], Coroutine[Any, Any, Result]], *, is_again: bool) -> Result:
        async def attempt() -> Result:
            nonlocal is_again
            if is_again:
                await self._calls.check_process(index)
            is_again = True
            return await call(index)

        try:
            return await self._calls.insist(index, attempt)
        except PsError as error:
            log.error("parameter server refused ps=%d what=%s cause=%s", index, what, error.message)
            if not isinstance(error, Superseded):
                try:
                    # If it is another process than before, or another chief's, that says more than its refusal.
                    await self._calls.insist(index, lambda: self._check(index))
                except PsError as later:
                    log.warning("parameter server does not answer ps=%d cause=%s", index, later.message)
            raise self._named(index, error) from None

    async def _check(self, index: int) -> None:
        """Looks at one shard and reports its status; another chief's incarnation there ends this chief."""
        own, calls = self._authority.fence, self._calls
        status = await calls.links[index].call(ShardStatusRequest(fence=own), timeout_s=2 * CONTROL_TIMEOUT_S)
        calls.heard(index)
        if own.is_overtaken_by(status.fence):
            self._on_superseded(f"{calls.name(index)}: another chief (incarnation {status.fence.chief_incarnation}) has taken it over")
        else:
            damage = status.damage if status.fence.era == own.era else ""  # or it is being brought back since
            incarnation, is_leaving = status.process_incarnation, status.is_leaving
            seen = ev.ShardSeen(shard=index, process_incarnation=incarnation, damage=damage, is_leaving=is_leaving, report=status.report)
            calls.report(seen)

    async def _insist(self, index: int, request: Request[Result], timeout_s: float) -> Result:
        link = self._calls.links[index]
        return await self._calls.insist(index, lambda: link.call(request, timeout_s=timeout_s))

    async def _still_rules(self, fence: Fence) -> bool:
        """Whether the process that has saved last still obeys this chief. One shard will do: another chief takes all before it looks."""
        pauses: Iterator[float] | None = None
        while True:
            status = await self._insist(0, ShardStatusRequest(), CONTROL_TIMEOUT_S)
            if fence.is_overtaken_by(status.fence):
                self._on_superseded(f"{self._calls.name(0)} obeys the chief of incarnation {status.fence.chief_incarnation}")
                return False
            if status.fence == fence:
                return True
            # Another process, or epoch, has not heard of this chief, or not in this epoch. Its standby takes its place, or the cluster goes
            # back: then nobody asks any more.
            pauses = pauses or self._calls.pace.pauses()
            if pauses is None or self._authority.fence != fence:
                return False
            await self._calls.pace.sleep(next(pauses))

    async def _adopt(self, index: int) -> tuple[ShardStatus, Adoption]:
        calls, authority = self._calls, self._authority
        before, status = None, await calls.look_at(index)
        while before is None or before.process_incarnation != status.process_incarnation:
            self._check_life(status)
            # Another process may have taken the former's place until it was adopted: then it is not known which one it was.
            request = AdoptRequest(fence=authority.fence, chief_address=authority.chief_address, session_keys=authority.session_keys)
            adoption = await self._insist(index, request, CONTROL_TIMEOUT_S)
            before, status = status, await calls.look_at(index)
        authority.learn(adoption.session_keys)
        calls.report(ev.SessionKeysFound(keys=authority.session_keys))
        calls.adopted(index, process_incarnation=status.process_incarnation)
        log.info(
            "adopted ps=%d address=%s chief_incarnation=%d epoch=%d step=%s",
            index,
            calls.links[index].address,
            authority.fence.chief_incarnation,
            authority.fence.epoch,
            adoption.step,
        )
        return status, adoption

    def _check_life(self, status: ShardStatus) -> None:
        """Raises Superseded if this chief continues in a life that it has found, and the shard is in another one since.

        To take it over would give its steps the numbers that others have in the life before.
        """
        own, found = self._authority.fence.life, status.fence.life
        if own in self._found_lives and found and found != own and found not in self._found_lives:
            raise Superseded(f"ps {status.shard}: it was restarted, and another chief has begun anew there; end this chief")

    async def _copied_at(self, index: int, request: SaveRequest) -> None:
        progress = await self._insist(index, request, _COPY_TIMEOUT_S)
        if progress.state is SaveState.FAILED:
            raise self._named(index, progress.failure)

    async def _written_at(self, index: int, request: SaveRequest) -> CheckpointFile:
        request = replace(request, max_wait_s=_POLL_S)
        while True:
            progress = await self._insist(index, request, _POLL_S + CONTROL_TIMEOUT_S)
            if progress.file is not None:
                return progress.file
            if progress.state is not SaveState.WRITING:
                raise self._named(index, progress.failure)

    async def _restored_at(self, index: int, request: RestoreRequest) -> int:
        """Returns the process that holds the values; one that is restarted meanwhile is brought back from the beginning."""
        while True:
            adopted, _ = await self._adopt(index)
            failure: PsError | None = None
            try:
                await self._restored_once(index, request)
            except PsError as error:
                failure = error
            status = await self._calls.look_at(index)
            if status.process_incarnation != adopted.process_incarnation:
                continue
            if failure is not None:
                raise self._named(index, failure)
            return adopted.process_incarnation

    async def _restored_once(self, index: int, request: RestoreRequest) -> None:
        request = replace(request, max_wait_s=_SAY_EVERY_S)
        while True:
            progress = await self._insist(index, request, _SAY_EVERY_S + _COPY_TIMEOUT_S)
            if progress.is_done:
                return
            self._calls.report(ev.ShardRestoring(shard=index, num_bytes_read=progress.num_bytes_read, num_bytes=progress.num_bytes))

    def _named(self, index: int, failure: PsError | None) -> PsError:
        failure = failure or InternalError("its save ended without a file")
        return type(failure)(f"{self._calls.name(index)}: {failure.message}", facts=failure.facts)

    def _living_chief(self, statuses: list[ShardStatus]) -> str:
        for index, status in enumerate(statuses):
            heard_s = status.chief_heard_ago_s
            if status.fence.chief_incarnation and heard_s is not None and heard_s < LIVING_CHIEF_S:
                where = f" at {status.chief_address}" if status.chief_address else ""
                who = f"another chief{where} (incarnation {status.fence.chief_incarnation})"
                return f"{self._calls.name(index)} obeys {who}, which it heard {seconds(heard_s)} ago"
        return ""


def step_requests(step: ev.ApplyStep, *, num_shards: int) -> tuple[ApplyRequest, ...]:
    """Returns each shard's request for a step: the same for all, except the scales of its own slices and the contributions it lacks."""
    if not (step.scales or step.shares or step.without):
        return (step.request,) * num_shards
    each: dict[str, Any] = {"scales": step.scales, "shares": step.shares, "without": step.without}
    return tuple(replace(step.request, **{name: of_all[index] for name, of_all in each.items() if of_all}) for index in range(num_shards))


def _newest_record(adoptions: Sequence[Adoption]) -> ChiefRecord | None:
    """Returns the newest readable record, or None: a chief can do without, so one that cannot be read is said."""
    kept = sorted((adoption for adoption in adoptions if adoption.record), key=lambda adoption: adoption.record_version, reverse=True)
    for adoption in kept:
        try:
            return unpack_record(adoption.record)
        except PsError as error:
            log.warning("cannot read the record of an earlier chief version=%d cause=%s", adoption.record_version, error.message)
    return None


def _are_of_one_time(before: Sequence[ShardStatus], statuses: Sequence[ShardStatus]) -> bool:
    """Whether all shards are unchanged since the look before.

    Who must wait for the last to answer may know of the first one what is over: it was restarted, and obeys another chief.
    """
    marks = [[(one.process_incarnation, one.fence, one.step is None) for one in looked_at] for looked_at in (before, statuses)]
    return marks[0] == marks[1]
