"""A parameter server of a simulated cluster: the real store, in a process that can be killed at any event. Knows no chief."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.history import History
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyRequest,
    KeepRecordRequest,
    PushHeader,
    PushResult,
    ReadRequest,
    RestoreRequest,
    RowsRequest,
    SaveRequest,
    SaveState,
    ShardSettings,
    ShardSpec,
    ShardStatus,
    ShardStatusRequest,
)
from ps_server.model.shard_model import ShardModel, StepWork
from ps_server.serving.local import InProcessShard
from tests.simulation.arenas import PUSHED_ROWS_BYTES, keys_of
from tests.simulation.disk import Crash
from tests.simulation.oracle import LEARNING_RATE, Oracle
from tests.simulation.tasks import Answer, Life
from tests.simulation.world import World


class ShardNode:
    """Serves the calls of chiefs and workers. Each is done at one moment, but for what is written to storage, which takes its time."""

    def __init__(
        self,
        world: World,
        life: Life,
        *,
        index: int,
        storage: CheckpointStorage | None,
        oracle: Oracle,
        on_crash: Callable[[], None],
        history: History | None,
    ) -> None:
        self._world = world
        self._life = life
        self._place = life.name
        self._oracle = oracle
        oracle.emptied(life.name)
        self._storage = storage
        self._asked_to_restore: RestoreRequest | None = None
        self._on_crash = on_crash
        self._layout: Layout | None = None
        self._methods: dict[str, Callable[..., Any]] = {
            "ask": self._ask,
            "create": self._create,
            "push": self._push,
            "read": self._read,
        }
        # The learning rate of each version of its settings.
        self._rates: dict[int, float] = {}
        self.fails_half_way = False  # when it next applies a step
        self.shard = InProcessShard(
            index=index, storage=storage, run_in_background=self._in_background, history=history, clock=lambda: world.now
        )

    def serve(self, method: str, arguments: Sequence[Any], answer: Answer) -> None:
        """Takes up a call."""
        try:
            if method == "of process":
                process, *arguments = arguments
                self._check_process(process)
                method = "ask"
            answer(self._methods[method](*arguments))
        except PsError as error:
            answer(error)

    def _check_process(self, process: int) -> None:
        if process not in (0, self._status.process_incarnation):
            raise Unavailable("the stream has ended")

    def _in_background(self, work: Callable[[], None]) -> None:
        request = self._asked_to_restore

        def do() -> None:
            try:
                work()
            except Crash:
                self._world.seen["parameter server killed while it wrote"] += 1
                self._on_crash()
            if request is not None:
                self._see_restored(request)

        self._world.later(self._life, self._world.between(0.01, 0.2), do)

    @property
    def _status(self) -> ShardStatus:
        return self.shard.call(ShardStatusRequest())

    def _ask(self, request: Any) -> object:
        match request:
            case AdoptRequest():
                return self._adopt(request)
            case ApplyRequest():
                return self._apply(request)
            case SaveRequest():
                return self._save(request)
            case RestoreRequest():
                return self._restore(request)
            case KeepRecordRequest():
                self.shard.call(request)
                self._rates[request.settings.version] = _rate_of(request.settings)
                return None
        return self.shard.call(request)

    def _adopt(self, request: AdoptRequest) -> object:
        adoption = self.shard.call(request)
        self._oracle.adopted(request.fence.life)
        if adoption.step is None:
            self._oracle.emptied(self._place)
        return adoption

    def _apply(self, request: ApplyRequest) -> object:
        if self.fails_half_way and self._status.step == request.step:
            self.fails_half_way = False
            with mock.patch.object(ShardModel, "run_apply", _half_applied):
                self.shard.call(request)
        reply = self.shard.call(request)
        if not reply.repeated_request:
            status = self._status
            rate = self._rates.get(status.settings_version, LEARNING_RATE)
            self._oracle.applied(self._place, status.fence.life, request, self._values(request.fence.epoch), rate=rate)
        return reply

    def _save(self, request: SaveRequest) -> object:
        progress = self.shard.call(request)
        if progress.state is not SaveState.FAILED:
            self._oracle.copied(self._place, request.fence.life, request.tag, request.fence.epoch)
        return progress

    def _restore(self, request: RestoreRequest) -> object:
        self._asked_to_restore = request
        try:
            return self.shard.call(request)
        finally:
            self._asked_to_restore = None

    # -- the workers' calls

    def _create(self, spec: ShardSpec, content: Array) -> object:
        is_new = self.shard.create_variables(spec, Segments([content]))
        self._note_layout(spec)
        self._oracle.created(self._place, self._status.fence.life, spec, self._values(spec.epoch), is_new=is_new)
        return is_new

    def _push(self, header: PushHeader, gradients: Array) -> object:
        try:
            reply = self.shard.push_gradients(header, Segments([gradients]))
            if reply.result in (PushResult.STAGED, PushResult.APPLIED) and gradients.size:
                self._oracle.staged(self._place, header.push_id, gradients)
            if reply.result is PushResult.APPLIED:
                epoch = header.era.epoch
                self._oracle.arrived(self._place, self._status.fence.life, header.push_id, epoch, self._values(epoch))
            return reply
        finally:
            self._oracle.holds(self._place, header.push_id, self._status.report)

    def _read(self, epoch: int, step: int | None, layout_hash: str, num_bytes: int) -> object:
        into = np.empty(num_bytes, np.uint8)
        its_step = self.shard.read(ReadRequest(epoch=epoch, step=step, layout_hash=layout_hash), Segments([into]))
        self._oracle.served(self._place, self._status.fence.life, epoch)
        return its_step, into

    # -- what the oracle sees

    def _see_restored(self, request: RestoreRequest) -> None:
        status = self._status
        if status.fence.epoch == request.spec.epoch and status.step == request.spec.initial_step:
            self._note_layout(request.spec)
            self._rates[request.settings.version] = _rate_of(request.settings)
            self._world.seen["restored from a delta"] += self._storage is not None and b'"bases"' in self._storage.manifest(request.tag)
            self._oracle.restored(self._place, self._status.fence.life, request, status.step, self._values(status.fence.epoch))

    def _note_layout(self, spec: ShardSpec) -> None:
        self._layout = spec.layout
        limit = spec.max_staged_per_worker
        self._oracle.has_room(self._place, self._status.report, push_bytes=spec.layout.nbytes + PUSHED_ROWS_BYTES, max_pushes=limit)

    def _values(self, epoch: int) -> Array:
        """Returns the values of its variable, and of the rows of some keys."""
        layout = self._layout
        if layout is None:
            return np.empty(0, np.float32)
        into = np.empty(layout.nbytes, np.uint8)
        self.shard.read(ReadRequest(epoch=epoch, step=None, layout_hash=layout.hash), Segments([into]))
        keys, values = keys_of(layout), np.ascontiguousarray(layout.view(into, 0)).reshape(-1)
        rows = np.empty((keys.size, values.size), np.float32)
        request = RowsRequest(epoch=epoch, layout_hash=layout.hash, table=0, step=None)
        self.shard.read_rows(request, keys, Segments([rows.reshape(-1).view(np.uint8)]))
        return np.concatenate([values, rows.reshape(-1)])


def _rate_of(settings: ShardSettings) -> float:
    """Returns the learning rate of the model's optimizer with these settings."""
    return float(settings.optimizers[0][1].learning_rate.arguments["value"]) if settings.optimizers else LEARNING_RATE


def _half_applied(model: ShardModel, work: StepWork) -> int:
    _RUN_APPLY(model, work)
    raise InternalError("a defect, or no memory")


_RUN_APPLY = ShardModel.run_apply
