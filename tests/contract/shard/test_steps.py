"""Steps of every `Shard`, on every transport: the mean of the named contributions, applied once."""

import math

import numpy as np
import pytest

from ps_protocol.errors import (
    ContributionMissing,
    StepMismatch,
)
from ps_protocol.roles.contribution import PushId, contributions_named
from ps_protocol.roles.shard import ShardStatusRequest
from tests.support.parameter_servers.shards import TRANSPORTS, Trainer, shard_over

shard = shard_over(TRANSPORTS)


def test_mean_of_the_named_contributions_is_applied(trainer: Trainer) -> None:
    trainer.create(1.0)
    headers = [trainer.header(worker) for worker in range(3)]
    for header, value in zip(headers, (2.0, 4.0, 600.0), strict=True):
        trainer.push(header, trainer.arena(value))
    assert trainer.apply(headers[0].push_id, headers[1].push_id).step == 1
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0 - 0.5 * 3.0))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0


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


def test_a_missing_contribution_is_named_in_the_facts_and_the_step_is_the_mean_of_the_others(trainer: Trainer) -> None:
    trainer.create(1.0)
    header, missing = trainer.header(), PushId(worker=7, incarnation=1, sequence=3)
    trainer.push(header, trainer.arena(2.0))
    with pytest.raises(ContributionMissing) as caught:
        trainer.apply(header.push_id, missing)
    assert contributions_named(caught.value.facts) == (missing,)
    assert trainer.apply(header.push_id, missing, without=(missing,)).step == 1
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.0))
    assert trainer.apply(header.push_id, missing).repeated_request


def test_a_missing_contribution_that_arrives_late_is_dropped(trainer: Trainer) -> None:
    trainer.create(1.0)
    headers = [trainer.header(0), trainer.header(1)]
    for header in headers:
        trainer.push(header, trainer.arena(2.0))
    trainer.apply(*(header.push_id for header in headers), without=(headers[1].push_id,))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.0))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    assert trainer.train(1, worker=1).step == 2


def test_more_missing_contributions_than_one_error_can_name_are_named_bit_by_bit(trainer: Trainer) -> None:
    trainer.create(1.0)
    missing = tuple(PushId(worker=worker, incarnation=1 << 60, sequence=1 << 60) for worker in range(50))
    known: tuple[PushId, ...] = ()
    while len(known) < len(missing):
        with pytest.raises(ContributionMissing) as caught:
            trainer.apply(*missing, without=known)
        named = contributions_named(caught.value.facts)
        assert named
        assert set(named).isdisjoint(known)
        known += named
    assert trainer.apply(*missing, without=known).step == 1


def test_a_single_warning_reports_that_gradients_are_no_longer_finite(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer.create()
    for step, value in enumerate((1.0, math.nan, math.inf, math.nan, 1.0, math.nan)):
        trainer.train(step, value=value)
    said = [record.message for record in caplog.records if "not finite" in record.message]
    assert [message.partition(" has ")[0] for message in said] == ["ps 0: the gradient of step 1", "ps 0: the gradient of step 5"]
    assert all("--reject-nonfinite" in message for message in said)
