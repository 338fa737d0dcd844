"""Saving one shard's part of a checkpoint: the copy, for which steps wait, and the writing, for which nobody does."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition

from ps_protocol.checkpoint_files import write_file
from ps_protocol.checkpoint_format import SavedTensor, tensor_name
from ps_protocol.checkpoint_storage import CheckpointStorage
from ps_protocol.errors import Cancelled, CheckpointStorageMissing, InternalError, PsError, StepMismatch, Unavailable
from ps_protocol.failpoints import failpoint
from ps_protocol.shard import CheckpointFile, SaveProgress, SaveRequest, SaveState, ShardSpec
from ps_server.background import RunInBackground
from ps_server.copy_memories import CopyMemories, CopyMemory, copy_memory
from ps_server.hidden_state import HiddenState, encode_hidden_state
from ps_server.memory import MemoryBudget, format_bytes
from ps_server.model_state import hidden_state_of, memory_of, tensors_of
from ps_server.save_pace import SavePace
from ps_server.shard_model import ShardModel
from ps_server.stripes import ONE_THREAD, StripeRunner
from ps_server.turns import TURN_WAIT_S, Turns
from ps_server.update_rule import UpdateRule

log = logging.getLogger("lockstep.server")


@dataclass(slots=True, eq=False)
class _Save:
    """One attempt. `is_copied`: steps may go on; `progress` says the rest."""

    request: SaveRequest
    is_copied: bool = False
    is_unwanted: bool = False
    progress: SaveProgress = field(default_factory=lambda: SaveProgress(state=SaveState.WRITING))

    @property
    def is_over(self) -> bool:
        return self.progress.state is not SaveState.WRITING

    def is_for(self, request: SaveRequest) -> bool:
        return (self.request.epoch, self.request.step, self.request.tag) == (request.epoch, request.step, request.tag)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What is to be written, in memory of its own."""

    spec: ShardSpec
    rules: Sequence[UpdateRule]
    hidden: HiddenState
    memory: CopyMemory

    def tensors(self) -> list[SavedTensor]:
        """One for each tensor of each slice: takes a while where there are many."""
        tensors = tensors_of(self.spec, self.rules, self.memory.state)
        return [SavedTensor(name=tensor_name(tensor.piece, tensor.part), array=tensor.memory) for tensor in tensors]


