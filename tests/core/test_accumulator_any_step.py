"""Contributions of steps gone by, where they are accepted: staged until they are applied, discarded, or applied on arrival."""

from collections.abc import Iterator

import pytest

from ps_protocol.errors import EpochMismatch, Superseded
from ps_protocol.roles.shard import PushReply, PushResult
from tests.core.staging_shard import STEP, StagingShard, push_id


@pytest.fixture
def lenient() -> Iterator[StagingShard]:
    shard = StagingShard()
    shard.accumulator.accepts_any_step = True
    yield shard
    shard.accumulator.clear(EpochMismatch("the test is over"))
    assert shard.num_lent == 0


def test_contributions_of_any_step_are_staged_and_stay(lenient: StagingShard) -> None:
    for worker, step in enumerate((STEP - 1, STEP, STEP + 1)):
        assert lenient.push(worker, step=step) is PushResult.STAGED
    under_way = lenient.open(3, step=STEP - 2)
    lenient.advance()
    assert lenient.accumulator.num_staged == 3
    assert lenient.fill(under_way)
    assert lenient.stage(under_way).result is PushResult.STAGED


def test_applied_contributions_are_ended_by_name(lenient: StagingShard) -> None:
    lenient.push(0)
    lenient.push(1)
    lenient.accumulator.end(lenient.accumulator.contributions([push_id(0)], step=STEP))
    lenient.advance()
    assert (lenient.accumulator.num_staged, lenient.num_lent) == (1, 1)
    assert lenient.push(0) is PushResult.DUPLICATE


def test_discarding_drops_what_is_named_and_knows_no_others(lenient: StagingShard) -> None:
    lenient.push(0)
    lenient.push(1, sequence=1)
    lenient.push(1, sequence=2)
    late, given_up = lenient.open(2), lenient.open(3)
    lenient.accumulator.discard([push_id(0), push_id(9), push_id(2), push_id(3, sequence=0)], current_step=STEP)
    assert lenient.accumulator.num_staged == 2
    assert lenient.stage(late).result is PushResult.STALE
    with pytest.raises(Superseded, match="given up incarnation 1"):
        lenient.stage(given_up)
    lenient.accumulator.discard([push_id(1, incarnation=2, sequence=0)], current_step=STEP)
    assert lenient.accumulator.num_staged == 2
    lenient.accumulator.discard([push_id(1, sequence=0)], current_step=STEP)
    assert (lenient.accumulator.num_staged, lenient.num_lent) == (0, 0)


def test_arrival_counts_as_applied_before_it_is(lenient: StagingShard) -> None:
    contribution = lenient.open()
    lenient.fill(contribution)
    lenient.accumulator.begin_arrival(contribution, step=STEP)
    assert lenient.push() is PushResult.DUPLICATE
    lenient.accumulator.clear(EpochMismatch("cluster epoch rose to 2"))
    assert lenient.num_lent == 1
    lenient.accumulator.end([contribution])
    lenient.accumulator.abandon(contribution)
    assert lenient.stage(contribution) == PushReply(result=PushResult.APPLIED, step=STEP)
    assert (lenient.num_lent, lenient.accumulator.num_pushes) == (0, 1)
