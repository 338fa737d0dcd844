"""What every `Shard` does, whatever carries it: one suite for the in-process shard and for real servers over gRPC."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.errors import (
    ContributionMissing,
    EpochMismatch,
    FrameOutOfOrder,
    LayoutMismatch,
    LimitExceeded,
    NotInitialized,
    PsError,
    PushIdReused,
    ShuttingDown,
    SlotNotFound,
    StepAhead,
    StepGone,
    StepMismatch,
    StepNotReady,
    Superseded,
    TooManyPushes,
    TruncatedStream,
    VariableExists,
    WrongRole,
)
from ps_protocol.layout import Layout, aligned_bytes
from ps_protocol.segments import Segments
from ps_protocol.shard import Adoption, PushId, PushReply, PushResult, Shard
from ps_protocol.tensors import Array, DataType
from tests.contract.shards import CHIEF, EPOCH, MIXED, TRANSPORTS, Trainer, layout_of, open_shard, variable


def _views(layout: Layout, memory: Array) -> dict[str, Array]:
    return {piece.variable.name: layout.view(memory, index) for index, piece in enumerate(layout.slices)}


# Adoption and fences


def test_fresh_shard_has_no_step(shard: Shard) -> None:
    assert shard.adopt(epoch=1, chief_incarnation=1) == Adoption(step=None, layout_hash="")
    assert shard.adopt(epoch=1, chief_incarnation=1) == Adoption(step=None, layout_hash="")


def test_adoption_tells_where_the_shard_stands(trainer: Trainer) -> None:
    trainer.create()
    trainer.train(0)
    assert trainer.shard.adopt(epoch=EPOCH, chief_incarnation=CHIEF + 1) == Adoption(step=1, layout_hash=MIXED.hash)


@pytest.mark.parametrize(("epoch", "chief_incarnation"), [(EPOCH, CHIEF - 1), (EPOCH - 1, CHIEF), (EPOCH + 1, CHIEF - 1)])
def test_earlier_chief_is_superseded(trainer: Trainer, epoch: int, chief_incarnation: int) -> None:
    trainer.adopt()
    with pytest.raises(Superseded):
        trainer.shard.adopt(epoch=epoch, chief_incarnation=chief_incarnation)


def test_earlier_chief_cannot_apply(trainer: Trainer) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    trainer.shard.adopt(epoch=EPOCH, chief_incarnation=CHIEF + 1)
    with pytest.raises(Superseded, match=f"chief incarnation {CHIEF + 1} has adopted it"):
        trainer.apply(header.push_id)
    assert trainer.apply(header.push_id, chief_incarnation=CHIEF + 1).step == 1


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
def test_every_call_of_another_epoch_is_refused(trainer: Trainer, epoch: int) -> None:
    trainer.create()
    shard, into = trainer.shard, Segments([trainer.arena()])
    calls: list[Callable[[], object]] = [
        lambda: shard.create_variables(trainer.spec(epoch=epoch), into),
        lambda: trainer.read(epoch=epoch),
        lambda: trainer.push(trainer.header(epoch=epoch)),
        lambda: trainer.apply(PushId(worker=0, incarnation=1, sequence=1), epoch=epoch),
        lambda: shard.list_slots(epoch=epoch),
        lambda: shard.read_slot("momentum", into, epoch=epoch, layout_hash=MIXED.hash),
        lambda: shard.shutdown(epoch=epoch, reason="test"),
    ]
    for call in calls:
        with pytest.raises(EpochMismatch, match=f"cluster epoch is {EPOCH}, you have epoch {epoch}"):
            call()
    assert trainer.train(0).step == 1


def test_shard_that_nobody_adopted_refuses_in_words(trainer: Trainer) -> None:
    with pytest.raises(EpochMismatch, match="no chief has adopted it since it started"):
        trainer.read()
    with pytest.raises(EpochMismatch, match="no chief has adopted it"):
        trainer.shard.list_slots(epoch=0)


def test_later_epoch_drops_what_is_staged(trainer: Trainer) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    trainer.shard.adopt(epoch=EPOCH + 1, chief_incarnation=CHIEF)
    assert trainer.shard.status().num_staged == 0
    with pytest.raises(ContributionMissing):
        trainer.apply(header.push_id, epoch=EPOCH + 1)


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


def test_later_attempt_changes_nothing_after_the_first_step(trainer: Trainer) -> None:
    trainer.create(1.0)
    trainer.train(0)
    assert not trainer.create(9.0, attempt=2)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_other_variables_are_refused_by_name(trainer: Trainer) -> None:
    trainer.create()
    other = layout_of(*MIXED.slices[:1], variable("bias", (4,)), *MIXED.slices[2:])
    with pytest.raises(VariableExists, match=r"'bias' with shape \(3,\) float32 exists, asked for is variable 'bias' with shape \(4,\)"):
        trainer.shard.create_variables(trainer.spec(other), Segments([aligned_bytes(other.nbytes)]))
    with pytest.raises(VariableExists, match="5 slices exist, asked for are 4"):
        trainer.shard.create_variables(trainer.spec(Layout(MIXED.slices[:4])), Segments([]))


def test_other_optimizer_is_refused(trainer: Trainer) -> None:
    trainer.create()
    with pytest.raises(VariableExists, match="the optimizer is"):
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
    assert trainer.shard.status().allocated_bytes == 0
    assert trainer.create()


def test_nothing_works_before_the_variables_exist(trainer: Trainer) -> None:
    trainer.adopt()
    calls: list[Callable[[], object]] = [
        lambda: trainer.read(),
        lambda: trainer.push(trainer.header()),
        lambda: trainer.apply(PushId(worker=0, incarnation=1, sequence=1)),
        lambda: trainer.shard.list_slots(epoch=EPOCH),
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
def test_smallest_shards_step_along(shard: Shard, layout: Layout, optimizer: str) -> None:
    trainer = Trainer(shard, layout, optimizer=optimizer)
    assert trainer.create(1.0)
    for step in range(3):
        assert trainer.train(step).step == step + 1
    assert trainer.read()[0] == 3
    for slot in shard.list_slots(epoch=EPOCH):
        assert trainer.slot(slot)[0] == 3


def test_padding_that_a_client_fills_stays_zero(trainer: Trainer) -> None:
    trainer.adopt()
    dirty = trainer.arena()
    dirty[:] = 255
    for view in _views(MIXED, dirty).values():
        view[...] = 1.0
    trainer.shard.create_variables(trainer.spec(), Segments([dirty]))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    header = trainer.header()
    trainer.push(header, dirty)
    trainer.apply(header.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))
    assert trainer.shard.status().num_nonfinite == 0


# Reading


def test_last_two_steps_can_be_read(trainer: Trainer) -> None:
    trainer.create(1.0)
    for step in range(3):
        trainer.train(step)
    for step, value in ((3, -0.5), (2, 0.0)):
        read_step, values = trainer.read(step)
        assert read_step == step
        np.testing.assert_array_equal(values, trainer.arena(value))


def test_steps_that_are_gone_or_not_there_are_told_apart(trainer: Trainer) -> None:
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


# Pushing


def test_push_is_staged_and_changes_no_variable(trainer: Trainer) -> None:
    trainer.create(1.0)
    assert trainer.push(trainer.header()) == PushReply(result=PushResult.STAGED, step=0)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.shard.status().num_staged == 1


def test_push_sent_twice_counts_once(trainer: Trainer) -> None:
    trainer.create(1.0)
    header = trainer.header()
    assert trainer.push(header, trainer.arena(1.0)).result is PushResult.STAGED
    assert trainer.push(header, trainer.arena(99.0)).result is PushResult.DUPLICATE
    trainer.apply(header.push_id)
    assert trainer.push(header, trainer.arena(99.0)) == PushReply(result=PushResult.DUPLICATE, step=1)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))
    status = trainer.shard.status()
    assert (status.num_pushes, status.num_duplicates, status.num_staged) == (1, 2, 0)


def test_push_for_a_step_gone_by_is_stale(trainer: Trainer) -> None:
    trainer.create()
    trainer.train(0)
    header = trainer.header(1, step=0)
    assert trainer.push(header) == PushReply(result=PushResult.STALE, step=1)
    assert trainer.push(header) == PushReply(result=PushResult.STALE, step=1)
    assert trainer.shard.status().num_stale == 1


def test_push_for_a_step_to_come_is_refused(trainer: Trainer) -> None:
    trainer.create()
    with pytest.raises(StepAhead, match="local_step 12 is ahead of global_step 0; read"):
        trainer.push(trainer.header(step=12))


def test_push_id_for_another_step_is_refused(trainer: Trainer) -> None:
    trainer.create()
    trainer.train(0)
    with pytest.raises(PushIdReused):
        trainer.push(trainer.header(step=1, sequence=1))


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
    assert trainer.shard.status().num_staged == 0
    assert trainer.push(header).result is PushResult.STAGED


def test_older_incarnation_of_a_worker_is_superseded(trainer: Trainer) -> None:
    trainer.create()
    trainer.push(trainer.header(incarnation=2))
    with pytest.raises(Superseded, match="worker 0: incarnation 2 has pushed, this is 1"):
        trainer.push(trainer.header(incarnation=1))


def test_what_the_older_incarnation_staged_may_still_be_applied(trainer: Trainer) -> None:
    trainer.create(1.0)
    older = trainer.header(incarnation=1)
    trainer.push(older, trainer.arena(1.0))
    trainer.push(trainer.header(incarnation=2), trainer.arena(50.0))
    trainer.apply(older.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_worker_cannot_stage_without_end(trainer: Trainer) -> None:
    trainer.create(max_staged=3)
    for _ in range(3):
        trainer.push(trainer.header())
    with pytest.raises(TooManyPushes, match="worker 0: 3 pushes in flight, limit 3") as caught:
        trainer.push(trainer.header())
    assert caught.value.facts == {"worker": "0", "in_flight": "3", "limit": "3"}
    header = trainer.header(1)
    trainer.push(header)
    trainer.apply(header.push_id)
    assert trainer.push(trainer.header(step=1)).result is PushResult.STAGED


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_is_checked_before_it_is_taken(transport: str, socket_dir: Path) -> None:
    layout = layout_of(variable("w", (1 << 16,)))
    with open_shard(transport, socket_dir=socket_dir, max_memory_bytes=3 * layout.nbytes) as shard:
        with pytest.raises(LimitExceeded, match=r"ps 0: .* needs 1.0 MiB, 768.0 KiB of 768.0 KiB free; .*--max-memory-bytes"):
            Trainer(shard, layout, optimizer="adam").create()
        trainer = Trainer(shard, layout)
        assert trainer.create()
        assert trainer.push(trainer.header(0)).result is PushResult.STAGED
        with pytest.raises(LimitExceeded, match=r"a push of worker 1 needs 256.0 KiB, 0 bytes of 768.0 KiB free"):
            trainer.push(trainer.header(1))
        assert shard.status().allocated_bytes == 3 * layout.nbytes


# Applying


def test_mean_of_the_named_contributions_is_applied(trainer: Trainer) -> None:
    trainer.create(1.0)
    headers = [trainer.header(worker) for worker in range(3)]
    for header, value in zip(headers, (2.0, 4.0, 600.0), strict=True):
        trainer.push(header, trainer.arena(value))
    assert trainer.apply(headers[0].push_id, headers[1].push_id).step == 1
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0 - 0.5 * 3.0))
    assert trainer.shard.status().num_staged == 0


def test_result_does_not_depend_on_the_order_of_arrival(socket_dir: Path) -> None:
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        with open_shard("in_process", socket_dir=socket_dir) as shard:
            trainer = Trainer(shard, optimizer="adam")
            trainer.create(1.0)
            headers = [trainer.header(worker) for worker in range(5)]
            for worker in order:
                trainer.push(headers[worker], trainer.random(worker))
            trainer.apply(*(header.push_id for header in headers))
            results.append(trainer.read()[1])
    np.testing.assert_array_equal(results[0], results[1])


def test_apply_repeated_has_its_effect_once(trainer: Trainer) -> None:
    trainer.create(1.0)
    header = trainer.header()
    trainer.push(header)
    first, second = trainer.apply(header.push_id), trainer.apply(header.push_id)
    assert (first.step, first.repeated_request) == (1, False)
    assert (second.step, second.repeated_request) == (1, True)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_apply_repeated_with_other_contributors_is_refused(trainer: Trainer) -> None:
    trainer.create()
    trainer.train(0)
    with pytest.raises(StepMismatch, match="step 0 was applied with other contributors: the shard is at step 1"):
        trainer.apply(PushId(worker=9, incarnation=1, sequence=1))


@pytest.mark.parametrize("step", [1, 5])
def test_apply_of_another_step_is_refused(trainer: Trainer, step: int) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    with pytest.raises(StepMismatch, match=f"step {step} is not the one to apply: the shard is at step 0"):
        trainer.apply(header.push_id, step=step)


def test_apply_with_a_missing_contribution_changes_nothing(trainer: Trainer) -> None:
    trainer.create(1.0)
    header = trainer.header()
    trainer.push(header)
    with pytest.raises(ContributionMissing, match="1 of 2 contributions are not staged here: 7/1/3"):
        trainer.apply(header.push_id, PushId(worker=7, incarnation=1, sequence=3))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.apply(header.push_id).step == 1


@pytest.mark.parametrize("num_contributors", [0, 2])
def test_apply_needs_contributors_and_each_once(trainer: Trainer, num_contributors: int) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    with pytest.raises(PsError) as caught:
        trainer.apply(*[header.push_id] * num_contributors)
    assert caught.value.reason in ("INVALID_SPEC", "MALFORMED_MESSAGE")
    assert trainer.apply(header.push_id).step == 1


def test_nonfinite_elements_of_the_mean_are_counted(trainer: Trainer) -> None:
    trainer.create()
    gradients = trainer.arena(1.0)
    views = _views(MIXED, gradients)
    views["w"][0, :3] = np.nan
    views["d"][4] = np.inf
    header = trainer.header()
    assert trainer.push(header, gradients).result is PushResult.STAGED
    trainer.apply(header.push_id)
    assert trainer.shard.status().num_nonfinite == 4
    trainer.train(1)
    assert trainer.shard.status().num_nonfinite == 0


# Slots and status


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [("sgd", []), ("momentum", ["momentum"]), ("adagrad", ["accumulator"]), ("adam", ["m", "v"])],
)
def test_slots_have_the_names_of_the_original(shard: Shard, optimizer: str, slots: list[str]) -> None:
    trainer = Trainer(shard, optimizer=optimizer)
    trainer.create()
    assert list(shard.list_slots(epoch=EPOCH)) == slots
    with pytest.raises(SlotNotFound, match=f"optimizer '{optimizer}' has no slot 'velocity'; it has {', '.join(slots) or 'none'}"):
        trainer.slot("velocity")


def test_slot_is_read_with_its_step(shard: Shard) -> None:
    trainer = Trainer(shard, optimizer="adagrad", hyperparameters={"initial_accumulator_value": 0.25})
    trainer.create()
    step, slot = trainer.slot("accumulator")
    assert step == 0
    for view in _views(MIXED, slot).values():
        assert (view == 0.25).all()
    trainer.train(0, value=2.0)
    step, slot = trainer.slot("accumulator")
    assert step == 1
    for view in _views(MIXED, slot).values():
        assert (view == 4.25).all()


def test_status_counts(trainer: Trainer) -> None:
    fresh = trainer.shard.status()
    assert (fresh.shard, fresh.epoch, fresh.chief_incarnation, fresh.step, fresh.allocated_bytes) == (0, 0, 0, None, 0)
    trainer.create()
    trainer.train(0)
    trainer.push(trainer.header(step=1))
    status = trainer.shard.status()
    assert (status.epoch, status.chief_incarnation, status.step, status.num_slices) == (EPOCH, CHIEF, 1, 5)
    assert (status.arena_bytes, status.allocated_bytes) == (MIXED.nbytes, 3 * MIXED.nbytes)
    assert (status.num_staged, status.num_pushes) == (1, 2)
    assert status.last_apply_s > 0
    assert status.process_incarnation == fresh.process_incarnation != 0


def test_steps_take_no_more_memory(trainer: Trainer) -> None:
    trainer.create()
    allocated = []
    for step in range(20):
        headers = [trainer.header(worker, step=step) for worker in range(3)]
        for header in headers:
            trainer.push(header)
        trainer.apply(*(header.push_id for header in headers), step=step)
        allocated.append(trainer.shard.status().allocated_bytes)
    assert set(allocated) == {5 * MIXED.nbytes}


# The end


def test_shard_that_shuts_down_refuses_with_the_reason(trainer: Trainer) -> None:
    trainer.create()
    trainer.shard.shutdown(epoch=EPOCH, reason="training is finished")
    trainer.shard.shutdown(epoch=EPOCH, reason="again")
    with pytest.raises(ShuttingDown, match="ps 0 is shutting down: training is finished"):
        trainer.read()
    with pytest.raises(ShuttingDown):
        trainer.push(trainer.header())
    assert trainer.shard.status().step == 0


def test_shard_that_nobody_adopted_can_be_shut_down(shard: Shard) -> None:
    shard.shutdown(epoch=0, reason="not needed")
    with pytest.raises(ShuttingDown):
        shard.adopt(epoch=1, chief_incarnation=1)
