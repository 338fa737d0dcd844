"""What a shard writes into its history: the values that it began with, its settings, and each step with the digest of its values."""

import numpy as np

from ps_protocol import history_events as events
from ps_protocol.history import HistoryWriter
from ps_protocol.shard import ApplyRequest, PushId, RestoreRequest, ShardSettings
from ps_protocol.tensors import Array
from ps_server.shard_model import ShardModel


class ShardHistory:
    """The history of one shard; without a writer nothing is written, at no price. The caller serialises what changes the model."""

    def __init__(self, writer: HistoryWriter | None, *, process_incarnation: int) -> None:
        self._writer = writer
        self._process = process_incarnation

    def created(self, model: ShardModel) -> None:
        """The variables have their first values."""
        if self._writer is not None:
            tables = [_bytes(model.tables.table(index).values) for index in range(len(model.tables))]
            sent = [memory for memory, piece in zip(tables, model.spec.layout.tables, strict=True) if piece.variable.initializer is None]
            events.note_created(self._writer, model.spec, [model.buffer(None).memory, *sent], process=self._process)

    def restored(self, model: ShardModel, request: RestoreRequest, from_epoch: int) -> None:
        """The variables are those of a checkpoint, which was saved in `from_epoch`."""
        if self._writer is not None:
            events.note_restored(
                self._writer,
                model.spec,
                request.settings,
                process=self._process,
                tag=request.tag,
                from_epoch=from_epoch,
                sha256=_digest(model),
            )

    def configured(self, model: ShardModel, settings: ShardSettings) -> None:
        """The shard works otherwise from now on."""
        if self._writer is not None:
            events.note_configured(self._writer, settings, shard=model.spec.shard)

    def applied(self, model: ShardModel, request: ApplyRequest) -> None:
        """A step has been applied, and nobody has been told yet."""
        if self._writer is not None:
            events.note_applied(self._writer, request, shard=model.spec.shard, sha256=_digest(model))

    def arrived(self, model: ShardModel, push_id: PushId, *, epoch: int) -> None:
        """A contribution has been applied as it came."""
        if self._writer is not None:
            events.note_arrived(self._writer, push_id, shard=model.spec.shard, epoch=epoch, step=model.step)


def _digest(model: ShardModel) -> str:
    return events.digest(model.buffer(None).memory, [_bytes(model.tables.table(index).values) for index in range(len(model.tables))])


def _bytes(values: Array) -> Array:
    return values.reshape(-1).view(np.uint8)
