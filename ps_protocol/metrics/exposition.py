"""Families in the text format of Prometheus (0.0.4), those of every process, and `/metrics`. Knows /proc; no role's families, no port.

A family is a name in base units, one sentence that describes it, and samples with labels. The code that makes a family bounds its number
of samples, since Prometheus keeps a time series for each combination of labels.
"""

import functools
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from ps_protocol.http.messages import Request, Response, Route
from ps_protocol.model.light_dataclass import light_dataclass

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# As they are written behind a name; made by `labels`, so that those of many samples are made once.
Labels = str
NO_LABELS: Labels = ""


@light_dataclass(frozen=True, slots=True)
class Family:
    """Samples of one name. A counter's name ends in `_total`. `words`: what it is, one sentence without a full stop.

    A summary's samples are its count and its sum, see `summary`.
    """

    name: str
    kind: Literal["counter", "gauge", "summary"]
    words: str
    samples: Sequence[tuple[Labels, float]]
    suffixes: tuple[str, ...] = ("",)


def labels(**values: str) -> Labels:
    """Returns labels, with whatever text as values."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items()) + "}"


def counter(name: str, words: str, *samples: tuple[Labels, float]) -> Family:
    """Returns what only grows, until the process starts again."""
    return Family(name, "counter", words, samples)


def gauge(name: str, words: str, *samples: tuple[Labels, float]) -> Family:
    """Returns what goes up and down."""
    return Family(name, "gauge", words, samples)


def summary(name: str, words: str, *, total: float, count: int) -> Family:
    """Returns how often something happened and the sum of what was measured; the mean of a window is the quotient of their rates."""
    return Family(name, "summary", words, ((NO_LABELS, count), (NO_LABELS, total)), ("_count", "_sum"))


def exposition(families: Iterable[Family]) -> bytes:
    """Returns the families as text; one without samples is left out."""
    lines = [line for family in families if family.samples for line in _lines(family)]
    return "\n".join([*lines, ""]).encode("utf-8", "backslashreplace")


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.words}."
    yield f"# TYPE {family.name} {family.kind}"
    if len(family.suffixes) == 1:
        yield from [f"{family.name}{where} {_number(value)}" for where, value in family.samples]
        return
    for (where, value), suffix in zip(family.samples, family.suffixes, strict=True):
        yield f"{family.name}{suffix}{where} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


_DESCRIPTORS = "/proc/self/fd"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def process_families(*, role: str, version: str) -> Iterator[Family]:
    """Yields what every process exports: the version, and processor time, memory and descriptors by the names of Prometheus' own clients.

    Memory and descriptors only where there is /proc.
    """
    yield gauge("lockstep_build_info", "Always 1; the labels name role and version", (labels(role=role, version=version), 1))
    times = os.times()
    yield counter("process_cpu_seconds_total", "User and system processor time spent, in seconds", (NO_LABELS, times.user + times.system))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield gauge("process_max_fds", "Most descriptors that may be open", (NO_LABELS, soft))
    with suppress(OSError):
        yield gauge("process_open_fds", "Descriptors that are open", (NO_LABELS, _num_descriptors()))
    with suppress(OSError):
        with open("/proc/self/statm", encoding="ascii") as file:
            virtual, resident = (int(word) * _PAGE_BYTES for word in file.read().split()[:2])
        yield gauge("process_virtual_memory_bytes", "Virtual memory, in bytes", (NO_LABELS, virtual))
        yield gauge(
            "process_resident_memory_bytes", "Resident memory, in bytes; shared memory counts in each process", (NO_LABELS, resident)
        )
    with suppress(OSError):
        yield gauge("process_start_time_seconds", "When the process began, in seconds since 1970", (NO_LABELS, _started_at()))


def _num_descriptors() -> int:
    # Linux 6.2 and newer say so; to list a thousand takes a millisecond.
    return os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))


@functools.cache  # the file adds up the times of all threads, which takes a millisecond for hundreds
def _started_at() -> float:
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        # The name, in brackets, may have spaces; the 20th word after it is the time since the machine began.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS_A_SECOND


_DISTRIBUTION, _METADATA = "lockstep_ps-", ".dist-info"
# Within this time every scraper gets the same answer: many of them cost no more than one.
_SAME_FOR_S = 0.5


class MetricsPage:
    """The answer to scrapes. Thread-safe. `role`: the role of this process, for example "chief". `families`: called for each new answer."""

    def __init__(self, families: Callable[[], Iterable[Family]], *, role: str) -> None:
        self._families, self._role = families, role
        self._version = ""
        self._lock = threading.Lock()
        self._made_at, self._answer = 0.0, b""

    def route(self, *, rpc: str) -> Route:
        """Returns the path; who may call `rpc` may ask for it."""
        return Route(path=PATH, answer=self.answer, rpc=rpc)

    def answer(self, _: Request) -> Response:
        """Returns the numbers of now, or of half a second ago."""
        with self._lock:
            # Not when the role starts, since there may be no scraper.
            self._version = self._version or _installed_version()
            if not self._answer or time.monotonic() - self._made_at > _SAME_FOR_S:
                self._answer = exposition([*process_families(role=self._role, version=self._version), *self._families()])
                self._made_at = time.monotonic()
            return Response(body=self._answer, content_type=CONTENT_TYPE)


def _installed_version() -> str:
    """Returns the version as the installed package's directory has it in its name: `importlib.metadata` takes 50 ms to import."""
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):
                if name.startswith(_DISTRIBUTION) and name.endswith(_METADATA):
                    return name.removeprefix(_DISTRIBUTION).removesuffix(_METADATA)
    return "unknown"
