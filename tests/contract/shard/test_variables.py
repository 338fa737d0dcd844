"""Variables of every `Shard`, on every transport: creation, reading, slots, status."""

from collections.abc import Callable

import numpy as np
import pytest

from ps_protocol.errors import (
    FrameOutOfOrder,
    LayoutMismatch,
    NotInitialized,
    PsError,
    SlotNotFound,
    StepGone,
    StepNotReady,
    TruncatedStream,
    VariableExists,
    WrongRole,
)
from ps_protocol.model.layout import Layout, Segments, aligned_bytes
from ps_protocol.model.variables import DataType
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import AdoptRequest, ReadMetricsRequest, Shard, ShardStatusRequest
from tests.support.chief.eras import fence
from tests.support.parameter_servers.shards import CHIEF, EACH_WAY, EPOCH, MIXED, Trainer, layout_of, shard_over, variable, views

shard = shard_over(EACH_WAY)

# Creation


def test_initial_values_are_read_back(trainer: Trainer) -> None:
    trainer.adopt()
    values = trainer.random(1)
    assert trainer.shard.create_variables(trainer.spec(step=7), Segments([values]))
    step, read = trainer.read()
    assert step == 7
    np.testing.assert_array_equal(read, values)


def test_same_creation_again_changes_nothing(trainer: Trainer) -> None:
    assert trainer.create(1.0)
    assert not trainer.create(2.0)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))


def test_later_attempt_replaces_the_values_before_the_first_step(trainer: Trainer) -> None:
    trainer.create(1.0)
    assert trainer.create(2.0, attempt=2)
    step, values = trainer.read(0)
    assert step == 0
    np.testing.assert_array_equal(values, trainer.arena(2.0))
    assert not trainer.create(3.0, attempt=1)


def test_later_attempt_that_breaks_off_leaves_the_values(trainer: Trainer) -> None:
    trainer.create(1.0)
    with pytest.raises(TruncatedStream):
        trainer.shard.create_variables(trainer.spec(attempt=2), Segments([trainer.arena(2.0)[:-64]]))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.create(3.0, attempt=2)


def test_creation_that_comes_late_changes_nothing_that_another_chief_has_found(trainer: Trainer) -> None:
    trainer.create(1.0)
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)))
    trainer.push(trainer.header())
    assert not trainer.shard.create_variables(trainer.spec(attempt=2), trainer.first_values(2.0))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 1


def test_creation_in_the_next_epoch_replaces_values_that_another_chief_has_found_and_nobody_has_trained(trainer: Trainer) -> None:
    trainer.create(1.0)
    for epoch in (EPOCH, EPOCH + 1):
        trainer.shard.call(AdoptRequest(fence=fence(epoch, CHIEF + 1)))
    assert trainer.shard.create_variables(trainer.spec(epoch=EPOCH + 1), trainer.first_values(2.0))


def test_later_attempt_changes_nothing_after_the_first_step(trainer: Trainer) -> None:
    trainer.create(1.0)
    trainer.train(0)
    assert not trainer.create(9.0, attempt=2)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_a_creation_with_other_variables_is_refused_by_name(trainer: Trainer) -> None:
    trainer.create()
    other = layout_of(*MIXED.slices[:1], variable("bias", (4,)), *MIXED.slices[2:])
    with pytest.raises(VariableExists, match=r"slices\[1\].variable.shape is \(4,\), the shard's is \(3,\)"):
        trainer.shard.create_variables(trainer.spec(other), Segments([aligned_bytes(other.nbytes)]))
    with pytest.raises(VariableExists, match=r"slices\[4\] is missing"):
        trainer.shard.create_variables(trainer.spec(Layout(MIXED.slices[:4])), Segments([]))


def test_a_creation_with_another_optimizer_is_refused(trainer: Trainer) -> None:
    trainer.create()
    with pytest.raises(VariableExists, match=r"optimizer.name is .adam., the shard.s is .sgd."):
        Trainer(trainer.shard, optimizer="adam").create()


def test_creation_for_another_shard_is_refused(trainer: Trainer) -> None:
    with pytest.raises(WrongRole, match="this is ps 0, not ps 4"):
        trainer.create(shard=4)


@pytest.mark.parametrize(("num_bytes", "error"), [(-64, TruncatedStream), (64, FrameOutOfOrder)], ids=["short", "long"])
def test_values_of_another_length_create_nothing(trainer: Trainer, num_bytes: int, error: type[PsError]) -> None:
    trainer.adopt()
    with pytest.raises(error):
        trainer.shard.create_variables(trainer.spec(), Segments([aligned_bytes(MIXED.nbytes + num_bytes)]))
    with pytest.raises(NotInitialized, match="ps 0: the variables have no values yet; waiting for a worker to initialise the model"):
        trainer.read()
    assert trainer.shard.call(ShardStatusRequest()).report.allocated_bytes == 0
    assert trainer.create()


