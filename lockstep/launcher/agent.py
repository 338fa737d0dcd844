"""Runs one process on a host for a launcher elsewhere: `python -m lockstep.launcher.agent`, over ssh, srun and the like.

Reads what to run from standard input, and writes frames to standard output (`remote.py` has the protocol). Whatever happens to
the launcher or to the connection, no process is left behind: the end of standard input, or a minute of silence, ends it.
"""

import base64
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from lockstep.launcher.gpus import VISIBLE, gpus_here
from lockstep.launcher.looks import Refused, answer_look, enter_host
from lockstep.launcher.remote import BEAT_S, HEAD, MARK
from lockstep.launcher.supervisor import Interrupted, Process, ProcessSpec, Supervisor
from ps_protocol.security.tokens import write_secret

_SILENT_S = 60.0
# How long a process has to end by itself once the launcher is gone: a chief saves a checkpoint.
_GRACE_S = 10.0
# How long this process may take to end after the launcher: that, and the command for a launcher that is lost.
_END_S = 30.0
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
        self._send(b"j", json.dumps(said).encode() + b"\n")

    def _send(self, kind: bytes, content: bytes) -> None:
        self._write(HEAD.pack(kind, len(content)) + content)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]


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
    except (BrokenPipeError, Interrupted):
        return 1  # the launcher is gone
    except Refused as error:
        channel.output(f"host {task['host']}: {error}")
        channel.tell(ended=task["exit_code"])
    return 0


def _run(task: dict[str, Any], lines: Iterator[bytes], channel: Channel) -> int:
    enter_host(version=task["version"], cwd=task["cwd"])
    if task["look_for"] is not None:
        answer_look(task["look_for"], _spec(task, Path()), host=task["host"])
        return 0
    with Supervisor(log_directory=None, show_line=lambda name, line: channel.output(line)) as supervisor:
        # An engine that ends a job signals every process of it. This one passes on how the others end, and ends with the launcher.
        supervisor.ignore_signals()
        process = supervisor.start(_spec(task, supervisor.directory))
        orders = Orders(lines, process)
        files = Files(supervisor.directory, task["returns"], channel)
        beat_at = time.monotonic()
        while process.is_running and orders.obey():
            supervisor.poll(timeout_s=_LOOK_S)
            files.look()
            if time.monotonic() >= beat_at:
                channel.tell()
                beat_at = time.monotonic() + BEAT_S
        if process.is_running:
            is_lost = task["orphaned"] and not orders.have_ended_it
            orphaned = subprocess.Popen(task["orphaned"], stdout=sys.stderr) if is_lost else None
            process.signal_group(signal.SIGTERM)
            supervisor.await_end(lambda: not process.is_running, grace_s=_GRACE_S)
            if orphaned is not None:
                orphaned.wait()
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
    if (numbers := environment.get(VISIBLE)) and (gpus := gpus_here(os.environ)):
        environment[VISIBLE] = _gpus(task["name"], numbers.split(","), gpus)
    return ProcessSpec(name=task["name"], command=command, environment=environment)


def _gpus(name: str, numbers: Sequence[str], gpus: Sequence[str]) -> str:
    """Returns the names of a worker's GPUs, which the launcher has numbered without knowing them."""
    wanted = [int(number) for number in numbers if number.isdecimal()]
    if any(number >= len(gpus) for number in wanted):
        raise Refused(f"{name} needs {max(wanted) + 1} GPUs here with the workers before it, and there are {len(gpus)}")
    return ",".join(gpus[int(number)] if number.isdecimal() else number for number in numbers)


class Files:
    """The files by which a role says where it serves; the launcher gets a copy of each."""

    def __init__(self, directory: Path, names: list[str], channel: Channel) -> None:
        self._paths = {name: directory / name for name in names}
        self._sent: dict[str, str] = {}
        self._channel = channel

    def look(self) -> None:
        """Sends those that are new or have changed."""
        found: dict[str, str] = {}
        for name, path in self._paths.items():
            with suppress(FileNotFoundError):
                found[name] = path.read_text()
        # The first one is written last, and has to arrive last.
        for name, text in reversed(found.items()):
            if text != self._sent.get(name):
                self._sent[name] = text
                self._channel.tell(file=name, text=text)


class Orders:
    """What the launcher asks for, while the process runs."""

    def __init__(self, lines: Iterator[bytes], process: Process) -> None:
        self._process = process
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        # Whether the launcher has asked the process to end: if it is gone then, it is not lost.
        self.have_ended_it = False
        threading.Thread(target=self._listen, args=(lines,), name="orders", daemon=True).start()

    def obey(self) -> bool:
        """Carries out what the launcher has asked for. Returns whether it is still there."""
        while True:
            try:
                order = self._queue.get_nowait()
            except Empty:
                return True
            if order is None:
                return False
            if "signal" in order:
                number = signal.Signals(order["signal"])
                self.have_ended_it = self.have_ended_it or number in (signal.SIGTERM, signal.SIGINT)
                self._process.signal_group(number)

    def _listen(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            self._queue.put(json.loads(line))
        self._queue.put(None)
        # Nobody may read what this process writes any more, so its main thread may never get to the order. The guardian ends the rest.
        time.sleep(_END_S)  # no condition to wait on: the main thread may be stuck in a write
        os._exit(1)


def _lines() -> Iterator[bytes]:
    """Yields what the launcher says, until it is gone."""
    rest = b""
    while select.select([0], [], [], _SILENT_S)[0] and (data := os.read(0, 1 << 16)):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


if __name__ == "__main__":
    sys.exit(main())
