"""Contributions from their first byte to the step that they enter, or to any other end. No buffer is lost."""

from collections.abc import Iterator

import numpy as np
import pytest

from ps_protocol.errors import (
    Cancelled,
    ContributionMissing,
    EpochMismatch,
    InvalidSpec,
    LimitExceeded,
    PsError,
    PushIdReused,
    StepAhead,
    Superseded,
    TooManyPushes,
)
from ps_protocol.roles.contribution import contributions_named
from ps_protocol.roles.shard import PushReply, PushResult
from ps_server.contributions import inbox
from ps_server.contributions.inbox import Contribution
from tests.support.parameter_servers.staging import NBYTES, STEP, StagingShard, push_id

# Contributions from their first byte to the step they enter, or whatever else ends them. After each test no buffer is lost.


@pytest.fixture
def shard() -> Iterator[StagingShard]:
    fixture = StagingShard()
    yield fixture
    fixture.inbox.clear(EpochMismatch("the test is over"))
    assert fixture.num_lent == 0
    assert not fixture.inbox._num_held
    fixture.pool.release_all()
    assert fixture.budget.allocated_bytes == 0


def test_an_incomplete_push_is_not_staged(shard: StagingShard) -> None:
    shard.fill(shard.open())
    assert shard.inbox.num_staged == 0
    with pytest.raises(ContributionMissing):
        shard.values(push_id(0))


def test_abandoned_push_gives_its_buffer_back_and_can_be_sent_again(shard: StagingShard) -> None:
    contribution = shard.open()
    shard.fill(contribution)
    shard.inbox.abandon(contribution)
    assert shard.num_lent == 0
    assert shard.push() is PushResult.STAGED


def test_abandoning_after_staging_changes_nothing(shard: StagingShard) -> None:
    contribution = shard.open()
    shard.stage(contribution)
    shard.inbox.abandon(contribution)
    assert shard.inbox.num_staged == 1


def test_gradients_come_in_the_order_of_push_ids(shard: StagingShard) -> None:
    for worker, value in ((2, 20), (0, 10), (1, 15)):
        shard.push(worker, value=value)
    assert shard.values(push_id(1), push_id(2), push_id(0)) == [10, 15, 20]


def test_missing_contributions_are_named(shard: StagingShard) -> None:
    shard.push(0)
    with pytest.raises(ContributionMissing, match=r"2 of 3 contributions are not staged here: 7/1/1, 8/2/3 "):
        shard.values(push_id(0), push_id(7), push_id(8, incarnation=2, sequence=3))


def test_contributors_must_be_given_and_each_once(shard: StagingShard) -> None:
    shard.push(0)
    for contributors in ([], [push_id(0), push_id(0)]):
        with pytest.raises(InvalidSpec, match="at least one, and each once"):
            shard.values(*contributors)


def test_push_id_that_is_staged_is_a_duplicate_without_a_buffer(shard: StagingShard) -> None:
    shard.push(value=1)
    again = shard.open()
    assert again.outcome == PushReply(result=PushResult.DUPLICATE, step=STEP)
    assert not shard.fill(again, 99)
    assert (shard.num_lent, shard.inbox.num_duplicates) == (1, 1)
    assert shard.values(push_id(0)) == [1]


def test_push_id_of_an_applied_step_is_a_duplicate(shard: StagingShard) -> None:
    shard.push()
    shard.advance()
    assert shard.push() is PushResult.DUPLICATE
    assert shard.inbox.num_stale == 0


def test_push_id_that_was_stale_stays_stale(shard: StagingShard) -> None:
    assert [shard.push(step=STEP - 1), shard.push(step=STEP - 1)] == [PushResult.STALE, PushResult.STALE]
    assert (shard.inbox.num_stale, shard.inbox.num_duplicates, shard.num_lent) == (1, 1, 0)