def test_calls_before_the_variables_exist_are_refused(trainer: Trainer) -> None:
    trainer.adopt()
    calls: list[Callable[[], object]] = [
        lambda: trainer.read(),
        lambda: trainer.push(trainer.header()),
        lambda: trainer.apply(PushId(worker=0, incarnation=1, sequence=1)),
        lambda: trainer.shard.call(ReadMetricsRequest(epoch=EPOCH)),
        lambda: trainer.slot("momentum"),
    ]
    for call in calls:
        with pytest.raises(NotInitialized, match="waiting for a worker to initialise the model"):
            call()


@pytest.mark.parametrize(
    "layout",
    [layout_of(), layout_of(variable("none", (0, 3))), layout_of(variable("scalar")), layout_of(variable("d", (), DataType.FLOAT64))],
    ids=["no variables", "no elements", "a scalar", "a double"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_shards_with_the_smallest_models_advance_with_the_others(shard: Shard, layout: Layout, optimizer: str) -> None:
    trainer = Trainer(shard, layout, optimizer=optimizer)
    assert trainer.create(1.0)
    for step in range(3):
        assert trainer.train(step).step == step + 1
    assert trainer.read()[0] == 3
    for slot in shard.call(ShardStatusRequest()).slots:
        assert trainer.slot(slot)[0] == 3


def test_padding_that_a_client_fills_stays_zero(trainer: Trainer) -> None:
    trainer.adopt()
    dirty = trainer.arena()
    dirty[:] = 255
    for view in views(MIXED, dirty).values():
        view[...] = 1.0
    trainer.shard.create_variables(trainer.spec(), Segments([dirty]))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    header = trainer.header()
    trainer.push(header, dirty)
    trainer.apply(header.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))
    assert trainer.shard.call(ShardStatusRequest()).report.num_nonfinite == 0


# Reading


def test_steps_that_are_over_and_steps_to_come_are_distinguished(trainer: Trainer) -> None:
    trainer.create()
    for step in range(3):
        trainer.train(step)
    with pytest.raises(StepGone, match="step 1 is gone, the shard is at step 3") as gone:
        trainer.read(1)
    with pytest.raises(StepNotReady, match="step 4 is not there yet, the shard is at step 3"):
        trainer.read(4)
    assert gone.value.facts["step"] == "3"
    assert trainer.read()[0] == 3


def test_reader_with_another_layout_is_refused(trainer: Trainer) -> None:
    trainer.create()
    with pytest.raises(LayoutMismatch, match=f"its layout is '{MIXED.hash}', you have 'other'"):
        trainer.read(layout_hash="other")


# Slots and status


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("sgd", []), ("momentum", ["momentum"]), ("adagrad", ["accumulator"]), ("adam", ["m", "v"])],
)
def test_slots_have_the_names_of_the_original(shard: Shard, optimizer: str, slots: list[str]) -> None:
    trainer = Trainer(shard, optimizer=optimizer)
    trainer.create()
    assert list(shard.call(ShardStatusRequest()).slots) == slots
    with pytest.raises(SlotNotFound, match=f"optimizer '{optimizer}' has no slot 'velocity'; it has {', '.join(slots) or 'none'}"):
        trainer.slot("velocity")


def test_slot_is_read_with_its_step(shard: Shard) -> None:
    trainer = Trainer(shard, optimizer="adagrad", hyperparameters={"initial_accumulator_value": 0.25})
    trainer.create()
    step, slot = trainer.slot("accumulator")
    assert step == 0
    for view in views(MIXED, slot).values():
        assert (view == 0.25).all()
    trainer.train(0, value=2.0)
    step, slot = trainer.slot("accumulator")
    assert step == 1
    for view in views(MIXED, slot).values():
        assert (view == 4.25).all()


def test_the_status_counts_steps_contributions_and_memory(trainer: Trainer) -> None:
    fresh = trainer.shard.call(ShardStatusRequest())
    assert (fresh.shard, fresh.fence.epoch, fresh.fence.chief_incarnation, fresh.step, fresh.report.allocated_bytes) == (0, 0, 0, None, 0)
    trainer.create()
    trainer.train(0)
    trainer.push(trainer.header(step=1))
    status = trainer.shard.call(ShardStatusRequest())
    assert (status.fence, status.step) == (fence(EPOCH, CHIEF), 1)
    assert status.report.allocated_bytes == 3 * MIXED.nbytes
    assert (status.report.variables_bytes, status.report.slots_bytes) == (2 * MIXED.nbytes, 0)
    assert (status.report.num_staged, status.report.num_pushes) == (1, 2)
    assert status.report.last_apply_s > 0
    assert status.process_incarnation == fresh.process_incarnation != 0


def test_steps_take_no_more_memory(trainer: Trainer) -> None:
    trainer.create()
    allocated = []
    for step in range(20):
        headers = [trainer.header(worker, step=step) for worker in range(3)]
        for header in headers:
            trainer.push(header)
        trainer.apply(*(header.push_id for header in headers), step=step)
        allocated.append(trainer.shard.call(ShardStatusRequest()).report.allocated_bytes)
    assert set(allocated) == {5 * MIXED.nbytes}
