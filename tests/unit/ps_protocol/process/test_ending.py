"""How a role is asked to end: an engine and a launcher may both send a signal, and that is one request."""

import signal

import pytest

from ps_protocol.process.ending import EndSignals


def test_signals_that_come_together_ask_once_and_a_later_one_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    end = EndSignals(asked.append)
    for now, number in (
        (10.0, signal.SIGTERM),
        (10.2, signal.SIGTERM),
        (10.4, signal.SIGINT),
        (10.6, signal.SIGINT),
        (10.9, signal.SIGTERM),
    ):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        end(number)
    assert asked == ["SIGTERM", "SIGINT"]
