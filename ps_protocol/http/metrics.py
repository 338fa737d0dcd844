"""`/metrics`: the numbers of a role in Prometheus' text format, at a path of its HTTP port. Knows families; no role."""

import importlib.metadata
import threading
import time
from collections.abc import Callable, Iterable

from ps_protocol.http.messages import Request, Response, Route
from ps_protocol.process.exposition import CONTENT_TYPE, Family, exposition, process_families

PATH = "/metrics"
# Whoever asks more often gets the same answer again: many scrapers cost no more than one.
_SAME_FOR_S = 0.5


class MetricsPage:
    """The answer to scrapes. Thread-safe. `role`: what runs here, for example "chief". `families`: asked for each new answer."""

    def __init__(self, families: Callable[[], Iterable[Family]], *, role: str) -> None:
        self._families, self._role = families, role
        self._version = _installed_version()
        self._lock = threading.Lock()
        self._made_at, self._answer = 0.0, b""

    def route(self, *, rpc: str) -> Route:
        """Returns the path; who may call `rpc` may ask for it."""
        return Route(path=PATH, answer=self.answer, rpc=rpc, may_wait=True)

    def answer(self, _: Request) -> Response:
        """Returns the numbers of now, or of half a second ago."""
        with self._lock:
            if not self._answer or time.monotonic() - self._made_at > _SAME_FOR_S:
                self._answer = exposition([*process_families(role=self._role, version=self._version), *self._families()])
                self._made_at = time.monotonic()
            return Response(body=self._answer, content_type=CONTENT_TYPE)


def _installed_version() -> str:
    try:
        return importlib.metadata.version("lockstep-ps")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
