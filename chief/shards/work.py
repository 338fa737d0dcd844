"""Carries out the coordinator's instructions at all shards, and watches over them. Reports events; decides nothing."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from chief.core import messages
from chief.core import messages as ev
from chief.core import messages as rec
from chief.core.messages import AdoptShard, ShardAdopted
from chief.core.wording import seconds
from chief.shards.calls import CONTROL_TIMEOUT_S, TRANSIENT, ShardCalls
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.link import DirectLink, ShardLanes, ShardLink, Work
from chief.shards.requests import (
    Authority,
    apply_requests,
    are_of_one_time,
    finding,
    prepare_request,
    record_found,
    restore_failure,
    restore_requests,
    save_failure,
    settings_of,
)
from chief.shards.standby import ReplicaReturn, replicated, trusted
from ps_protocol.errors import Cancelled, CheckpointNotFound, EpochMismatch, InternalError, PsError, Superseded, TrainingFailed, Unavailable
from ps_protocol.process.failpoints import failpoint
from ps_protocol.roles.shard import Adoption, ApplyRequest, CheckpointFile, RestoreRequest, SaveRequest, SaveState, ShardStatus
from ps_protocol.wire.codec import RecordPacker

# What the chief has its shards do while it trains: prepare and apply steps, work otherwise; and it watches and ends them. Decides nothing.
#
# What it reports of a step names the step's epoch. What brings shards back to a checkpoint is in `recovery_tasks`.


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


# What the chief does to take its shards over, to save them and to bring them back to a checkpoint. Reports events; decides nothing.


# A chief that is alive is heard by its shards several times a second.
_LIVING_CHIEF_S = 2.5
_LOOK_AGAIN_S = 0.5
_GIVE_UP_S = 10.0
# How long a shard may copy its values, or look into a checkpoint, before it answers.
_COPY_TIMEOUT_S = 60.0
_POLL_S = 5.0


class RecoveryTasks:
    """Belongs to one event loop. `store` is None if there is no place for checkpoints.

    `on_superseded` is told, in words, that another chief has the shards: then nothing is reported.
    """

    def __init__(
        self, calls: ShardCalls, *, authority: Authority, store: CheckpointStore | None, on_superseded: Callable[[str], None]
    ) -> None:
        self._calls = calls
        self._authority = authority
        self._store = store
        self._on_superseded = on_superseded
        # Whoever looks for a checkpoint shall find the one that is just becoming whole.
        self._at_store = asyncio.Lock()
        self._num_restoring = 0
        self._packer = RecordPacker()

    @property
    def is_restoring(self) -> bool:
        """Whether shards are being brought back."""
        return self._num_restoring > 0

    async def look_at_all(self, *, is_takeover: bool) -> None:
        """Waits until all shards have been reached and none is a living chief's, and reports ShardsFound.

        Raises PsError if they are not what they should be; TrainingFailed if their chief lives. `is_takeover`: whatever that one does.
        """
        start, is_said = self._calls.clock(), False
        before: list[ShardStatus] = []
        while True:
            statuses = trusted(self._calls.links, await self._calls.at_all(self._calls.look_at))
            if not are_of_one_time(before, statuses):
                before = statuses
                continue
            words = "" if is_takeover else self._living_chief(statuses)
            if not words:
                break
            waited_s = self._calls.clock() - start
            if waited_s >= _GIVE_UP_S:
                raise TrainingFailed(f"{words}; end that chief first, or start this one with --takeover if it shall take its place")
            if not is_said:
                log.warning("waiting for the present chief to end, at most %s cause=%s", seconds(_GIVE_UP_S), words)
            is_said = True
            await asyncio.sleep(_LOOK_AGAIN_S)
        self._calls.report(rec.ShardsFound(findings=tuple(finding(status) for status in statuses)))

    async def adopt_all(self, work: rec.AdoptShards) -> None:
        """Puts all shards under this chief, and reports what they say: RecordFound, and ShardAdopted for each."""
        try:
            adopted = await self._calls.at_all(self._adopt)
        except Superseded as error:
            self._on_superseded(error.message)
            return
        for event in record_found([adoption for _, adoption in adopted]):
            self._calls.report(event)
        for index, (process_incarnation, adoption) in enumerate(adopted):
            self._calls.report(ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption))

    async def adopt(self, work: AdoptShard) -> None:
        """Puts one shard under this chief, and reports ShardAdopted. Raises PsError."""
        process_incarnation, adoption = await self._adopt(work.shard)
        self._calls.report(ShardAdopted(shard=work.shard, process_incarnation=process_incarnation, adoption=adoption))

    async def keep_record(self, work: rec.KeepRecord) -> None:
        """Has shards keep a record, and reports RecordKept; what keeps a shard from it shows with the next step, too."""
        record, failure = self._packer.pack(work.record), ""
        try:
            if work.is_for_all:
                await self._calls.at_all(lambda index: self._keep_at(index, work, record))
            else:
                await self._keep_at(0, work, record)
        except Superseded as error:
            self._on_superseded(error.message)  # nobody may be told what the other chief does not know
            return
        except PsError as error:
            failure = error.message
        self._calls.report(rec.RecordKept(epoch=work.epoch, version=work.version, failure=failure))

    async def _keep_at(self, index: int, work: rec.KeepRecord, record: bytes) -> None:
        link, incarnation = self._calls.links[index], self._authority.chief_incarnation
        await self._calls.insist(
            index,
            lambda: link.keep_record(
                epoch=work.epoch, chief_incarnation=incarnation, version=work.version, record=record, timeout_s=_COPY_TIMEOUT_S
            ),
        )

    def manifest_of(self, tag: str) -> str:
        """Returns the SHA-256 of the manifest of a whole checkpoint; blocks on storage. Raises CheckpointNotFound."""
        found = None if self._store is None else self._store.find(rec.FindCheckpoint(only=tag))
        if found is None or found.checkpoint is None:
            why = "; ".join(why for _, why in found.skipped) if found else "there is no place for checkpoints"
            raise CheckpointNotFound(f"checkpoint {tag} cannot be read: {why}")
        return found.manifest_sha256

    async def find(self, wish: rec.FindCheckpoint) -> None:
        """Looks for a checkpoint, and reports CheckpointFound."""
        if wish.fence is not None and not await self._fenced():
            return
        if self._store is None:
            self._calls.report(rec.CheckpointFound(checkpoint=None))
            return
        async with self._at_store:
            found = await asyncio.to_thread(self._store.find, wish)
        self._calls.report(found)

    async def commit(self, work: rec.CommitCheckpoint) -> None:
        """Makes a checkpoint whole, and reports CheckpointCommitted or SaveFailed; then removes what is too old."""
        assert self._store is not None
        async with self._at_store:
            done = await asyncio.to_thread(self._store.commit, work)
        if work.is_awaited and not isinstance(done, rec.SaveFailed) and not await self._still_rules(work.checkpoint.epoch):
            return
        self._calls.report(done)
        if not isinstance(done, rec.SaveFailed):
            async with self._at_store:
                await asyncio.to_thread(self._store.prune, work.keep)

    async def save(self, work: rec.SaveStep) -> None:
        """Has all shards save a step: reports StepCopied, then StepSaved; or SaveFailed."""
        request = SaveRequest(
            epoch=work.epoch,
            chief_incarnation=self._authority.chief_incarnation,
            step=work.step,
            tag=work.tag,
            num_shards=len(self._calls),
        )
        if self._store is not None:
            self._store.expect(work.tag)
        try:
            await self._calls.at_all(lambda index: self._copied(index, request))
            self._calls.report(rec.StepCopied(tag=work.tag))
            files = await self._calls.at_all(lambda index: self._saved(index, request))
        except Superseded as error:
            self._on_superseded(error.message)
        except PsError as error:
            if self._store is not None:
                async with self._at_store:
                    await asyncio.to_thread(self._store.abandon, work.tag)
            self._calls.report(save_failure(work.tag, error))
        else:
            self._calls.report(rec.StepSaved(tag=work.tag, files=tuple(files)))

    async def restore(self, work: rec.RestoreShards) -> None:
        """Brings all shards back to a checkpoint, and reports ShardsRestored, or RestoreFailed."""
        self._num_restoring += 1
        requests = restore_requests(work)
        try:
            incarnations = await self._calls.at_all(lambda index: self._restored(index, requests[index]))
        except Superseded as error:
            self._on_superseded(error.message)
        except PsError as error:
            self._calls.report(restore_failure(work, error))
        else:
            self._calls.report(rec.ShardsRestored(epoch=work.epoch, tag=work.tag, process_incarnations=tuple(incarnations)))
        finally:
            self._num_restoring -= 1

    async def _fenced(self) -> bool:
        """Puts all shards under this chief, whatever they hold; says whether they are."""
        for failure in await self._calls.at_all(self._fence):
            if isinstance(failure, Superseded):
                self._on_superseded(failure.message)
                return False
        return True

    async def _fence(self, index: int) -> PsError | None:
        try:
            await self._adopt(index)
        except PsError as error:
            return error  # what is wrong with a shard shows when it is brought back
        return None

    async def _still_rules(self, epoch: int) -> bool:
        """Whether the process that has saved last still obeys this chief. One shard will do: another chief takes all before it looks."""
        status = await self._calls.insist(0, lambda: self._calls.links[0].status(timeout_s=CONTROL_TIMEOUT_S))
        if status.chief_incarnation > self._authority.chief_incarnation:
            self._on_superseded(f"{self._calls.name(0)} obeys the chief of incarnation {status.chief_incarnation}")
            return False
        # Another process, or epoch, has not heard of this chief, or not in this epoch: the cluster is about to go back, or has gone.
        return (status.epoch, status.chief_incarnation) == (epoch, self._authority.chief_incarnation)

    async def _adopt(self, index: int) -> tuple[int, Adoption]:
        calls, authority = self._calls, self._authority
        status = await calls.look_at(index)
        adoption = await calls.insist(
            index,
            lambda: calls.links[index].adopt(
                epoch=authority.epoch,
                chief_incarnation=authority.chief_incarnation,
                chief_address=authority.chief_address,
                life=authority.life,
                timeout_s=CONTROL_TIMEOUT_S,
            ),
        )
        calls.adopted(index, process_incarnation=status.process_incarnation)
        log.info(
            "adopted ps=%d address=%s chief_incarnation=%d epoch=%d step=%s",
            index,
            calls.links[index].address,
            authority.chief_incarnation,
            authority.epoch,
            adoption.step,
        )
        return status.process_incarnation, adoption

    async def _copied(self, index: int, request: SaveRequest) -> None:
        link = self._calls.links[index]
        progress = await self._calls.insist(index, lambda: link.save(request, max_wait_s=0.0, timeout_s=_COPY_TIMEOUT_S))
        if progress.state is SaveState.FAILED:
            raise self._named(index, progress.failure)

    async def _saved(self, index: int, request: SaveRequest) -> CheckpointFile:
        link = self._calls.links[index]
        while True:
            progress = await self._calls.insist(
                index, lambda: link.save(request, max_wait_s=_POLL_S, timeout_s=_POLL_S + CONTROL_TIMEOUT_S)
            )
            if progress.file is not None:
                return progress.file
            if progress.state is not SaveState.WRITING:
                raise self._named(index, progress.failure)

    async def _restored(self, index: int, request: RestoreRequest) -> int:
        """Returns the process that holds the values; one that is restarted meanwhile is brought back from the beginning."""
        while True:
            process_incarnation, _ = await self._adopt(index)
            failure: PsError | None = None
            try:
                await self._restored_once(index, request)
            except PsError as error:
                failure = error
            status = await self._calls.look_at(index)
            if status.process_incarnation != process_incarnation:
                continue
            if failure is not None:
                raise self._named(index, failure)
            return process_incarnation

    async def _restored_once(self, index: int, request: RestoreRequest) -> None:
        link = self._calls.links[index]
        timeout_s = _POLL_S + _COPY_TIMEOUT_S
        while True:
            progress = await self._calls.insist(index, lambda: link.restore(request, max_wait_s=_POLL_S, timeout_s=timeout_s))
            if progress.is_done:
                return

    def _named(self, index: int, failure: PsError | None) -> PsError:
        failure = failure or InternalError("its save ended without a file")
        return type(failure)(f"{self._calls.name(index)}: {failure.message}", facts=failure.facts)

    def _living_chief(self, statuses: list[ShardStatus]) -> str:
        for index, status in enumerate(statuses):
            heard_s = status.chief_heard_ago_s
            if status.chief_incarnation and heard_s is not None and heard_s < _LIVING_CHIEF_S:
                where = f" at {status.chief_address}" if status.chief_address else ""
                who = f"another chief{where} (incarnation {status.chief_incarnation})"
                return f"{self._calls.name(index)} obeys {who}, which it heard {seconds(heard_s)} ago"
        return ""


# Carries out what the coordinator wants done at shards and with checkpoints. Owns tasks, lanes and authority; decides nothing.
#
# What takes time is a task of the event loop, but for the steps: these are sent by the thread that completes them, and become a task when
# that did not go well. Whatever is done under an epoch is given up, without a report, when another one begins.


Wish = messages.ShardWork | messages.AdoptShard | messages.RecoveryInstruction


class ShardSide:
    """The shards of one chief, and its place for checkpoints. To be made in the event loop; `carry_out` is for all threads.

    `report` takes what happens; `on_defect` what must not, and `on_superseded` that another chief has the shards, in words.
    """

    def __init__(
        self,
        links: Sequence[ShardLink],
        *,
        store: CheckpointStore | None,
        report: Callable[[messages.Event], None],
        on_defect: Callable[[BaseException], None],
        on_superseded: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._report, self._on_defect = report, on_defect
        self.authority = Authority()
        self._calls = ShardCalls(links, report=report, clock=clock)
        self._steps = ShardTasks(self._calls, authority=self.authority, on_superseded=on_superseded)
        self._recovery = RecoveryTasks(self._calls, authority=self.authority, store=store, on_superseded=on_superseded)
        self._replicas = ReplicaReturn(replicated(links), report=report, manifest_of=self._recovery.manifest_of, clock=clock)
        direct = [link for link in links if isinstance(link, DirectLink)]
        self._lanes = ShardLanes([link.open_caller() for link in direct]) if len(direct) == len(links) else None
        # What the thread that has brought a step about does itself, once it has told of everything.
        self.own_work: deque[Work] = deque()
        self._working = threading.Lock()
        self._is_working = False
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that another epoch ends.
        self._of_epoch: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self._num_saving = 0
        self._is_watching = False

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being saved."""
        return self._num_saving > 0

    def begin(self, *, chief_address: str, is_takeover: bool, on_failure: Callable[[PsError], None]) -> None:
        """Begins to look at the shards and to watch them; `on_failure` is told if they are not to be had."""
        self.authority.chief_address = chief_address
        for link in self._replicas.links.values():
            link.attach(self._report)
        self._spawn(self._look_at_all(is_takeover, on_failure))

    def carry_out(self, wish: Wish) -> None:
        """Begins what is wanted. Never waits; to be called in the order of the wishes."""
        match wish:
            case messages.ApplyStep():
                self._apply(wish)
            case messages.PrepareStep():
                self._in_loop(self._begin, self._steps.prepare, wish)
            case messages.ConfigureShards():
                self._in_loop(self._begin, self._steps.configure, wish)
            case messages.AdoptShard():
                self._in_loop(self._begin, self._adopt, wish)
            case messages.AdoptShards():
                self._begin_epoch(wish, self._adopt_all)
            case messages.RestoreShards():
                self._begin_epoch(wish, self._restore)
            case messages.KeepRecord():
                self._in_loop(self._keep, wish)
            case messages.SaveStep():
                self._in_loop(self._begin, self._save, wish)
            case messages.FindCheckpoint():
                if wish.fence is not None:
                    self._obey(wish.fence)
                self._in_loop(self._begin_lasting, self._recovery.find, wish)
            case messages.CommitCheckpoint():
                self._in_loop(self._begin_lasting, self._commit, wish)
            case messages.BringReplicasBack():
                self._in_loop(self._begin, self._replicas.bring_back, wish)

    def do_own_work(self) -> None:
        """Does one thing after the other, also what comes of it; who comes meanwhile leaves theirs to the thread that is at it."""
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
        self._steps.is_ending = True

    async def shut_down_all(self, *, reason: str, within_s: float) -> None:
        """Ends the shards."""
        await self._steps.shut_down_all(reason=reason, within_s=within_s)

    async def close(self) -> None:
        """Closes the connections to the shards."""
        if self._lanes is not None:
            self._lanes.close()
        await self._steps.close()

    # -- steps

    def _apply(self, step: messages.ApplyStep) -> None:
        failpoint("chief.apply.before")
        if self._lanes is None:
            self._in_loop(self._begin, self._insist_on, step)
        else:
            self.own_work.extend(self._lanes.apply(self._steps.requests_of(step), partial(self._left_lanes, step)))

    def _left_lanes(self, step: messages.ApplyStep, is_applied: bool) -> None:
        if is_applied:
            self._calls.heard_all()
            self._applied(step)
        else:
            self._in_loop(self._begin, partial(self._insist_on, is_again=True), step)

    async def _insist_on(self, step: messages.ApplyStep, *, is_again: bool = False) -> None:
        if await self._steps.apply(step, is_again=is_again):
            self._applied(step)

    def _applied(self, step: messages.ApplyStep) -> None:
        try:
            failpoint("chief.apply.after")
            self._report(messages.StepApplied(step=step.step, epoch=step.epoch))
        except Exception as error:
            self._in_loop(self._on_defect, error)

    # -- shards that are taken over, saved and brought back

    async def _look_at_all(self, is_takeover: bool, on_failure: Callable[[PsError], None]) -> None:
        try:
            await self._recovery.look_at_all(is_takeover=is_takeover)
        except PsError as error:
            on_failure(error)

    async def _adopt_all(self, wish: messages.AdoptShards) -> None:
        await self._recovery.adopt_all(wish)
        self._watch()

    async def _restore(self, wish: messages.RestoreShards) -> None:
        await self._recovery.restore(wish)
        self._watch()

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            for index in range(len(self._calls)):
                self._spawn(self._steps.watch(index, is_paused=lambda: self._recovery.is_restoring))
            if self._replicas.links:
                self._spawn(self._replicas.watch(is_paused=lambda: self._recovery.is_restoring))

    async def _adopt(self, wish: messages.AdoptShard) -> None:
        try:
            await self._recovery.adopt(wish)
        except PsError as error:
            self._report(messages.ShardFailed(shard=wish.shard, why=error.message))

    async def _save(self, wish: messages.SaveStep) -> None:
        with self._saving():
            await self._recovery.save(wish)

    async def _commit(self, wish: messages.CommitCheckpoint) -> None:
        with self._saving():
            await self._recovery.commit(wish)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        self._num_saving += 1
        try:
            yield
        finally:
            self._num_saving -= 1

    def _keep(self, wish: messages.KeepRecord) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._keeping = self._begin(self._recovery.keep_record, wish)

    # -- tasks

    def _obey(self, wish: messages.AdoptShards | messages.RestoreShards) -> None:
        self.authority.obey(epoch=wish.epoch, chief_incarnation=wish.chief_incarnation, life=wish.life)

    def _begin_epoch(self, wish: Any, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self._obey(wish)

        def begin() -> None:
            for task in [*self._of_epoch]:
                task.cancel()
            self._begin(work, wish)

        self._in_loop(begin)

    def _begin(self, work: Callable[[Any], Coroutine[Any, Any, None]], wish: Any) -> "asyncio.Task[None] | None":
        """Begins what another epoch ends, unless it has begun already."""
        if getattr(wish, "epoch", self.authority.epoch) != self.authority.epoch:
            return None
        task = self._spawn(work(wish))
        self._of_epoch.add(task)
        task.add_done_callback(self._of_epoch.discard)
        return task

    def _begin_lasting(self, work: Callable[[Any], Coroutine[Any, Any, None]], wish: Any) -> None:
        self._spawn(work(wish))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_defect(error)

    def _in_loop(self, do: Callable[..., object], *arguments: Any) -> None:
        """Does something in the loop's thread: at once if this is it."""
        if threading.get_ident() == self._loop_thread:
            do(*arguments)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all that it was for
            self._loop.call_soon_threadsafe(do, *arguments)
