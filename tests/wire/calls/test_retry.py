"""Retries: which calls are repeated, for how long, and the warnings meanwhile."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from ps_protocol import errors
from ps_protocol.process import waiting
from ps_protocol.rpc.client import Connection
from ps_protocol.v1.error_pb2 import ErrorDetails
from tests.support.network.servers import serving, unary


class Flaky:
    """Fails with each of `failures`, then answers; remembers how much time it was given."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.given_s: list[float] = []

    def __call__(self, left_s: float) -> str:
        self.given_s.append(left_s)
        if self._failures:
            raise self._failures.pop(0)
        return "answer"


def refused() -> errors.Unavailable:
    return errors.Unavailable("cannot reach ps 0: connection refused", facts={"a": "b"})


def always_refused(left_s: float) -> str:
    raise refused()


def test_a_call_that_succeeds_is_made_once() -> None:
    attempt = Flaky()
    assert waiting.call(attempt, what="ps 0", timeout_s=5) == "answer"
    assert len(attempt.given_s) == 1
    assert attempt.given_s[0] == pytest.approx(5, abs=0.5)


def test_a_call_that_is_unavailable_is_repeated_with_the_remaining_time() -> None:
    attempt = Flaky(refused(), refused(), refused())
    assert waiting.call(attempt, what="ps 0", timeout_s=5) == "answer"
    assert len(attempt.given_s) == 4
    assert attempt.given_s == sorted(attempt.given_s, reverse=True)
    assert all(0 < left_s <= 5 for left_s in attempt.given_s)


@pytest.mark.parametrize("error", [errors.ShuttingDown("x"), errors.Superseded("x"), errors.DeadlineExceeded("x"), ValueError("x")])
def test_errors_other_than_unavailable_are_raised_without_a_retry(error: Exception) -> None:
    attempt = Flaky(error)
    with pytest.raises(type(error)) as caught:
        waiting.call(attempt, what="ps 0", timeout_s=5)
    assert caught.value is error
    assert len(attempt.given_s) == 1


def test_retries_end_at_the_time_limit_with_the_last_failure() -> None:
    started = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"cannot reach ps 0: connection refused \(tried for \d\.\d s\)") as caught:
        waiting.call(always_refused, what="ps 0", timeout_s=0.4)
    assert time.monotonic() - started < 3.0  # a busy machine; without the bound it would be for ever
    assert caught.value.facts == {"a": "b"}


def test_a_deadline_after_failures_names_both() -> None:
    attempt = Flaky(refused(), errors.DeadlineExceeded("waited for x"))
    with pytest.raises(errors.DeadlineExceeded, match=r"waited for x \(before that: cannot reach ps 0: connection refused\)"):
        waiting.call(attempt, what="ps 0", timeout_s=5)


def test_warning_comes_before_anyone_has_waited_too_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert waiting.FIRST_NOTICE_S == 2.0
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.2)
    with caplog.at_level(logging.WARNING), pytest.raises(errors.Unavailable):
        waiting.call(always_refused, what="ps 0 at h:1", timeout_s=0.9)
    assert len(caplog.records) == 1, "once, and then every 10 s"
    assert caplog.records[0].levelno == logging.WARNING
    text = caplog.records[0].getMessage()
    assert "what=ps 0 at h:1" in text
    assert "cause=cannot reach ps 0: connection refused" in text


def test_a_short_failure_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        waiting.call(Flaky(refused()), what="ps 0", timeout_s=5)
    assert not caplog.records


def test_closing_a_client_ends_its_wait_for_a_retry() -> None:
    stop, entered = threading.Event(), threading.Event()
    outcome: list[BaseException] = []

    def attempt(left_s: float) -> str:
        entered.set()
        raise refused()

    def wait() -> None:
        try:
            waiting.call(attempt, what="ps 0", timeout_s=30, stop=stop)
        except errors.PsError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert entered.wait(10)
    stop.set()
    thread.join(10)
    assert isinstance(outcome[0], errors.Cancelled)
    assert "connection refused" in str(outcome[0])


@contextlib.contextmanager
def echo_at(address: str) -> Iterator[str]:
    with serving(unary("test.Service", Call=lambda request, context: request), address=address) as bound:
        yield bound


def test_server_that_starts_late_or_again_is_found_soon(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/ps.sock"
    connection = Connection(address, name="ps 0", service="test.Service")
    results: Queue[str] = Queue()
    failures = threading.Semaphore(0)

    def attempt(left_s: float) -> str:
        try:
            return connection.unary("Call", ErrorDetails(reason="on"), ErrorDetails, timeout_s=left_s, awaited="x").reason
        except errors.Unavailable:
            failures.release()
            raise

    for _ in range(2):
        thread = threading.Thread(target=lambda: results.put(waiting.call(attempt, what="ps 0", timeout_s=20)))
        thread.start()
        assert failures.acquire(timeout=10)
        with echo_at(address):
            assert results.get(timeout=10) == "on"
        thread.join(10)
    connection.close()
