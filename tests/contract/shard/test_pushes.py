"""Pushes to every `Shard`, on every transport: which are staged, and which are refused."""

from pathlib import Path

import numpy as np
import pytest

from ps_protocol.errors import (
    FrameOutOfOrder,
    LayoutMismatch,
    LimitExceeded,
    PsError,
    TruncatedStream,
)
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.roles.shard import PushReply, PushResult, ShardStatusRequest
from tests.support.parameter_servers.shards import MIXED, TRANSPORTS, Trainer, layout_of, open_shard, shard_over, variable

shard = shard_over(TRANSPORTS)


def test_push_is_staged_and_changes_no_variable(trainer: Trainer) -> None:
    trainer.create(1.0)
    assert trainer.push(trainer.header()) == PushReply(result=PushResult.STAGED, step=0)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 1


def test_push_sent_twice_counts_once(trainer: Trainer) -> None:
    trainer.create(1.0)
    header = trainer.header()
    assert trainer.push(header, trainer.arena(1.0)).result is PushResult.STAGED
    assert trainer.push(header, trainer.arena(99.0)).result is PushResult.DUPLICATE
    trainer.apply(header.push_id)
    assert trainer.push(header, trainer.arena(99.0)) == PushReply(result=PushResult.DUPLICATE, step=1)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))
    status = trainer.shard.call(ShardStatusRequest())
    assert (status.report.num_pushes, status.report.num_duplicates, status.report.num_staged) == (1, 2, 0)


def test_push_with_another_layout_is_refused(trainer: Trainer) -> None:
    trainer.create()
    other = Trainer(trainer.shard, layout_of(variable("other")))
    with pytest.raises(LayoutMismatch):
        other.push(other.header())


@pytest.mark.parametrize(("num_bytes", "error"), [(-64, TruncatedStream), (64, FrameOutOfOrder)], ids=["short", "long"])
def test_push_of_another_length_has_no_effect(trainer: Trainer, num_bytes: int, error: type[PsError]) -> None:
    trainer.create(1.0)
    header = trainer.header()
    with pytest.raises(error):
        trainer.push(header, aligned_bytes(MIXED.nbytes + num_bytes))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    assert trainer.push(header).result is PushResult.STAGED


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_is_checked_before_it_is_taken(transport: str, socket_dir: Path) -> None:
    layout = layout_of(variable("w", (1 << 16,)))
    with open_shard(transport, socket_dir=socket_dir, max_memory_bytes=3 * layout.nbytes) as shard:
        with pytest.raises(LimitExceeded, match=r"ps 0: .* needs 1.0 MiB, 768.0 KiB of 768.0 KiB free; .*--max-memory-bytes"):
            Trainer(shard, layout, optimizer="adam").create()
        trainer = Trainer(shard, layout)
        assert trainer.create()
        assert trainer.push(trainer.header(0)).result is PushResult.STAGED
        with pytest.raises(LimitExceeded):
            trainer.push(trainer.header(1))
        assert shard.call(ShardStatusRequest()).report.allocated_bytes == 3 * layout.nbytes
