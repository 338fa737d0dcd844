"""The page as a whole: its file, its paths, and the port that serves them, for as long as the chief runs. Decides nothing."""

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from chief.page.event_log import EventLog
from chief.page.feed import additions, snapshot
from chief.page.keeper import StoryKeeper
from chief.page.recorder import FirstServer, Recorder, StatusSource
from ps_protocol.http.messages import HTML, BadRequest, Request, Response, Route, json_response
from ps_protocol.http.server import HttpServer
from ps_protocol.roles.chief import ClusterStatus, ContributionCounts
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import MetricCell
from ps_protocol.rpc.channel import Access
from ps_protocol.security.options import Security

Number = TypeVar("Number", int, float)

_STATUS = "/ps_protocol.v1.ChiefService/GetClusterStatus"
# Readers that ask at the same time see the same look.
_MAX_AGE_S = 0.4
_SCRAPED_AGE_S = 1.5
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page:
    """Serves a chief's page from `start` to `stop`. Raises InvalidSpec where it cannot listen.

    `join_counts` is told what the chiefs before this one have counted. `event_log` has what the chief has noted.
    `more`: other paths at the same port.
    """

    def __init__(
        self,
        cluster: StatusSource,
        *,
        name: str,
        join_counts: Callable[[ContributionCounts], None],
        event_log: EventLog,
        address: str,
        security: Security,
        allow_insecure_network: bool = False,
        more: Sequence[Route] = (),
    ) -> None:
        self._event_log = event_log
        # Tells a browser that events are counted from the first again: another process answers than before, or has joined that one's.
        self._run = secrets.token_hex(8)
        access = Access(security, role=CallerRole.CHIEF)
        self._metrics = FirstServer(access, cluster=name)
        self._recorder = Recorder(cluster, read_metrics=self._metrics.read_metrics)
        self._keeper = StoryKeeper(self._recorder, event_log, FirstServer(access, cluster=name), join_counts=join_counts)
        page = page_response()
        self._server = HttpServer(
            [
                Route(path="/", answer=lambda _: page),
                Route(path="/api/cluster", rpc=_STATUS, answer=self._cluster),
                *more,
            ],
            address=address,
            cluster=name,
            security=security,
            allow_insecure_network=allow_insecure_network,
        )

    @property
    def url(self) -> str:
        """The URL of the page; empty before `start`."""
        return self._server.url

    @property
    def status(self) -> ClusterStatus:
        """The cluster, as it was at most 1.5 s ago; a look a second is taken anyway."""
        return self._recorder.look(max_age_s=_SCRAPED_AGE_S).status

    @property
    def reported(self) -> Sequence[MetricCell]:
        """The metrics that workers have reported, as read last."""
        return self._recorder.cells

    def start(self) -> None:
        """Begins to serve."""
        self._server.start()
        self._recorder.start()
        self._keeper.start()

    def stop(self) -> None:
        """Ends, and closes the port."""
        self._keeper.stop()
        self._recorder.stop()
        self._server.stop()
        self._metrics.close()

    def _cluster(self, request: Request) -> Response:
        """The cluster now, and the points after `after` (a time of day) and events after `event` (an event's number)."""
        after, event = _query(request, "after", float), _query(request, "event", int)
        metrics, num_left_out = self._recorder.metrics(after=after)
        value = {
            "run": f"{self._run}{'+' * self._keeper.has_joined}",
            **snapshot(self._recorder.look(max_age_s=_MAX_AGE_S)),
            **additions(
                speed=self._recorder.speed(after=after),
                metrics=metrics,
                num_left_out=num_left_out,
                entries=self._event_log.since(event),
            ),
        }
        return json_response(value)


def page_response() -> Response:
    """Returns the page. A browser runs the scripts that are in it, and no others."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])};"
        " connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return Response(body=text.encode(), content_type=HTML, headers={"Content-Security-Policy": policy})


def _query(request: Request, name: str, parse: Callable[[str], Number]) -> Number:
    try:
        return parse(request.query.get(name, "0")[:40])
    except ValueError:
        raise BadRequest(400, f"{name}: want a number") from None
