"""The `lockstep` command as tests call it, in a process of its own or in this one, and a cluster to call it for. Claims nothing."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from lockstep.__main__ import main
from lockstep.launcher.cluster import ClusterSpec, LocalCluster
from lockstep.launcher.supervisor import Supervisor

Ended = subprocess.CompletedProcess[str]


def lockstep(*arguments: str, timeout_s: float = 20.0, **environment: str) -> Ended:
    """Runs a command as a user does."""
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environment})


def lockstep_here(*arguments: str) -> Ended:
    """Runs in this process a command that starts nothing, for what it says: a process would do nothing but import most of the time."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ):
        try:
            code: int | str | None = main(arguments)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int), code
    return Ended(arguments, code, out.getvalue(), err.getvalue())


@contextmanager
def cluster(tmp_path: Path, *, max_steps: int | None = None) -> Iterator[LocalCluster]:
    """Two parameter servers and a chief that wait for two workers."""
    with Supervisor(log_directory=tmp_path / "logs", show_line=lambda name, line: None) as supervisor:
        started = LocalCluster(ClusterSpec(num_ps=2, num_workers=2, max_steps=max_steps), supervisor=supervisor, note=lambda text: None)
        started.start_roles()
        yield started
        # What they have said would fill their pipes one day.
        supervisor.poll(timeout_s=0.0)
