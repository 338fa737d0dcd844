"""Runs one process on a host for a launcher elsewhere: `python -m lockstep.launcher.agent`, over ssh, srun and the like.

Reads what to run from standard input, and writes frames to standard output (`remote.py` has the protocol). Whatever happens to
the launcher or to the connection, no process is left behind: the end of standard input, or a minute of silence, ends it.
"""

import base64
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import lockstep
from lockstep.launcher.remote import BEAT_S, HEAD, MARK
from lockstep.launcher.supervisor import Process, ProcessSpec, Supervisor, with_checkout
from ps_protocol.security.tokens import write_secret

_SILENT_S = 60.0
# How long a process has to end by itself once the launcher is gone: a chief saves a checkpoint.
_GRACE_S = 10.0
_LOOK_S = 0.1


class Channel:
    """The way back to the launcher."""

    def __init__(self) -> None:
        self._output = os.dup(1)
        os.dup2(2, 1)  # nothing else may be written between frames
        self._write(MARK)

    def output(self, line: str) -> None:
        """Passes on a line of the process."""
        self._send(b"o", f"{line}\n".encode())

    def tell(self, **said: object) -> None:
        """Tells the launcher something about the process."""
        self._send(b"j", json.dumps(said).encode())

    def _send(self, kind: bytes, content: bytes) -> None:
        self._write(HEAD.pack(kind, len(content)) + content)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]


class Refused(Exception):
    """The process cannot run here; the text says why and what to do."""


def main() -> int:
    """Returns the exit code: 0, however the process ended; 1 if the launcher is gone, 2 if there was none."""
    lines = _lines()
    if (first := next(lines, None)) is None:
        print("this is Lockstep's agent, which a launcher on another host tells what to run; nobody has told it anything", file=sys.stderr)
        return 2
    task = json.loads(first)
    channel = Channel()
    try:
        channel.tell(ended=_run(task, lines, channel))
    except BrokenPipeError:
        return 1  # the launcher is gone
    except Refused as error:
        channel.output(f"host {task['host']}: {error}")
        channel.tell(ended=task["exit_code"])
    return 0


def _run(task: dict[str, Any], lines: Iterator[bytes], channel: Channel) -> int:
    if (version := task["version"]) != lockstep.__version__:
        raise Refused(f"it has Lockstep {lockstep.__version__}, the launcher {version}; install the same")
    try:
        os.chdir(task["cwd"])
    except OSError as error:
        raise Refused(f"no {task['cwd']}: {error.strerror}; copy the program there, or name its place with --host-dir") from error
    for path in task["shared"]:
        if not os.path.exists(path):
            raise Refused(f"it does not see {path}, which the launcher has written; all hosts must share that directory, or give a URL")
    if not task["command"]:
        return 0
    orders: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    with Supervisor(log_directory=None, show_line=lambda name, line: channel.output(line)) as supervisor:
        threading.Thread(target=_listen, args=(lines, orders), name="orders", daemon=True).start()
        process = supervisor.start(_spec(task, supervisor.directory))
        files = Files(supervisor.directory, task["returns"], channel)
        beat_at = time.monotonic()
        while process.is_running and _obey(orders, process):
            supervisor.poll(timeout_s=_LOOK_S)
            files.look()
            if time.monotonic() >= beat_at:
                channel.tell()
                beat_at = time.monotonic() + BEAT_S
        if process.is_running:
            process.signal_group(signal.SIGTERM)
            supervisor.await_end(lambda: not process.is_running, grace_s=_GRACE_S)
        files.look()
    return process.returncode or 0


def _spec(task: dict[str, Any], directory: Path) -> ProcessSpec:
    """The process, with this host's private directory and Python in place of the launcher's."""
    for name, content in task["files"].items():
        write_secret(directory / name, base64.b64decode(content))

    def here(text: str) -> str:
        return text.replace(task["private"], str(directory))

    command = [sys.executable if word == task["python"] else here(word) for word in task["command"]]
    environment = {name: None if text is None else here(text) for name, text in task["environment"].items()}
    return ProcessSpec(name=task["name"], command=command, environment={**environment, **with_checkout()})


class Files:
    """The files by which a role says where it serves; the launcher gets a copy of each."""

    def __init__(self, directory: Path, names: list[str], channel: Channel) -> None:
        self._paths = {name: directory / name for name in names}
        self._sent: dict[str, str] = {}
        self._channel = channel

    def look(self) -> None:
        """Sends those that are new or have changed."""
        for name, path in self._paths.items():
            try:
                text = path.read_text()
            except FileNotFoundError:
                continue
            if text != self._sent.get(name):
                self._sent[name] = text
                self._channel.tell(file=name, text=text)


def _obey(orders: "SimpleQueue[dict[str, Any] | None]", process: Process) -> bool:
    """Carries out what the launcher has asked for. Returns whether it is still there."""
    while True:
        try:
            order = orders.get_nowait()
        except Empty:
            return True
        if order is None:
            return False
        if "signal" in order:
            process.signal_group(signal.Signals(order["signal"]))


def _lines() -> Iterator[bytes]:
    """Yields what the launcher says, until it is gone."""
    rest = b""
    while select.select([0], [], [], _SILENT_S)[0] and (data := os.read(0, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _listen(lines: Iterator[bytes], orders: "SimpleQueue[dict[str, Any] | None]") -> None:
    for line in lines:
        orders.put(json.loads(line))
    orders.put(None)
    # Nobody may read what this process writes any more, so its main thread may never get to the order. The guardian ends the rest.
    time.sleep(2 * _GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
