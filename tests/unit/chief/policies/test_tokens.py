"""Tokens: strict ones, which lose no contribution, and the queue of SyncReplicasOptimizer, exactly as it behaves."""

import contextlib
import tracemalloc
from collections.abc import Sequence

import pytest

from chief.options import CoordinationConfig
from chief.policies.fifo import FifoTokens
from chief.policies.sync import StrictTokens, SyncPolicy
from ps_protocol.errors import InvalidSpec, StepAhead
from ps_protocol.model.policy import PolicySpec, TokenMode
from ps_protocol.roles.chief import PushOutcome, TokenResult
from tests.support.chief.chief_driver import Driver, Worker

ALL = range(10)


def strict(*, num_extras: int, step: int = 0, contributed: Sequence[int] = ALL) -> StrictTokens:
    """Tokens of a step that all workers are part of, unless others are named."""
    return StrictTokens(num_extras=num_extras, step=step, contributed=contributed)


def ask(tokens: StrictTokens, worker: int, *, local_step: int = 0, request_id: int = 1) -> int | None:
    return tokens.ask(worker, local_step=local_step, request_id=request_id, is_open=True)


def test_a_worker_of_the_open_step_waits_and_is_released_when_the_next_opens() -> None:
    tokens = strict(num_extras=0)
    assert ask(tokens, 0) is None
    assert ask(tokens, 1) is None
    assert tokens.open_step(1) == [(0, 1), (1, 1)]
    assert tokens.open_step(2) == []


def test_a_worker_of_an_older_step_gets_the_open_step_however_often_it_asks() -> None:
    tokens = strict(num_extras=0, step=5)
    assert [ask(tokens, 0, local_step=2), ask(tokens, 0, local_step=2)] == [5, 5]


def test_a_step_that_has_not_come_is_refused() -> None:
    policy = SyncPolicy(spec=PolicySpec(), num_required=1, tokens=strict(num_extras=0, step=5), step=5)
    with pytest.raises(StepAhead, match="local_step 6 is ahead of global_step 5"):
        policy.ask(0, local_step=6, request_id=1)
    assert policy.drop(1) == policy.advance() == []


def test_extra_tokens_go_to_the_first_workers_that_ask_up_to_their_number() -> None:
    tokens = strict(num_extras=2)
    assert [ask(tokens, worker) for worker in (2, 0, 1)] == [0, 0, None]
    assert tokens.num_free == 0


def test_extras_that_were_spent_under_another_chief_are_not_given_again() -> None:
    tokens = strict(num_extras=2, contributed=(0, 0, 1))
    assert [ask(tokens, worker) for worker in (1, 0)] == [0, None]
    assert strict(num_extras=0, contributed=(0, 0)).num_free == 0


def test_a_worker_that_has_not_contributed_does_not_get_an_extra() -> None:
    tokens = strict(num_extras=1, contributed=())
    assert ask(tokens, 0) is None
    assert tokens.num_free == 1


def test_a_repeated_request_gets_its_extra_again_and_not_another() -> None:
    tokens = strict(num_extras=2)
    assert [ask(tokens, 0), ask(tokens, 0)] == [0, 0]
    assert tokens.num_free == 1
    assert tokens.spend(0)
    assert ask(tokens, 0) == 0, "the answer may have been lost; the token stays spent"
    assert tokens.num_free == 1
    assert not tokens.spend(0)


def test_a_worker_holds_at_most_one_unspent_extra() -> None:
    tokens = strict(num_extras=2)
    assert [ask(tokens, 0, request_id=1), ask(tokens, 0, request_id=2)] == [0, 0]
    assert tokens.num_free == 1


def test_the_extra_of_a_gone_worker_goes_to_the_one_that_has_waited_longest() -> None:
    tokens = strict(num_extras=1)
    assert [ask(tokens, worker) for worker in (0, 2, 1)] == [0, None, None]
    assert tokens.drop(0) == [(2, 0)]
    assert tokens.holds(2)
    assert tokens.open_step(1) == [(1, 1)], "the other one waits still"


def test_a_spent_extra_does_not_come_back() -> None:
    tokens = strict(num_extras=1)
    assert ask(tokens, 0) == 0
    assert ask(tokens, 1) is None
    assert tokens.spend(0)
    assert tokens.drop(0) == []


def test_a_repeated_wish_keeps_its_place() -> None:
    tokens = strict(num_extras=1)
    assert ask(tokens, 9) == 0
    for worker in (0, 1, 0):
        assert ask(tokens, worker) is None
    assert tokens.drop(9) == [(0, 0)]


