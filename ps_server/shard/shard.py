"""The shard as many threads use it: pushes, reads and the calls of every step. Knows no wire.

What takes long (copies of tensors, files, the apply) runs outside the gate's lock; what ends in `_locked` is called in a block of it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import (
    Cancelled,
    EpochMismatch,
    LayoutMismatch,
    NotInitialized,
    PsError,
    ShuttingDown,
    StepGone,
    StepMismatch,
    StepNotReady,
    Superseded,
    Unavailable,
    VariableExists,
    WrongRole,
    printable,
)
from ps_protocol.model.shown import format_bytes
from ps_protocol.model.variables import Array
from ps_protocol.process.failpoints import failpoint
from ps_protocol.process.history import digest
from ps_protocol.process.memory import give_back_freed_memory
from ps_protocol.roles import history as events
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.history import History
from ps_protocol.roles.request import Answer, Request
from ps_protocol.roles.shard import (
    MAX_WAIT_SLICE_S,
    Adoption,
    AdoptRequest,
    ApplyReply,
    ApplyRequest,
    CountRowsRequest,
    HiddenState,
    KeepRecordRequest,
    KeepStoryRequest,
    MetricCell,
    PrepareRequest,
    PushHeader,
    PushReply,
    ReadMetricsRequest,
    ReadRequest,
    ReplicaState,
    RestoreProgress,
    RestoreRequest,
    RowsRequest,
    SaveProgress,
    SaveRequest,
    ShardReport,
    ShardSettings,
    ShardSpec,
    ShardStatus,
    ShardStatusRequest,
    ShutdownRequest,
)
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.shared_memory.segment import SegmentMaker
from ps_server.contributions.inbox import Contribution
from ps_server.model.shard_model import SMALL_BYTES, ShardModel, StepWork, difference
from ps_server.model.snapshot import Snapshot, StateMemory
from ps_server.numbers.apply import ONE_THREAD, StripeRunner
from ps_server.numbers.arena import VersionedBuffer
from ps_server.numbers.memory import MemoryBudget, VariablesMemory, private_variables
from ps_server.shard.checkpoints import Checkpoints, RunInBackground
from ps_server.shard.encoded_variables import EncodedMoves, EncodedVariables
from ps_server.shard.followed import FollowedWeights, StepCopy
from ps_server.shard.gate import Gate
from ps_server.shard.handles import Creation, OpenPush, Reading, RowReading
from ps_server.shard.sharing import Claim, Sharing, Sharings
from ps_server.shard.table_files import TableFile

log = logging.getLogger("lockstep.server")

_LARGE_BYTES = 16 << 20
# A chief that knows for so long that this process ends, and has not begun to save, does not need to.
_BEGIN_S = 1.0
_LOOK_S = 0.1


class ServedShard:
    """A shard in its own process; the Protocol `Shard` is what callers have of it. Thread-safe.

    `process_incarnation` is random for each start. `memory_limit_bytes` None: no limit. `table_dir`: where rows of tables without a size
    lie in files; None: they lie in memory. `on_shutdown` is called with the reason when the chief ends the process. `apply_threads` share
    the work of a step; the caller owns them. `segments` makes memory that workers of the same host may share; None: there is none.
    `storage`: where checkpoints are; None: nowhere. `run_in_background` begins the writing and the reading of checkpoints (None: in
    threads). `history` is kept if it is given. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        index: int,
        process_incarnation: int,
        memory_limit_bytes: int | None = None,
        table_dir: Path | None = None,
        on_shutdown: Callable[[str], None] | None = None,
        apply_threads: StripeRunner = ONE_THREAD,
        segments: SegmentMaker | None = None,
        storage: CheckpointStorage | None = None,
        run_in_background: RunInBackground | None = None,
        history: History | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.process_incarnation = process_incarnation
        self._name = f"ps {index}"
        make_file = partial(TableFile, directory=table_dir, owner=self._name) if table_dir is not None else None
        self.budget = MemoryBudget(memory_limit_bytes, owner=self._name, lock=threading.Lock(), make_file=make_file)
        self._on_shutdown = on_shutdown
        self._apply_threads = apply_threads
        self._segments = segments
        self._history = ShardHistory(history, process_incarnation=process_incarnation)
        self._gate = Gate(self._name, budget=self.budget, clock=clock)
        self._encoded, self._moves = EncodedVariables(self.budget), EncodedMoves()
        self._followed = FollowedWeights(self.budget, clock=clock)
        self._sharings = Sharings(self._gate, segments, name=self._name)
        self._checkpoints = Checkpoints(
            self,
            self._gate,
            storage=storage,
            run_in_background=run_in_background,
            on_restored=self._gate.tell,
            stripes=apply_threads,
        )
        # None until a creation is whole, or a checkpoint restored.
        self._model: ShardModel | None = None
        self._creation: Creation | None = None
        self._last_apply_s = self._apply_s = 0.0
        self._num_applied = 0
        # Whether the process is about to end, and when the chief was first told so.
        self._clock, self._is_leaving = clock, False
        self._told_leaving_at: float | None = None
        self._answers: dict[type, Callable[[Any], Any]] = {
            AdoptRequest: self._adopt,
            KeepRecordRequest: self._keep_record,
            KeepStoryRequest: self._keep_story,
            SaveRequest: self._save,
            RestoreRequest: self._restore,
            PrepareRequest: self._prepare_step,
            ApplyRequest: self.apply_step,
            ReadMetricsRequest: self._read_metrics,
            CountRowsRequest: self._count_rows,
            FetchRequest: self._fetch,
            ShardStatusRequest: self._status,
            ShutdownRequest: self._shutdown,
        }

    def call(self, request: Request[Answer]) -> Answer:
        """Answers what any role asks without a payload. What each request does and raises, it says itself."""
        answer: Answer = self._answers[type(request)](request)
        return answer

    # The chief's: whom the shard belongs to

    @property
    def epoch(self) -> int:
        """Epoch of the cluster; 0 before a chief has adopted the shard."""
        return self._gate.fences.epoch

    def _adopt(self, request: AdoptRequest) -> Adoption:
        fence, replica = request.fence, request.replica
        fences, chief = self._gate.fences, self._gate.chief
        with self._gate.turn(fences.check_not_ending):
            is_damaged = bool(fences.damage)
            self._check_rival_locked(fence, request.chief_address, replica)
            before = fences.fence
            is_new_epoch = fences.adopt(fence)
            self._gate.admitted.take_keys(request.session_keys, is_new_life=fence.life != before.life)
            chief.address = request.chief_address
            chief.heard()
            if is_new_epoch:
                self._end_epoch_locked(is_damaged=is_damaged)
            if (fence.life, fence.chief_incarnation) != (before.life, before.chief_incarnation):
                chief.begin_another()
                if not is_new_epoch:
                    self._fix_values_locked()
            if chief.count_on(replica) and replica.forgets:
                reason = NotInitialized(f"{self._name}: another replica holds the shard, this one has dropped its variables; ask the chief")
                self._checkpoints.forget_restore(reason)
                self._drop_model_locked(reason)
            self._publish_locked()
            say_so = self._sharings.end_locked(self._sharings.open if is_new_epoch else ())
            adoption = self._adoption_locked()
        say_so()
        self._gate.tell()
        return adoption

    def _keep_record(self, request: KeepRecordRequest) -> None:
        with self._gate:
            self._gate.check_chief(request.fence)
            if self._model is None or not self._model.lacks(request.settings):
                self._gate.chief.keep(request.record, version=request.version)
                return
        try:
            with self._gate.step(request.fence):
                model = self._model_locked()
                model.configure(request.settings)
                self._history.configured(model, request.settings)
                self._gate.chief.keep(request.record, version=request.version)
        finally:
            self._gate.tell()

    def _keep_story(self, request: KeepStoryRequest) -> bytes:
        with self._gate:
            return self._gate.chief.keep_story(request.story)

    def _save(self, request: SaveRequest) -> SaveProgress:
        # Also while the shard shuts down.
        with self._gate:
            self._gate.fences.check_chief(request.fence)
            self._gate.fences.check_epoch(request.fence.epoch)
            self._gate.chief.heard()
        return self._checkpoints.save(request)

    def await_last_save(self, timeout_s: float, *, is_hurried: Callable[[], bool]) -> None:
        """Tells the chief that the process is about to end, and waits until the chief has saved, or does not begin to, or is silent.

        Returns at once where nothing would be saved. `is_hurried`: whether to wait no longer.
        """
        with self._gate:
            self._is_leaving = True
        end, num_fetched = self._clock() + timeout_s, self._checkpoints.num_fetched
        while self._clock() < end and not is_hurried() and self._may_be_saved(num_fetched):
            self._checkpoints.await_fetched(num_fetched, timeout_s=_LOOK_S)

    def _may_be_saved(self, num_fetched: int) -> bool:
        with self._gate:
            chief, has_storage = self._gate.chief, self._checkpoints.has_storage
            if self._model is None or self._gate.fences.is_refusing or chief.is_silent or chief.replica.has_twin or not has_storage:
                return False
            asked_at = self._told_leaving_at
        if self._checkpoints.num_fetched > num_fetched:
            return False
        return self._checkpoints.is_saving or asked_at is None or self._clock() < asked_at + _BEGIN_S

    def wait_for_save(self, timeout_s: float) -> None:
        """Waits until no checkpoint is being written, but not longer than this."""
        self._checkpoints.wait_until_saved(timeout_s)

    def _restore(self, request: RestoreRequest) -> RestoreProgress:
        if request.fence.epoch > self._gate.fences.epoch:
            with self._gate:  # only by adopting the server may a chief take it from another chief of the same number
                self._gate.fences.check_chief(request.fence)
            self._adopt(AdoptRequest(fence=request.fence, chief_address=self._gate.chief.address))
        with self._gate:
            self._gate.check_chief(request.fence)
            self._gate.fences.check_epoch(request.spec.epoch)
            if request.replica_version < self._gate.chief.replica.version:
                raise Unavailable(f"{self._name}: the chief has changed how it counts on this replica since; repeat the call")
        return self._checkpoints.restore(request)

    def _shutdown(self, request: ShutdownRequest) -> None:
        with self._gate:
            fences = self._gate.fences
            if fences.fence != NOBODY:
                fences.check_chief(request.fence)
                fences.check_era(request.fence.era)
        reason = printable(request.reason)
        self.begin_shutdown(reason)
        if self._on_shutdown is not None:
            self._on_shutdown(reason)

    def begin_shutdown(self, reason: str) -> None:
        """Refuses all calls but status and shutdown from now on. Idempotent: the first reason stays."""
        with self._gate:
            self._gate.fences.refuse_from_now_on(reason)
            self._checkpoints.break_off_restore(ShuttingDown(f"{self._name} is shutting down: {reason}"))
            self._publish_locked()
            self._gate.changed()
        self._gate.tell()

    # The chief's: every step

    def _prepare_step(self, request: PrepareRequest) -> tuple[float, ...]:
        step = request.of
        with self._gate.step(step.fence) as turn:
            model = self._model_locked()
            if model.is_repeated(step):
                return tuple(model.prepared(step))
            work = model.begin_prepare(step)
            with turn.unlocked():
                return tuple(model.run_prepare(step, work))

    def apply_step(self, request: ApplyRequest, *, on_applied: Callable[[ApplyReply], object] | None = None) -> ApplyReply:
        """Applies a step. A repetition, also one that comes while the first is at work, is answered when that is done.

        `on_applied` is called before the waiters for the step wake up.
        """
        try:
            failpoint("ps.apply.before")
            reply = self._apply_step(request)
            failpoint("ps.apply.before_ack")
            if on_applied is not None:
                on_applied(reply)
            return reply
        finally:
            self._gate.tell()

    def _apply_step(self, request: ApplyRequest) -> ApplyReply:
        with self._gate.step(request.fence) as turn:
            model = self._model_locked()
            if model.is_repeated(request):
                return ApplyReply(step=model.step, repeated_request=True, checksums=model.last_checksums)
            # Where steps come as fast as they can, each overwrites the copy before the last: a slow reader would never come through.
            self._gate.wait_for_readers(before=model.step, is_for_all=model.accepts_stale)
            work = model.begin_apply(request)
            started = time.perf_counter()
            try:
                with turn.unlocked():
                    checksums = model.inbox.checksums(work.contributions) if request.wants_checksums else ()
                    num_nonfinite = model.run_apply(work)
                    failpoint("ps.apply.before_publish")
            except BaseException:
                self._damage_locked(request.step)
                raise
            self._say_nonfinite(num_nonfinite, before=model.num_nonfinite, step=request.step)
            model.finish_apply(request, work, num_nonfinite=num_nonfinite, checksums=checksums)
            self._history.applied(model, request, work)
            self._followed.let_go_unused()
            self._last_apply_s = time.perf_counter() - started
            self._apply_s += self._last_apply_s
            self._num_applied += 1
            return ApplyReply(step=request.step + 1, repeated_request=False, checksums=checksums)

    # Followers of the variables

    def _fetch(self, request: FetchRequest) -> FetchReply:
        fences = self._gate.fences
        with self._gate.admit(request.era.epoch):
            # Else the weights of a cluster that began anew would be taken for later ones of the one before.
            fences.check_era(request.era)
            model = self._model_locked(request.layout_hash)
            if model.step < request.least:
                self._followed.keep(request, model)
            if model.step < request.least and request.max_wait_s:

                def is_there() -> bool:
                    return self._model is not model or fences.served_epoch != request.era.epoch or model.step >= request.least

                self._gate.wait_at_most(min(request.max_wait_s, MAX_WAIT_SLICE_S), is_there)
                model = self._admitted_locked(request.era.epoch, request.layout_hash)
                fences.check_era(request.era)
            newest = model.step
            if newest < request.least:
                raise StepNotReady(
                    f"{self._name}: step {request.least} has not been made yet, it is at step {newest}", facts={"step": str(newest)}
                )
            step, copy = newest if request.step is None else request.step, None
            with suppress(StepGone):  # followers may have a copy of it nevertheless
                buffer = model.buffer(step)
                copy = StepCopy(step=step, memory=buffer.memory, is_intact=model.watch(buffer))
        with self._gate.holding(step) if self._followed.is_starved else nullcontext():
            return self._followed.answer(request, model=model, copy=copy, newest_step=newest)

    # The workers': how the model begins

    def open_creation(self, spec: ShardSpec) -> Creation:
        """Begins to create all variables of the shard. The attempt that came last displaces one under way."""
        with self._gate:
            self._gate.wait_for_step()
            # Displacing may have to wait, and then everything may have changed.
            while True:
                self._check_creator_locked(spec)
                if self._is_created_locked(spec):
                    return Creation(self._gate, spec, None, end=self._end_creation)
                if self._creation is None:
                    break
                self._displace_locked(self._creation, spec)
            model = self._model or self._make_model(spec)
            if spec.layout.tables:
                # Tables have one copy: while it is written anew, there are no variables.
                model.inbox.clear(Cancelled(f"{self._name}: the variables are created anew"))
                model.serve(0)
                self._put_model_locked(None)
            self._creation = Creation(self._gate, spec, model, end=self._end_creation)
            return self._creation

    # The workers': every step

    def open_push(self, header: PushHeader, *, resumes: bool = False) -> OpenPush:
        """Begins to stage a contribution, or goes on with one whose stream broke; it is answered at once if its bytes are not wanted."""
        with self._gate.admit(header.era.epoch):
            self._gate.fences.check_era(header.era)
            self._gate.admitted.check(header.push_id.worker, header.push_id.incarnation, header.secret)
            model = self._model_locked(header.layout_hash)
            contribution = model.inbox.open(header, current_step=model.step, resumes=resumes)
            return OpenPush(self._gate, model, contribution, end=self._end_push)

    def open_variables(self, request: ReadRequest) -> Reading:
        """Begins to read the variables of a step (None: the latest)."""
        with self._gate.admit(request.epoch):
            return self._reading_locked(self._model_locked(request.layout_hash), request)

    def await_variables(self, listener: Callable[[], object], request: ReadRequest) -> Reading | None:
        """Begins to read the variables of a step; None if it is not there yet.

        The listener is then called once, without the lock, perhaps before this returns, when anything has changed; it must not wait.
        """
        with self._gate.admit(request.epoch):
            model = self._model_locked(request.layout_hash)
            if request.step is None or request.step <= model.step:
                return self._reading_locked(model, request)
            self._gate.listen(listener)
            return None

    def forget(self, listener: Callable[[], object]) -> None:
        """Does not call a listener any more, or at least not later than now."""
        self._gate.forget(listener)

    @property
    def num_listeners(self) -> int:
        """Readers that wait for a step."""
        return self._gate.num_listeners

    @property
    def is_quick(self) -> bool:
        """Whether any call on the model, also a step, would return in a moment: the model is small, and no other call is at work on it."""
        model = self._model
        return model is None or (model.is_small and self._gate.is_free)

    def open_sharing(self, claim: Claim, *, on_end: Callable[[], object]) -> Sharing:
        """Begins to share memory with a worker; `on_end` is called if the sharing must end before the worker ends it."""
        with self._gate.admit(claim.epoch):
            return self._sharings.open_locked(self._model_locked(claim.layout_hash), claim, on_end=on_end)

    def open_rows(self, request: RowsRequest) -> RowReading:
        """Begins to read rows of a table (without waiting), or of a slot of it, when no step is being applied."""
        with self._gate.admit(request.epoch):
            model = self._model_locked(request.layout_hash)
            if request.slot:
                model.step_of_rows(request)
                self._gate.wait_for_step()
                model = self._admitted_locked(request.epoch, request.layout_hash)
            step, table = model.step_of_rows(request), model.table(request.table)
            if request.is_prefetch:
                # No step waits for what is only read ahead.
                return RowReading(table.piece, table.prefetch, step=step, is_intact=None, hold=nullcontext())
            is_intact, copy = None, partial(table.take, step=None if model.applies_on_arrival else step)
            if request.slot:
                is_intact, copy = model.watch_slots(), partial(table.take_slot, request.slot)
            return RowReading(table.piece, copy, step=step, is_intact=is_intact, hold=self._gate.reading(step))

    def open_slot(self, request: ReadRequest) -> Reading:
        """Begins to read one slot of the dense variables, when no step is being applied."""
        with self._gate.admit(request.epoch):
            self._model_locked(request.layout_hash).slot(request.slot)
            self._gate.wait_for_step()
            model = self._admitted_locked(request.epoch, request.layout_hash)
            return Reading(
                model.slot(request.slot),
                layout=model.spec.layout,
                step=model.step,
                is_intact=model.watch_slots(),
                hold=self._gate.reading,
                name=f"slot {request.slot!r}",
            )

    # Calls from any role

    def _read_metrics(self, request: ReadMetricsRequest) -> tuple[MetricCell, ...]:
        with self._gate.admit(request.epoch):
            return tuple(self._model_locked().inbox.metrics.cells())

    def _count_rows(self, request: CountRowsRequest) -> tuple[int, ...]:
        with self._gate.admit(request.epoch):
            model = self._model_locked()
            step, tables = model.step, [table for table in model.keyed_tables if table.piece.variable.name == request.name]
        # Without the lock, beside steps.
        counts = [table.rows.counts_by_age(step=step) for table in tables]
        return tuple(map(sum, zip(*counts, strict=True)))

    def applied(self) -> tuple[int, float]:
        """Returns how many steps this process has applied, and how many seconds that took altogether."""
        with self._gate:
            return self._num_applied, self._apply_s

    def _status(self, request: ShardStatusRequest) -> ShardStatus:
        # With zeros before there are variables; also while the shard shuts down. The chief asks all the time, also where no step is made.
        self._followed.let_go_unused()
        with self._gate:
            fences, chief = self._gate.fences, self._gate.chief
            if request.fence != NOBODY and request.fence == fences.fence:
                chief.heard()
                if self._is_leaving and self._told_leaving_at is None:
                    self._told_leaving_at = self._clock()
            model = None if fences.damage else self._model
            inbox, keyed = (model.inbox, model.keyed_tables) if model else (None, [])
            return ShardStatus(
                shard=self.index,
                process_incarnation=self.process_incarnation,
                fence=fences.fence,
                step=model.step if model else None,
                report=ShardReport(
                    allocated_bytes=self.budget.allocated_bytes,
                    limit_bytes=self.budget.limit_bytes or 0,
                    num_staged=inbox.num_staged if inbox else 0,
                    num_pushes=inbox.num_pushes if inbox else 0,
                    num_stale=inbox.num_stale if inbox else 0,
                    num_duplicates=inbox.num_duplicates if inbox else 0,
                    num_nonfinite=model.num_nonfinite if model else 0,
                    num_sharing=self._sharings.num_sharing,
                    last_apply_s=self._last_apply_s,
                    variables_bytes=model.variables_bytes if model else 0,
                    slots_bytes=model.slots_bytes if model else 0,
                    files_bytes=sum(table.files_bytes for table in keyed),
                    created_bytes=self._creation.progress[0] if self._creation else 0,
                    num_rows=sum(table.num_rows for table in keyed),
                    num_found=sum(table.rows.num_found for table in keyed),
                    num_made=sum(table.rows.num_made for table in keyed),
                    num_evicted=sum(table.rows.num_evicted for table in keyed),
                    num_refused=sum(table.rows.num_refused for table in keyed),
                    num_unadmitted=sum(table.rows.num_unadmitted for table in keyed),
                ),
                settings_version=model.settings.version if model else 0,
                chief_address=chief.address,
                chief_heard_ago_s=chief.heard_ago_s,
                is_alone=chief.replica.is_alone,
                slots=model.slot_names if model else (),
                damage=fences.damage,
                is_leaving=self._is_leaving,
            )

    # How pushes and creations end

    def _end_push(self, model: ShardModel, contribution: Contribution) -> PushReply:
        """Stages a contribution that has all its bytes, or applies it at once, beside others."""
        with self._gate:
            model.inbox.end_write(contribution)
            is_arrival = model.applies_on_arrival
            if not is_arrival:
                reply = model.inbox.stage(contribution, current_step=model.step)
        if is_arrival:
            try:
                reply = self._apply_arrival(model, contribution)
            finally:
                self._gate.tell()
        failpoint("ps.push.staged_before_ack")
        return reply

    def _apply_arrival(self, model: ShardModel, contribution: Contribution) -> PushReply:
        with self._gate.arrival() as arrival:
            if contribution.outcome is None:  # or it was answered while it waited
                work = model.begin_arrival(contribution)
                started = time.perf_counter()
                try:
                    with arrival.unlocked():
                        num_nonfinite = model.run_apply(work)
                except BaseException:
                    self._damage_locked(work.dense.step)
                    raise
                self._say_nonfinite(num_nonfinite, before=model.num_nonfinite, step=work.dense.step)
                model.finish_arrival(work, num_nonfinite=num_nonfinite)
                self._last_apply_s = time.perf_counter() - started
                self._apply_s += self._last_apply_s
                self._num_applied += 1
                self._history.arrived(model, contribution.push_id, work, epoch=self._gate.fences.epoch)
            return model.inbox.stage(contribution, current_step=model.step)

    def _say_nonfinite(self, count: int, *, before: int, step: int) -> None:
        """Warns when gradients begin to have elements that are not finite; not again while they have."""
        if count and not before:
            log.warning(
                "%s: the gradient of step %d has %d elements that are not finite (NaN or infinity), and the variables take them over; the"
                " status counts them. To refuse such gradients, with the variable and the worker named: lockstep up --reject-nonfinite",
                self._name,
                step,
                count,
            )

    def _damage_locked(self, step: int) -> None:
        """Notes, before the next turn, that a step was left half applied."""
        self._gate.fences.note_damage(step)
        self._publish_locked()

    def _end_creation(self, creation: Creation, is_whole: bool) -> None:
        with self._gate:
            if creation.failure is None and is_whole and creation.model is not None:
                creation.model.publish_initial(creation.spec)
                self._creation = None
                self._put_model_locked(creation.model)
            else:
                self._forget_creation_locked(creation)
        if creation.spec.content_bytes >= _LARGE_BYTES:
            # The messages of the first values; none like them comes again where steps go by shared memory.
            give_back_freed_memory()

    def _fix_values_locked(self) -> None:
        """Lets no creation change the values that a second chief has found here: it would drop contributions."""
        if self._model is None:
            return
        self._model.is_fixed = True
        if self._creation is not None:
            self._break_off_locked(self._creation, Cancelled(f"{self._name}: another chief has found the variables that were here before"))

    def _check_creator_locked(self, spec: ShardSpec) -> None:
        self._gate.fences.check_caller(spec.epoch)
        if self._checkpoints.restoring:
            raise Unavailable(f"{self._name}: {self._awaited_locked()}; its variables come from there")

    def _is_created_locked(self, spec: ShardSpec) -> bool:
        if spec.shard != self.index:
            raise WrongRole(
                f"this is {self._name}, not ps {spec.shard}; check the addresses and their order", facts={"index": str(self.index)}
            )
        model = self._model
        if model is None:
            return False
        if spec.epoch > model.spec.epoch and not (model.has_applied and model.step) and not model.is_fixed:
            # It has not been trained: values that a worker of an earlier epoch began, or of a checkpoint of step 0, may be dropped.
            self._drop_model_locked(Cancelled(f"{self._name}: the variables are created anew, in epoch {spec.epoch}"))
            return False
        words = difference(model.spec, spec)
        if words:
            raise VariableExists(f"{self._name}: {words}; use another cluster for another model")
        return spec.attempt <= model.spec.attempt or model.has_applied or model.is_fixed

    def _displace_locked(self, creation: Creation, spec: ShardSpec) -> None:
        newest = max(spec.attempt, creation.spec.attempt)
        reason = Cancelled(
            f"{self._name}: initialisation attempt {spec.attempt} was broken off, attempt {newest} has begun on another stream"
        )
        if spec.attempt < newest:
            raise reason
        self._break_off_locked(creation, reason)

    def _break_off_locked(self, creation: Creation, reason: PsError) -> None:
        # Its buffer may be written anew by another.
        creation.break_off(reason)
        self._forget_creation_locked(creation)
        creation.let_go()

    def _forget_creation_locked(self, creation: Creation) -> None:
        if self._creation is creation:
            self._creation = None
            if creation.model is not None and creation.model is not self._model:
                creation.model.release()

    def _awaited_locked(self) -> str:
        """Returns words for the wait until there is a model."""
        restoring = self._checkpoints.restoring
        if restoring:
            return restoring
        if self._creation is None:
            return "waiting for a worker to initialise the model"
        received, wanted = self._creation.progress
        spec = self._creation.spec
        share = f"{format_bytes(received)} of {format_bytes(wanted)} for {len(spec.layout.slices) + len(spec.layout.tables)} variables"
        return f"{share} there in attempt {spec.attempt}; waiting for the rest"

    # The model

    def _admitted_locked(self, epoch: int, layout_hash: str) -> ShardModel:
        """Returns the model for a caller that has waited: everything may have changed."""
        self._gate.fences.check_caller(epoch)
        return self._model_locked(layout_hash)

    def _model_locked(self, layout_hash: str | None = None) -> ShardModel:
        model = self._model
        if model is None:
            raise NotInitialized(f"{self._name}: the variables have no values yet; {self._awaited_locked()}")
        if layout_hash not in (None, model.spec.layout.hash):
            raise LayoutMismatch(
                f"{self._name}: its layout is {model.spec.layout.hash!r}, you have {layout_hash!r}; ask the chief for the model",
                facts={"layout_hash": model.spec.layout.hash},
            )
        return model

    def _reading_locked(self, model: ShardModel, request: ReadRequest) -> Reading:
        buffer = model.buffer(request.step)
        found = buffer.step
        assert found is not None
        # Not of a step gone by, which a late reader reads, and not where values change in place.
        is_shared = found == model.step and not model.applies_on_arrival and buffer.memory.nbytes > SMALL_BYTES
        return Reading(
            buffer.memory,
            layout=model.spec.layout,
            step=found,
            is_intact=model.watch(buffer),
            hold=self._gate.reading,
            name="the copy of the variables",
            encode=partial(self._encoded.frames, version=buffer.version) if is_shared else encoded_frames,
            encode_moves=self._moves_locked(model, buffer, request),
        )

    def _moves_locked(self, model: ShardModel, buffer: VersionedBuffer, request: ReadRequest) -> Callable[[], Array | None]:
        """Returns what encodes how the values came from those that a reader has to those of the buffer, where both are here."""
        is_asked = request.encoding is FloatEncoding.INT4_BLOCKS
        before = model.copy_before(buffer, request.held_step) if is_asked else None
        if before is None:
            return lambda: None
        marks = model.watch(before), model.watch(buffer)
        return partial(
            self._moves.of,
            model.spec.layout,
            before.memory,
            buffer.memory,
            version=buffer.version,
            is_intact=lambda: all(is_same() for is_same in marks),
        )

    def _make_model(self, spec: ShardSpec) -> ShardModel:
        """Returns a model whose values are undefined. Raises LimitExceeded if there is no memory for it."""
        return ShardModel(
            spec,
            budget=self.budget,
            stripes=self._apply_threads,
            allocate=self._allocate,
            half_done=lambda: failpoint("ps.apply.mid"),
        )

    def _allocate(self, arena_bytes: int) -> VariablesMemory:
        if self._segments is not None:
            try:
                return self._segments.variables(arena_bytes)
            except OSError as error:
                log.warning("%s: cannot create shared memory: %s; workers use gRPC instead", self._name, error)
        return private_variables(arena_bytes)

    def _put_model_locked(self, model: ShardModel | None) -> None:
        self._model = model
        if model is not None:
            self._publish_locked()
            if not model.has_applied:  # one that was restored counts as such
                self._history.created(model)
        else:
            self._encoded.release()
            # Without a model nothing calls back into the shard.
            self._sharings.end_locked(self._sharings.open)()

    def _drop_model_locked(self, reason: PsError) -> None:
        """Drops contributions, creations and the model; streams under way end with `reason`, and callers find no values."""
        self._gate.fences.damage = ""
        self._drop_contributions_locked(reason)
        if self._model is not None:
            model = self._model
            model.serve(0)
            self._put_model_locked(None)
            model.release()

    def _drop_contributions_locked(self, reason: PsError) -> None:
        """Drops contributions and creations, whole or under way; their streams end with `reason`."""
        if self._model is not None:
            self._model.inbox.clear(reason)
        while self._creation is not None:
            self._break_off_locked(self._creation, reason)

    def _publish_locked(self) -> None:
        """Tells workers that share memory whether they are still served."""
        if self._model is not None:
            self._model.serve(self._gate.fences.served_epoch)

    # Epochs

    def _check_rival_locked(self, fence: Fence, address: str, replica: ReplicaState) -> None:
        """Raises Superseded for a chief that has the number of another one, because both started at once: the first keeps the shard.

        Once the first is silent, the other may have the shard, if it is empty, or if the other does not count on this replica.
        """
        fences, chief = self._gate.fences, self._gate.chief
        known, number = fences.fence, fence.chief_incarnation
        is_same_life = fence.life == known.life
        is_elsewhere = bool(chief.address and address and chief.address != address)
        if number != known.chief_incarnation or (is_same_life and not is_elsewhere):
            return
        is_free = self._model is None and self._creation is None and not self._checkpoints.restoring
        if is_same_life:
            is_free = (is_free or replica.forgets) and fence.epoch >= known.epoch
        if is_free and chief.is_silent:
            log.warning("%s: another chief of incarnation %d takes it, since the former chief is silent", self._name, number)
            fences.forget_chief()
            chief.forget()
        elif is_same_life:
            raise Superseded(
                f"{self._name}: the chief at {chief.address} has adopted it as incarnation {number}; end this chief",
                facts={"chief_incarnation": str(number)},
            )

    def _end_epoch_locked(self, *, is_damaged: bool) -> None:
        """Drops the contributions of the epoch before; all state, if a step was half applied."""
        epoch = self._gate.fences.epoch
        reason = EpochMismatch(f"{self._name}: cluster epoch rose to {epoch}; reconnect", facts={"epoch": str(epoch)})
        self._checkpoints.break_off_save()
        self._checkpoints.break_off_restore(reason)
        if is_damaged:
            self._drop_model_locked(reason)
        self._drop_contributions_locked(reason)
        if self._model is not None:
            self._model.begin_epoch(self._gate.fences.fence)

    def _adoption_locked(self) -> Adoption:
        chief = self._gate.chief
        model = None if self._gate.fences.damage else self._model
        last = model.last_request if model else None
        return Adoption(
            step=model.step if model else None,
            layout_hash=model.spec.layout.hash if model else "",
            record=chief.record,
            record_version=chief.record_version,
            last_apply=last if last is not None and last.fence.epoch == self._gate.fences.epoch else None,
            pushes=model.inbox.push_ids.lately_applied() if model else (),
            session_keys=self._gate.admitted.keys,
            was_alone=chief.was_alone,
            given_up=model.inbox.given_up if model else (),
        )

    # The shard's part in checkpoints, each in a block of its gate: `Checkpoints` does not take its lock

    def find_state(self, request: SaveRequest) -> tuple[ShardModel, StateMemory]:
        """Returns the model that is to be saved and its memories as they are; raises why it cannot be."""
        with self._gate.admit(request.fence.epoch):
            model = self._model_to_save_locked(request)
            return model, model.state_since(request.since)

    def copy_state(self, request: SaveRequest, model: ShardModel, into: StateMemory, *, copy: Callable[[StateMemory], None]) -> Snapshot:
        """Calls `copy` with the memories of the step while no other begins; raises why that is not the step to save."""
        with self._gate.turn(_nothing) as turn:
            self._gate.fences.check_caller(request.fence.epoch)
            # Another one would not be the model that there is memory for.
            if self._model_locked() is not model:
                raise Unavailable(f"{self._name}: the model was replaced; repeat the call")
            self._model_to_save_locked(request)
            with turn.unlocked():
                copy(model.state)
                return model.snapshot(into, step=request.step)

    def make_room(self, request: RestoreRequest, *, check: Callable[[], None]) -> ShardModel:
        """Drops the model that is here, for there may not be memory for two, and returns a new one for the request."""
        with self._gate.turn(_nothing):
            check()
            self._drop_model_locked(Cancelled(f"{self._name}: it is brought back to checkpoint {request.tag}; connect again"))
            return self._make_model(request.spec)

    def put_restored(
        self, model: ShardModel, hidden: HiddenState, request: RestoreRequest, *, from_epoch: int, check: Callable[[], None]
    ) -> None:
        """Makes a model whose tensors were filled the shard's."""
        with self._gate:
            check()
            model.publish_restored(hidden, request.settings)
            self._history.restored(model, from_epoch)
            self._put_model_locked(model)

    def drop_restored(self, model: ShardModel) -> None:
        """Lets go of a model that came to nothing."""
        with self._gate:
            model.release()

    def _model_to_save_locked(self, request: SaveRequest) -> ShardModel:
        model = self._model_locked()
        # If contributions are applied as they arrive, no two shards are at one step: each saves its state of this moment.
        if model.step != request.step and not model.applies_on_arrival:
            raise StepMismatch(
                f"{self._name}: step {request.step} cannot be saved, it is at step {model.step}", facts={"step": str(model.step)}
            )
        return model


