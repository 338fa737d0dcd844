"""The page in a real browser, during a real `lockstep up`."""

import contextlib
import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ps_protocol.roles.chief import ClusterState
from tests.support.chief.running_chief import RunningChief, Worker, client_of, parameter_server
from tests.support.processes.browser import MISSING, PROGRAM, Browser, opened
from tests.support.processes.commands import read_until, up
from tests.support.waiting import wait_until

# A cluster and a browser have to start on a machine that runs other tests, too.
pytestmark = [pytest.mark.skipif(PROGRAM is None, reason=MISSING), pytest.mark.timeout(240)]

EVIL = "<img src=x onerror=document.title='run'>"
# Reports metrics, one of them with a name that would be markup; and says its process id.
WORKER = f"""
import math, os, sys, time
import numpy as np
import worker_client
print("pid", os.getpid(), flush=True)
with worker_client.connect() as session:
    session.create_or_join({{"w": np.zeros(4)}}, optimizer=worker_client.sgd(0.5))
    while not session.is_finished:
        time.sleep(0.02)  # the pace of training: training is to last while the page is read
        session.step({{"w": np.ones(4)}}, metrics={{"loss": math.exp(-session.local_step / 100), {EVIL!r}: 1.0}})
"""


class Scene:
    """A cluster of two workers, where its page is, and whose processes they are."""

    def __init__(self, lines: list[str]) -> None:
        text = "\n".join(lines)
        (self.url,) = set(re.findall(r"its page, in a browser: (\S+)", text))
        self.workers = {int(index): int(pid) for index, pid in re.findall(r"\[worker (\d)\] pid (\d+)", text)}
        (address,) = set(re.findall(r"lockstep status --chief unix:(\S+)", text))
        self.directory = Path(address).parent
        words = dict(line.split() for line in (self.directory / "tokens").read_text().splitlines())
        self.admin_url = f"{self.url.partition('#')[0]}#token={words['admin']}"


@contextlib.contextmanager
def running(run_dir: Path) -> Iterator[Scene]:
    with up("--workers", "2", "--max-steps", "100000", "--lease", "5", worker=WORKER, run_dir=run_dir) as process:
        made = Scene([*read_until(process, "joined", times=2)])
        try:
            yield made
        finally:
            for pid in made.workers.values():
                os.kill(pid, signal.SIGCONT)
            process.terminate()
            process.communicate(timeout=30)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with running(tmp_path_factory.mktemp("up") / "run") as made:
        yield made


@pytest.fixture
def own_scene(tmp_path: Path) -> Iterator[Scene]:
    """One that a test may do anything to."""
    with running(tmp_path / "run") as made:
        yield made


@pytest.fixture(scope="module")
def only_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(only_browser: Browser) -> Iterator[Browser]:
    """A tab of its own."""
    with only_browser.tab() as tab:
        tab.resize(1280, 900)
        yield tab


def test_a_reader_sees_the_progress_and_which_worker_is_stuck(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url)
    browser.await_text("Training. Nothing is waited for.", selector="#headline")
    browser.await_text("loss", selector="#charts")
    wait_until(lambda: browser.evaluate("document.querySelectorAll('#charts path.curve').length") >= 2, timeout_s=30, what="curves")
    assert re.search(r"worker 0[\s\S]*worker 1", browser.text("#workers"))
    assert "ps 0" in browser.text("#servers")
    assert "joined" in browser.text("#events")
    assert "of 100,000" in browser.text("#figures")

    # Those of docs/how-to/questions.md that a healthy training answers.
    for words, selector in (
        ("Time left", "#figures"),
        ("Contributions", "#figures"),
        ("Cost so far", "#figures"),
        ("Last in", "#workers"),
        ("Sent", "#workers"),
    ):
        assert words in browser.text(selector)
    for title in ("Curves", "The latest steps", "What happened", "Change the training"):
        assert title in browser.text("main")

    # What the address had in it is gone from it, and nothing was asked of anybody else.
    own = scene.url.partition("#")[0]
    assert browser.evaluate("location.href") == own
    assert all(url.startswith((own, "data:")) for url in browser.requested), browser.requested
    # A name is text and not markup.
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.text("#charts")
    assert browser.evaluate("document.title") != "run"
    assert not [words for words in browser.complaints if "403" not in words], browser.complaints

    # Two seconds are for the chief and the page; the rest is for a machine with other tests on it.
    os.kill(scene.workers[1], signal.SIGSTOP)
    browser.await_text("missing: worker 1", selector="#headline", timeout_s=10.0)
    assert "waiting" in browser.evaluate("document.getElementById('now').className")
    assert "worker 1" in browser.text("#live"), "who cannot see it is told, once"
    browser.await_text("worker 1", selector="#workers tr.silent")
    os.kill(scene.workers[1], signal.SIGCONT)
    browser.await_text("Nothing is waited for", selector="#headline")


