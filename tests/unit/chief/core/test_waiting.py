"""Timers fire in order, once, and never early; and blocked callers that expire, are cancelled or are refused."""

import pytest

from chief.core.messages import Refuse, Reply
from chief.core.waiting import Blocked, Line, Outbox, Timer, Timers, Waiting
from ps_protocol.errors import Unavailable


class Fired:
    """Timers by name, and those that have come."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.names: list[str] = []

    def timer(self, name: str) -> Timer:
        return self.timers.timer(lambda now: self.names.append(name))

    def fire(self, now: float) -> list[str]:
        self.names.clear()
        self.timers.fire(now)
        return [*self.names]


def test_timers_come_in_order_of_time() -> None:
    fired = Fired()
    fired.timer("a").set(3.0)
    fired.timer("b").set(1.0)
    assert fired.timers.next() == 1.0
    assert fired.fire(0.9) == []
    assert fired.fire(3.0) == ["b", "a"]
    assert fired.timers.next() is None


def test_a_timer_moved_later_does_not_come_early() -> None:
    fired = Fired()
    timer = fired.timer("a")
    timer.set(1.0)
    timer.set(5.0)
    assert fired.fire(1.0) == []
    assert fired.timers.next() == 5.0
    assert fired.fire(5.0) == ["a"]


def test_of_several_that_are_due_at_once_the_earliest_comes_first_although_it_was_moved_later_and_equals_as_they_were_set() -> None:
    fired = Fired()
    moved = fired.timer("moved")
    moved.set(1.0)
    moved.set(4.0)
    for name in ("first", "second"):
        fired.timer(name).set(2.0)
    assert fired.fire(5.0) == ["first", "second", "moved"]


def test_a_timer_moved_earlier_comes_early_and_once() -> None:
    fired = Fired()
    timer = fired.timer("a")
    timer.set(5.0)
    timer.set(1.0)
    assert fired.fire(1.0) == ["a"]
    assert fired.fire(9.0) == []


def test_a_cleared_timer_does_not_come() -> None:
    fired = Fired()
    timer = fired.timer("a")
    timer.set(1.0)
    timer.clear()
    assert fired.fire(9.0) == []


def test_a_timer_that_an_earlier_one_clears_does_not_come() -> None:
    fired = Fired()
    second = fired.timer("b")
    fired.timers.timer(lambda now: second.clear()).set(1.0)
    second.set(2.0)
    assert fired.fire(3.0) == []


def test_renewing_a_lease_a_million_times_does_not_grow_the_heap() -> None:
    fired = Fired()
    first, second = fired.timer("a"), fired.timer("b")
    for number in range(1000):
        first.set(10.0 + number)
        second.clear()
        second.set(20.0 + number)
    assert len(fired.timers._heap) == 2


def test_calls_that_block_and_are_answered_do_not_grow_the_heap() -> None:
    out, timers = Outbox(), Timers()
    line: Line[str] = Waiting(out, timers).line(lambda blocked, now: None)
    for number in range(1000):
        line.block(number, "a token", until=20.0 + number, who=7)
        assert line.answer(7, None)
    assert len(timers._heap) == 1


@pytest.mark.parametrize("way", ["expired", "cancelled", "refused", "answered"])
def test_a_call_waits_in_one_place_and_is_answered_once(way: str) -> None:
    out, timers = Outbox(), Timers()
    waiting = Waiting(out, timers)

    def expire(blocked: Blocked[str], now: float) -> None:
        assert blocked.ask == "a token"
        assert blocked.line.answer(blocked.who, int(now))

    line = waiting.line(expire)
    line.block(3, "a token", until=5.0)
    error = Unavailable("not now")
    match way:
        case "expired":
            timers.fire(5.0)
        case "cancelled":
            waiting.cancel(3)
        case "refused":
            line.refuse_all(error)
        case "answered":
            assert line.answer(3, 1)
    expected = {"expired": [Reply(call=3, value=5)], "refused": [Refuse(call=3, error=error)], "answered": [Reply(call=3, value=1)]}
    assert out.finish(6.0) == expected.get(way, [])
    waiting.cancel(3)
    timers.fire(9.0)
    assert (len(line), line.answer(3, 2), out.finish(9.0)) == (0, False, [])


def test_the_replies_and_follow_ups_of_a_refused_event_are_dropped() -> None:
    out = Outbox()
    out.reply(1, None)
    out.afterwards(lambda now: out.reply(2, None))
    out.discard()
    assert out.finish(1.0) == []
