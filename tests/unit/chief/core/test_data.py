"""Training data leased in ranges: each is in exactly one applied contribution of its pass, also when workers or the chief die."""

from collections import Counter
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chief.core.cluster import data as data_leases
from chief.core.cluster.data import DataLeases, nth_range
from chief.core.epoch.answers import _MAX_UNKEPT
from chief.options import CheckpointConfig
from ps_protocol.errors import DataMismatch
from ps_protocol.model.data import DataMarks, DataSpec
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import LeaseReply, LeaseResult, PushOutcome, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.examples import examples

SIX = DataSpec(name="train", num_samples=60, range_size=10)
MOVES = ("lease", "count", "apply", "drop", "refuse", "save", "restore")
GRANTED, WAIT, EXHAUSTED = LeaseResult.GRANTED, LeaseResult.WAIT, LeaseResult.EXHAUSTED


def leased(driver: Driver, worker: Worker, request_id: int, data: DataSpec = SIX, *, max_ranges: int = 1) -> LeaseReply:
    reply = driver.answers[driver.lease(worker, data, request_id=request_id, max_ranges=max_ranges)]
    assert isinstance(reply, LeaseReply)
    return reply


def ids(reply: LeaseReply) -> tuple[int, ...]:
    return tuple(part.id for part in reply.ranges)


