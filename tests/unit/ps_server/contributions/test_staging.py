"""Memory for contributions of dense variables and tables: as much as a header asks for, and none before the header is checked."""

import numpy as np
import pytest

from ps_protocol.errors import IndexOutOfRange, InvalidSpec, LimitExceeded, TruncatedStream
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.shard import SparsePart
from ps_server.contributions.staging import StagedGradients, StagingMemory
from ps_server.numbers.arena import Padding
from ps_server.numbers.memory import BufferPool, MemoryBudget


def _slice(name: str, shape: tuple[int, ...], data_type: DataType = DataType.FLOAT32, *, is_sparse: bool = False) -> VariableSlice:
    spec = VariableSpec(name=name, data_type=data_type, shape=shape, is_sparse=is_sparse)
    return VariableSlice(variable=spec, start=0, stop=shape[0])


LAYOUT = Layout(
    [
        _slice("w", (3,)),
        _slice("emb", (10, 3), DataType.FLOAT16, is_sparse=True),
        _slice("b", (2,)),
        _slice("wide", (7, 2), is_sparse=True),
    ]
)


class _Fixture:
    def __init__(self, limit_bytes: int | None = None) -> None:
        self.budget = MemoryBudget(limit_bytes, owner="ps 0")
        self.pool = BufferPool(LAYOUT.nbytes, budget=self.budget)
        self.staging = StagingMemory(LAYOUT, self.pool, budget=self.budget)

    def lend(self, *parts: tuple[int, int], absent: tuple[int, ...] = (0, 1)) -> StagedGradients:
        sparse = [SparsePart(table=table, num_rows=num_rows) for table, num_rows in parts]
        return self.staging.lend(sparse, absent, purpose="a push of worker 0")


@pytest.fixture
def fixture() -> _Fixture:
    return _Fixture()


def test_arena_is_left_out_if_all_slices_are_absent(fixture: _Fixture) -> None:
    assert fixture.lend().dense.nbytes == 0
    assert fixture.budget.allocated_bytes == 0
    assert fixture.lend(absent=(1,)).dense.nbytes == LAYOUT.nbytes


def test_bytes_go_to_the_arena_then_to_indices_and_rows_of_each_table(fixture: _Fixture) -> None:
    staged = fixture.lend((0, 3), (1, 1), absent=())
    arena = np.arange(LAYOUT.nbytes, dtype=np.uint8)
    emb, wide = np.arange(9, dtype=np.float16).reshape(3, 3), np.array([[5.0, 6.0]], np.float32)
    content = b"".join([arena.tobytes(), np.array([4, 1, 9]).tobytes(), emb.tobytes(), np.array([6]).tobytes(), wide.tobytes()])
    for offset in range(0, len(content), 7):
        staged.writer.write(offset, content[offset : offset + 7])
    staged.writer.finish()
    fixture.staging.put_in_order(staged)
    Padding(LAYOUT).clear(arena)
    np.testing.assert_array_equal(staged.dense, arena)
    assert staged.rows[0].indices.tolist() == [1, 4, 9]
    np.testing.assert_array_equal(staged.rows[0].rows, emb[[1, 0, 2]])
    assert (staged.rows[1].indices.tolist(), staged.rows[1].rows.tolist()) == ([6], [[5.0, 6.0]])


def test_staging_memory_is_counted_while_it_is_lent(fixture: _Fixture) -> None:
    staged = fixture.lend((0, 100))
    # The rows as they came, and what it takes to sort, merge (half-precision ones in float32) and keep them.
    assert fixture.budget.allocated_bytes == 3 * 100 * (8 + 6) + 100 * 6
    fixture.staging.take_back(staged)
    assert fixture.budget.allocated_bytes == 0


@pytest.mark.parametrize("parts", [((2, 1),), ((-1, 1),), ((1, 1), (0, 1)), ((0, 1), (0, 1)), ((0, -1),)])
def test_tables_that_do_not_exist_or_ascend_are_refused(fixture: _Fixture, parts: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidSpec):
        fixture.lend(*parts)
    assert fixture.budget.allocated_bytes == 0


@pytest.mark.parametrize("absent", [(2,), (-1,), (1, 0), (0, 0)])
def test_absent_slices_that_do_not_exist_or_ascend_are_refused(fixture: _Fixture, absent: tuple[int, ...]) -> None:
    with pytest.raises(InvalidSpec, match="want ascending positions of the shard's 2 slices"):
        fixture.lend(absent=absent)


def test_size_is_checked_before_anything_is_allocated() -> None:
    fixture = _Fixture(limit_bytes=1000)
    with pytest.raises(LimitExceeded, match=r"a push of worker 0 \(rows of tables\) needs"):
        fixture.lend((0, 100))
    with pytest.raises(LimitExceeded, match=r"variable 'emb': a gradient of \d+ rows"):
        fixture.lend((0, 1 << 62))
    with pytest.raises(LimitExceeded):
        fixture.lend((0, 10), (1, 20))
    fixture.budget.limit_bytes = 200
    with pytest.raises(LimitExceeded):
        fixture.lend((0, 4), absent=())
    assert fixture.budget.allocated_bytes == 0


def test_incomplete_or_impossible_rows_are_refused(fixture: _Fixture) -> None:
    staged = fixture.lend((0, 1))
    staged.writer.write(0, np.array([10]).tobytes())
    with pytest.raises(TruncatedStream):
        staged.writer.finish()
    staged.writer.write(8, bytes(6))
    staged.writer.finish()
    with pytest.raises(IndexOutOfRange, match=r"variable 'emb': indices\[0\] = 10, want 0 to 9"):
        fixture.staging.put_in_order(staged)