class ShardSaves:
    """The saves of one shard, one at a time. Thread-safe. `find_model` returns the model, or raises why there is none, under the lock.

    `stripes` share the copying, while no step has them.
    """

    def __init__(
        self,
        lock: Condition,
        turns: Turns,
        *,
        index: int,
        budget: MemoryBudget,
        storage: CheckpointStorage | None,
        find_model: Callable[[SaveRequest], ShardModel],
        run_in_background: RunInBackground,
        stripes: StripeRunner = ONE_THREAD,
    ) -> None:
        self._lock, self._turns = lock, turns
        self._index, self._name = index, f"ps {index}"
        self._memories = CopyMemories(budget)
        self._stripes = stripes
        self._storage = storage
        self._find_model = find_model
        self._run_in_background = run_in_background
        self._latest: _Save | None = None

    def save(self, request: SaveRequest, *, max_wait_s: float) -> SaveProgress:
        """Copies the model's step and has it written, or says how far that is; see Shard.save. The caller has been let in.

        An attempt that is over is begun anew if this asks for it without a wait, as long as the step stands, and the file does not.
        """
        storage = self._storage
        if storage is None:
            raise CheckpointStorageMissing(f"{self._name}: it was started without --checkpoint-dir; give all roles the same one")
        with self._lock:
            save = self._known_locked(request)
        if save is not None and save.is_over and not max_wait_s and not self._stands(storage, save):
            save = None
        if save is None:
            save, is_mine = self._begin(request)
            if is_mine:
                self._copy_and_write(save, storage)
        with self._lock:
            if max_wait_s or not save.is_copied:
                self._lock.wait_for(lambda: save.is_over if max_wait_s else save.is_copied or save.is_over, max_wait_s or TURN_WAIT_S)
            return save.progress

    def wait_until_over(self, timeout_s: float) -> None:
        """Waits until nothing is being written, but not longer than this."""
        with self._lock:
            self._lock.wait_for(lambda: self._latest is None or self._latest.is_over, timeout_s)

    def break_off_locked(self) -> None:
        """Lets go of a save that nobody wants any more, as soon as it comes to its next file operation."""
        if self._latest is not None:
            self._latest.is_unwanted = True

    def _known_locked(self, request: SaveRequest) -> _Save | None:
        return self._latest if self._latest is not None and self._latest.is_for(request) else None

    def _begin(self, request: SaveRequest) -> tuple[_Save, bool]:
        with self._lock:
            model, latest = self._find_model(request), self._latest
            self._check_step(model, request)
            if latest is not None and not latest.is_over:
                if latest.is_for(request):
                    return latest, False
                latest.is_unwanted = True
                raise Unavailable(f"{self._name}: checkpoint {latest.request.tag} is still being written; repeat the call")
            self._latest = save = _Save(request)
            return save, True

    def _copy_and_write(self, save: _Save, storage: CheckpointStorage) -> None:
        try:
            copy = self._copy(save.request)
        except BaseException:
            with self._lock:
                # As if it had never been asked for.
                self._latest = None
                save.progress = SaveProgress(state=SaveState.FAILED, failure=Cancelled(f"{self._name}: nothing was copied; ask again"))
                self._lock.notify_all()
            raise
        with self._lock:
            save.is_copied = True
            self._lock.notify_all()
        self._run_in_background(lambda: self._write(save, copy, storage))

    def _copy(self, request: SaveRequest) -> _Copy:
        with self._lock:
            model = self._find_model(request)
            like = memory_of(model, values=model.arena.current.memory)
        memory = self._memories.lend(like, purpose=f"the copy for checkpoint {request.tag}")
        try:
            with self._turns.alone():
                with self._lock:
                    # Another one would not be the model that there is memory for.
                    if self._find_model(request) is not model:
                        raise Unavailable(f"{self._name}: the model was replaced; repeat the call")
                    self._check_step(model, request)
                started = time.perf_counter()
                copy_memory(memory_of(model, values=model.arena.current.memory), memory.state, stripes=self._stripes)
                hidden = hidden_state_of(model, step=request.step)
            seconds = time.perf_counter() - started
        except BaseException:
            self._memories.take_back(memory)
            raise
        log.debug("%s copied step=%d tag=%s bytes=%d stall_s=%.3f", self._name, request.step, request.tag, like.nbytes, seconds)
        return _Copy(model.spec, model.settings.rules, hidden, memory)

    def _write(self, save: _Save, copy: _Copy, storage: CheckpointStorage) -> None:
        request, started = save.request, time.perf_counter()
        file: CheckpointFile | None = None
        failure: PsError | None = None
        try:
            self._check_wanted(save)
            failpoint("ps.save.before_write")
            file = self._write_file(save, copy, storage)
            failpoint("ps.save.before_ack")
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold on to the copy
        except Exception as error:
            log.exception("%s: checkpoint %s could not be written", self._name, request.tag)
            failure = InternalError(f"{self._name}: checkpoint {request.tag} could not be written ({type(error).__name__}); see its log")
        self._memories.take_back(copy.memory)
        self._end(save, file, failure, seconds=time.perf_counter() - started)

    def _write_file(self, save: _Save, copy: _Copy, storage: CheckpointStorage) -> CheckpointFile:
        request, pace = save.request, SavePace(self._turns)

        def between() -> None:
            self._check_wanted(save)
            pace.give_way()

        return write_file(
            storage,
            request.tag,
            shard=self._index,
            num_shards=request.num_shards,
            tensors=copy.tensors(),
            metadata=encode_hidden_state(copy.hidden),
            between=between,
        )

    def _check_wanted(self, save: _Save) -> None:
        if save.is_unwanted:
            raise Cancelled(f"{self._name}: checkpoint {save.request.tag} is not wanted any more")

    def _end(self, save: _Save, file: CheckpointFile | None, failure: PsError | None, *, seconds: float) -> None:
        tag = save.request.tag
        if failure is not None:
            log.warning("%s: checkpoint not saved tag=%s cause=%s", self._name, tag, failure.message)
        elif file is not None:
            log.debug("%s saved tag=%s size=%s seconds=%.3f", self._name, tag, format_bytes(file.num_bytes), seconds)
        with self._lock:
            if failure is None:
                save.progress = SaveProgress(state=SaveState.DONE, file=file)
            else:
                save.progress = SaveProgress(state=SaveState.FAILED, failure=failure)
            self._lock.notify_all()

    def _check_step(self, model: ShardModel, request: SaveRequest) -> None:
        # Where contributions are applied as they arrive, no two shards are at one step: what they have at this moment is what is saved.
        if model.step != request.step and not model.settings.current.applies_on_arrival:
            raise StepMismatch(
                f"{self._name}: step {request.step} cannot be saved, it is at step {model.step}", facts={"step": str(model.step)}
            )

    def _stands(self, storage: CheckpointStorage, save: _Save) -> bool:
        """Whether the file of a save that is done is still there: what was begun in vain elsewhere is removed, and tried again."""
        file = save.progress.file
        if file is None:
            return False
        sizes = [stored.files.get(file.name) for stored in storage.stored() if stored.tag == save.request.tag]
        return file.num_bytes in sizes
