"""Transfers that share a link evenly, against times worked out by hand."""

import heapq
from collections.abc import Callable

import pytest

from lockstep.planning.simulation import SharedLink, Transfers


class NumberClock:
    """A clock that is a number, and what is to happen, in order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.planned: list[tuple[float, int, Callable[[int], None], int]] = []

    def later(self, delay_s: float, what: Callable[[int], None], whose: int) -> None:
        heapq.heappush(self.planned, (self.now + delay_s, len(self.planned), what, whose))

    def run(self) -> None:
        while self.planned:
            self.now, _, what, whose = heapq.heappop(self.planned)
            what(whose)


def test_a_transfer_alone_takes_its_time() -> None:
    link = SharedLink(alone_s=2.0)
    link.start(7, now=5.0)
    assert link.next_end() == 7.0
    assert link.pop_end(now=7.0) == 7
    assert link.next_end() is None


def test_transfers_at_the_same_time_take_as_long_as_all_of_them_one_after_the_other() -> None:
    link = SharedLink(alone_s=1.0)
    for transfer in range(4):
        link.start(transfer, now=0.0)
    for transfer in range(4):
        assert link.next_end() == pytest.approx(4.0)
        assert link.pop_end(now=4.0) == transfer


def test_a_later_transfer_slows_the_earlier_one_down() -> None:
    link = SharedLink(alone_s=2.0)
    link.start(0, now=0.0)
    link.start(1, now=1.0)  # half of the first is done; the other half takes 2 s now
    assert link.next_end() == pytest.approx(3.0)
    assert link.pop_end(now=3.0) == 0
    assert link.next_end() == pytest.approx(4.0)  # of the second, half was done beside the first
    assert link.pop_end(now=4.0) == 1


def test_a_link_that_was_idle_begins_anew() -> None:
    link = SharedLink(alone_s=1.0)
    link.start(0, now=0.0)
    link.pop_end(now=1.0)
    link.start(1, now=100.0)
    assert link.next_end() == pytest.approx(101.0)


def test_transfers_end_when_the_link_says_although_later_ones_delay_them() -> None:
    clock = NumberClock()
    ended: list[int] = []
    times: list[float] = []

    def end(transfer: int) -> None:
        ended.append(transfer)
        times.append(clock.now)

    transfers = Transfers(clock, alone_s=2.0, then=end)
    clock.later(0.0, transfers.start, 7)
    clock.later(1.0, transfers.start, 8)  # halves the link: 7 needs 2 s more, and then 8 has half of its own left
    clock.later(10.0, transfers.start, 9)
    clock.run()
    assert ended == [7, 8, 9]
    assert times == pytest.approx([3.0, 4.0, 12.0])


def test_transfer_without_a_duration_ends_at_once() -> None:
    clock = NumberClock()
    ended: list[int] = []
    Transfers(clock, alone_s=0.0, then=ended.append).start(3)
    assert ended == [3] and not clock.planned