def _nothing() -> None:
    """Checks nothing."""


class ShardHistory:
    """The history of one shard; without a writer nothing is written, at no price. The caller serialises what changes the model.

    From time to time it keeps the whole state, so that steps can be computed again when those before them are no longer in the history:
    whenever as many bytes of contributions have been applied as four such states have. So that costs a quarter of what workers write.
    """

    def __init__(self, writer: History | None, *, process_incarnation: int) -> None:
        self._writer = writer
        self._process = process_incarnation
        self._num_bytes = 0

    def created(self, model: ShardModel) -> None:
        """The variables have their first values."""
        if self._writer is not None:
            self._writer.write(events.Created(spec=model.spec, process=self._process), model.sent_contents)

    def restored(self, model: ShardModel, from_epoch: int) -> None:
        """The variables are those of a checkpoint, which was saved in `from_epoch`."""
        if self._writer is not None:
            self._keep_state(self._writer, model, epoch=model.spec.epoch, from_epoch=from_epoch)

    def configured(self, model: ShardModel, settings: ShardSettings) -> None:
        """Notes that the shard has other settings from now on."""
        if self._writer is not None:
            self._writer.write(events.Configured(step=model.step, settings=settings))

    def applied(self, model: ShardModel, request: ApplyRequest, work: StepWork) -> None:
        """A step has been applied; its waiters are still asleep."""
        if self._writer is not None:
            values, *tables = model.contents
            self._writer.write(events.Applied(request=request, sha256=digest(values, tables)))
            self._count(self._writer, model, work, epoch=request.fence.epoch)

    def arrived(self, model: ShardModel, push_id: PushId, work: StepWork, *, epoch: int) -> None:
        """A contribution has been applied as it came."""
        if self._writer is not None:
            self._writer.write(events.Arrived(push_id=push_id, epoch=epoch))
            self._count(self._writer, model, work, epoch=epoch)

    def _count(self, writer: History, model: ShardModel, work: StepWork, *, epoch: int) -> None:
        rows = (row for gradients in work.sparse.gradients for row in gradients.values())
        self._num_bytes += len(work.contributions) * (model.spec.layout.nbytes + _RECORD_BYTES)
        self._num_bytes += sum(row.indices.nbytes + row.rows.nbytes for row in rows)
        if self._num_bytes >= _STATE_PERIOD * (model.state.nbytes + _STATE_BYTES):
            self._keep_state(writer, model, epoch=epoch)

    def _keep_state(self, writer: History, model: ShardModel, *, epoch: int, from_epoch: int | None = None) -> None:
        now = model.snapshot()
        state = events.StateKept(
            spec=replace(model.spec, epoch=epoch, initial_step=model.step),
            settings=model.settings,
            process=self._process,
            hidden=now.hidden,
            from_epoch=from_epoch,
        )
        writer.write(state, [tensor.memory for tensor in now.tensors()])
        self._num_bytes = 0


_STATE_PERIOD = 4
# About what a contribution and a state take beside their tensors.
_RECORD_BYTES, _STATE_BYTES = 128, 1024
