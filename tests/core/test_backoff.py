"""Claims about the pauses between attempts."""

import itertools
import random

from ps_protocol.process.waiting import delays_s


def first(count: int, seed: int) -> list[float]:
    return list(itertools.islice(delays_s(random.Random(seed), first_s=0.1, max_s=3.0), count))


def test_pauses_double_up_to_the_bound_and_stay_in_its_upper_half() -> None:
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0, 3.0]
    for seed in range(50):
        assert all(bound / 2 <= delay <= bound for delay, bound in zip(first(8, seed), bounds, strict=True))


def test_callers_do_not_pause_alike() -> None:
    assert len({first(1, seed)[0] for seed in range(20)}) == 20
