from chief.core.cluster.ledger import Ledger
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


def push(worker: int) -> PushId:
    return PushId(worker=worker, incarnation=1, sequence=1)


def run_step(ledger: Ledger, *, at: float) -> None:
    ledger.complete_step((push(0), push(1)), last_worker=1, now=at)
    ledger.close_step(now=at + 0.5)


def test_an_entry_has_contributors_durations_and_the_last_contributor() -> None:
    ledger = Ledger(size=8, now=10.0)
    run_step(ledger, at=13.0)
    (entry,) = ledger.entries(5)
    assert (entry.step, entry.contributors, entry.last_worker) == (0, (push(0), push(1)), 1)
    assert (entry.duration_s, entry.apply_duration_s) == (3.5, 0.5)


def test_the_next_step_opens_when_the_last_is_applied() -> None:
    ledger = Ledger(size=8, now=10.0)
    run_step(ledger, at=13.0)
    assert ledger.step_age_s(14.0) == 0.5
    run_step(ledger, at=15.0)
    assert [entry.step for entry in ledger.entries(5)] == [1, 0]
    assert ledger.entries(1)[0].duration_s == 2.0


def test_entry_says_when_the_contribution_of_each_contributor_came() -> None:
    ledger = Ledger(size=2, now=10.0)
    pushes = tuple(PushId(worker=worker, incarnation=1, sequence=sequence) for worker, sequence in ((0, 7), (0, 8), (3, 1), (4, 1)))
    for worker, at in ((3, 10.25), (0, 10.5), (0, 10.75)):
        ledger.count(PushOutcome.ACCEPTED, worker=worker, step=0, now=at)
    ledger.complete_step(pushes, last_worker=0, now=10.75)
    ledger.close_step(now=11.0)
    (entry,) = ledger.entries(1)
    assert entry.arrivals_us == (500_000, 750_000, 250_000, 0), "the last one had come before the step was opened"
    assert entry.wait_duration_s == 0.5
    assert ledger.entries(1)[0] is entry, "an entry that has not changed is made once"


def test_only_the_latest_steps_are_kept() -> None:
    ledger = Ledger(size=3, now=0.0)
    for number in range(10):
        run_step(ledger, at=float(number))
    assert [entry.step for entry in ledger.entries(100)] == [9, 8, 7]
    assert ledger.entries(0) == ()


def test_late_and_stale_are_counted_with_the_step_that_they_were_meant_for() -> None:
    ledger = Ledger(size=2, now=0.0)
    ledger.count(PushOutcome.ACCEPTED, worker=0, step=0, now=0.0)
    ledger.count(PushOutcome.LATE, worker=0, step=0, now=0.0)
    run_step(ledger, at=1.0)
    ledger.count(PushOutcome.STALE, worker=0, step=0, now=0.0)
    ledger.count(PushOutcome.STALE, worker=0, step=0, now=0.0)
    (entry,) = ledger.entries(1)
    assert (entry.num_late, entry.num_stale) == (1, 2)
    assert (ledger.num_accepted, ledger.num_late, ledger.num_stale) == (1, 1, 2)


def test_a_contribution_to_a_step_that_is_forgotten_is_counted_all_the_same() -> None:
    ledger = Ledger(size=1, now=0.0)
    for number in range(3):
        run_step(ledger, at=float(number))
    ledger.count(PushOutcome.STALE, worker=0, step=0, now=0.0)
    assert ledger.num_stale == 1


def test_the_greatest_staleness_is_that_of_what_was_accepted() -> None:
    ledger = Ledger(size=2, now=0.0)
    for outcome, staleness in ((PushOutcome.ACCEPTED, 3), (PushOutcome.STALE, 9), (PushOutcome.ACCEPTED, 1)):
        ledger.count(outcome, worker=0, step=0, staleness=staleness, now=0.0)
    assert ledger.max_staleness == 3
