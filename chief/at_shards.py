"""Does what a coordinator wants done at shards that are objects of this process, one after the other. Knows no network, no lock.

What has come of it are events; a refusal of a shard is one, too. A Ctrl-C meanwhile is kept for after it: half a step would be the end of
training for all threads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from chief import events as ev
from chief import recovery_events as rec
from chief.authority import Authority
from chief.checkpoint_store import CheckpointStore
from chief.found_record import record_found
from chief.shard_requests import apply_requests, finding, prepare_request, restore_failure, restore_requests, save_failure, settings_of
from ps_protocol.chief import MAX_WAIT_SLICE_S
from ps_protocol.codec_record import pack_record
from ps_protocol.errors import InternalError, PsError
from ps_protocol.shard import Adoption, CheckpointFile, RestoreProgress, RestoreRequest, SaveProgress, SaveRequest, SaveState, Shard

Work = ev.ShardWork | ev.AdoptShard | rec.RecoveryInstruction
WORK = (ev.PrepareStep, ev.ApplyStep, ev.ConfigureShards, ev.AdoptShard, *rec.RecoveryInstruction.__args__)

Request = TypeVar("Request")
Result = TypeVar("Result")


def look_at(shards: Sequence[Shard]) -> rec.ShardsFound:
    """Looks at all shards, and does nothing to them."""
    return rec.ShardsFound(findings=tuple(finding(shard.status()) for shard in shards))


class AtShards:
    """Does one thing at all shards. `store` is None if there is no place for checkpoints; `authority` is that of the chief, not of this."""

    def __init__(self, shards: Sequence[Shard], *, store: CheckpointStore | None, authority: Authority) -> None:
        self.num_done = 0
        self.interrupt: KeyboardInterrupt | None = None
        self._shards = tuple(shards)
        self._store = store
        self._authority = authority

    def carry_out(self, work: Work) -> Iterator[ev.Event]:
        """Yields the events that report what comes of it, as it comes."""
        match work:
            case rec.SaveStep():
                yield from self._save(work)
            case rec.RestoreShards():
                self._obey(work)
                yield self._restore(work)
            case rec.FindCheckpoint():
                yield rec.CheckpointFound(checkpoint=None) if self._store is None else self._store.find(work)
            case rec.KeepRecord():
                yield self._keep(work)
            case rec.CommitCheckpoint():
                assert self._store is not None
                done = self._store.commit(work)
                if not isinstance(done, rec.SaveFailed):
                    self._store.prune(work.keep)
                yield done
            case _:
                try:
                    yield from self._at_all(work)
                except PsError as error:
                    yield ev.ShardFailed(shard=self.num_done, why=error.message, epoch=self._authority.epoch)

    def _at_all(self, work: Work) -> Iterator[ev.Event]:
        incarnation = self._authority.chief_incarnation
        match work:
            case ev.PrepareStep():
                request = prepare_request(work, chief_incarnation=incarnation)
                sums = [self._whole(shard.prepare_step, request) for shard in self._shards]
                yield ev.StepPrepared(step=work.step, sums=tuple(tuple(part) for part in sums), epoch=work.epoch)
            case ev.ApplyStep():
                requests = apply_requests(work, chief_incarnation=incarnation, num_shards=len(self._shards))
                for shard, step in zip(self._shards, requests, strict=True):
                    self._whole(shard.apply_step, step)
                yield ev.StepApplied(step=work.step, epoch=work.epoch)
            case ev.ConfigureShards():
                settings = settings_of(work, chief_incarnation=incarnation)
                for shard in self._shards:
                    self._whole(shard.configure, settings)
                yield ev.ShardsConfigured(version=work.version, epoch=work.epoch)
            case ev.AdoptShard():
                yield self._adopted(work.shard, self._adopt(work.shard))
            case rec.AdoptShards():
                self._obey(work)
                adoptions = [self._adopt(index) for index in range(len(self._shards))]
                yield from record_found(adoptions)
                for index, adoption in enumerate(adoptions):
                    yield self._adopted(index, adoption)

    def _obey(self, work: rec.AdoptShards | rec.RestoreShards) -> None:
        self._authority.obey(epoch=work.epoch, chief_incarnation=work.chief_incarnation, life=work.life)

    def _keep(self, work: rec.KeepRecord) -> ev.Event:
        record, incarnation, failure = pack_record(work.record), self._authority.chief_incarnation, ""
        for shard in self._shards if work.is_for_all else self._shards[:1]:
            try:
                shard.keep_record(epoch=work.epoch, chief_incarnation=incarnation, version=work.version, record=record)
            except PsError as error:
                failure = failure or error.message
        return rec.RecordKept(epoch=work.epoch, version=work.version, failure=failure)

    def _adopt(self, index: int) -> Adoption:
        authority = self._authority
        return self._shards[index].adopt(epoch=authority.epoch, chief_incarnation=authority.chief_incarnation, life=authority.life)

    def _adopted(self, index: int, adoption: Adoption) -> ev.ShardAdopted:
        process_incarnation = self._shards[index].status().process_incarnation
        return ev.ShardAdopted(shard=index, process_incarnation=process_incarnation, adoption=adoption)

    def _save(self, work: rec.SaveStep) -> Iterator[ev.Event]:
        request = SaveRequest(
            epoch=work.epoch,
            chief_incarnation=self._authority.chief_incarnation,
            step=work.step,
            tag=work.tag,
            num_shards=len(self._shards),
        )
        try:
            progress = [shard.save(request) for shard in self._shards]
            yield rec.StepCopied(tag=work.tag)
            files = tuple(_saved(shard, request, done) for shard, done in zip(self._shards, progress, strict=True))
        except PsError as error:
            if self._store is not None:
                self._store.abandon(work.tag)
            yield save_failure(work.tag, error)
        else:
            yield rec.StepSaved(tag=work.tag, files=files)

    def _restore(self, work: rec.RestoreShards) -> ev.Event:
        try:
            for index in range(len(self._shards)):
                self._adopt(index)
            for shard, request in zip(self._shards, restore_requests(work), strict=True):
                _restored(shard, request)
        except PsError as error:
            return restore_failure(work, error)
        incarnations = tuple(shard.status().process_incarnation for shard in self._shards)
        return rec.ShardsRestored(epoch=work.epoch, tag=work.tag, process_incarnations=incarnations)

    def _whole(self, call: Callable[[Request], Result], request: Request) -> Result:
        """Makes one call, and once more if a Ctrl-C breaks it off."""
        try:
            result = call(request)
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt
            result = call(request)
        self.num_done += 1
        return result


def _saved(shard: Shard, request: SaveRequest, progress: SaveProgress) -> CheckpointFile:
    while progress.state is SaveState.WRITING:
        progress = shard.save(request, max_wait_s=MAX_WAIT_SLICE_S)
    if progress.file is None:
        raise progress.failure or InternalError("a save ended without a file")
    return progress.file


def _restored(shard: Shard, request: RestoreRequest) -> RestoreProgress:
    while not (progress := shard.restore(request, max_wait_s=MAX_WAIT_SLICE_S)).is_done:
        pass
    return progress
