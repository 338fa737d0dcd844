"""Claims about the pauses between attempts, and about the condition that is its own lock: it is one in every way."""

import itertools
import random
import threading

import pytest

from ps_protocol.process.waiting import QuickCondition, delays_s

# Claims about the condition that is its own lock: it is one in every way.


def test_who_waits_lets_others_in_however_often_it_has_entered() -> None:
    condition, said = QuickCondition(), list[str]()

    def answer() -> None:
        with condition:
            said.append("answer")
            condition.notify_all()

    with condition, condition:
        other = threading.Thread(target=answer)
        other.start()
        assert condition.wait_for(lambda: said, timeout=20)
    other.join()
    assert isinstance(condition, threading.Condition)


def test_who_is_not_in_it_may_neither_notify_nor_leave() -> None:
    condition = QuickCondition()
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.notify_all()
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.release()
    with condition:
        assert not condition.wait(timeout=0.0)


# Claims about the pauses between attempts.


def first(count: int, seed: int) -> list[float]:
    return list(itertools.islice(delays_s(random.Random(seed), first_s=0.1, max_s=3.0), count))


def test_pauses_double_up_to_the_bound_and_stay_in_its_upper_half() -> None:
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]
    for seed in range(50):
        assert all(bound / 2 <= delay <= bound for delay, bound in zip(first(8, seed), bounds, strict=True))


def test_callers_do_not_pause_alike() -> None:
    assert len({first(1, seed)[0] for seed in range(20)}) == 20