def test_push_id_with_another_step_is_refused(shard: StagingShard) -> None:
    shard.push()
    shard.advance()
    with pytest.raises(PushIdReused, match="push 0/1/1 was for step 5 and came again for step 6"):
        shard.open(step=STEP + 1)


def test_sequence_that_was_passed_over_is_no_duplicate(shard: StagingShard) -> None:
    shard.push(sequence=3)
    assert shard.push(sequence=2) is PushResult.STAGED
    assert len(shard.values(push_id(0, sequence=2), push_id(0, sequence=3))) == 2


def test_step_ahead_is_refused_and_supersedes_nobody(shard: StagingShard) -> None:
    with pytest.raises(StepAhead, match="local_step 6 is ahead of global_step 5"):
        shard.open(incarnation=9, step=STEP + 1)
    assert shard.push(incarnation=1) is PushResult.STAGED


def test_older_incarnation_is_superseded(shard: StagingShard) -> None:
    shard.push(incarnation=2)
    with pytest.raises(Superseded, match="worker 0: incarnation 2 has pushed, this is 1"):
        shard.open(incarnation=1)


def test_a_newer_incarnation_keeps_the_contributions_that_the_older_one_staged(shard: StagingShard) -> None:
    shard.push(incarnation=1, value=1)
    shard.push(incarnation=2, value=2)
    assert shard.values(push_id(0, incarnation=1)) == [1]
    shard.advance()
    assert (shard.inbox.num_staged, shard.num_lent) == (0, 0)


def test_newer_incarnation_ends_the_streams_of_the_older_one(shard: StagingShard) -> None:
    older = shard.open(incarnation=1)
    shard.push(incarnation=2)
    assert not shard.fill(older)
    with pytest.raises(Superseded):
        shard.stage(older)


def test_same_push_on_a_second_stream_ends_the_first(shard: StagingShard) -> None:
    first, second = shard.open(), shard.open()
    assert not shard.fill(first)
    with pytest.raises(Cancelled):
        shard.stage(first)
    assert shard.fill(second)
    assert shard.stage(second).result is PushResult.STAGED


def test_buffer_that_is_being_written_goes_back_when_the_copy_ends(shard: StagingShard) -> None:
    first = shard.open()
    assert shard.inbox.begin_write(first) is not None
    second = shard.open()
    assert shard.num_lent == 2
    assert second.memory is not None and first.memory is not None and second.memory.dense is not first.memory.dense
    shard.inbox.end_write(first)
    assert shard.num_lent == 1


def test_worker_has_a_limit_of_pushes_in_flight(shard: StagingShard) -> None:
    shard.push(3, sequence=1)
    open_one = shard.open(3, sequence=2)
    with pytest.raises(TooManyPushes, match="worker 3: 2 pushes in flight, limit 2") as caught:
        shard.open(3, sequence=3)
    assert {name: caught.value.facts[name] for name in ("worker", "in_flight", "limit")} == {"worker": "3", "in_flight": "2", "limit": "2"}
    assert [(one.worker, one.sequence) for one in contributions_named(caught.value.facts)] == [(3, 1), (3, 2)]
    assert shard.push(4) is PushResult.STAGED
    shard.inbox.abandon(open_one)
    assert shard.push(3, sequence=3) is PushResult.STAGED


def test_a_push_that_its_worker_has_refused_takes_no_place_when_it_arrives_late(shard: StagingShard) -> None:
    shard.push(3, sequence=1)
    assert shard.push(3, sequence=3, refused=(1, 2)) is PushResult.STAGED
    assert shard.push(3, sequence=2) is PushResult.STALE
    assert shard.push(3, sequence=1) is PushResult.STALE
    assert shard.inbox.num_staged == 1


def test_a_push_under_way_that_its_worker_has_refused_is_not_staged(shard: StagingShard) -> None:
    under_way = shard.open(3, sequence=1)
    assert shard.push(3, sequence=2, refused=(1,)) is PushResult.STAGED
    assert not shard.fill(under_way)
    assert shard.stage(under_way).result is PushResult.STALE
    assert shard.inbox.num_staged == 1


