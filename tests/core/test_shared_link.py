"""Transfers that share a link evenly, against times worked out by hand."""

import pytest

from lockstep.shared_link import SharedLink


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
