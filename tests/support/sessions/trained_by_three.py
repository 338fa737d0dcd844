"""A framework's program in one process, and in three workers with one role killed in the middle. Asserts nothing."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support.processes.commands import descendants, read_until, up

NUM_STEPS = 20
# For programs: `in_the_middle()` on worker 0 waits until the test has killed a process, so that it is killed in the middle of a step.
IN_THE_MIDDLE = """
import os, sys, time
def in_the_middle():
    if len(sys.argv) > 2:
        print("in the middle", flush=True)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)  # the test leaves a file once it has killed a process; nothing else says so
"""
# On a GPU, JAX rounds the factors of a product to fewer bits unless it is told not to.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def alone(program: str, tmp_path: Path, **environment: str) -> Path:
    """Runs a program on one process and returns the file that it wrote: its first argument."""
    script, out = tmp_path / "alone.py", tmp_path / "alone.out"
    script.write_text(program, encoding="utf-8")
    subprocess.run([sys.executable, str(script), str(out)], env={**os.environ, **EXACT, **environment}, check=True, timeout=150)
    return out


def together(program: str, tmp_path: Path, *, victim: str = "", recovery: Sequence[str] = (), **environment: str) -> Path:
    """Runs a program on three workers and two parameter servers and returns the file that it wrote: its first argument.

    `victim`: "worker", "ps_server" or "chief": one of these is killed (kill -9) while worker 0 is in its `in_the_middle()`. `recovery`:
    flags with which `lockstep up` saves checkpoints for that.
    """
    tmp_path.mkdir(exist_ok=True)
    out, killed = tmp_path / "together.out", tmp_path / "killed"
    options = ["--restart-workers", "3", "--checkpoint-dir", str(tmp_path / "checkpoints"), *recovery] if victim else []
    arguments = ["--ps", "2", "--workers", "3", "--max-steps", str(NUM_STEPS), *options, "--", str(out), *[str(killed)] * bool(victim)]
    with up(*arguments, worker=program, run_dir=tmp_path / "run", **EXACT, **environment) as process:
        if victim:
            read_until(process, "in the middle")
            _kill(victim, descendants(process))
            killed.touch()
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return out


def arrays_in(path: Path) -> list[Any]:
    """The arrays of a file of `np.savez`, in their order."""
    with np.load(path) as file:  # noqa: TID251 (our own)
        return [file[name] for name in file.files]


def _kill(victim: str, processes: Sequence[psutil.Process]) -> None:
    for one in processes:
        if victim in one.cmdline() or (victim == "worker" and one.environ().get("LOCKSTEP_WORKER_INDEX") == "1"):
            one.kill()
            psutil.wait_procs([one], timeout=10)
            return
    raise AssertionError(f"no {victim} is running")
