"""The memory that a worker fills next: lent by shards where no push can be using it, else its own; and what is sent from it."""

import numpy as np
import pytest

from ps_protocol.errors import TooManyPushes
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, DataType, VariableSpec
from worker_client.model.gradient_memory import GradientMemory
from worker_client.model.gradients import Staging
from worker_client.model.memory import ModelMemory

MODEL = ModelSpec(
    variables=(
        VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(4,)),
        VariableSpec(name="b", data_type=DataType.FLOAT32, shape=()),
        VariableSpec(name="cut", data_type=DataType.FLOAT32, shape=(40,)),
    ),
    optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)),
    placement=PlacementPolicy(strategy="round_robin", split_bytes=64),
)


class FakeBuffers:
    """Two shards' buffers: one set apart for the user when he first asks, else the first that is free, the same until it is pushed."""

    def __init__(self, *, num_buffers: int = 3, num_sharing: int = 2) -> None:
        self.layouts = layouts(place(MODEL, num_shards=2), num_shards=2)
        self.buffers = [[aligned_bytes(layout.nbytes) if index < num_sharing else None for index, layout in enumerate(self.layouts)]]
        self.buffers += [[None if arena is None else arena.copy() for arena in self.buffers[0]] for _ in range(num_buffers - 1)]
        self.in_flight: set[int] = set()
        self.kept: int | None = None
        own = ModelMemory(MODEL, layouts=self.layouts, is_writable=True)
        self.memory = GradientMemory(MODEL, own, give=self.give, give_kept=self.give_kept)

    def give(self) -> list[Array | None]:
        free = [index for index in range(len(self.buffers)) if index not in self.in_flight and index != self.kept]
        if not free:
            raise TooManyPushes("all buffers are in flight")
        return self.buffers[free[0]]

    def give_kept(self) -> list[Array | None]:
        if self.kept is None:
            given = self.give()
            self.kept = next(index for index, arenas in enumerate(self.buffers) if arenas is given)
        if self.kept in self.in_flight:
            raise TooManyPushes("it is in flight")
        return self.buffers[self.kept]

    def ask(self, *, may_overlap: bool = False) -> dict[str, Array]:
        return dict(self.memory.ask(may_overlap=may_overlap).views)

    def push(self, gradients: dict[str, Array]) -> Staging:
        """Pushes as `push()` does, from where nobody else writes."""
        return self._send(gradients, may_lend=False)

    def step(self, gradients: dict[str, Array]) -> Staging:
        """Pushes as `step()` does under strict sync."""
        return self._send(gradients, may_lend=True)

    def _send(self, gradients: dict[str, Array], *, may_lend: bool) -> Staging:
        staging = self.memory.staging_for(gradients, may_lend=may_lend)
        staged = staging.stage(gradients, step=0)
        staged.memory.pack()
        for index, arenas in enumerate(self.buffers):
            if any(mine is not None and mine is arena for mine, arena in zip(arenas, staged.memory.arenas, strict=True)):
                self.in_flight.add(index)
        self.memory.note_push(staging)
        return staging


def in_buffer(buffers: FakeBuffers, staging: Staging) -> int:
    """The buffer that a staging lies in."""
    return next(index for index, arenas in enumerate(buffers.buffers) if arenas[0] is staging.memory.arenas[0])


def filled(value: float) -> dict[str, Array]:
    return {spec.name: np.full(spec.shape, value, np.float32) for spec in MODEL.variables}


def fill(arrays: dict[str, Array], value: float) -> dict[str, Array]:
    for array in arrays.values():
        array[...] = value
    return arrays


def test_arrays_kept_over_steps_stay_the_memory_that_is_sent() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask()
    for step in range(3):
        staging = buffers.step(fill(kept, step))
        assert all(staging.views[name] is kept[name] for name in kept)
        assert in_buffer(buffers, staging) == 0
        assert buffers.memory.unlock(is_over=True)
        buffers.in_flight.clear()
        assert all(buffers.ask()[name] is kept[name] for name in kept)


