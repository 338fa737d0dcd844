"""The `lockstep` command as tests call it, and programs for `lockstep up`. Asserts nothing."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import psutil

from lockstep.__main__ import main
from tests.support.processes.warm import WarmPopen, is_warm_server, run_warm

Ended = subprocess.CompletedProcess[str]


def lockstep(*arguments: str, timeout_s: float = 20.0, **environment: str) -> Ended:
    """Runs a command as a user does."""
    command = [sys.executable, "-m", "lockstep", *arguments]
    return run_warm(command, environment={**os.environ, **environment}, timeout_s=timeout_s)


def lockstep_here(*arguments: str, **environment: str) -> Ended:
    """Runs in this process a command that starts nothing, for what it says: a process would do nothing but import most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, environment):
        try:
            code: int | str | None = main(arguments)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), code
    return Ended(arguments, code, out.getvalue(), err.getvalue())


# Contributes until the cluster says that training is finished, or for as many steps as its first argument says.
TRAIN = """
import sys
from ps_protocol.process.memory import importing_for_good
with importing_for_good():
    import numpy as np
    import worker_client
num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
    while not session.is_finished and (num_steps is None or session.local_step < num_steps):
        session.step({"w": np.ones(4)})
        print("step", session.local_step, flush=True)
    # In one write, also where Python writes each argument by itself: several may write to one pipe.
    print(f"value {session.read()['w'][0]}\\n", end="", flush=True)
"""
# Says so, then waits to be killed.
IDLE = "import threading; print('idle', flush=True); threading.Event().wait(300)"


@contextmanager
def up(*arguments: str, worker: str, run_dir: Path, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    script = run_dir.parent / "train.py"
    script.write_text(worker)
    command, rest = list(arguments), []
    if "--" in command:
        command, rest = command[: command.index("--")], command[command.index("--") + 1 :]
    full = [sys.executable, "-m", "lockstep", "up", *command, "--run-dir", str(run_dir), "--", sys.executable, str(script), *rest]
    with WarmPopen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def run_up(*arguments: str, worker: str, run_dir: Path, **environment: str) -> tuple[int, str]:
    with up(*arguments, worker=worker, run_dir=run_dir, **environment) as process:
        out, _ = process.communicate(timeout=50)
        return process.returncode, out


def read_until(process: "subprocess.Popen[str]", text: str, *, times: int = 1) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while sum(text in line for line in lines) < times:
        line = process.stdout.readline()
        assert line, "it ended early:\n" + "\n".join(lines)
        lines.append(line.rstrip("\n"))
    return lines


def descendants(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children(recursive=True) if not is_warm_server(one)]


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
