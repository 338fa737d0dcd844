"""`lockstep up` as tests start it, and programs for its workers. Claims nothing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# Contributes until the cluster says that training is finished, or for as many steps as its first argument says.
TRAIN = """
import sys
import numpy as np
import worker_client
from worker_client import PushOutcome
num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else None
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
    while not session.is_finished and (num_steps is None or session.local_step < num_steps):
        session.step({"w": np.ones(4)})
        print("step", session.local_step, flush=True)
    print("value", session.read()["w"][0], flush=True)
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
    with subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}) as process:
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


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