def test_a_contribution_sent_without_a_wait_lies_in_memory_that_the_user_has_no_view_of() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask()
    views = {name: array.reshape(-1)[:1] for name, array in kept.items()}
    for value in (1, 2):
        staging = buffers.push(fill(kept, value))
        assert in_buffer(buffers, staging) == value
        fill(views, 9)
        np.testing.assert_array_equal(staging.views["w"], np.full(4, value))
        assert buffers.memory.unlock(is_over=False)
    assert all(buffers.ask()[name] is kept[name] for name in kept)


def test_lent_arrays_are_read_only_only_while_they_are_under_way_and_the_user_has_word() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask()
    buffers.step(fill(kept, 1))
    assert not buffers.memory.unlock(is_over=False)
    buffers.memory.protect()
    with pytest.raises(ValueError, match="read-only"):
        kept["w"][...] = 2
    others = buffers.ask()
    fill(others, 2)
    np.testing.assert_array_equal(kept["w"], np.ones(4))
    buffers.in_flight.clear()  # the shards have applied it
    assert buffers.memory.unlock(is_over=False)
    assert buffers.step(fill(kept, 3)).views["w"] is kept["w"]


def test_arrays_of_a_contribution_under_way_may_be_sent_again_and_are_copied() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask()
    kept["w"][...] = 3
    kept["cut"][...] = 4
    buffers.step(kept)
    buffers.memory.protect()
    again = buffers.step(kept)
    assert in_buffer(buffers, again) == 1
    np.testing.assert_array_equal(again.views["w"], np.full(4, 3))
    np.testing.assert_array_equal(again.views["cut"], np.full(40, 4))


def test_some_of_the_arrays_are_sent_from_where_they_are_and_foreign_ones_join_them() -> None:
    buffers = FakeBuffers()
    kept = fill(buffers.ask(), 1)
    staging = buffers.step({**kept, "b": np.array(5, np.float32)})
    assert staging.views["w"] is kept["w"]
    assert kept["b"] == 5


def test_foreign_arrays_are_copied_straight_into_a_buffer() -> None:
    buffers = FakeBuffers()
    staging = buffers.step(filled(7))
    assert in_buffer(buffers, staging) == 0
    np.testing.assert_array_equal(staging.views["w"], np.full(4, 7))


def test_foreign_arrays_leave_those_of_the_user_alone() -> None:
    buffers = FakeBuffers()
    kept = fill(buffers.ask(), 1)
    assert in_buffer(buffers, buffers.step(filled(7))) == 1
    np.testing.assert_array_equal(kept["w"], np.ones(4))


def test_where_contributions_overlap_the_arrays_are_the_sessions_own_and_stay_writable() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask(may_overlap=True)
    for value in range(3):
        staging = buffers.push(fill(kept, value))
        assert staging.memory.arenas == (None, None)  # the shard copies it into a buffer
        buffers.memory.protect()
        assert all(buffers.ask(may_overlap=True)[name] is kept[name] for name in kept)


def test_lent_arrays_that_are_kept_where_contributions_overlap_are_copied() -> None:
    buffers = FakeBuffers()
    kept = buffers.ask()
    assert buffers.ask(may_overlap=True)["w"] is not kept["w"]
    assert [in_buffer(buffers, buffers.push(fill(kept, value))) for value in range(2)] == [1, 2]


def test_without_a_free_slot_the_sessions_own_memory_serves() -> None:
    buffers = FakeBuffers(num_buffers=1)
    buffers.push(filled(1))
    arrays = fill(buffers.ask(), 2)
    assert buffers.push(arrays).memory.arenas == (None, None)


def test_shards_that_give_no_memory_are_sent_the_sessions_own() -> None:
    buffers = FakeBuffers(num_sharing=0)
    kept = buffers.ask()
    for send in (buffers.push, buffers.step):
        assert send(kept).memory.arenas == (None, None)
        buffers.memory.protect()
        fill(kept, 1)
        assert buffers.ask()["w"] is kept["w"]


def test_part_of_the_memory_may_be_of_shards_and_part_the_sessions_own() -> None:
    buffers = FakeBuffers(num_sharing=1)
    kept = buffers.ask()
    buffers.step(kept)
    buffers.memory.protect()
    assert not kept["w"].flags.writeable
    assert kept["b"].flags.writeable and kept["cut"].flags.writeable
