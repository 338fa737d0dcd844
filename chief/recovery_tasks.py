"""What the chief does to take its shards over, to save them and to bring them back to a checkpoint. Reports events; decides nothing."""

import asyncio
import logging
from collections.abc import Callable

from chief import recovery_events as rec
from chief.authority import Authority
from chief.checkpoint_store import CheckpointStore
from chief.events import AdoptShard, ShardAdopted
from chief.found_record import record_found
from chief.replica_return import trusted
from chief.shard_calls import CONTROL_TIMEOUT_S, ShardCalls
from chief.shard_requests import are_of_one_time, finding, restore_failure, restore_requests, save_failure
from chief.wording import seconds
from ps_protocol.codec_record import RecordPacker
from ps_protocol.errors import CheckpointNotFound, InternalError, PsError, Superseded, TrainingFailed
from ps_protocol.shard import Adoption, CheckpointFile, RestoreRequest, SaveRequest, SaveState, ShardStatus

log = logging.getLogger("lockstep.chief")

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
