"""`/metrics`: the numbers of a role, and what workers have reported, in Prometheus' text format over HTTP. Knows families; no role."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ps_protocol.http.messages import Request, Response, Route
from ps_protocol.process.exposition import CONTENT_TYPE, Family, exposition, gauge, labels, process_families
from ps_protocol.roles.shard import MetricCell

PATH = "/metrics"
_DISTRIBUTION, _METADATA = "lockstep_ps-", ".dist-info"
MAX_NAMES, MAX_NAME_CHARACTERS = 100, 128
# Within this time every scraper gets the same answer: many of them cost no more than one.
_SAME_FOR_S = 0.5


class MetricsPage:
    """The answer to scrapes. Thread-safe. `role`: what runs here, for example "chief". `families`: asked for each new answer."""

    def __init__(self, families: Callable[[], Iterable[Family]], *, role: str) -> None:
        self._families, self._role = families, role
        self._version = ""
        self._lock = threading.Lock()
        self._made_at, self._answer = 0.0, b""

    def route(self, *, rpc: str) -> Route:
        """Returns the path; who may call `rpc` may ask for it."""
        return Route(path=PATH, answer=self.answer, rpc=rpc, may_wait=True)

    def answer(self, _: Request) -> Response:
        """Returns the numbers of now, or of half a second ago."""
        with self._lock:
            # Not when the role starts, since perhaps nobody asks.
            self._version = self._version or _installed_version()
            if not self._answer or time.monotonic() - self._made_at > _SAME_FOR_S:
                self._answer = exposition([*process_families(role=self._role, version=self._version), *self._families()])
                self._made_at = time.monotonic()
            return Response(body=self._answer, content_type=CONTENT_TYPE)


def reported_families(cells: Iterable[MetricCell]) -> Iterator[Family]:
    """Yields what workers have reported as metrics, of all workers together: a label for each of them would be too many series.

    The name is a label: the first 100 names, of 128 characters at most.
    """
    sums: dict[str, tuple[float, float, int]] = {}
    for cell in cells:
        if cell.name in sums or (len(sums) < MAX_NAMES and len(cell.name) <= MAX_NAME_CHARACTERS):
            total, weight, count = sums.get(cell.name, (0.0, 0.0, 0))
            sums[cell.name] = total + cell.total, weight + cell.weight, count + cell.count
    named = [labels(metric=name) for name in sums]
    rows = [*zip(named, sums.values(), strict=True)]
    # Reported numbers may be negative, and a rollback takes some back, so these are not counters.
    yield gauge(
        "lockstep_reported_sum", "Sum of a metric that workers reported, each times its weight", *((one, row[0]) for one, row in rows)
    )
    yield gauge("lockstep_reported_weight", "Sum of the weights of a metric's reports", *((one, row[1]) for one, row in rows))
    yield gauge("lockstep_reported_reports", "How often a metric was reported", *((one, row[2]) for one, row in rows))


def _installed_version() -> str:
    """Returns the version as the installed package's directory has it in its name: `importlib.metadata` takes 50 ms to import."""
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):
                if name.startswith(_DISTRIBUTION) and name.endswith(_METADATA):
                    return name.removeprefix(_DISTRIBUTION).removesuffix(_METADATA)
    return "unknown"
