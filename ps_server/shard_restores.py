"""Bringing a shard back to a checkpoint, beside the calls that ask how far that is."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

from ps_protocol.checkpoint_manifest import read_checkpoint
from ps_protocol.checkpoint_storage import CheckpointStorage
from ps_protocol.errors import Cancelled, CheckpointStorageMissing, InternalError, PsError, WrongRole
from ps_protocol.failpoints import failpoint
from ps_protocol.shard import RestoreProgress, RestoreRequest
from ps_server.background import RunInBackground
from ps_server.checkpoint_reading import CheckpointPlan
from ps_server.creations import Creations
from ps_server.memory import format_bytes
from ps_server.model_state import memory_of, resume, tensors_of
from ps_server.shard_model import ShardModel
from ps_server.turns import Turns

log = logging.getLogger("lockstep.server")


@dataclass(slots=True, eq=False)
class _Restore:
    """One attempt. `reason` is set when nobody wants it any more."""

    request: RestoreRequest
    num_bytes: int = 0
    num_bytes_read: int = 0
    is_done: bool = False
    failure: PsError | None = None
    reason: PsError | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.failure is not None

    def is_for(self, request: RestoreRequest) -> bool:
        mine = self.request
        return (mine.spec.epoch, mine.tag, mine.manifest_sha256) == (request.spec.epoch, request.tag, request.manifest_sha256)

    def progress(self) -> RestoreProgress:
        return RestoreProgress(is_done=self.is_done, num_bytes_read=self.num_bytes_read, num_bytes=self.num_bytes)

    def words(self) -> str:
        share = f"{format_bytes(self.num_bytes_read)} of {format_bytes(self.num_bytes)} read" if self.num_bytes else "its manifest is read"
        return f"being restored from checkpoint {self.request.tag}: {share}"


class ShardRestores:
    """The restorations of one shard, one at a time. Thread-safe. `on_restored` is told of the model that comes
    of one, with the epoch that it was saved in, before anybody else; `on_done` is called, without the lock, when it is over.
    """

    def __init__(
        self,
        lock: Condition,
        turns: Turns,
        creations: Creations,
        *,
        index: int,
        storage: CheckpointStorage | None,
        run_in_background: RunInBackground,
        on_restored: Callable[[ShardModel, RestoreRequest, int], None],
        on_done: Callable[[], None],
    ) -> None:
        self._lock, self._turns, self._creations = lock, turns, creations
        self._index, self._name = index, f"ps {index}"
        self._storage = storage
        self._run_in_background = run_in_background
        self._on_restored = on_restored
        self._on_done = on_done
        self._latest: _Restore | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the shard is being brought back now."""
        return self._latest is not None and not self._latest.is_over

    def restore(self, request: RestoreRequest, *, max_wait_s: float) -> RestoreProgress:
        """Begins a restoration, or says how far it is; see Shard.restore. The caller has been let in, under the epoch of the request.

        One that has failed is begun anew if this asks for it without a wait.
        """
        storage = self._storage
        if storage is None:
            raise CheckpointStorageMissing(f"{self._name}: it was started without --checkpoint-dir; give all roles the same one")
        if request.spec.shard != self._index:
            raise WrongRole(f"this is {self._name}, not ps {request.spec.shard}; check the addresses and their order")
        with self._lock:
            restore = self._latest
            if restore is None or not restore.is_for(request) or (restore.failure is not None and not max_wait_s):
                self.break_off_locked(Cancelled(f"{self._name}: another restoration has begun"))
                self._latest = restore = self._begin_locked(request, storage)
        with self._lock:
            if max_wait_s:
                self._lock.wait_for(lambda: restore.is_over, max_wait_s)
            if restore.failure is not None:
                raise restore.failure
            return restore.progress()

    def break_off_locked(self, reason: PsError) -> None:
        """Gives up a restoration under way: what has been read is dropped."""
        if self.is_under_way and self._latest is not None:
            self._latest.reason = self._latest.failure = reason
            self._creations.restoring = None
            self._lock.notify_all()

    def forget_locked(self, reason: PsError) -> None:
        """As `break_off_locked`; and what has been restored is dropped by the caller, so that the same may be asked for again."""
        self.break_off_locked(reason)
        self._latest = None

    def _begin_locked(self, request: RestoreRequest, storage: CheckpointStorage) -> _Restore:
        restore = _Restore(request)
        self._creations.restoring = restore.words
        self._run_in_background(lambda: self._run(restore, storage))
        return restore

    def _run(self, restore: _Restore, storage: CheckpointStorage) -> None:
        started, failure = time.perf_counter(), None
        try:
            self._restore(restore, storage)
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold on to the model that came to nothing
        except Exception as error:
            log.exception("%s: checkpoint %s could not be restored", self._name, restore.request.tag)
            failure = InternalError(
                f"{self._name}: checkpoint {restore.request.tag} could not be restored ({type(error).__name__}); see its log"
            )
        with self._lock:
            if restore.reason is None:
                restore.failure, restore.is_done = failure, failure is None
                self._creations.restoring = None
            self._lock.notify_all()
        seconds, request = time.perf_counter() - started, restore.request
        if failure is None:
            size = format_bytes(restore.num_bytes)
            log.info("%s restored tag=%s step=%d size=%s seconds=%.3f", self._name, request.tag, request.spec.initial_step, size, seconds)
        else:
            log.warning("%s: not restored tag=%s cause=%s", self._name, request.tag, failure.message)
        self._on_done()

    def _restore(self, restore: _Restore, storage: CheckpointStorage) -> None:
        request = restore.request
        stored = read_checkpoint(storage, request.tag, sha256=request.manifest_sha256)
        plan = CheckpointPlan(stored.checkpoint, request.spec)
        restore.num_bytes = plan.num_bytes
        # Nothing has been changed until now: what is no checkpoint of this model harms nothing.
        model = self._make_room(restore)
        try:
            values, *_ = model.first_values
            # The padding, and what no slot belongs to, begins as in a model that was created.
            model.arena.fill_slots(values)
            tensors = tensors_of(request.spec, model.settings.rules, memory_of(model, values=values))
            resume(model, plan.read(storage, tensors, on_progress=lambda num_bytes: self._note(restore, num_bytes)))
            with self._lock:
                self._check_wanted(restore)
                model.publish_restored(request.settings)
                self._on_restored(model, request, stored.checkpoint.epoch)
                self._creations.put_locked(model)
        except BaseException:
            with self._lock:
                model.release()
            raise

    def _make_room(self, restore: _Restore) -> ShardModel:
        """Drops the model that is here, for there may not be memory for two."""
        tag = restore.request.tag
        with self._turns.alone(), self._lock:
            self._check_wanted(restore)
            self._creations.drop_model_locked(Cancelled(f"{self._name}: it is brought back to checkpoint {tag}; connect again"))
            return self._creations.make(restore.request.spec)

    def _note(self, restore: _Restore, num_bytes: int) -> None:
        failpoint("ps.restore.mid")
        restore.num_bytes_read = num_bytes
        self._check_wanted(restore)

    def _check_wanted(self, restore: _Restore) -> None:
        if restore.reason is not None:
            raise restore.reason
