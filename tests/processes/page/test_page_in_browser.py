"""The page in a real browser, during a real `lockstep up`."""

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ps_protocol.roles.chief import ClusterState, Condition, Level
from tests.processes.page.headlines import SIGHTS, headlines, kept, show_together, shown
from tests.processes.page.showing import page_of, violations
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
        time.sleep(0.1)  # the pace of training: training is to last while the page is read
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


@contextlib.contextmanager
def running(run_dir: Path) -> Iterator[Scene]:
    options = "--workers", "2", "--max-steps", "100000", "--lease", "5", "--checkpoint-dir", str(run_dir.with_name("checkpoints"))
    with up(*options, worker=WORKER, run_dir=run_dir) as process:
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


def await_health(browser: Browser) -> None:
    """Waits until the page is green, whatever it says: on a busy machine a worker may be slow."""
    wait_until(lambda: browser.text("#now.green"), timeout_s=40, what="a green headline")


def test_a_reader_sees_the_progress_and_which_worker_is_stuck(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url)
    await_health(browser)
    browser.await_text("loss", selector="#charts")
    wait_until(lambda: browser.evaluate("document.querySelectorAll('#charts path.curve').length") >= 2, timeout_s=30, what="curves")
    assert re.search(r"worker 0[\s\S]*worker 1", browser.text("#workers"))
    assert "ps 0" in browser.text("#servers")
    assert "joined" in browser.text("#events")
    assert "of 100,000" in browser.text("#figures")

    # Those of docs/how-to/watch.md that a healthy training answers.
    for words, selector in (
        ("Time left", "#figures"),
        ("Contributions", "#figures"),
        ("Cost so far", "#figures"),
        ("Last in", "#workers"),
        ("Sent", "#workers"),
    ):
        assert words in browser.text(selector)
    for title in ("Curves", "The latest steps", "What happened"):
        assert title in browser.text("main")

    # What the address had in it is gone from it, and nothing was asked of anybody else.
    own = scene.url.partition("#")[0]
    assert browser.evaluate("location.href") == own
    assert all(url.startswith((own, "data:")) for url in browser.requested), browser.requested
    # A name is text and not markup.
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.text("#charts")
    assert browser.evaluate("document.title") != "run"
    assert not browser.complaints

    os.kill(scene.workers[1], signal.SIGSTOP)
    browser.await_text("for worker 1 (silent)", selector="#headline")
    assert browser.evaluate("document.getElementById('now').className") == "amber"
    assert "worker 1 (silent)" in browser.text("#live"), "who cannot see it is told, once"
    assert f"kill -CONT {scene.workers[1]}" in browser.text("#first")
    browser.await_text("worker 1", selector="#workers tr.silent")
    os.kill(scene.workers[1], signal.SIGCONT)
    await_health(browser)


def test_without_a_token_the_page_asks_for_one(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url.partition("#")[0])
    browser.await_text("This cluster asks for a token", selector="#ask")
    browser.evaluate("(document.getElementById('ask-token').value = 'wrong') && document.getElementById('ask-form').requestSubmit()")
    browser.await_text("invalid token", selector="#ask-why")


def test_the_axis_of_speed_begins_at_zero_and_ends_above_the_curve(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url)
    wait_until(lambda: browser.evaluate("typeof rangeOf") == "function", timeout_s=20, what="the page's script")
    for values, wanted in {
        "Array(99).fill(4.8)": [0, 6],
        "[3, 17.2]": [0, 20],
        # A spike of two points is not what the curve is about.
        "[...Array(50).keys()].map(i => i === 20 || i === 21 ? 900 : 1 + i % 2)": [0, 2],
    }.items():
        assert browser.evaluate(f"rangeOf({values}, true)") == wanted
        ends = browser.evaluate(f"(marks => [marks[0], marks.at(-1)])(ticks(...rangeOf({values}, true), 4))")
        assert ends == wanted, "both ends are labelled"


def test_the_noise_of_a_converged_loss_does_not_fill_the_plot(scene: Scene, browser: Browser) -> None:
    browser.open(scene.url)
    wait_until(lambda: browser.evaluate("typeof rangeOf") == "function", timeout_s=20, what="the page's script")
    for middle, width in ((0.0305, 0.0004), (0.03, 0.009)):
        low, high = browser.evaluate(f"rangeOf([...Array(300).keys()].map(i => {middle} + {width} * Math.sin(i * i)), false)")
        assert low < middle - width and middle + width < high
        assert 2 * width < 0.6 * (high - low)
    for slowness in (1, 9):
        fall = browser.evaluate(f"rangeOf([...Array(300).keys()].map(i => 0.03 + 2.3 * Math.exp(-i / {slowness})), false)")
        assert fall == [0, 3], "that it fell is what the curve shows"


