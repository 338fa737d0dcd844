import pytest

from chief.policies.sync import TokenQueue
from ps_protocol.errors import StepAhead


def ask(queue: TokenQueue, worker: int, *, local_step: int = 0, request_id: int = 1, may_take_extra: bool = True) -> int | None:
    return queue.ask(worker, local_step=local_step, request_id=request_id, may_take_extra=may_take_extra)


def test_a_worker_of_the_open_step_waits_and_is_released_when_the_next_opens() -> None:
    queue = TokenQueue(num_extras=0)
    assert ask(queue, 0) is None
    assert ask(queue, 1) is None
    assert queue.open_step(1) == [0, 1]
    assert queue.waiting == ()


def test_a_worker_of_an_older_step_gets_the_open_step_however_often_it_asks() -> None:
    queue = TokenQueue(num_extras=0, step=5)
    assert [ask(queue, 0, local_step=2), ask(queue, 0, local_step=2)] == [5, 5]


def test_a_step_that_has_not_come_is_refused() -> None:
    queue = TokenQueue(num_extras=0, step=5)
    with pytest.raises(StepAhead, match="local_step 6 is ahead of global_step 5"):
        ask(queue, 0, local_step=6)
    assert queue.waiting == ()


def test_extras_go_to_who_asks_first_and_only_as_many_as_there_are() -> None:
    queue = TokenQueue(num_extras=2)
    assert [ask(queue, worker) for worker in (2, 0, 1)] == [0, 0, None]
    assert queue.num_free == 0


def test_a_worker_that_may_not_take_an_extra_does_not_get_one() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 0, may_take_extra=False) is None
    assert queue.num_free == 1


def test_a_repeated_request_gets_its_extra_again_and_not_another() -> None:
    queue = TokenQueue(num_extras=2)
    assert [ask(queue, 0), ask(queue, 0)] == [0, 0]
    assert queue.num_free == 1
    assert queue.spend_extra(0)
    assert ask(queue, 0) == 0, "the answer may have been lost; the token stays spent"
    assert queue.num_free == 1
    assert not queue.spend_extra(0)


def test_a_worker_holds_at_most_one_unspent_extra() -> None:
    queue = TokenQueue(num_extras=2)
    assert [ask(queue, 0, request_id=1), ask(queue, 0, request_id=2)] == [0, 0]
    assert queue.num_free == 1


def test_the_extra_of_a_gone_worker_goes_to_the_one_that_has_waited_longest() -> None:
    queue = TokenQueue(num_extras=1)
    assert [ask(queue, worker) for worker in (0, 2, 1)] == [0, None, None]
    assert queue.drop(0) == [2]
    assert queue.holds_extra(2)
    assert queue.waiting == (1,)


def test_a_spent_extra_does_not_come_back() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 0) == 0
    assert ask(queue, 1) is None
    assert queue.spend_extra(0)
    assert queue.drop(0) == []


def test_a_repeated_wish_keeps_its_place() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 9) == 0
    for worker in (0, 1, 0):
        assert ask(queue, worker) is None
    assert queue.drop(9) == [0]


def test_a_forgotten_wish_is_not_served_and_an_extra_that_is_held_stays() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 0) == 0
    assert ask(queue, 1) is None
    queue.forget_wish(0)
    queue.forget_wish(1)
    assert queue.holds_extra(0)
    assert queue.open_step(1) == []


def test_extras_of_a_step_gone_by_are_gone_and_each_step_has_new_ones() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 0) == 0
    assert queue.open_step(1) == []
    assert not queue.holds_extra(0)
    assert queue.num_free == 1


def test_a_waiting_worker_gets_an_extra_once_it_may() -> None:
    queue = TokenQueue(num_extras=1)
    assert ask(queue, 0, may_take_extra=False) is None
    assert queue.allow_extra(0) == [0]
    assert queue.holds_extra(0)
