"""Transfers that share a link evenly, against times worked out by hand."""

import heapq
from collections.abc import Callable

import pytest

from lockstep.planning.simulation import Transfers


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


@pytest.mark.parametrize(
    ("alone_s", "starts", "ends"),
    [
        pytest.param(2.0, [5.0], [7.0], id="alone"),
        pytest.param(1.0, [0.0] * 4, [4.0] * 4, id="at the same time they take as long as one after the other"),
        # At 1 s half of the first is done, and the other half takes 2 s; then half of the second is done, beside the first.
        pytest.param(2.0, [0.0, 1.0], [3.0, 4.0], id="a later one slows the earlier one down"),
        pytest.param(2.0, [0.0, 1.0, 10.0], [3.0, 4.0, 12.0], id="a link that was idle begins anew"),
    ],
)
def test_transfers_share_the_link_and_end_in_order(alone_s: float, starts: list[float], ends: list[float]) -> None:
    clock = NumberClock()
    found: list[tuple[int, float]] = []
    transfers = Transfers(clock, alone_s=alone_s, then=lambda transfer: found.append((transfer, clock.now)))
    for transfer, start_s in enumerate(starts):
        clock.later(start_s, transfers.start, transfer)
    clock.run()
    assert [transfer for transfer, _ in found] == [*range(len(starts))]
    assert [end for _, end in found] == pytest.approx(ends)


def test_transfer_without_a_duration_ends_at_once() -> None:
    clock = NumberClock()
    ended: list[int] = []
    Transfers(clock, alone_s=0.0, then=ended.append).start(3)
    assert ended == [3] and not clock.planned
