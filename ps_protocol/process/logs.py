"""A role's log, and its run within it: text or JSON, on standard error at a bounded rate, without making the role wait. Knows no role."""

import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from types import TracebackType

from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process import options
from ps_protocol.process.exhaustion import end_if_exhausted, ending_without_memory
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.listening import allow_many_connections
from ps_protocol.process.options import Given
from ps_protocol.process.output import BoundedOutput, write_last

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What one place in the code may log at once, and how much comes to that with every second, in lines. A longer text counts for several.
_BURST = 50.0
_LINES_PER_S = 1.0
_LINE_CHARACTERS = 256
# How often the number of lines left out is logged.
_PERIOD_S = 10.0
# The end of a role must not wait for a reader of its log.
_TIMEOUT_S = 1.0
# So much of a message says which one was left out.
_SAMPLE_CHARACTERS = 120


def log_format_of(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Returns the format of a role's log. It is read before the other options, so that their errors are logged in it too.

    Raises InvalidSpec for an unknown format.
    """
    flag = options.LOG_FORMAT.flag
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith(f"{flag}=") else [word])]
    given = words[words.index(flag) + 1 :][:1] if flag in words else [None]
    return Given({options.LOG_FORMAT.key: given[0] if given else None}, environment)[options.LOG_FORMAT]


@contextmanager
def logging_to_stderr(log_format: str = options.LOG_FORMAT.default) -> Iterator[None]:
    """Has a role's log go to standard error, from INFO on, by a thread of its own; the end of the block waits until it is written.

    For the rest of the process: lines logged after the block are dropped. Python's own way would wait for a reader, and hold a lock that
    the end of the process waits for.
    """
    with BoundedOutput(sys.stderr, timeout_s=_TIMEOUT_S) as output:
        with closing(_log_to(output, logging.INFO, _formatter(log_format))):
            if log_format == "json":
                sys.excepthook = _log_uncaught  # the interpreter writes a traceback in lines of text
                threading.excepthook = _log_uncaught_in_thread
            yield


def run_role(program: str, arguments: Sequence[str], run: Callable[[], int]) -> int:
    """Returns the exit code of `run`, which is a role's whole work, within its log; 2, with one line that says why, if it raises a PsError.

    Ends the process with 1 if the system refuses it memory or a thread.
    """
    allow_many_connections()
    log_format = options.LOG_FORMAT.default
    try:
        log_format = log_format_of(arguments, os.environ)
        with logging_to_stderr(log_format), ending_without_memory():
            return run()
    except PsError as error:
        _write_last_words(program, error.message, log_format)
        return ExitCode.USAGE
    except (MemoryError, OSError, RuntimeError) as error:
        end_if_exhausted(error, lambda words: _write_last_words(program, words, log_format))
        raise


def _write_last_words(program: str, message: str, log_format: str) -> None:
    """Writes why a role ends, as one line in the format of its log, after the log has ended."""
    line = f"{program}: {message}"
    if log_format == "json":
        line = JsonFormatter().format(logging.LogRecord("lockstep", logging.CRITICAL, __file__, 0, line, (), None))
    write_last(sys.stderr, f"{line}\n")


@contextmanager
def warnings_to_stderr() -> Iterator[None]:
    """Does the same for a command: its warnings look as Python shows them by default."""
    with BoundedOutput(sys.stderr) as output:
        output.hurry()
        with closing(_log_to(output, logging.WARNING, logging.Formatter("%(message)s"))):
            yield


# What a line of a role's log ends with: a fact, then its fields.
_FIELDS = re.compile(r"(?: [a-z_]+=%[-+#.0-9]*[a-z])+$")
_FIELD = re.compile(r" ([a-z_]+)=(%[-+#.0-9]*[a-z])")


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """Returns the message without its fields, and the fields: numbers and None as such, all else as the message has it."""
    found = _FIELDS.search(record.msg) if isinstance(record.msg, str) and isinstance(record.args, tuple) else None
    if found is None or not isinstance(record.args, tuple):
        return record.getMessage(), {}
    fields = _FIELD.findall(found[0])
    values = record.args[-len(fields) :]
    # JSON has no number that is not finite.
    kept = {
        name: value
        for (name, _), value in zip(fields, values, strict=True)
        if value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    }
    texts = {name: text % (value,) for (name, text), value in zip(fields, values, strict=True)}
    return record.msg[: found.start()] % record.args[: -len(fields)], {**texts, **kept}


class JsonFormatter(logging.Formatter):
    """One JSON object for each record: `time` (UTC, RFC 3339), `level`, `logger`, `message`, its fields, `exception` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the object on one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message, values = _parts(record)
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": message,
            **values,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def _formatter(log_format: str) -> logging.Formatter:
    return JsonFormatter() if log_format == "json" else logging.Formatter(_FORMAT)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Writes the error that ends the process, after the end of its log."""
    record = logging.LogRecord("lockstep", logging.CRITICAL, __file__, 0, "uncaught error", (), (kind, error, trace))
    write_last(sys.stderr, f"{JsonFormatter().format(record)}\n")


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    error = failed.exc_value or failed.exc_type()
    name = failed.thread.name if failed.thread else "?"
    logging.getLogger("lockstep").critical("a thread ended by an error thread=%s", name, exc_info=error)


def _log_to(output: BoundedOutput, level: int, formatter: logging.Formatter) -> "BoundedLogHandler":
    handler = BoundedLogHandler(output)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level)
    return handler


@light_dataclass(slots=True)
class _Site:
    """One place in the code that logs: how many lines it may still log, and how many were left out."""

    budget: float
    at: float
    sample: str = ""
    num_left_out: int = 0
    left_out_since: float = 0.0
    record: logging.LogRecord | None = None


class BoundedLogHandler(logging.Handler):
    """Writes the log: for each place in the code 50 lines at once and one line a second. Logs every 10 s how many were left out.

    A place is a line of code and, for errors with a traceback, the class of the error. A place that logs too often leaves the others alone.
    """

    def __init__(self, output: BoundedOutput) -> None:
        super().__init__()
        self._output = output
        self._sites: dict[tuple[object, ...], _Site] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record's text, or counts it."""
        now = time.monotonic()
        key = (record.pathname, record.lineno, record.levelno, record.exc_info[0] if record.exc_info else None)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _Site(budget=_BURST, at=now)
        site.budget = min(_BURST, site.budget + (now - site.at) * _LINES_PER_S)
        site.at = now
        if site.budget < 1.0:
            self._leave_out(site, record, now)
            return
        try:
            text = self.format(record)
            site.sample = record.getMessage()[:_SAMPLE_CHARACTERS]
        except Exception:
            self.handleError(record)
            return
        site.budget -= max(1.0, len(text) / _LINE_CHARACTERS)
        self._write(text)

    def close(self) -> None:
        """Logs the number of lines left out since the last time."""
        self._say_what_was_left_out()
        super().close()

    def _leave_out(self, site: _Site, record: logging.LogRecord, now: float) -> None:
        if not site.num_left_out:
            site.left_out_since, site.record = now, record
        site.num_left_out += 1
        if self._timer is None:
            self._timer = threading.Timer(_PERIOD_S, self._say_what_was_left_out)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no thread to be had: the next one to be left out tries again
                self._timer.start()
                return
            self._timer = None

    def _say_what_was_left_out(self) -> None:
        self.acquire()
        try:
            timer, self._timer = self._timer, None
            if timer is not None:
                timer.cancel()
            now = time.monotonic()
            for site in self._sites.values():
                self._say_what_one_left_out(site, now)
        finally:
            self.release()

    def _say_what_one_left_out(self, site: _Site, now: float) -> None:
        first, count = site.record, site.num_left_out
        if first is None:
            return
        site.record, site.num_left_out = None, 0
        words = "… %d more like this in the last %.0f s: %s"
        values = (count, max(1.0, now - site.left_out_since), site.sample)
        self._write(self.format(logging.LogRecord(first.name, first.levelno, first.pathname, first.lineno, words, values, None)))

    def _write(self, text: str) -> None:
        with suppress(OSError):  # standard error is gone, and there is nowhere to report that
            self._output.write(f"{text}\n")


class SeldomWarning:
    """One kind of warning that any host can cause that reaches a port: logged every 10 s at most. Thread-safe.

    Never waits: another thread logs it, since the log may be a pipe that nobody reads.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._next_at = 0.0

    def warn(self, words: str, values: Callable[[], tuple[object, ...]]) -> None:
        """Logs a warning at most every 10 s; `values`, which the text needs, are computed only then."""
        with self._lock:
            if time.monotonic() < self._next_at:
                return
            self._next_at = math.inf  # until it is written
        threading.Thread(target=self._write, args=(words, values()), name="warning", daemon=True).start()

    def _write(self, words: str, values: tuple[object, ...]) -> None:
        self._log.warning(words, *values)
        self._next_at = time.monotonic() + _PERIOD_S