def test_contributions_of_an_older_incarnation_do_not_count_against_the_limit_of_the_newer_one(shard: StagingShard) -> None:
    for sequence in (1, 2):
        shard.push(incarnation=1, sequence=sequence)
    for sequence in (1, 2):
        assert shard.push(incarnation=2, sequence=sequence) is PushResult.STAGED


def test_advance_drops_staged_contributions_and_settles_open_ones(shard: StagingShard) -> None:
    shard.push(0)
    late = shard.open(1)
    shard.advance()
    assert (shard.inbox.num_staged, shard.num_lent) == (0, 0)
    assert not shard.fill(late)
    assert shard.stage(late) == PushReply(result=PushResult.STALE, step=STEP + 1)
    assert shard.push(1) is PushResult.STALE
    assert shard.inbox.num_stale == 1


def test_advance_settles_a_push_in_the_middle_of_a_copy_once(shard: StagingShard) -> None:
    late = shard.open()
    assert shard.inbox.begin_write(late) is not None
    shard.advance()
    shard.advance()
    assert (shard.num_lent, shard.inbox.num_stale) == (1, 1)
    shard.inbox.end_write(late)
    assert shard.num_lent == 0


def test_a_new_epoch_drops_all_contributions_and_incarnations(shard: StagingShard) -> None:
    shard.push(0, incarnation=5)
    under_way = shard.open(1)
    shard.inbox.clear(EpochMismatch("cluster epoch rose to 2"))
    with pytest.raises(EpochMismatch, match="rose to 2"):
        shard.stage(under_way)
    assert shard.push(0, incarnation=1) is PushResult.STAGED


def test_push_that_does_not_fit_into_memory_leaves_no_trace() -> None:
    shard = StagingShard(limit_bytes=NBYTES)
    shard.push(0)
    with pytest.raises(LimitExceeded, match="a push of worker 1 needs"):
        shard.open(1)
    shard.advance()
    assert shard.push(1, step=STEP + 1) is PushResult.STAGED


def test_a_push_whose_stream_broke_makes_room_for_one_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LEAST_RESUMED_BYTES", 0)
    shard = StagingShard(limit_bytes=NBYTES)
    broken = shard.open(0)
    shard.inbox.suspend(broken)
    assert broken.is_suspended
    assert shard.push(1) is PushResult.STAGED
    with pytest.raises(Cancelled):
        shard.stage(broken)


def test_steps_reuse_the_same_buffers(shard: StagingShard) -> None:
    for sequence in range(1, 200):
        for worker in range(3):
            shard.push(worker, sequence=sequence, step=shard.step)
        shard.advance()
    assert shard.pool.num_buffers == 3
    push_ids = shard.inbox.push_ids
    assert sum(push_ids.outcome(push_id(0, sequence=sequence)) is not None for sequence in range(1, 200)) <= 64


