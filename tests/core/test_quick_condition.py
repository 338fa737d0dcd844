"""Claims about the condition that is its own lock: it is one in every way."""

import threading

import pytest

from ps_protocol.process.waiting import QuickCondition


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
