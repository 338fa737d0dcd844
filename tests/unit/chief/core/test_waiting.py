from chief.core.waiting import Deadlines


def test_keys_come_due_in_order_of_time() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", 1), 3.0)
    deadlines.set(("b", 1), 1.0)
    assert deadlines.next() == 1.0
    assert deadlines.pop_due(0.9) == []
    assert deadlines.pop_due(3.0) == [("b", 1), ("a", 1)]
    assert deadlines.next() is None


def test_a_deadline_moved_later_does_not_come_early() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", 1), 1.0)
    deadlines.set(("a", 1), 5.0)
    assert deadlines.pop_due(1.0) == []
    assert deadlines.next() == 5.0
    assert deadlines.pop_due(5.0) == [("a", 1)]


def test_a_deadline_moved_earlier_comes_early_and_once() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", 1), 5.0)
    deadlines.set(("a", 1), 1.0)
    assert deadlines.pop_due(1.0) == [("a", 1)]
    assert deadlines.pop_due(9.0) == []


def test_a_cleared_deadline_does_not_come() -> None:
    deadlines = Deadlines()
    deadlines.set(("a", 1), 1.0)
    deadlines.clear(("a", 1))
    assert deadlines.pop_due(9.0) == []


def test_renewing_a_lease_a_million_times_does_not_grow_the_heap() -> None:
    deadlines = Deadlines()
    for number in range(1000):
        deadlines.set(("a", 1), 10.0 + number)
        deadlines.clear(("b", 1))
        deadlines.set(("b", 1), 20.0 + number)
    assert len(deadlines._heap) == 2
