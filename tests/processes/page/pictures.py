"""`make pictures`: the pictures of the page in the documentation, of real processes, taken by a real Chromium.

A demo: healthy, in the dark, on a phone, with two workers stopped, and after the loss of a parameter server. Then a hundred workers, as
threads of this process. It takes about three minutes.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

import worker_client
from ps_protocol.errors import PsError
from tests.support.processes.browser import MISSING, PROGRAM, Browser, opened
from tests.support.processes.commands import read_until
from tests.support.waiting import wait_until

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
WIDTH, PHONE = 1200, 390
NUM_SERVERS, NUM_WORKERS, NUM_NEEDED = 2, 100, 96
_DEMO = ("--workers", "3", "--max-steps", "3000", "--pace", "0.05", "--checkpoint-interval", "15")
# As many as the page has bars.
_NUM_STEPS = 200


def main(directory: Path = IMAGES) -> int:
    """Takes all pictures and returns 0; 1 if there is no browser."""
    if PROGRAM is None:
        print(MISSING, file=sys.stderr)
        return 1
    logging.disable(logging.WARNING)  # a hundred workers wait for each other when they begin
    with tempfile.TemporaryDirectory() as scratch, opened(Path(scratch) / "profile") as browser:
        with demo(Path(scratch)) as (url, process):
            take_demo(browser, url, process, directory)
        with hundred(Path(scratch) / "hundred") as url, shown(browser, url) as tab:
            await_steps(tab, NUM_WORKERS)
            take(tab, directory / "page-hundred.png")
    return 0


def take_demo(browser: Browser, url: str, process: psutil.Process, directory: Path) -> None:
    """Takes those of the demo, one after the other."""
    with shown(browser, url) as tab:
        await_steps(tab, 3 * _NUM_STEPS)
        take(tab, directory / "page.png")
    with shown(browser, url, is_dark=True) as tab:
        take(tab, directory / "page-dark.png")
    with shown(browser, url, width=PHONE) as tab:
        take(tab, directory / "page-phone.png")
    with shown(browser, url) as tab:
        stopped: list[int] = tab.evaluate("seen.data.workers.rows.filter(row => row[0] === 'worker' && row[1] < 2).map(row => row[3])")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        tab.await_text("(silent)", selector="#headline")
        tab.await_text("silent for", selector="#workers")
        take(tab, directory / "page-stalled.png")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await_training(tab)
        os.kill(server_of(process, 1), signal.SIGKILL)
        tab.await_text("rolled back", selector="#events")
        begin = tab.evaluate("seen.data.step")
        await_steps(tab, begin + _NUM_STEPS)
        # The steps of before the loss have been computed again.
        wait_until(lambda: tab.evaluate("document.getElementById('now').className") == "green", timeout_s=200, what="a green headline")
        take(tab, directory / "page-rollback.png")


def take(tab: Browser, path: Path) -> None:
    """Takes one picture."""
    tab.screenshot(path)
    # A third of the bytes, in the same colours to the eye.
    few = Image.open(path).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


def await_steps(tab: Browser, number: int) -> None:
    """Waits until the page shows so many steps."""
    wait_until(lambda: (tab.evaluate("seen.data && seen.data.step") or 0) >= number, timeout_s=400, what=f"{number} steps")


def await_training(tab: Browser) -> None:
    """Waits until nothing holds training up."""
    shows = "typeof seen !== 'undefined' && seen.data && seen.data.state === 'training' && !seen.data.is_held_up"
    wait_until(lambda: tab.evaluate(shows), timeout_s=200, what="a training")


@contextlib.contextmanager
def shown(browser: Browser, url: str, *, width: int = WIDTH, is_dark: bool = False) -> Iterator[Browser]:
    """A tab that shows the page, with curves."""
    with browser.tab() as tab:
        tab.resize(width, 900, is_dark=is_dark)
        tab.open(url)
        await_training(tab)
        wait_until(lambda: tab.evaluate("document.querySelectorAll('#charts path.curve').length") >= 2, timeout_s=60, what="curves")
        yield tab


@contextlib.contextmanager
def demo(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A demo; where its page is, and its process."""
    places = "--run-dir", str(directory / "run"), "--checkpoint-dir", str(directory / "checkpoints")
    command = [sys.executable, "-m", "lockstep", "demo", *_DEMO, *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            (line,) = read_until(process, "its page, in a browser: ")[-1:]
            assert process.stdout is not None
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield line.split()[-1], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(timeout=60)


def server_of(demo: psutil.Process, index: int) -> int:
    """Returns the process id of a parameter server."""
    (found,) = [one.pid for one in demo.children(recursive=True) if f"ps{index}.address --index {index}" in " ".join(one.cmdline())]
    return found


@contextlib.contextmanager
def hundred(directory: Path) -> Iterator[str]:
    """A cluster of a hundred workers, four of them in reserve; where its page is."""
    is_over = threading.Event()

    def train(chief: str, index: int) -> None:
        rng = np.random.default_rng(index)
        with contextlib.suppress(PsError), worker_client.connect(chief, worker_index=index, timeout_s=60) as session:
            session.create_or_join({"w": np.zeros(4096), "b": np.zeros(64)}, optimizer=worker_client.sgd(0.1), timeout_s=60)
            while not is_over.wait(rng.gamma(20.0, 0.02)):  # stands for a computation whose time varies
                loss = 0.1 + float(np.exp(-session.local_step / 60)) * rng.uniform(0.9, 1.1)
                session.step({"w": np.ones(4096), "b": np.ones(64)}, metrics={"loss": loss, "accuracy": 1 - loss / 2}, timeout_s=60)

    with contextlib.ExitStack() as stack:
        kept = "--checkpoint-dir", str(directory)
        servers = [stack.enter_context(role("ps_server", "--index", str(index), *kept))["address"] for index in range(NUM_SERVERS)]
        counts = "--workers", str(NUM_WORKERS), "--replicas-to-aggregate", str(NUM_NEEDED), "--max-steps", "4000"
        chief = stack.enter_context(role("chief", "--ps", ",".join(servers), "--page", "127.0.0.1:0", *counts, *kept))
        workers = [threading.Thread(target=train, args=(chief["address"], index), daemon=True) for index in range(NUM_WORKERS)]
        for worker in workers:
            worker.start()
        try:
            yield chief["url"]
        finally:
            is_over.set()


@contextlib.contextmanager
def role(module: str, *arguments: str) -> Iterator[dict[str, str]]:
    """A parameter server or a chief, and what its log says of addresses."""
    command = [sys.executable, "-m", module, "--address", "127.0.0.1:0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            lines = read_until(process, " ready address=")
            assert process.stdout is not None
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield dict(re.findall(r"\b(address|url)=(\S+)", "\n".join(lines)))
        finally:
            process.terminate()
            process.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
