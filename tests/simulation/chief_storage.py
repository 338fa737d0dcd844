"""What a simulated chief does about checkpoints, at shards and at storage. Decides nothing."""

from collections.abc import Callable
from typing import Any

from chief.core import messages as rec
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.requests import save_failure
from ps_protocol.errors import InternalError, PsError
from ps_protocol.roles.shard import SaveProgress, SaveRequest, SaveState
from tests.simulation.chief_shards import ChiefAtShards, Host
from tests.simulation.disk import Crash
from tests.simulation.tasks import All, Life, Sleep, Task
from tests.simulation.world import World


class ChiefAtStorage:
    """One chief's way to checkpoints; `store` None: it has none."""

    def __init__(
        self, world: World, life: Life, host: Host, *, shards: ChiefAtShards, store: CheckpointStore | None, on_killed: Callable[[], None]
    ) -> None:
        self._world, self._life, self._host, self._shards, self._store, self._on_killed = world, life, host, shards, store, on_killed

    def find(self, work: rec.FindCheckpoint) -> Task:
        """Looks for the checkpoint that is wanted."""
        if work.fence is not None and not (yield from self._shards.fence()):
            return
        yield Sleep(self._world.between(0.005, 0.05))
        self._host.report(rec.CheckpointFound(checkpoint=None) if self._store is None else self._store.find(work))

    def save(self, work: rec.SaveStep) -> Task:
        """Has all shards save a step."""
        assert self._store is not None
        request = SaveRequest(epoch=work.epoch, chief_incarnation=self._shards.incarnation, step=work.step, tag=work.tag)
        self._store.expect(work.tag)
        copied = yield All([self._shards.at(index, "save", request) for index in range(self._shards.num_shards)])
        failure = self._failure_of(copied)
        if failure is None:
            self._host.report(rec.StepCopied(tag=work.tag))
            files = yield All([self._saved(index, request, copied[index]) for index in range(self._shards.num_shards)])
            failure = self._failure_of(files)
        if failure is not None and not self._host.is_ended:
            self._store.abandon(work.tag)
            self._host.report(save_failure(work.tag, failure))
        elif not self._host.is_ended:
            self._host.report(rec.StepSaved(tag=work.tag, files=tuple(files)))

    def _saved(self, index: int, request: SaveRequest, progress: SaveProgress) -> Task:
        while progress.state is SaveState.WRITING:
            yield Sleep(0.03)
            progress = yield from self._shards.at(index, "save", request)
        if progress.file is None:
            raise progress.failure or InternalError("a save ended without a file")
        return progress.file

    def _failure_of(self, results: list[Any]) -> PsError | None:
        return next((one for one in results if isinstance(one, PsError)), None)

    def commit(self, work: rec.CommitCheckpoint) -> Task:
        """Makes a checkpoint whole, which may be the end of this process."""
        assert self._store is not None
        yield Sleep(self._world.between(0.005, 0.05))
        try:
            event = self._store.commit(work)
        except Crash:
            self._on_killed()
            return
        yield Sleep(self._world.between(0.001, 0.02))
        is_told = not work.is_awaited or isinstance(event, rec.SaveFailed) or (yield from self._shards.still_rules(work.checkpoint.epoch))
        if is_told and not self._host.is_ended:
            self._host.report(event)
            yield from self._prune(event, work.keep)

    def _prune(self, event: rec.CheckpointCommitted | rec.SaveFailed, keep: int) -> Task:
        assert self._store is not None
        yield Sleep(self._world.between(0.0, 0.02))
        try:
            if isinstance(event, rec.CheckpointCommitted) and not self._host.is_ended:
                self._store.prune(keep)
        except Crash:
            self._on_killed()