@pytest.mark.parametrize(("width", "is_dark"), [(360, False), (1280, True)])
def test_the_page_fits_a_phone_and_a_dark_theme_without_a_violation_for_axe_core(
    scene: Scene, browser: Browser, width: int, is_dark: bool
) -> None:
    browser.resize(width, 800, is_dark=is_dark)
    browser.open(scene.url)
    await_health(browser)
    wait_until(lambda: browser.evaluate("document.querySelectorAll('#charts path.curve').length") >= 1, timeout_s=30, what="a curve")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    (red, *_) = map(int, re.findall(r"\d+", background))
    assert (red < 60) == is_dark
    browser.await_text("live", selector="#link")
    assert violations(browser) == []


START = f"LOCKSTEP_WORKER_INDEX=1 LOCKSTEP_CHIEF=unix:/{'a-long-path/' * 12}chief.sock PROGRAM"
LATER = Condition(name="nothing kept", level=Level.AMBER, line="No checkpoints", advice="Give the chief a directory.")


@pytest.mark.parametrize(("width", "is_dark"), [(390, False), (1200, True)])
def test_a_green_headline_with_a_long_command_fits_and_axe_core_finds_no_violation(browser: Browser, width: int, is_dark: bool) -> None:
    first = Condition(name="x", level=Level.GREEN, line="Training at 6 steps/s", advice="See to it.", commands=(START,))
    with page_of(first, LATER) as url:
        browser.resize(width, 800, is_dark=is_dark)
        browser.open(url)
        browser.await_text(first.line, selector="#headline")
        assert browser.evaluate("document.getElementById('now').className") == "green"
        assert START in browser.text("#first code") and "See to it." in browser.text("#first")
        assert LATER.line in browser.text("#others") and LATER.advice not in browser.text("#others")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(browser) == []


@pytest.mark.parametrize("sight", ["dark", "phone"])  # and that one is light
def test_every_amber_and_red_headline_fits_and_axe_core_finds_no_violation(browser: Browser, sight: str) -> None:
    width, is_dark = SIGHTS[sight]
    browser.resize(width, 800, is_dark=is_dark)
    every = headlines()
    for name in kept(browser, shown(browser, every)):
        first = every[name][0]
        assert (
            browser.text("#headline") == first.line
            and browser.evaluate("document.getElementById('now').className") == first.level.name.lower()
        )
        assert all(command in browser.text("#first") for command in first.commands)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
    show_together(browser)
    # Copies on one page have the same ids and labels, of course; on the page itself the tests above look at these.
    of_copies = ("duplicate-id", "landmark-unique")
    assert [one for one in violations(browser, "main") if not one.startswith(of_copies)] == []


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"], ids=["this machine", "network"])
def test_a_command_is_copied_by_the_keyboard_also_without_https(browser: Browser, address: str) -> None:
    first = Condition(name="x", level=Level.RED, line="Waiting 6 s for worker 1", commands=("echo 1", START))
    with page_of(first, address=address) as url:
        # Browsers trust 127.0.0.1, and no other address without HTTPS.
        browser.open(url if address.startswith("127") else f"http://0.0.0.0:{url.rstrip('/').rpartition(':')[2]}/")
        browser.await_text(first.line, selector="#headline")
        assert browser.evaluate("isSecureContext") == address.startswith("127")
        pasted = "document.addEventListener('copy', event => { window.pasted = event.target.value; })"
        clipboard = "if (navigator.clipboard) navigator.clipboard.writeText = async text => { window.pasted = text; }"
        browser.evaluate(f"{pasted}; {clipboard}; document.getElementById('now').focus(); 0")
        for _ in first.commands:
            browser.press("Tab")
        browser.press("Enter")
        browser.await_text("Copied", selector="#first .command:nth-child(2) button")
        assert browser.evaluate("window.pasted") == START
        assert browser.text("#live") == "Copied"


def test_a_page_that_has_heard_nothing_yet_has_no_colour(browser: Browser) -> None:
    browser.call("Page.addScriptToEvaluateOnNewDocument", source="window.fetch = () => new Promise(() => {});")
    with page_of(LATER) as url:
        browser.open(url)
        browser.await_text("Connecting to the chief …", selector="#headline")
        assert browser.evaluate("document.getElementById('now').className") == ""
        assert not browser.evaluate("getComputedStyle(document.getElementById('now')).getPropertyValue('--tone')")


def test_a_chief_that_does_not_answer_is_the_headline(browser: Browser) -> None:
    with page_of(Condition(name="training", level=Level.GREEN, line="Training")) as url:
        browser.open(url)
        browser.await_text("Training", selector="#headline")
    browser.await_text("for the chief (no answer)", selector="#headline")
    assert browser.evaluate("document.getElementById('now').className") == "red"
    assert "Start it again" in browser.text("#first")
    assert violations(browser) == []


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
    await_health(browser)
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
