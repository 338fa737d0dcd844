"""Real parameter servers and a real chief, each a process of its own on loopback. Knows how to start and end them; asserts nothing."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of a running cluster."""

    chief: str
    ps: tuple[str, ...]


@contextmanager
def running_cluster(num_ps: int, *, chief_flags: Sequence[str] = ()) -> Iterator[Cluster]:
    """Parameter servers and a chief, until the block ends."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        ps = _start_ps(num_ps, stack, directory)
        process = _start(["chief", "--ps", ",".join(ps), *chief_flags], stack, announce=directory / "chief")
        yield Cluster(_announced(process, directory / "chief"), ps)


def _start_ps(count: int, stack: ExitStack, directory: Path) -> tuple[str, ...]:
    # All at once: most of the time is Python's own start.
    paths = [directory / f"ps{index}" for index in range(count)]
    processes = [_start(["ps_server", "--index", str(index)], stack, announce=path) for index, path in enumerate(paths)]
    return tuple(_announced(process, path) for process, path in zip(processes, paths, strict=True))


def _start(words: Sequence[str], stack: ExitStack, *, announce: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", *words, "--address", "127.0.0.1:0", "--announce", str(announce)]
    log = stack.enter_context(announce.with_suffix(".log").open("w+", encoding="utf-8"))
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True)
    stack.callback(_end, process)
    return process


def _announced(process: "subprocess.Popen[str]", path: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            log = path.with_suffix(".log").read_text(encoding="utf-8")
            raise RuntimeError(f"{path.name} did not start: {log[-2000:]}")
        try:
            process.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
    return path.read_text(encoding="utf-8").strip()


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