def test_workers_that_were_silent_longest_are_forgotten(shard: StagingShard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MAX_WORKERS", 2)
    for worker in (0, 1, 2):
        shard.push(worker)
    assert shard.inbox.push_ids.workers == {1, 2}
    # Forgotten, but what it staged is still recognised.
    assert shard.push(0) is PushResult.DUPLICATE
    assert shard.num_lent == 3


@pytest.mark.parametrize("seed", range(5))
def test_no_sequence_of_events_loses_a_buffer(shard: StagingShard, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LEAST_RESUMED_BYTES", 0)
    rng = np.random.default_rng(seed)
    under_way: list[Contribution] = []
    for _ in range(300):
        event = rng.integers(7)
        try:
            if event <= 1:
                worker, incarnation, sequence = (int(rng.integers(1, 4)) for _ in range(3))
                step, resumes = shard.step - int(rng.integers(2)), bool(rng.integers(2))
                under_way.append(shard.open(worker, incarnation=incarnation, sequence=sequence, step=step, resumes=resumes))
            elif event == 5 and rng.integers(4) == 0:
                shard.advance()
            elif under_way:
                contribution = under_way[int(rng.integers(len(under_way)))]
                if event == 2 and not contribution.is_writing:
                    shard.inbox.begin_write(contribution)
                elif contribution.is_writing:
                    shard.inbox.end_write(contribution)
                elif event == 3:
                    shard.inbox.abandon(contribution)
                elif event == 6:
                    shard.inbox.suspend(contribution)
                else:
                    shard.stage(contribution)
        except PsError:
            pass
        num_writing = sum(c.is_writing and c.outcome is not None for c in under_way)
        assert shard.num_lent == shard.inbox.num_staged + len(shard.inbox._open) + num_writing
    for contribution in under_way:
        if contribution.is_writing:
            shard.inbox.end_write(contribution)


# Contributions of steps gone by, where they are accepted: staged until they are applied, discarded, or applied on arrival.


@pytest.fixture
def lenient() -> Iterator[StagingShard]:
    shard = StagingShard()
    shard.inbox.accepts_any_step = True
    yield shard
    shard.inbox.clear(EpochMismatch("the test is over"))
    assert shard.num_lent == 0


def test_contributions_of_any_step_are_staged_and_stay(lenient: StagingShard) -> None:
    for worker, step in enumerate((STEP - 1, STEP, STEP + 1)):
        assert lenient.push(worker, step=step) is PushResult.STAGED
    under_way = lenient.open(3, step=STEP - 2)
    lenient.advance()
    assert lenient.inbox.num_staged == 3
    assert lenient.fill(under_way)
    assert lenient.stage(under_way).result is PushResult.STAGED


def test_applied_contributions_are_ended_by_name(lenient: StagingShard) -> None:
    lenient.push(0)
    lenient.push(1)
    lenient.inbox.end(lenient.inbox.select([push_id(0)], step=STEP), step=STEP)
    lenient.advance()
    assert (lenient.inbox.num_staged, lenient.num_lent) == (1, 1)
    assert lenient.push(0) is PushResult.DUPLICATE


def test_discarding_drops_the_named_contributions_and_ignores_unknown_ones(lenient: StagingShard) -> None:
    lenient.push(0)
    lenient.push(1, sequence=1)
    lenient.push(1, sequence=2)
    late, given_up = lenient.open(2), lenient.open(3)
    lenient.inbox.discard([push_id(0), push_id(9), push_id(2), push_id(3, sequence=0)], current_step=STEP)
    assert lenient.inbox.num_staged == 2
    assert lenient.stage(late).result is PushResult.STALE
    with pytest.raises(Superseded, match="given up incarnation 1"):
        lenient.stage(given_up)
    lenient.inbox.discard([push_id(1, incarnation=2, sequence=0)], current_step=STEP)
    assert lenient.inbox.num_staged == 2
    lenient.inbox.discard([push_id(1, sequence=0)], current_step=STEP)
    assert (lenient.inbox.num_staged, lenient.num_lent) == (0, 0)


def test_arrival_counts_as_applied_before_it_is(lenient: StagingShard) -> None:
    contribution = lenient.open()
    lenient.fill(contribution)
    lenient.inbox.begin_arrival(contribution, step=STEP)
    assert lenient.push() is PushResult.DUPLICATE
    lenient.inbox.clear(EpochMismatch("cluster epoch rose to 2"))
    assert lenient.num_lent == 1
    lenient.inbox.end([contribution], step=STEP)
    lenient.inbox.abandon(contribution)
    assert lenient.stage(contribution) == PushReply(result=PushResult.APPLIED, step=STEP)
    assert (lenient.num_lent, lenient.inbox.num_pushes) == (0, 1)
