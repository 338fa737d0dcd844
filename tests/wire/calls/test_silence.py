"""A call that hangs is logged while it hangs, and only then."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import DeadlineExceeded, Unavailable
from ps_protocol.process import waiting
from ps_protocol.process.waiting import SilenceWatch
from ps_protocol.roles.chief import ClusterStatusRequest
from ps_protocol.rpc.chief import GrpcChief
from tests.support.waiting import wait_until


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilenceWatch]:
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.1)
    monkeypatch.setattr(waiting, "_LOOK_INTERVAL_S", 0.02)
    watch = SilenceWatch()
    yield watch
    watch.close()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lockstep.silence"]


def test_a_call_that_hangs_is_named_while_it_hangs(watch: SilenceWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), watch.expecting("ps 1 at nowhere: push to step 7"):
        wait_until(lambda: messages(caplog), what="the notice")
    (message,) = messages(caplog)
    assert "no answer yet from ps 1 at nowhere: push to step 7" in message


def test_only_a_call_that_hangs_longer_than_expected_is_named(watch: SilenceWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), watch.expecting("slow", expected_s=60.0):
        with watch.expecting("quick"):
            pass
        with watch.expecting("hanging"):
            wait_until(lambda: messages(caplog), what="the notice")
    assert all("hanging" in message for message in messages(caplog))


def test_the_notice_is_repeated_only_after_a_while(watch: SilenceWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), watch.expecting("first"):
        wait_until(lambda: messages(caplog), what="the notice")
        with watch.expecting("second"):
            wait_until(lambda: len(messages(caplog)) > 1, what="the second call's notice")
    assert [message.split()[4].rstrip(",") for message in messages(caplog)] == ["first", "second"]


def test_the_alarm_sounds_while_a_call_hangs_longer_than_it_may(
    watch: SilenceWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_GRACE_S", 0.05)
    monkeypatch.setattr(waiting, "_ALARM_INTERVAL_S", 0.05)
    late: list[str] = []
    early: list[str] = []
    with watch.expecting("long", expected_s=60.0, alarm=lambda: early.append("long")):
        with caplog.at_level(logging.WARNING), watch.expecting("", alarm=lambda: late.append("hanging")):
            wait_until(lambda: len(late) > 4, what="the alarm, again and again")
    assert not early
    assert not messages(caplog), "what has no name is not spoken of"


def test_call_to_a_chief_that_is_silent_ends_when_its_caller_wants(socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_dir / "chief"))
        silent.listen()
        chief = GrpcChief(f"unix:{socket_dir}/chief")
        try:
            with pytest.raises((DeadlineExceeded, Unavailable)):
                chief.call(ClusterStatusRequest(), timeout_s=0.2)
        finally:
            chief.close()