def test_a_forgotten_wish_is_not_served_and_an_extra_that_is_held_stays() -> None:
    tokens = strict(num_extras=1)
    assert ask(tokens, 0) == 0
    assert ask(tokens, 1) is None
    tokens.forget_wish(0)
    tokens.forget_wish(1)
    assert tokens.holds(0)
    assert tokens.open_step(1) == []


def test_extra_tokens_of_a_past_step_are_invalid_and_each_step_has_new_ones() -> None:
    tokens = strict(num_extras=1)
    assert ask(tokens, 0) == 0
    assert tokens.open_step(1) == []
    assert not tokens.holds(0)
    assert tokens.num_free == 1


def test_a_waiting_worker_gets_an_extra_once_it_has_contributed() -> None:
    tokens = strict(num_extras=1, contributed=())
    assert ask(tokens, 0) is None
    assert tokens.spend(0)
    assert tokens.after_commit(0) == [(0, 0)]
    assert tokens.holds(0)


# The queue of SyncReplicasOptimizer, habits and all: when workers continue, and what is lost; and that strict tokens lose nothing.


ACCEPTED, STALE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.LATE


def cluster(r: int, t: int, *, num_tokens: int = -1, tokens: TokenMode = TokenMode.FIFO, applies_at_once: bool = True) -> Driver:
    policy = PolicySpec(tokens=tokens, num_tokens=num_tokens)
    return Driver(replicas_to_aggregate=r, total_num_replicas=t, policy=policy, lease_s=1e6, applies_at_once=applies_at_once)


class Clocked:
    """A worker whose gradients take `periods`; it pushes, waits for its token, and computes again."""

    def __init__(self, worker: Worker, periods: float) -> None:
        self.worker, self.periods = worker, periods
        self.due: float | None = periods
        self.call = 0

    def finish(self) -> PushOutcome:
        outcome, self.due = self.worker.push(), None
        self.call = self.worker.ask(max_wait_s=20.0)
        return outcome

    def go_on(self, now: float) -> None:
        if self.due is None and self.worker.has_token(self.call):
            self.due = now + self.periods


def play(driver: Driver, *periods: float, num_steps: int) -> tuple[float, list[PushOutcome]]:
    """Returns the time that so many steps take, if each worker computes for its periods, and what became of all contributions."""
    clocked = [Clocked(worker, duration) for worker, duration in zip(driver.train(*range(len(periods))), periods, strict=True)]
    now, outcomes = 0.0, []
    while driver.step < num_steps:
        now = min(worker.due for worker in clocked if worker.due is not None)
        for worker in clocked:
            if worker.due == now:
                outcomes.append(worker.finish())
        for worker in clocked:
            worker.go_on(now)
    return now, outcomes


def num_dropped(outcomes: list[PushOutcome]) -> int:
    return sum(outcome is not ACCEPTED for outcome in outcomes)


@pytest.mark.parametrize(
    ("r", "t", "tokens", "num_tokens", "periods", "num_steps", "time", "dropped"),
    [
        pytest.param(2, 3, TokenMode.FIFO, 0, (1, 1), 20, 29, 18, id="one dead backup of three poisons the fifo queue"),
        pytest.param(2, 3, TokenMode.STRICT, 0, (1, 1), 20, 20, 0, id="and not strict tokens"),
        pytest.param(2, 4, TokenMode.FIFO, 0, (1, 1), 20, 38, 36, id="two dead backups of four nearly halve its speed"),
        pytest.param(2, 4, TokenMode.STRICT, 0, (1, 1), 20, 20, 0, id="and not that of strict tokens"),
        pytest.param(3, 2, TokenMode.FIFO, 1, (1, 1), 10, 20, 0, id="as many tokens as workers are short of are just enough"),
        pytest.param(2, 2, TokenMode.FIFO, -1, (1, 1), 10, 11, 2, id="the default tokens let two gradients go to waste"),
        pytest.param(2, 2, TokenMode.FIFO, 0, (1, 3), 10, 30, 0, id="without tokens each worker gives one to each step"),
    ],
)
def test_steps_take_as_long_and_lose_as_much_as_their_tokens_allow(
    r: int, t: int, tokens: TokenMode, num_tokens: int, periods: tuple[int, int], num_steps: int, time: int, dropped: int
) -> None:
    took, outcomes = play(cluster(r, t, tokens=tokens, num_tokens=num_tokens), *periods, num_steps=num_steps)
    assert (took, num_dropped(outcomes)) == (time, dropped)


def test_a_backup_ten_times_slower_costs_the_fifo_queue_nearly_half_as_much_again() -> None:
    fifo, _ = play(cluster(2, 3, num_tokens=0), 1, 1, 10, num_steps=60)
    strictly, _ = play(cluster(2, 3, tokens=TokenMode.STRICT), 1, 1, 10, num_steps=60)
    assert 80 <= fifo <= 90
    assert strictly <= 61


