"""A headless Chromium for tests, over a pipe, as its DevTools protocol has it. Knows no page of ours."""

import base64
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no chromium in PATH; install Debian's package chromium to run what a reader of the page sees"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-default-browser-check", "--remote-debugging-pipe"),
)
# Descriptors 3 and 4 are those that Chromium listens and speaks at.
# First out of the way of each other: a copy onto itself would be closed when the program starts.
_START = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(r, 3)
os.dup2(w, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_ANSWER_S = 60.0


class Browser:
    """A browser with one tab at a time. For one thread."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, reading: int, writing: int) -> None:
        self._process, self._writing = process, writing
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._num_calls, self._session = 0, ""
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    @contextmanager
    def tab(self) -> Iterator["Browser"]:
        """Opens a tab that knows nothing of earlier ones: no cookie, no storage, nothing requested, no complaint."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.requested, self.complaints = [], []
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            yield self
        finally:
            self._session = ""
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._num_calls += 1
        number = self._num_calls
        answer = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": self._session} if self._session else {})}
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        said = answer.get(timeout=_ANSWER_S)
        del self._answers[number]
        assert "error" not in said, f"{method}: {said['error']}"
        result: dict[str, Any] = said["result"]
        return result

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """Gives the tab this size, and the reader's wish for dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        # A picture of the whole page has no room for them, and would lack a strip at the right.
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)

    def press(self, key: str) -> None:
        """Presses and releases a key, "Tab" or "Enter"."""
        number, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number, text=text)

    def evaluate(self, expression: str) -> Any:
        """Returns what an expression is in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """Returns what a reader sees of an element; empty if there is none."""
        found: str = self.evaluate(f"(document.querySelector({json.dumps(selector)}) || {{innerText: ''}}).innerText")
        return found

    def await_text(self, wanted: str, *, selector: str = "body", timeout_s: float = 40.0) -> None:
        """Waits until a reader sees a text in an element."""
        wait_until(lambda: wanted in self.text(selector), timeout_s=timeout_s, what=f"{selector} shows {wanted!r}")

    def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        """Writes a picture of the page."""
        result = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(result["data"]))

    def _read(self, descriptor: int) -> None:
        rest = b""
        while data := os.read(descriptor, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    if (waiting := self._answers.get(message["id"])) is not None:
                        waiting.put(message)
                elif message.get("sessionId") != self._session:
                    continue  # of a tab that is closed
                elif message["method"] == "Network.requestWillBeSent":
                    self.requested.append(message["params"]["request"]["url"])
                elif message["method"] == "Runtime.exceptionThrown":
                    self.complaints.append(str(message["params"]["exceptionDetails"]))
                elif message["method"] == "Log.entryAdded":
                    self.complaints.append(f"{message['params']['entry']['level']}: {message['params']['entry']['text']}")


@contextmanager
def opened(directory: Path) -> Iterator[Browser]:
    """A browser with an empty profile in `directory`."""
    assert PROGRAM is not None, MISSING
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    command = [sys.executable, "-c", _START, str(to_browser), str(from_browser), PROGRAM, *_FLAGS, f"--user-data-dir={directory}"]
    environment = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": "unix:path=/dev/null"}
    process = subprocess.Popen(
        command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(process, reading=to_us, writing=from_us)
    finally:
        os.close(from_us)
        process.kill()
        process.wait()
