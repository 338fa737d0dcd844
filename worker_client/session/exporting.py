"""A worker's own `/metrics`: its port, for as long as the session lasts. Knows families; no step waits for it."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from ps_protocol.errors import InvalidSpec
from ps_protocol.http.messages import Request, Response, Route
from ps_protocol.http.server import HttpServer
from ps_protocol.metrics.exposition import PATH, Family, MetricsPage
from ps_protocol.security.options import Security

log = logging.getLogger("lockstep.worker")

_RPC = "/ps_protocol.v1.ParameterService/ReadMetrics"


class WorkerMetrics:
    """Serves from `start` to `stop`. Raises InvalidSpec for an address that is none, or that strangers can reach.

    It asks for the tokens of the worker's token file, and speaks TLS with the worker's certificate, where there are any.
    """

    def __init__(self, address: str, *, cluster: str, security: Security, allow_insecure_network: bool) -> None:
        self._page: MetricsPage | None = None
        self._is_serving = False
        self._server = HttpServer(
            [Route(path=PATH, answer=self._answer, rpc=_RPC)],
            address=address,
            cluster=cluster,
            # The rest of it is about calling others.
            security=replace(security, token="", tls=None, tls_ca=None, tls_server_name=""),
            allow_insecure_network=allow_insecure_network,
        )

    @property
    def url(self) -> str:
        """The URL of the metrics; empty: they are not served."""
        return f"{self._server.url}{PATH.removeprefix('/')}" if self._is_serving else ""

    def start(self, families: Callable[[], Iterable[Family]], *, worker: int) -> None:
        """Begins to serve. If the port cannot be opened, training continues without it."""
        self._page = MetricsPage(families, role=f"worker {worker}")
        try:
            self._server.start()
        except InvalidSpec as error:
            log.warning("there are no metrics of this worker cause=%s", error.message)
            return
        self._is_serving = True
        log.info("metrics url=%s", self.url)

    def stop(self) -> None:
        """Closes the port. Idempotent."""
        self._is_serving = False
        self._server.stop()

    def _answer(self, request: Request) -> Response:
        assert self._page is not None
        return self._page.answer(request)
