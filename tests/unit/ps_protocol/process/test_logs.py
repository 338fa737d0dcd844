"""A role's log: each place in the code is limited in rate by itself, and omitted lines are counted."""

import io
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.process.logs import BoundedLogHandler, log_format_of, logging_to_stderr
from ps_protocol.process.output import BoundedOutput
from tests.support.processes.processes import run
from tests.support.processes.unread import full_pipe
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

log = logging.getLogger("tests.logs")


@contextmanager
def written(log_format: str = "text") -> Iterator[io.StringIO]:
    """A role's log for the time of a block; a role keeps it to its end."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    hooks = sys.excepthook, threading.excepthook
    try:
        with redirect_stderr(io.StringIO()) as stream, logging_to_stderr(log_format):
            yield stream
    finally:
        sys.excepthook, threading.excepthook = hooks
        root.setLevel(level)
        root.handlers[:] = handlers


def flood(num_lines: int) -> None:
    for number in range(num_lines):
        log.warning("refused a call number=%d", number)


def test_flood_of_one_place_is_cut_and_counted() -> None:
    begin = time.monotonic()
    with written() as stream:
        flood(10_000)
    lines = stream.getvalue().splitlines()
    assert 50 <= len(lines) < 70 + (time.monotonic() - begin), lines
    count = int(lines[-1].split("… ")[1].split()[0])
    assert count + len(lines) - 1 == 10_000
    assert re.search(r"WARNING tests.logs: … \d+ more like this in the last \d+ s: refused a call number=\d+$", lines[-1])


def test_log_lines_of_other_places_and_errors_are_not_dropped() -> None:
    def fail(error: Exception) -> None:
        try:
            raise error
        except Exception:
            log.exception("failed")

    begin = time.monotonic()
    with written() as stream:
        flood(1_000)
        log.warning("of another kind")
        for _ in range(1_000):
            fail(ValueError("known"))
        fail(OSError("new"))
    text = stream.getvalue()
    assert "of another kind" in text and "OSError: new" in text
    assert text.count("ValueError: known") <= 52 + (time.monotonic() - begin), "fifty at once, and one a second"


def test_long_texts_use_the_budget_up_sooner() -> None:
    with written() as stream:
        for _ in range(1_000):
            log.warning("%s", "x" * 10_000)
    assert len(stream.getvalue()) < 50_000


def test_omitted_lines_are_reported_without_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_line_logged_after_the_log_was_closed_does_not_block() -> None:
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


def test_each_line_of_a_json_log_is_an_object_and_its_rate_is_bounded() -> None:
    with written("json") as stream:
        log.info('of "two"\nlines of %s', "name\x1b[2J", extra={"more": 1})
        try:
            raise OSError("disk\nfull")
        except OSError:
            log.exception("failed")
        threading.Thread(target=lambda: 1 / 0, name="dividing").start()
        wait_until(lambda: "dividing" in stream.getvalue(), what="the thread's end is logged")
        flood(10_000)
    lines = stream.getvalue().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(lines) < 80
    assert found[0]["message"] == 'of "two"\nlines of name\x1b[2J' and found[0]["level"] == "INFO" and found[0]["logger"] == "tests.logs"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found[0]["time"])
    assert "OSError: disk\nfull" in found[1]["exception"] and "ZeroDivisionError" in found[2]["exception"]
    assert "\x1b" not in stream.getvalue(), "JSON escapes what could move a terminal's cursor"
    assert re.match(r"… \d+ more like this in the last \d+ s: refused a call", found[-1]["message"])
    assert found[-2]["message"] == "refused a call" and found[-2]["number"] > 0


def test_what_a_log_call_names_at_its_end_is_a_field_of_the_json_object_and_not_of_its_message() -> None:
    with written("json") as stream:
        log.info("saved 5 %% of %s step=%d cause=%s elapsed_s=%.1f", "it", 7, OSError("disk full: a=b"), 1.25)
        log.info("no number rate=%g", float("nan"))
        log.info("a text with step=%d in the middle", 3)
        log.info("given whole step=8")
        log.info("not yet known step=%s", None)
    first, *others = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {key: first[key] for key in ("message", "step", "cause", "elapsed_s")} == {
        "message": "saved 5 % of it",
        "step": 7,
        "cause": "disk full: a=b",
        "elapsed_s": 1.25,
    }
    assert [(one["message"], one.get("step"), one.get("rate")) for one in others] == [
        ("no number", None, "nan"),
        ("a text with step=3 in the middle", None, None),
        ("given whole step=8", None, None),
        ("not yet known", None, None),
    ]
    assert "step" in others[-1], "it has none, which is told as such"


def test_log_format_is_known_before_the_other_options() -> None:
    assert log_format_of([], {}) == "text"
    assert log_format_of(["--address", "x", "--log-format", "json"], {}) == "json"
    assert log_format_of(["--log-format=json"], {"LOCKSTEP_LOG_FORMAT": "text"}) == "json"
    assert log_format_of(["--log-format"], {"LOCKSTEP_LOG_FORMAT": "json"}) == "json"
    with pytest.raises(InvalidSpec, match="--log-format: got 'xml', want text or json"):
        log_format_of(["--log-format", "xml"], {})


@pytest.mark.parametrize("words", ["ps_server", "chief", "lockstep.combined --index 0 --with-chief"])
def test_a_role_that_cannot_start_reports_that_in_json_too(words: str) -> None:
    ended = run("-m", *words.split(), "--log-format", "json")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    found = json.loads(line)
    assert found["level"] == "CRITICAL" and ("--index" in found["message"] or "--workers" in found["message"] or "--ps" in found["message"])