def done_of(marks: DataMarks | None) -> set[int]:
    """The ranges that these say are done."""
    assert marks is not None
    size = marks.data.num_ranges
    bits = {one.epoch * size + index: one.done[index // 8] >> index % 8 & 1 for one in marks.passes for index in range(size)}
    return {*range(marks.epoch * size), *(identity for identity, is_done in bits.items() if is_done)}


def contribute(worker: Worker, ranges: tuple[int, ...]) -> int:
    return worker.ask(commit=worker.next_commit(ranges=ranges))


@given(num=st.integers(1, 300), seed=st.integers(0, 1 << 62), epoch=st.integers(0, 9))
@settings(max_examples=examples(60))
def test_a_shuffled_pass_has_every_range_once(num: int, seed: int, epoch: int) -> None:
    assert sorted(nth_range(i, num_ranges=num, epoch=epoch, seed=seed) for i in range(num)) == list(range(num))


def test_a_late_message_that_a_worker_holds_a_range_that_it_has_given_back_leases_no_range() -> None:
    leases = DataLeases()
    granted = [one.id for one in leases.lease(0, 1, SIX, max_ranges=2, request_id=1)]
    assert leases.give_back(0, 1, granted[:1])
    leases.hold(0, 1, granted)  # sent before
    assert [one.id for one in leases.lease(1, 1, SIX, max_ranges=1, request_id=1)] == granted[:1]
    # Of a worker that has it anew it is true.
    assert leases.give_back(1, 1, granted[:1])
    assert [one.id for one in leases.lease(0, 1, SIX, max_ranges=1, request_id=2)] == granted[:1]
    leases.hold(0, 1, granted)
    assert granted[0] not in [one.id for one in leases.lease(1, 1, SIX, max_ranges=9, request_id=2)]


@pytest.mark.parametrize("is_late_first", [False, True])
def test_a_worker_that_comes_to_another_chief_holds_the_ranges_that_all_its_messages_name(is_late_first: bool) -> None:
    """Whichever comes first: a worker has used ranges between two messages, and has been leased none."""
    leases = DataLeases()
    leases.resume(DataMarks(data=SIX, epoch=0))
    for ranges in ((0, 1), (1,)) if is_late_first else ((1,), (0, 1)):
        leases.hold(0, 1, ranges)
    assert [one.id for one in leases.lease(1, 1, SIX, max_ranges=2, request_id=1)] == [0, 2]


def test_a_range_leased_again_stays_with_its_worker_when_an_earlier_message_does_not_name_it() -> None:
    leases = DataLeases()
    leases.resume(DataMarks(data=SIX, epoch=0))
    leases.hold(0, 1, (0, 1))
    leases.give_back(0, 1, (0,))
    assert [one.id for one in leases.lease(0, 1, SIX, max_ranges=1, request_id=1)] == [0]
    assert not leases.hold(0, 1, (1,))  # sent before the answer had come
    assert not {0, 1}.intersection(one.id for one in leases.lease(1, 1, SIX, max_ranges=2, request_id=1))


def test_a_late_message_that_a_worker_holds_a_range_of_a_contribution_that_no_server_has_leases_no_range() -> None:
    leases = DataLeases()
    granted = [one.id for one in leases.lease(0, 1, SIX, max_ranges=1, request_id=1)]
    push_id = PushId(worker=0, incarnation=1, sequence=1)
    leases.count(push_id, granted)
    assert leases.uncount(push_id)
    leases.hold(0, 1, granted)  # sent before
    assert [one.id for one in leases.lease(1, 1, SIX, max_ranges=1, request_id=1)] == granted


def test_ranges_go_round_until_the_last_pass_is_done() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    data = DataSpec(name="train", num_samples=25, range_size=10, num_epochs=2, shuffle_seed=1)
    seen: Counter[tuple[int, int, int]] = Counter()
    for request in range(6):
        reply = leased(driver, worker, request, data)
        seen.update((part.epoch, part.start, part.stop) for part in reply.ranges)
        assert worker.has_token(contribute(worker, ids(reply)))
    assert seen == Counter({(epoch, *span): 1 for epoch in (0, 1) for span in ((0, 10), (10, 20), (20, 25))})
    assert leased(driver, worker, 7, data).result is EXHAUSTED


def test_a_repeated_wish_gets_the_same_ranges() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    assert leased(driver, worker, 1, max_ranges=2) == leased(driver, worker, 1, max_ranges=2)
    assert ids(leased(driver, worker, 2)) == (2,)


def test_a_range_given_to_a_late_copy_of_a_request_goes_to_others_once_its_worker_asks_again() -> None:
    leases = DataLeases()
    spec = DataSpec(name="d", num_samples=4, range_size=1, num_epochs=1)
    (lost,) = leases.lease(0, 1, spec, max_ranges=1, request_id=1)  # another chief has answered this one
    assert not leases.compare(0, 1, [], request_id=1)  # nor does another copy free anything
    assert leases.compare(0, 1, [], request_id=2)
    (own,) = leases.lease(0, 1, spec, max_ranges=1, request_id=2)
    assert own == lost
    assert not leases.compare(0, 1, [own.id], request_id=3)


def test_a_range_goes_to_others_once_its_worker_asks_without_it_for_more() -> None:
    leases = DataLeases()
    spec = DataSpec(name="d", num_samples=2, range_size=1, num_epochs=1)
    leases.resume(DataMarks(data=spec, epoch=0, position=0, passes=()))
    leases.hold(0, 1, [0, 1])  # then the chief before says that the contribution made from range 0 counts for nothing
    assert not leases.compare(0, 1, [1], request_id=1)  # perhaps a late copy, made before the worker had range 0
    leases.waits_no_more(0, 1, request_id=1)
    assert leases.compare(0, 1, [1], request_id=2)
    assert [given.id for given in leases.lease(1, 1, spec, max_ranges=2, request_id=1)] == [0]


def test_other_data_than_the_clusters_is_refused() -> None:
    driver = Driver.outlived(total_num_replicas=1)
    (worker,) = driver.train(0)
    leased(driver, worker, 1)
    with pytest.raises(DataMismatch, match=r"you have 'train' \(70 samples in ranges of 10, 1 passes, in order\)"):
        driver.lease(worker, DataSpec(name="train", num_samples=70, range_size=10))


def test_the_ranges_of_a_lost_worker_go_to_a_waiting_worker() -> None:
    driver = Driver.outlived(replicas_to_aggregate=1)
    dead, alive = driver.train(0, 1)
    held = leased(driver, dead, 1, max_ranges=6)
    waiting = driver.lease(alive, SIX, max_wait_s=10.0)
    assert waiting not in driver.answers
    dead.leave(failure="boom")
    assert driver.answers[waiting].result is GRANTED
    assert set(ids(driver.answers[waiting])) <= set(ids(held))


def test_the_ranges_of_a_dropped_contribution_are_leased_again() -> None:
    driver = Driver.outlived(replicas_to_aggregate=1, total_num_replicas=2)
    first, second = driver.train(0, 1)
    mine, theirs = ids(leased(driver, first, 1)), ids(leased(driver, second, 1))
    assert first.has_token(contribute(first, mine))
    second.commit(0, staged=False, ranges=theirs)
    second.local_step = 1
    assert ids(leased(driver, second, 2)) == theirs


def test_a_waiting_worker_learns_which_workers_hold_the_other_ranges() -> None:
    driver = Driver.outlived(replicas_to_aggregate=1)
    first, second = driver.train(0, 1)
    leased(driver, first, 1, max_ranges=6)
    reply = leased(driver, second, 1)
    assert (reply.result, reply.waiting_for) == (WAIT, "6 ranges of the training data are leased to worker 0")


def test_the_last_steps_are_made_by_those_that_still_have_data() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    first, second = driver.train(0, 1)
    leased(driver, second, 1, max_ranges=1)
    last = ids(leased(driver, first, 1, max_ranges=5))
    calls = [contribute(first, last[:1]), contribute(second, (0,))]
    assert first.has_token(calls[0])
    assert second.has_token(calls[1])
    for identity in last[1:]:
        call = contribute(first, (identity,))
        assert leased(driver, second, 2).result in (WAIT, EXHAUSTED)
        assert first.has_token(call)
    assert leased(driver, second, 3).result is EXHAUSTED
    assert len(driver.applied[-1].request.contributors) == 1


def test_going_back_to_a_checkpoint_goes_back_in_the_data_too() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(every_steps=2))
    (worker,) = driver.train(0)
    for request in range(3):
        assert worker.has_token(contribute(worker, ids(leased(driver, worker, request))))
    assert done_of(driver.storage["step-000000002"].record.data) == {0, 1}
    leased(driver, worker, 3, max_ranges=2)
    driver.restart(0)
    driver.come_back(worker)
    assert ids(leased(driver, worker, 4, max_ranges=9)) == (2, 3, 4, 5)
    status = driver.coordinator.status(driver.now).data
    assert status is not None
    assert (status.num_done, status.num_leased, status.num_ranges) == (2, 4, 6)


def test_one_worker_cannot_lease_passes_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chief.core.cluster.data.MAX_LEASED", 10)
    leases, endless = DataLeases(), DataSpec(name="endless", num_samples=3, range_size=1, num_epochs=0)
    granted = [leases.lease(0, 1, endless, max_ranges=4, request_id=number) for number in range(5)]
    assert [len(ranges) for ranges in granted] == [4, 4, 2, 0, 0]
    assert leases.give_back(0, 1, [granted[0][0].id])
    assert len(leases.lease(1, 1, endless, max_ranges=4, request_id=0)) == 1


def test_a_worker_cannot_claim_ranges_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chief.core.cluster.data.MAX_LEASED", 10)
    leases, data = DataLeases(), DataSpec(name="train", num_samples=100, range_size=1)
    leases.lease(1, 1, data, max_ranges=2, request_id=1)
    leases.hold(0, 1, range(100))
    status = leases.status()
    assert status is not None and status.num_leased == 10


def test_ranges_that_do_not_exist_are_not_counted() -> None:
    leases = DataLeases()
    leases.lease(0, 1, SIX, max_ranges=1, request_id=1)
    leases.count(PushId(worker=0, incarnation=1, sequence=1), (-1, 6, 1 << 62))
    assert not leases.has_counted


@given(moves=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(MOVES)), max_size=80))
@settings(max_examples=examples(80))
def test_each_range_is_done_once_under_any_events(moves: list[tuple[int, str]]) -> None:
    spec = DataSpec(name="train", num_samples=7, range_size=1, num_epochs=2, shuffle_seed=5)
    leases = DataLeases()
    held: dict[int, list[int]] = {worker: [] for worker in range(3)}
    counted: list[tuple[PushId, tuple[int, ...]]] = []
    done: list[int] = []
    saved: tuple[object, list[int]] = (None, [])
    leases.lease(0, 1, spec, max_ranges=1, request_id=0)
    leases.drop(0, 1)
    for number, (worker, move) in enumerate([*moves, *[(0, "flush")]]):
        if move == "lease":
            held[worker] += [part.id for part in leases.lease(worker, 1, spec, max_ranges=2, request_id=number + 1)]
        elif move == "count" and held[worker]:
            push_id = PushId(worker=worker, incarnation=1, sequence=number + 1)
            leases.count(push_id, held[worker])
            counted.append((push_id, tuple(held[worker])))
            held[worker] = []
        elif move == "apply" and counted:
            push_id, ranges = counted.pop(0)
            leases.applied([push_id])
            done += ranges
        elif move == "drop":
            leases.drop(worker, 1)
            held[worker] = []
        elif move == "refuse":
            leases.give_back(worker, 1, held[worker])
            held[worker] = []
        elif move == "save":
            saved = leases.marks(), list(done)
        elif move == "restore" and saved[0] is not None:
            leases.resume(saved[0])  # type: ignore[arg-type]
            done, counted, held = list(saved[1]), [], {w: [] for w in range(3)}
    for worker in range(3):
        leases.drop(worker, 1)
    for push_id, ranges in counted:
        leases.applied([push_id])
        done += ranges
    rest = leases.lease(0, 1, spec, max_ranges=99, request_id=1000)
    assert sorted([*done, *(part.id for part in rest)]) == list(range(14))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_chief_that_goes_on_late_in_a_pass_looks_at_few_ranges(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be ten millions in a pass, and all calls wait meanwhile."""
    spec = DataSpec(name="train", num_samples=2000, range_size=1, shuffle_seed=seed)
    leases, order = DataLeases(), [nth_range(i, num_ranges=2000, epoch=0, seed=seed) for i in range(2000)]
    for request in range(1900):
        (one,) = leases.lease(0, 1, spec, max_ranges=1, request_id=request + 1)
        if request != 1890:
            leases.finish([one.id])
    looked: list[int] = []

    def look(position: int, **spec: Any) -> int:
        looked.append(position)
        return nth_range(position, **spec)

    monkeypatch.setattr(data_leases, "nth_range", look)
    successor = DataLeases()
    successor.resume(leases.marks())
    given = successor.lease(0, 2, spec, max_ranges=3, request_id=1)
    assert [one.id for one in given] == [order[1890], order[1900], order[1901]]
    assert looked == list(range(1890, 1902))


# The way through the training data when a chief dies: what steps have applied is done, what workers have is theirs. No clock.


ACCEPTED, LATE = PushOutcome.ACCEPTED, PushOutcome.LATE
DATA = DataSpec(name="train", num_samples=12, range_size=1)


def started(**config: Any) -> tuple[Driver, list[Worker]]:
    driver = Driver.outlived(**{"total_num_replicas": 2, "checkpoints": None} | config)
    return driver, driver.train(0, 1)


def leased_ids(driver: Driver, worker: Worker, number: int = 1, *, data: DataSpec = DATA, request_id: int = 1) -> tuple[int, ...]:
    reply = driver.answers[driver.lease(worker, data, max_ranges=number, request_id=request_id)]
    assert isinstance(reply, LeaseReply)
    return tuple(one.id for one in reply.ranges)


def done(driver: Driver) -> set[int]:
    return done_of(driver.coordinator.cluster.data.marks())


def step(driver: Driver, workers: list[Worker], *, request_id: int, data: DataSpec = DATA, number: int = 1) -> set[int]:
    ranges = [leased_ids(driver, worker, number, data=data, request_id=request_id) for worker in workers]
    calls = [worker.ask(commit=worker.next_commit(ranges=mine)) for worker, mine in zip(workers, ranges, strict=True)]
    assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    return {identity for mine in ranges for identity in mine}


def test_ranges_of_applied_steps_are_done_also_for_later_chiefs() -> None:
    driver, workers = started()
    used = step(driver, workers, request_id=1) | step(driver, workers, request_id=2)
    for number in (3, 4):
        driver.new_chief()
        for worker in workers:
            driver.come_back(worker)
        assert done(driver) == used
        used |= step(driver, workers, request_id=number)
    assert used == set(range(8)), "each once"


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_ranges_of_an_interrupted_step_are_done_once_the_step_is_repeated(ahead: int) -> None:
    driver, workers = started()
    used = step(driver, workers, request_id=1)
    driver.applies_at_once = False
    for worker in workers:
        mine = leased_ids(driver, worker, request_id=2)
        used |= {*mine}
        worker.ask(commit=worker.next_commit(ranges=mine))
    driver.apply_at(ahead)
    driver.applies_at_once = True
    driver.new_chief()
    driver.work()
    assert driver.step == 2
    assert done(driver) == used


def test_the_range_of_a_contribution_that_was_reported_accepted_is_not_handed_out_again() -> None:
    driver, workers = started()
    mine = leased_ids(driver, workers[0])
    assert workers[0].commit(ranges=mine).outcome is ACCEPTED
    driver.new_chief()
    driver.come_back(workers[0])
    driver.come_back(workers[1])
    assert not {*mine} & {*leased_ids(driver, workers[1], 12, request_id=2)}


def test_many_ranges_are_put_into_a_record_and_no_longer_travel_with_each_step() -> None:
    data = DataSpec(name="train", num_samples=4 * _MAX_UNKEPT, range_size=1, shuffle_seed=3)
    driver, workers = started()
    used: set[int] = set()
    sent = []
    for number in range(12):
        used |= step(driver, workers, request_id=number + 1, data=data, number=_MAX_UNKEPT // 10)
        sent.append(len(driver.applied[-1].request.ranges))
    assert max(sent) <= 1.4 * _MAX_UNKEPT
    assert sent[-2] < max(sent)
    driver.new_chief()
    assert done(driver) == used


def test_a_new_chief_hands_out_no_range_before_the_workers_have_named_theirs() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    mine = leased_ids(driver, workers[0], 3, request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=3, max_wait_s=20.0)
    assert call not in driver.answers
    driver.come_back(workers[0], held=mine)
    reply = driver.answers[call]
    assert not {*mine} & {one.id for one in reply.ranges}
    assert workers[0].commit(ranges=mine).outcome is ACCEPTED


def test_a_range_that_a_later_message_of_a_worker_does_not_name_goes_to_one_that_waits() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    mine = leased_ids(driver, workers[0], 3, request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    driver.come_back(workers[0], held=mine)  # sent to the chief before, and late
    assert len(leased_ids(driver, workers[1], 12, request_id=3)) == 7
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=4, max_wait_s=20.0)
    assert call not in driver.answers
    driver.come_back(workers[0], held=mine[:1])
    assert {one.id for one in driver.answers[call].ranges} == {*mine[1:]}


def test_a_new_chief_names_the_worker_that_it_waits_for_and_stops_waiting_after_its_lease() -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    driver.new_chief()
    driver.come_back(workers[1])
    words = driver.answers[driver.lease(workers[1], DATA, request_id=3)]
    assert (words.result, "worker 0" in words.waiting_for) == (LeaseResult.WAIT, True)
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=4, max_wait_s=20.0)
    driver.pass_time(2.1)
    assert len(driver.answers[call].ranges) == 10


def without_the_model(driver: Driver, **fields: Any) -> None:
    """The chief has died before its record named a model."""
    for shard in driver.shards:
        if shard.record is not None:
            shard.record = replace(shard.record, model=None, **fields)


def test_a_chief_that_waits_for_the_model_hands_out_nothing_that_others_may_still_have() -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    without_the_model(driver)
    driver.new_chief()
    driver.come_back(workers[1])
    words = driver.answers[driver.lease(workers[1], DATA, request_id=3)]
    assert (words.result, "worker 0" in words.waiting_for) == (LeaseResult.WAIT, True)
    call = driver.lease(workers[1], DATA, max_ranges=12, request_id=4, max_wait_s=20.0)
    driver.pass_time(2.1)
    assert len(driver.answers[call].ranges) == 10


@pytest.mark.parametrize("is_late", [False, True])
def test_once_the_model_is_known_no_wait_is_for_a_worker_that_has_returned_or_is_overdue(is_late: bool) -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    mine = leased_ids(driver, workers[0], 3, request_id=2)
    without_the_model(driver)
    driver.new_chief()
    driver.come_back(workers[1])
    if is_late:
        driver.pass_time(2.1)
    else:
        driver.come_back(workers[0], held=mine)
    driver.ask_model(workers[1], max_wait_s=0.0)
    assert driver.step == 1
    others = leased_ids(driver, workers[1], 12, request_id=3)
    assert len(others) == (10 if is_late else 7)


def test_a_record_that_is_kept_before_the_model_is_known_is_later_than_those_of_the_chief_before() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    without_the_model(driver, data=None)
    driver.new_chief()
    driver.come_back(workers[1])
    assert leased_ids(driver, workers[1], request_id=2)
    record = driver.shards[0].record
    assert record is not None
    assert record.data is not None, "another chief would know that data is leased"


def test_a_contribution_from_samples_that_another_has_by_now_is_dropped_and_its_worker_gives_another() -> None:
    driver, workers = started(lease_s=4.0)
    step(driver, workers, request_id=1)
    mine = leased_ids(driver, workers[0], request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    driver.pass_time(2.1)
    assert {*mine} <= {*leased_ids(driver, workers[1], 12, request_id=4)}
    driver.come_back(workers[0], held=mine)
    assert workers[0].commit(ranges=mine).outcome is LATE
    token = workers[0].answer(workers[0].ask())
    assert (token.result, token.step) == (TokenResult.TOKEN, driver.step), "it may contribute to the step all the same"


def test_a_new_incarnation_holds_no_ranges_of_the_former_one() -> None:
    driver, workers = started()
    step(driver, workers, request_id=1)
    mine = leased_ids(driver, workers[0], request_id=2)
    driver.new_chief()
    driver.come_back(workers[1])
    registration = driver.register(0, held=mine)
    assert registration.participant != workers[0].participant
    assert {*mine} <= {*leased_ids(driver, workers[1], 12, request_id=4)}


def test_shards_that_apply_on_arrival_announce_no_step_that_the_next_chief_does_not_know() -> None:
    driver, workers = started(policy=PolicySpec(name=PolicyName.ASYNC, use_locking=False))
    mine = leased_ids(driver, workers[0])
    driver.is_manual = True
    call = workers[0].send_commit(is_applied=True, ranges=mine)
    assert call not in driver.answers
    driver.is_manual = False
    driver.work_off()
    assert driver.answers[call].outcome is ACCEPTED
    driver.new_chief()
    assert done(driver) == {*mine}


def test_a_chief_that_died_while_shards_were_brought_back_leaves_that_to_its_successor() -> None:
    driver = Driver.outlived(total_num_replicas=2)
    workers = driver.train(0, 1)
    used = step(driver, workers, request_id=1)
    driver.is_manual = True
    driver.restart(0)
    while driver.coordinator.status(driver.now).num_rollbacks == 0:
        driver.do(driver.orders.pop(0))
    driver.orders.clear()
    driver.is_manual = False
    driver.new_chief()
    assert driver.step == 0
    assert driver.coordinator.cluster.members.epoch > 2, "brought back once more"
    for worker in workers:
        driver.come_back(worker)
    assert step(driver, workers, request_id=2) == used, "nothing of it is done"
