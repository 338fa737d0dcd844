"""The page with a status that a test makes up, and what axe-core finds on it. Starts no cluster."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from chief.page.cost import CostCount
from chief.page.feed import additions, snapshot
from chief.page.look import Look
from chief.page.site import page_response
from ps_protocol.http.messages import Route, json_response
from ps_protocol.http.server import HttpServer
from ps_protocol.roles.chief import Condition
from tests.support.chief.cluster_status import cluster_status, worker_status
from tests.support.processes.browser import Browser


@contextlib.contextmanager
def page_of(*conditions: Condition, address: str = "127.0.0.1:0") -> Iterator[str]:
    """The URL of a page that shows a cluster of which this is to be said."""
    status = cluster_status(worker_status(0), worker_status(1), conditions=conditions)
    cost = CostCount().add(status, at=0.0)
    look = Look(
        number=1,
        at=0.0,
        wall=0.0,
        status=status,
        cost=cost,
        steps_per_s=None,
        contributions_per_s={},
        read_s={},
        num_last={},
    )
    answer = json_response({"run": "1", **snapshot(look), **additions(speed=(), metrics={}, num_left_out=0, entries=())})
    page = page_response()
    routes = Route(path="/", answer=lambda _: page), Route(path="/api/cluster", answer=lambda _: answer)
    server = HttpServer(routes, address=address, cluster="job", allow_insecure_network=True)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def violations(browser: Browser, selector: str = "body") -> list[str]:
    """Returns what axe-core finds in an element that keeps people from using the page."""
    found = importlib.util.find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core-python is not installed; `make test` has it")
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    if browser.evaluate("typeof axe") == "undefined":
        browser.evaluate(Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8") + ";0")
    listed: list[str] = browser.evaluate(
        f"axe.run({selector!r}, {{resultTypes: ['violations']}})"
        ".then(found => found.violations.map(one => one.id + ': ' + one.nodes.map(node => node.html).join()))"
    )
    return listed
