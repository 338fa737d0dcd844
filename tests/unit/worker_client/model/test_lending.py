"""Which memory a worker fills next: what shards lend it where nothing in it can be under way, else its own; and from where it is sent."""

import numpy as np
import pytest

from ps_protocol.errors import TooManyPushes
from ps_protocol.model.layout import aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts, place
from ps_protocol.model.variables import Array, DataType, VariableSpec
from worker_client.model.gradients import Staging
from worker_client.model.lending import GradientMemory
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


class FakeSlots:
    """Two shards' slots: one set apart for the user when he first asks, else the first that is free, the same until it is pushed."""

    def __init__(self, *, num_slots: int = 3, num_sharing: int = 2) -> None:
        self.layouts = layouts(place(MODEL, num_shards=2), num_shards=2)
        self.slots = [[aligned_bytes(layout.nbytes) if index < num_sharing else None for index, layout in enumerate(self.layouts)]]
        self.slots += [[None if arena is None else arena.copy() for arena in self.slots[0]] for _ in range(num_slots - 1)]
        self.in_flight: set[int] = set()
        self.kept: int | None = None
        own = ModelMemory(MODEL, layouts=self.layouts, is_writable=True)
        self.memory = GradientMemory(MODEL, own, give=self.give, give_kept=self.give_kept)

    def give(self) -> list[Array | None]:
        free = [index for index in range(len(self.slots)) if index not in self.in_flight and index != self.kept]
        if not free:
            raise TooManyPushes("all slots are in flight")
        return self.slots[free[0]]

    def give_kept(self) -> list[Array | None]:
        if self.kept is None:
            given = self.give()
            self.kept = next(index for index, arenas in enumerate(self.slots) if arenas is given)
        if self.kept in self.in_flight:
            raise TooManyPushes("it is in flight")
        return self.slots[self.kept]

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
        for index, arenas in enumerate(self.slots):
            if any(mine is not None and mine is arena for mine, arena in zip(arenas, staged.memory.arenas, strict=True)):
                self.in_flight.add(index)
        self.memory.note_push(staging)
        return staging


def in_slot(slots: FakeSlots, staging: Staging) -> int:
    """The slot that a staging lies in."""
    return next(index for index, arenas in enumerate(slots.slots) if arenas[0] is staging.memory.arenas[0])


def filled(value: float) -> dict[str, Array]:
    return {spec.name: np.full(spec.shape, value, np.float32) for spec in MODEL.variables}


def fill(arrays: dict[str, Array], value: float) -> dict[str, Array]:
    for array in arrays.values():
        array[...] = value
    return arrays


def test_arrays_kept_over_steps_stay_the_memory_that_is_sent() -> None:
    slots = FakeSlots()
    kept = slots.ask()
    for step in range(3):
        staging = slots.step(fill(kept, step))
        assert all(staging.views[name] is kept[name] for name in kept)
        assert in_slot(slots, staging) == 0
        assert slots.memory.unlock(is_over=True)
        slots.in_flight.clear()
        assert all(slots.ask()[name] is kept[name] for name in kept)


def test_what_is_sent_without_a_wait_lies_where_the_user_has_no_view() -> None:
    slots = FakeSlots()
    kept = slots.ask()
    views = {name: array.reshape(-1)[:1] for name, array in kept.items()}
    for value in (1, 2):
        staging = slots.push(fill(kept, value))
        assert in_slot(slots, staging) == value
        fill(views, 9)
        np.testing.assert_array_equal(staging.views["w"], np.full(4, value))
        assert slots.memory.unlock(is_over=False)
    assert all(slots.ask()[name] is kept[name] for name in kept)


def test_lent_arrays_are_read_only_only_while_they_are_under_way_and_the_user_has_word() -> None:
    slots = FakeSlots()
    kept = slots.ask()
    slots.step(fill(kept, 1))
    assert not slots.memory.unlock(is_over=False)
    slots.memory.protect()
    with pytest.raises(ValueError, match="read-only"):
        kept["w"][...] = 2
    others = slots.ask()
    fill(others, 2)
    np.testing.assert_array_equal(kept["w"], np.ones(4))
    slots.in_flight.clear()  # the shards have applied it
    assert slots.memory.unlock(is_over=False)
    assert slots.step(fill(kept, 3)).views["w"] is kept["w"]


def test_arrays_of_a_contribution_under_way_may_be_sent_again_and_are_copied() -> None:
    slots = FakeSlots()
    kept = slots.ask()
    kept["w"][...] = 3
    kept["cut"][...] = 4
    slots.step(kept)
    slots.memory.protect()
    again = slots.step(kept)
    assert in_slot(slots, again) == 1
    np.testing.assert_array_equal(again.views["w"], np.full(4, 3))
    np.testing.assert_array_equal(again.views["cut"], np.full(40, 4))


def test_some_of_the_arrays_are_sent_from_where_they_are_and_foreign_ones_join_them() -> None:
    slots = FakeSlots()
    kept = fill(slots.ask(), 1)
    staging = slots.step({**kept, "b": np.array(5, np.float32)})
    assert staging.views["w"] is kept["w"]
    assert kept["b"] == 5


def test_foreign_arrays_are_copied_straight_into_a_slot() -> None:
    slots = FakeSlots()
    staging = slots.step(filled(7))
    assert in_slot(slots, staging) == 0
    np.testing.assert_array_equal(staging.views["w"], np.full(4, 7))


def test_foreign_arrays_leave_those_of_the_user_alone() -> None:
    slots = FakeSlots()
    kept = fill(slots.ask(), 1)
    assert in_slot(slots, slots.step(filled(7))) == 1
    np.testing.assert_array_equal(kept["w"], np.ones(4))


def test_where_contributions_overlap_the_arrays_are_the_sessions_own_and_stay_writable() -> None:
    slots = FakeSlots()
    kept = slots.ask(may_overlap=True)
    for value in range(3):
        staging = slots.push(fill(kept, value))
        assert staging.memory.arenas == (None, None)  # the shard copies it into a slot
        slots.memory.protect()
        assert all(slots.ask(may_overlap=True)[name] is kept[name] for name in kept)


def test_lent_arrays_that_are_kept_where_contributions_overlap_are_copied() -> None:
    slots = FakeSlots()
    kept = slots.ask()
    assert slots.ask(may_overlap=True)["w"] is not kept["w"]
    assert [in_slot(slots, slots.push(fill(kept, value))) for value in range(2)] == [1, 2]


def test_without_a_free_slot_the_sessions_own_memory_serves() -> None:
    slots = FakeSlots(num_slots=1)
    slots.push(filled(1))
    arrays = fill(slots.ask(), 2)
    assert slots.push(arrays).memory.arenas == (None, None)


def test_shards_that_give_no_memory_are_sent_the_sessions_own() -> None:
    slots = FakeSlots(num_sharing=0)
    kept = slots.ask()
    for send in (slots.push, slots.step):
        assert send(kept).memory.arenas == (None, None)
        slots.memory.protect()
        fill(kept, 1)
        assert slots.ask()["w"] is kept["w"]


def test_part_of_the_memory_may_be_of_shards_and_part_the_sessions_own() -> None:
    slots = FakeSlots(num_sharing=1)
    kept = slots.ask()
    slots.step(kept)
    slots.memory.protect()
    assert not kept["w"].flags.writeable
    assert kept["b"].flags.writeable and kept["cut"].flags.writeable
