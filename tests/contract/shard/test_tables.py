"""Sparse variables at every `Shard`, on every transport: rows are pushed and read, and other rows stay untouched."""

import threading

import numpy as np
import pytest

from ps_protocol.errors import (
    IndexOutOfRange,
    InvalidSpec,
    LimitExceeded,
    SlotNotFound,
    StepGone,
    TruncatedStream,
)
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import DataType, SparseMean
from ps_protocol.roles.shard import PushResult, RowsRequest, Shard, ShardStatusRequest, SparsePart
from tests.support.parameter_servers.shards import EPOCH, Trainer, layout_of, table, variable, views

TABLE = layout_of(table("emb", (10, 3)))
BOTH = layout_of(variable("w", (5,)), table("emb", (10, 3)), variable("b"), table("wide", (6,), DataType.FLOAT64, rows=(2, 6)))


@pytest.fixture
def tables(shard: Shard) -> Trainer:
    """A shard with one table of ten rows, all 1."""
    trainer = Trainer(shard, TABLE)
    trainer.create(1.0)
    return trainer


def test_rows_may_be_divided_by_all_contributions_instead(shard: Shard) -> None:
    trainer = Trainer(shard, layout_of(table("emb", (10, 3), sparse_mean=SparseMean.PER_REPLICA)))
    trainer.create(1.0)
    one, _ = trainer.push_rows(0, rows={0: ([1, 2], 4.0)})
    other, _ = trainer.push_rows(1, rows={0: ([2], 8.0)})
    third, _ = trainer.push_rows(2)
    trainer.apply(one.push_id, other.push_id, third.push_id)
    np.testing.assert_allclose(trainer.rows([1, 2])[1][:, 0], [1 - 2 / 3, 1 - 2.0], rtol=1e-6)


def test_dense_variables_and_tables_change_in_one_step(shard: Shard) -> None:
    trainer = Trainer(shard, BOTH)
    trainer.create(1.0)
    header, reply = trainer.push_rows(rows={0: ([9], 2.0), 1: ([0, 3], 4.0)}, dense=trainer.arena(2.0))
    assert reply.result is PushResult.STAGED
    trainer.apply(header.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.0))
    np.testing.assert_array_equal(trainer.rows([9, 0])[1][:, 0], [0.0, 1.0])
    np.testing.assert_array_equal(trainer.rows(range(4), position=1)[1], [-1.0, 1.0, 1.0, -1.0])


def test_step_is_kept_while_its_reader_is_at_work_where_steps_wait_for_readers(tables: Trainer) -> None:
    tables.configure(1, accepts_stale=True)
    tables.train_rows(0, [7], 2.0)
    done: list[str] = []

    def go_on() -> None:
        for step in (1, 2):
            tables.train_rows(step, [7], 2.0)
            done.append(f"step {step}")

    training = threading.Thread(target=go_on)

    def meanwhile(step: int) -> None:
        assert step == 1
        training.start()
        for _ in range(20):
            np.testing.assert_array_equal(tables.rows([7], step=step)[1], np.zeros((1, 3)))
        done.append("reading")

    into = np.empty((1, 3), np.float32)
    request = RowsRequest(epoch=EPOCH, layout_hash=TABLE.hash, table=0, step=None)
    found = tables.shard.read_rows(request, np.array([7]), Segments([into.view(np.uint8).reshape(-1)]), meanwhile=meanwhile)
    training.join(20)
    assert (found, into.tolist(), done[-1]) == (1, [[0.0] * 3], "step 2")
    assert done.index("reading") < done.index("step 2")
    assert tables.rows([7])[0] == 3


def test_slots_of_a_table_are_read_by_rows(shard: Shard) -> None:
    trainer = Trainer(shard, layout_of(variable("w", (5,)), table("emb", (10, 3))), optimizer="momentum")
    trainer.create()
    trainer.train_rows(0, [3], 2.0)
    step, rows = trainer.rows([3, 4], slot="momentum")
    assert step == 1
    np.testing.assert_array_equal(rows[:, 0], [2.0, 0.0])
    with pytest.raises(SlotNotFound, match="variable 'emb' has no slot 'velocity'; it has momentum"):
        trainer.rows([3], slot="velocity")
    with pytest.raises(StepGone):
        trainer.rows([3], slot="momentum", step=0)
    assert list(shard.call(ShardStatusRequest()).slots) == ["momentum"]
    np.testing.assert_array_equal(views(trainer.layout, trainer.slot("momentum")[1])["w"], np.zeros(5))


