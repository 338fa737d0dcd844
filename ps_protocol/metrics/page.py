"""`/metrics`: the families of a role in Prometheus' text format over HTTP. Knows no family by its name."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from ps_protocol.http.messages import Request, Response, Route
from ps_protocol.metrics.exposition import CONTENT_TYPE, Family, exposition, process_families

PATH = "/metrics"
_DISTRIBUTION, _METADATA = "lockstep_ps-", ".dist-info"
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


def _installed_version() -> str:
    """Returns the version as the installed package's directory has it in its name: `importlib.metadata` takes 50 ms to import."""
    for place in sys.path:
        with suppress(OSError):
            for name in os.listdir(place or "."):
                if name.startswith(_DISTRIBUTION) and name.endswith(_METADATA):
                    return name.removeprefix(_DISTRIBUTION).removesuffix(_METADATA)
    return "unknown"
