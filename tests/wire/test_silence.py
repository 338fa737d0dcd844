"""A call that hangs is spoken for while it hangs, and only then."""

import logging
from collections.abc import Iterator

import pytest

from ps_protocol import silence
from ps_protocol.silence import SilenceWatch
from tests.waiting import wait_until


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SilenceWatch]:
    monkeypatch.setattr(silence, "FIRST_NOTICE_S", 0.1)
    monkeypatch.setattr(silence, "_LOOK_INTERVAL_S", 0.02)
    watch = SilenceWatch()
    yield watch
    watch.close()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == silence.__name__]


def test_a_call_that_hangs_is_named_while_it_hangs(watch: SilenceWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), watch.expecting("ps 1 at nowhere: push to step 7"):
        wait_until(lambda: messages(caplog), what="the notice")
    (message,) = messages(caplog)
    assert "no answer yet from ps 1 at nowhere: push to step 7" in message


def test_a_call_that_has_ended_or_may_take_long_is_not_named(watch: SilenceWatch, caplog: pytest.LogCaptureFixture) -> None:
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