def test_with_the_default_tokens_a_fast_worker_makes_the_first_steps_alone() -> None:
    driver = cluster(2, 2)
    play(driver, 1, 5.5, num_steps=2)
    assert [{push.worker for push in step.request.contributors} for step in driver.applied] == [{0}, {0}]


def test_a_stale_token_is_handed_out_and_its_gradients_are_dropped() -> None:
    driver = cluster(1, 1, num_tokens=1)
    (worker,) = driver.train(0)
    assert worker.push() is ACCEPTED
    call = worker.ask()
    reply = worker.answer(call)
    assert (reply.result, reply.step, reply.global_step, reply.reads_latest) == (TokenResult.TOKEN, 0, 1, True)
    assert worker.push() is STALE
    assert worker.has_token(worker.ask())
    assert worker.local_step == 1


def test_a_repeated_request_gets_its_token_again_and_takes_no_other() -> None:
    driver = cluster(2, 1, num_tokens=2)
    (worker,) = driver.train(0)
    for repeat in (False, True, True):
        assert worker.has_token(worker.ask(repeat=repeat))
    assert worker.has_token(worker.ask()), "the second token was still there"
    assert not worker.has_token(worker.ask())


def test_tokens_go_to_workers_in_order_of_their_asking() -> None:
    driver = cluster(1, 3, num_tokens=0)
    first, second, third = driver.train(0, 1, 2)
    calls = [worker.ask() for worker in (third, first, second)]
    first.push()
    order = [call for call in driver.answers if call in calls]
    assert order == calls, "one step put three tokens in"


def test_a_restarted_worker_contributes_without_a_token_and_its_old_one_is_lost() -> None:
    driver = cluster(2, 2, num_tokens=1)
    first, dead = driver.train(0, 1)
    assert dead.has_token(dead.ask())
    restarted = Worker(driver, 1, takeover=True)
    assert restarted.registration.may_contribute
    call = first.ask()
    assert not first.has_token(call), "the token that the dead one had is not returned"
    assert [restarted.push(), first.push()] == [ACCEPTED, ACCEPTED]
    assert first.has_token(call)


@pytest.mark.parametrize(("r", "t", "num_tokens", "needed"), [(5, 3, 1, 2), (3, 1, 0, 2)])
def test_too_few_initial_tokens_are_refused_with_the_original_words(r: int, t: int, num_tokens: int, needed: int) -> None:
    policy = PolicySpec(tokens=TokenMode.FIFO, num_tokens=num_tokens)
    with pytest.raises(InvalidSpec, match=rf"Too few tokens to finish the first step: {num_tokens} \(given\) vs {needed} \(needed\)"):
        CoordinationConfig(replicas_to_aggregate=r, total_num_replicas=t, policy=policy)


def test_tokens_of_past_steps_are_explained() -> None:
    driver = cluster(2, 2, num_tokens=10)
    first, second = driver.train(0, 1)
    first.push(), second.push()
    assert driver.step == 1
    assert first.has_token(first.ask())
    words = driver.coordinator.cluster.explain(driver.now)
    assert "9 tokens of earlier steps come first out of the fifo queue: gradients for them are dropped" in words
    for _ in range(9):
        assert second.has_token(second.ask())
    assert "earlier step" not in driver.coordinator.cluster.explain(driver.now)


@pytest.mark.parametrize("number", [1_030, 1_031])
def test_there_are_at_most_a_thousand_tokens_and_those_of_ten_steps(number: int) -> None:
    policy = PolicySpec(tokens=TokenMode.FIFO, num_tokens=number)
    refused = pytest.raises(InvalidSpec, match="num_tokens: got 1031, want at most 1030 where a step queues 3")
    with refused if number > 1_030 else contextlib.nullcontext():
        CoordinationConfig(replicas_to_aggregate=2, total_num_replicas=3, policy=policy)


def test_a_million_tokens_take_no_more_memory_than_one() -> None:
    tracemalloc.start()
    try:
        tokens = FifoTokens(tokens_per_step=100_000, num_tokens=1_000_000)
        tokens.open_step(1)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert tokens.num_old == 1_000_000
    assert tokens.ask(0, local_step=0, request_id=1, is_open=True) == 0


def test_a_queue_that_all_wait_at_is_explained() -> None:
    driver = cluster(2, 2, num_tokens=0)
    first, second = driver.train(0, 1)
    first.push()
    first.ask()
    assert "last seen: worker 1" in driver.coordinator.cluster.explain(driver.now)
    second.ask()
    advice = "All live workers wait for a token and the queue is empty: start one more worker, or change to strict tokens"
    assert advice in driver.coordinator.cluster.explain(driver.now)
