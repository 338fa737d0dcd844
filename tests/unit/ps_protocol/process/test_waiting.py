"""Pauses between attempts, and the condition that is its own lock: it behaves as `threading.Condition` does."""

import itertools
import random
import threading
import time

import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.process import waiting
from ps_protocol.process.waiting import QuickCondition, delays_s
from tests.support.waiting import wait_until

# Claims about the condition that is its own lock: it is one in every way.


def test_waiting_on_a_condition_releases_its_lock_however_often_it_was_entered() -> None:
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


def test_a_thread_without_the_lock_of_a_condition_may_neither_notify_nor_release() -> None:
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


# Claims about calls that are tried again.


def test_a_process_that_stood_still_for_all_of_a_calls_time_tries_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, attempts = [100.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def attempt(left_s: float) -> str:
        attempts.append(left_s)
        if len(attempts) > 1:
            return "answer"
        now[0] += 68.0  # stopped, while it waited for what would have come within 11 s
        raise Unavailable("did not come within 11 s")

    assert waiting.call(attempt, what="it", timeout_s=60.0, stood_still=lambda since_s: since_s == 100.0) == "answer"
    assert attempts == [60.0, 60.0]
    attempts.clear()
    with pytest.raises(Unavailable, match=r"did not come within 11 s \(tried for 68.0 s\)"):
        waiting.call(attempt, what="it", timeout_s=60.0, stood_still=lambda since_s: False)


def test_a_watch_knows_that_its_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s[0])
    watch, began = waiting.SilenceWatch(), clock()
    try:
        assert not watch.stood_still(began)
        passed_s[0] = 10.0
        assert watch.stood_still(began), "also before its thread has looked"
        went_on = clock() + passed_s[0]
        wait_until(lambda: not watch.stood_still(went_on + 5.0), what="its thread has looked")
        assert watch.stood_still(began)
    finally:
        watch.close()


def test_a_transfer_of_which_nothing_moves_is_reported_after_2_s_and_one_that_moves_when_it_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_LOOK_INTERVAL_S", 0.01)
    now, progress = [100.0], waiting.Progress()
    watch = waiting.SilenceWatch()

    def reported(what: str) -> bool:
        return f"no answer yet from {what}," in caplog.text

    def pass_2_s(*, num_pieces: int) -> None:
        """Has the watch look again, at all calls from the earliest on."""
        marker = f"marker at {now[0]}"
        progress.num_pieces += num_pieces
        with watch.expecting(marker):
            now[0] += 2.0
            assert any(reported(marker) or pause.wait(0.01) for pause in itertools.repeat(threading.Event(), 5_000))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    try:
        with watch.expecting("ps 0", expected_s=60.0, progress=progress):
            for _ in range(10):
                pass_2_s(num_pieces=1)
                assert not reported("ps 0")
            pass_2_s(num_pieces=0)
            assert reported("ps 0")
        with watch.expecting("ps 1", expected_s=5.0, progress=progress):
            for _ in range(2):
                pass_2_s(num_pieces=1)
                assert not reported("ps 1")
            pass_2_s(num_pieces=1)
            assert reported("ps 1"), "it moves, and takes 6 s"
    finally:
        watch.close()