@pytest.mark.parametrize("indices", [[0, 10], [3, -1, 4]])
def test_row_that_does_not_exist_is_refused_and_changes_nothing(tables: Trainer, indices: list[int]) -> None:
    with pytest.raises(IndexOutOfRange):
        tables.push_rows(rows={0: (indices, 1.0)})
    with pytest.raises(IndexOutOfRange):
        tables.rows(indices)
    assert tables.shard.call(ShardStatusRequest()).report.num_staged == 0
    tables.train_rows(0, [9], 2.0)
    np.testing.assert_array_equal(tables.rows([9, 0])[1][:, 0], [0.0, 1.0])


def test_header_that_does_not_fit_the_layout_is_refused(tables: Trainer) -> None:
    with pytest.raises(InvalidSpec, match="want ascending positions of the shard's 1 tables"):
        tables.shard.push_gradients(tables.header(sparse=(SparsePart(table=1, num_rows=1),)), Segments([]))
    with pytest.raises(InvalidSpec, match="want ascending positions of the shard's 0 slices"):
        tables.shard.push_gradients(tables.header(absent=(0,)), Segments([]))
    with pytest.raises(LimitExceeded):
        tables.shard.push_gradients(tables.header(sparse=(SparsePart(table=0, num_rows=1 << 60),)), Segments([]))
    with pytest.raises(TruncatedStream):
        tables.shard.push_gradients(tables.header(sparse=(SparsePart(table=0, num_rows=2),)), Segments([np.zeros(20, np.uint8)]))
    with pytest.raises(InvalidSpec, match="table 1: the shard has 1"):
        request = RowsRequest(epoch=EPOCH, layout_hash=TABLE.hash, table=1, step=None)
        tables.shard.read_rows(request, np.zeros(1, "<i8"), Segments([np.zeros(12, np.uint8)]))
    assert tables.shard.call(ShardStatusRequest()).report.num_staged == 0


def test_memory_of_staged_rows_is_counted_and_comes_back(tables: Trainer) -> None:
    before = tables.shard.call(ShardStatusRequest()).report.allocated_bytes
    variables = tables.shard.call(ShardStatusRequest()).report.variables_bytes
    header, _ = tables.push_rows(rows={0: (range(10), 1.0)})
    assert tables.shard.call(ShardStatusRequest()).report.allocated_bytes >= before + 10 * (8 + 12)
    tables.apply(header.push_id)
    # The journal of the rows that were touched stays until the next step.
    assert tables.shard.call(ShardStatusRequest()).report.allocated_bytes == before + 10 * (8 + 12)
    assert tables.shard.call(ShardStatusRequest()).report.variables_bytes == variables + 10 * (8 + 12)
    other, _ = tables.push_rows(step=1, rows={0: ([], 1.0)})
    tables.apply(other.push_id, step=1)
    assert tables.shard.call(ShardStatusRequest()).report.allocated_bytes == before


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (4,)])
def test_tables_of_any_shape_are_trained(shard: Shard, shape: tuple[int, ...]) -> None:
    trainer = Trainer(shard, layout_of(table("emb", shape)), optimizer="momentum")
    trainer.create(1.0)
    indices = range(shape[0])
    for worker_step in range(2):
        trainer.train_rows(worker_step, indices, 2.0)
    step, rows = trainer.rows(indices)
    assert step == 2
    np.testing.assert_allclose(rows, np.full(shape, 1.0 - 1.0 - 0.5 * (0.9 * 2.0 + 2.0)), rtol=1e-6)


def test_tables_that_are_created_again_have_the_later_values(tables: Trainer) -> None:
    assert tables.create(2.0, attempt=2)
    np.testing.assert_array_equal(tables.rows([0])[1], [[2.0] * 3])
    assert not tables.create(3.0, attempt=2)
    tables.train_rows(0, [0], 2.0)
    assert not tables.create(4.0, attempt=3)
    np.testing.assert_array_equal(tables.rows([0, 1])[1][:, 0], [1.0, 2.0])
