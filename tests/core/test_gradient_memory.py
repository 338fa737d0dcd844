"""Which memory a worker fills next: that of shards where nothing in it can be under way, else another slot's, or its own."""

import numpy as np
import pytest

from ps_protocol.errors import TooManyPushes
from ps_protocol.layout import aligned_bytes
from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.placement import layouts, place
from ps_protocol.tensors import Array, DataType, VariableSpec
from worker_client.gradient_memory import GradientMemory
from worker_client.gradients import Staging
from worker_client.model_memory import ModelMemory

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
    """Two shards' slots: gives the first that is free, the same one until it is pushed."""

    def __init__(self, *, num_slots: int = 3, num_sharing: int = 2) -> None:
        self.layouts = layouts(place(MODEL, num_shards=2), num_shards=2)
        self.slots = [[aligned_bytes(layout.nbytes) if index < num_sharing else None for index, layout in enumerate(self.layouts)]]
        self.slots += [[None if arena is None else arena.copy() for arena in self.slots[0]] for _ in range(num_slots - 1)]
        self.in_flight: set[int] = set()
        self.memory = GradientMemory(MODEL, ModelMemory(MODEL, layouts=self.layouts, is_writable=True), self.give)

    def give(self) -> list[Array | None]:
        free = [index for index in range(len(self.slots)) if index not in self.in_flight]
        if not free:
            raise TooManyPushes("all slots are in flight")
        return self.slots[free[0]]

    def push(self, gradients: dict[str, Array]) -> Staging:
        """Stages and sends; the slot that it lies in is under way from now on."""
        staging = self.memory.staging_for(gradients)
        staged = staging.stage(gradients, step=0)
        staged.memory.pack()
        for index, arenas in enumerate(self.slots):
            if any(mine is not None and mine is arena for mine, arena in zip(arenas, staged.memory.arenas, strict=True)):
                self.in_flight.add(index)
        self.memory.note_push()
        return staging


def in_slot(slots: FakeSlots, staging: Staging) -> int:
    """The slot that a staging lies in."""
    return next(index for index, arenas in enumerate(slots.slots) if arenas[0] is staging.memory.arenas[0])


def filled(value: float) -> dict[str, Array]:
    return {spec.name: np.full(spec.shape, value, np.float32) for spec in MODEL.variables}


def test_arrays_kept_over_steps_stay_the_memory_that_is_sent() -> None:
    slots = FakeSlots()
    kept = dict(slots.memory.ask(may_overlap=False).views)
    for step in range(3):
        for array in kept.values():
            array[...] = step
        staging = slots.push(kept)
        assert all(staging.views[name] is kept[name] for name in kept)
        assert in_slot(slots, staging) == 0
        slots.in_flight.clear()
        slots.memory.release()


def test_what_is_under_way_cannot_be_written_and_the_next_arrays_are_others() -> None:
    slots = FakeSlots()
    first = dict(slots.memory.ask(may_overlap=False).views)
    first["w"][...] = 1
    slots.push(first)
    slots.memory.protect()
    with pytest.raises(ValueError, match="read-only"):
        first["w"][...] = 2
    second = dict(slots.memory.ask(may_overlap=False).views)
    second["w"][...] = 2
    np.testing.assert_array_equal(first["w"], np.ones(4))
    assert not np.shares_memory(first["w"], second["w"])


def test_arrays_can_be_written_again_when_their_contribution_is_over() -> None:
    slots = FakeSlots()
    kept = dict(slots.memory.ask(may_overlap=False).views)
    slots.push(kept)
    slots.memory.protect()
    slots.in_flight.clear()
    slots.memory.release()
    kept["w"][...] = 2
    assert slots.push(kept).views["w"] is kept["w"]


def test_arrays_of_a_contribution_under_way_may_be_pushed_again_and_are_copied() -> None:
    slots = FakeSlots()
    kept = dict(slots.memory.ask(may_overlap=False).views)
    kept["w"][...] = 3
    kept["cut"][...] = 4
    slots.push(kept)
    slots.memory.protect()
    again = slots.push(kept)
    assert in_slot(slots, again) == 1
    np.testing.assert_array_equal(again.views["w"], np.full(4, 3))
    np.testing.assert_array_equal(again.views["cut"], np.full(40, 4))


def test_foreign_arrays_are_copied_straight_into_a_slot() -> None:
    slots = FakeSlots()
    staging = slots.push(filled(7))
    assert in_slot(slots, staging) == 0
    np.testing.assert_array_equal(staging.views["w"], np.full(4, 7))


def test_who_asks_once_where_contributions_overlap_has_arrays_that_stay_writable() -> None:
    slots = FakeSlots()
    kept = dict(slots.memory.ask(may_overlap=True).views)
    for value in range(3):
        for array in kept.values():
            array[...] = value
        staging = slots.push(kept)
        assert staging.memory.arenas == (None, None)  # the session's own: the shard copies it into a slot
        slots.memory.protect()
    assert all(array.flags.writeable for array in kept.values())


def test_who_asks_each_time_where_contributions_overlap_gets_slots_by_turns() -> None:
    slots = FakeSlots()
    slots.push(dict(slots.memory.ask(may_overlap=True).views))
    seen = []
    for _ in range(2):
        slots.memory.protect()
        arrays = dict(slots.memory.ask(may_overlap=True).views)
        arrays["w"][...] = 1
        seen.append(in_slot(slots, slots.push(arrays)))
    assert seen == [0, 1]
    slots.in_flight.remove(0)
    assert slots.memory.ask(may_overlap=True).views["w"].flags.writeable
    assert in_slot(slots, slots.memory.ask(may_overlap=True)) == 0


def test_without_a_free_slot_the_sessions_own_memory_serves() -> None:
    slots = FakeSlots(num_slots=1)
    slots.push(filled(1))
    slots.memory.protect()
    staging = slots.memory.ask(may_overlap=False)
    assert staging.memory.arenas == (None, None)
    staging.views["w"][...] = 2
    assert slots.push(dict(staging.views)).memory is staging.memory


def test_shards_that_give_no_memory_are_sent_the_sessions_own() -> None:
    slots = FakeSlots(num_sharing=0)
    kept = dict(slots.memory.ask(may_overlap=False).views)
    slots.push(kept)
    slots.memory.protect()
    kept["w"][...] = 1
    assert slots.memory.ask(may_overlap=False).views["w"] is kept["w"]


def test_part_of_the_memory_may_be_of_shards_and_part_the_sessions_own() -> None:
    slots = FakeSlots(num_sharing=1)
    kept = dict(slots.memory.ask(may_overlap=False).views)
    slots.push(kept)
    slots.memory.protect()
    assert not kept["w"].flags.writeable
    assert kept["b"].flags.writeable and kept["cut"].flags.writeable