def test_an_action_on_the_page_needs_a_token(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url)
    browser.await_text("This needs the token of a worker or an admin", selector="#may-not")
    assert not browser.evaluate("document.getElementById('actions').checkVisibility()")
    browser.evaluate(f"(document.getElementById('token').value = {json.dumps(scene.admin_url.partition('=')[2])}) && 0")
    browser.evaluate("document.getElementById('token-form').requestSubmit()")
    wait_until(lambda: browser.evaluate("document.getElementById('actions').checkVisibility()"), timeout_s=20, what="the actions")
    browser.evaluate("(document.querySelector('[name=learning_rate]').value = '0.125') && 0")
    browser.evaluate("document.querySelector('form[data-path=\"/api/learning-rate\"]').requestSubmit()")
    browser.await_text("Holds from step", selector="#result")
    browser.await_text("learning_rate 0.125", selector="#figures")
    browser.await_text("settings", selector="#events")


def test_without_a_token_the_page_asks_for_one(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url.partition("#")[0])
    browser.await_text("This cluster asks for a token", selector="#ask")
    browser.evaluate("(document.getElementById('ask-token').value = 'wrong') && document.getElementById('ask-form').requestSubmit()")
    browser.await_text("invalid token", selector="#ask-why")


@pytest.mark.parametrize(("width", "is_dark"), [(360, False), (1280, True)])
def test_the_page_fits_a_phone_and_a_dark_theme(scene: Scene, browser: Browser, width: int, is_dark: bool) -> None:
    browser.resize(width, 800, is_dark=is_dark)
    browser.open(scene.url)
    browser.await_text("Nothing is waited for", selector="#headline")
    wait_until(lambda: browser.evaluate("document.querySelectorAll('#charts path.curve').length") >= 1, timeout_s=30, what="a curve")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    (red, *_) = map(int, re.findall(r"\d+", background))
    assert (red < 60) == is_dark


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_axe_core_finds_no_violation(scene: Scene, browser: Browser, is_dark: bool) -> None:
    program = axe_core()
    if program is None:
        pytest.skip("axe-core-python is not installed; `make test` has it")
    browser.resize(1280, 900, is_dark=is_dark)
    browser.open(scene.admin_url)
    browser.await_text("live", selector="#link")
    wait_until(lambda: browser.evaluate("document.getElementById('actions').checkVisibility()"), timeout_s=40, what="the actions")
    wait_until(lambda: browser.evaluate("document.querySelectorAll('#charts path.curve').length") >= 1, timeout_s=30, what="a curve")
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    browser.evaluate(program.read_text(encoding="utf-8") + ";0")
    violations = browser.evaluate(
        "axe.run().then(found => found.violations.map(one => one.id + ': ' + one.nodes.map(node => node.html).join()))"
    )
    assert violations == []


def axe_core() -> Path | None:
    """Returns the file of axe-core, which checks pages for what keeps people from using them."""
    found = importlib.util.find_spec("axe_core_python")
    return Path(found.origin).with_name("axe.min.js") if found is not None and found.origin is not None else None


def test_a_worker_whose_host_would_be_markup_is_shown_as_text(browser: Browser) -> None:
    with (
        parameter_server() as server,
        RunningChief(server.address, page="127.0.0.1:0", total_num_replicas=1) as chief,
        client_of(chief) as client,
    ):
        wait_until(lambda: client.status().state is ClusterState.WAITING_FOR_MODEL, timeout_s=20, what="the chief takes workers in")
        with Worker(client, 0, host=EVIL):
            browser.open(chief.page_url)
            browser.await_text(EVIL, selector="#workers")
            assert browser.evaluate("document.querySelectorAll('img').length") == 0
            assert browser.evaluate("document.title") != "run"


def test_the_page_continues_when_the_chief_is_restarted(own_scene: Scene, browser: Browser) -> None:
    browser.open(own_scene.url)
    browser.await_text("Nothing is waited for", selector="#headline")
    run = browser.evaluate("seen.run")
    (chief,) = processes_of("-m\0chief\0", own_scene.directory)
    # Stopped first: another one may be there sooner than the page asks again.
    os.kill(chief, signal.SIGSTOP)
    browser.await_text("not answering since", selector="#link")
    os.kill(chief, signal.SIGKILL)
    wait_until(lambda: browser.evaluate("seen.run") not in (run, None), timeout_s=40, what="another chief answers")
    browser.await_text("live", selector="#link")
    browser.await_text("took over at step", selector="#events")
    browser.await_text("joined", selector="#events")


def processes_of(words: str, directory: Path) -> list[int]:
    """The children of this test, and theirs, whose command line has these words, and is about this cluster."""
    lines = dict[int, str]()
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            lines[one.pid] = "\0".join([*one.cmdline(), ""])
    return [pid for pid, line in lines.items() if words in line and str(directory) in line]
