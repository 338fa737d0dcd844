"""Settings of every `Shard` other than the defaults: stale contributions, arrivals, weights, limits, other numbers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import ContributionMissing, InvalidSpec, LimitExceeded, MalformedMessage, StepMismatch, Superseded
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ClipSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import AdoptRequest, Metric, PrepareRequest, PushResult, ReadMetricsRequest, Shard, ShardStatusRequest
from tests.support.chief.eras import fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, keeping, layout_of, table, variable, views

SMALL = layout_of(variable("w", (4,)), variable("b", (2,)), table("emb", (6, 2)))


@pytest.fixture
def small(shard: Shard) -> Trainer:
    """Two dense variables and a table, all 0."""
    trainer = Trainer(shard, SMALL)
    trainer.create()
    return trainer


# Gradients that are not there


@pytest.mark.parametrize("factors", [{"weights": (1.0, 1.0)}, {"scales": (1.0,)}])
def test_weights_and_scales_of_the_wrong_number_are_refused(small: Trainer, factors: dict[str, Any]) -> None:
    header, _ = small.push_rows(dense=small.arena(2.0))
    with pytest.raises((InvalidSpec, MalformedMessage), match="give one"):
        small.shard.call(small.request(header.push_id, **factors))
    assert small.apply(header.push_id).step == 1


# Limits on norms


def test_a_repeated_prepare_is_answered_after_its_step(small: Trainer) -> None:
    header, _ = small.push_rows(dense=small.arena(2.0))
    sums = small.shard.call(PrepareRequest(of=small.request(header.push_id)))
    small.apply(header.push_id)
    assert list(small.shard.call(PrepareRequest(of=small.request(header.push_id)))) == list(sums)
    with pytest.raises(ContributionMissing):
        small.shard.call(PrepareRequest(of=small.request(header.push_id, step=1)))


# Steps gone by


def test_stale_contributions_stay_until_they_are_applied(small: Trainer) -> None:
    small.configure(1, accepts_stale=True)
    first, _ = small.push_rows(0, dense=small.arena(2.0))
    second, _ = small.push_rows(1, dense=small.arena(4.0))
    small.apply(first.push_id, step=0)
    late, reply = small.push_rows(2, step=0, dense=small.arena(6.0))
    assert reply.result is PushResult.STAGED
    small.apply(second.push_id, step=1)
    small.apply(late.push_id, step=2)
    step, memory = small.read()
    assert (step, small.shard.call(ShardStatusRequest()).report.num_staged) == (3, 0)
    np.testing.assert_array_equal(views(small.layout, memory)["w"], [-6.0] * 4)


def test_discarded_contributions_are_dropped(small: Trainer) -> None:
    small.configure(1, accepts_stale=True)
    headers = [small.push_rows(worker, dense=small.arena(2.0))[0] for worker in (0, 1, 2, 2)]
    gone = PushId(worker=2, incarnation=1, sequence=0)
    small.shard.call(small.request(headers[0].push_id, discards=(headers[1].push_id, gone)))
    assert small.shard.call(ShardStatusRequest()).report.num_staged == 0
    with pytest.raises(ContributionMissing):
        small.apply(headers[1].push_id, step=1)
    assert small.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1))).given_up == (gone,), (
        "the next chief has to know whom it cannot take for the same"
    )
    assert small.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 1))).given_up == ()


def test_a_return_to_strict_steps_drops_stale_contributions(small: Trainer) -> None:
    small.configure(1, accepts_stale=True)
    first, _ = small.push_rows(0, dense=small.arena(2.0))
    small.push_rows(1, dense=small.arena(4.0))
    small.apply(first.push_id, step=0)
    present, _ = small.push_rows(2, step=1, dense=small.arena(4.0))
    small.configure(2)
    assert small.shard.call(ShardStatusRequest()).report.num_staged == 1
    assert small.push_rows(3, step=0, dense=small.arena(1.0))[1].result is PushResult.STALE
    small.apply(present.push_id, step=1)
    np.testing.assert_array_equal(views(small.layout, small.read()[1])["w"], [-3.0] * 4)


def test_where_stale_contributions_are_kept_one_for_a_later_step_is_accepted_too(small: Trainer) -> None:
    small.configure(1, accepts_stale=True)
    header, reply = small.push_rows(step=1, dense=small.arena(2.0))
    assert reply.result is PushResult.STAGED
    assert small.apply(header.push_id, step=0).step == 1


# Arrivals


def test_contribution_is_applied_on_arrival_once(small: Trainer) -> None:
    small.configure(1, applies_on_arrival=True)
    header, reply = small.push_rows(dense=small.arena(2.0), rows={0: ([1, 1], 2.0)}, absent=(1,))
    assert reply.result is PushResult.APPLIED
    assert small.push(header, small.arena(2.0)).result is PushResult.DUPLICATE
    step, memory = small.read()
    assert (step, small.shard.call(ShardStatusRequest()).report.num_staged) == (1, 0)
    values = views(small.layout, memory)
    np.testing.assert_array_equal([values["w"][0], values["b"][0]], [-1.0, 0.0])
    np.testing.assert_array_equal(small.rows([1, 0])[1][:, 0], [-2.0, 0.0])
    assert small.shard.call(ShardStatusRequest()).report.last_apply_s > 0


def test_old_steps_are_applied_on_arrival_too(small: Trainer) -> None:
    small.configure(1, applies_on_arrival=True)
    for worker in range(4):
        assert small.push_rows(worker, step=0, dense=small.arena(2.0))[1].result is PushResult.APPLIED
    assert small.read()[0] == 4
    with pytest.raises(StepMismatch, match="applies on arrival"):
        small.apply(PushId(worker=0, incarnation=1, sequence=1), step=4)


def test_arrivals_of_many_workers_overlap_and_readers_do_not_wait(small: Trainer) -> None:
    small.configure(1, applies_on_arrival=True)

    def work(worker: int) -> None:
        for _ in range(10):
            assert small.push_rows(worker, dense=small.arena(2.0), rows={0: ([worker], 2.0)})[1].result is PushResult.APPLIED
            small.read()
            small.rows([worker])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, worker) for worker in range(4)]:
            future.result(50)
    assert small.read()[0] == 40
    # Nobody else touches a worker's row, so nothing of it is lost.
    np.testing.assert_array_equal(small.rows(range(4))[1][:, 0], [-10.0] * 4)


@pytest.mark.parametrize("before", [True, False], ids=["from arrivals", "to arrivals"])
def test_applying_on_arrival_cannot_be_switched_once_a_contribution_has_been_applied(small: Trainer, before: bool) -> None:
    small.configure(1, applies_on_arrival=before)
    header, reply = small.push_rows(0, dense=small.arena(2.0))
    if reply.result is PushResult.STAGED:
        small.apply(header.push_id, step=0)
    with pytest.raises(InvalidSpec, match="applies_on_arrival: it cannot change once anything has been applied"):
        small.configure(2, applies_on_arrival=not before)
    assert small.shard.call(ShardStatusRequest()).settings_version == 1


def test_limit_on_a_norm_needs_all_shards_and_so_no_arrivals(shard: Shard) -> None:
    trainer = Trainer(shard, SMALL, clip=ClipSpec(norm=1.0))
    trainer.create()
    with pytest.raises(InvalidSpec, match="use locking"):
        trainer.configure(1, applies_on_arrival=True)
    assert shard.call(ShardStatusRequest()).settings_version == 0


# Settings


def test_a_change_to_another_optimizer_is_refused_and_changes_nothing(small: Trainer) -> None:
    with pytest.raises(InvalidSpec, match="'sgd' cannot become 'adam'"):
        small.configure(1, accepts_stale=True, optimizers=((small.optimizer, OptimizerSpec(name="adam", learning_rate=constant(1.0))),))
    assert small.shard.call(ShardStatusRequest()).settings_version == 0


def test_settings_hold_where_there_are_variables_and_for_the_newest_chief(shard: Shard) -> None:
    trainer = Trainer(shard, SMALL)
    trainer.adopt()
    trainer.configure(1)
    trainer.create()
    assert shard.call(ShardStatusRequest()).settings_version == 0
    with pytest.raises(Superseded):
        trainer.configure(1, chief_incarnation=CHIEF - 1)
    trainer.configure(5)
    # Its successor counts anew.
    trainer.configure(1, chief_incarnation=CHIEF + 1, accepts_stale=True)
    assert shard.call(ShardStatusRequest()).settings_version == 1


def test_settings_hold_although_the_record_that_names_them_is_too_large(small: Trainer) -> None:
    with pytest.raises(LimitExceeded):
        small.shard.call(keeping(1, bytes(13 << 20)))
    assert small.shard.call(ShardStatusRequest()).settings_version == 1


def test_later_epoch_begins_with_the_settings_of_the_model(small: Trainer) -> None:
    faster = OptimizerSpec(name="sgd", learning_rate=constant(8.0))
    small.configure(4, accepts_stale=True, optimizers=((small.optimizer, faster),))
    small.train(0)
    adoption = small.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)))
    assert (adoption.step, small.shard.call(ShardStatusRequest()).settings_version) == (1, 0)
    header = small.header(step=1, epoch=EPOCH + 1)
    assert small.push(header).result is PushResult.STAGED
    assert small.apply(header.push_id, step=1, epoch=EPOCH + 1).step == 2
    np.testing.assert_array_equal(views(small.layout, small.read(epoch=EPOCH + 1)[1])["w"], [-8.0 - 0.5] * 4)


def test_shard_keeps_applying_on_arrival_in_a_later_epoch(small: Trainer) -> None:
    small.configure(4, applies_on_arrival=True)
    small.push(small.header())
    assert small.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF))).step == 1
    assert small.push(small.header(step=1, epoch=EPOCH + 1)).result is PushResult.APPLIED


# Metrics


def test_metrics_are_counted_when_their_contribution_is_applied(small: Trainer) -> None:
    headers = []
    for worker, (value, weight) in enumerate(((2.0, 1.0), (4.0, 3.0))):
        header = small.header(worker, metrics={"loss": Metric(value=value, weight=weight)})
        small.push(header)
        headers.append(header)
    assert list(small.shard.call(ReadMetricsRequest(epoch=EPOCH))) == []
    small.apply(headers[1].push_id)
    (cell,) = small.shard.call(ReadMetricsRequest(epoch=EPOCH))
    assert (cell.name, cell.worker, cell.total, cell.weight, cell.count, cell.last) == ("loss", 1, 12.0, 3.0, 1, 4.0)
