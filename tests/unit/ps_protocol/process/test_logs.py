"""What a role logs: bounded in rate by the place in the code, counted where it is left out, and other places are left alone."""

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from ps_protocol.process.logs import BoundedLogHandler, logging_to_stderr
from ps_protocol.process.output import BoundedOutput
from tests.support.repository import ROOT
from tests.support.unread import full_pipe
from tests.support.waiting import wait_until

log = logging.getLogger("tests.logs")


@contextmanager
def written() -> Iterator[io.StringIO]:
    """A role's log for the time of a block; a role keeps it to its end."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    try:
        with redirect_stderr(io.StringIO()) as stream, logging_to_stderr():
            yield stream
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def flood(num_lines: int) -> None:
    for number in range(num_lines):
        log.warning("refused a call number=%d", number)


def test_flood_of_one_place_is_cut_and_counted() -> None:
    with written() as stream:
        flood(10_000)
    lines = stream.getvalue().splitlines()
    assert 50 <= len(lines) < 70, lines
    count = int(lines[-1].split("… ")[1].split()[0])
    assert count + len(lines) - 1 == 10_000
    assert re.search(r"WARNING tests.logs: … \d+ more like this in the last \d+ s: refused a call number=\d+$", lines[-1])


def test_other_places_and_other_errors_are_not_swallowed() -> None:
    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:
            log.exception("failed")

    with written() as stream:
        flood(1_000)
        log.warning("of another kind")
        for _ in range(1_000):
            fail(ValueError("known"))
        fail(OSError("new"))
    text = stream.getvalue()
    assert "of another kind" in text and "OSError: new" in text
    assert text.count("ValueError: known") <= 52


def test_long_texts_use_the_budget_up_sooner() -> None:
    with written() as stream:
        for _ in range(1_000):
            log.warning("%s", "x" * 10_000)
    assert len(stream.getvalue()) < 50_000


def test_what_was_left_out_is_said_without_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.process.logs._PERIOD_S", 0.05)
    stream = io.StringIO()
    handler = BoundedLogHandler(BoundedOutput(stream))
    log.addHandler(handler)
    try:
        flood(100)
        wait_until(lambda: "more like this" in stream.getvalue(), what="it is said")
    finally:
        log.removeHandler(handler)
        handler.close()


def test_what_is_logged_after_the_end_waits_for_nobody() -> None:
    program = """
import logging, sys
from ps_protocol.process.logs import logging_to_stderr
log = logging.getLogger("tests")
with logging_to_stderr():
    log.info("within " + "x" * 100_000)
for number in range(100):
    log.warning("after " * 10_000)
"""
    with full_pipe() as unread:
        process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=unread.descriptor, timeout=20.0)
    assert process.returncode == 0
