"""Processes of two versions of the protocol: the caller reports at once both versions and what to do, whichever is newer."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.roles.identity import PROTOCOL_VERSION
from tests.support.processes.processes import Process, announced, end
from tests.support.repository import ROOT

OURS, MAJOR = str(PROTOCOL_VERSION), PROTOCOL_VERSION.major
NEWER, NEXT = f"{MAJOR + 1}.0", f"{MAJOR}.{PROTOCOL_VERSION.minor + 1}"
WORKER = """
import numpy as np, lockstep
with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(2)}, optimizer=lockstep.sgd(1.0))
    print(session.step({"w": np.ones(2)}).outcome.name)
"""


def role(stack: ExitStack, directory: Path, version: str, module: str, *words: str) -> tuple[Process, Path]:
    """Starts a role of a version; returns it, and the file that has what it says."""
    name = module.replace("_", "-")
    log = stack.enter_context((directory / f"{name}.log").open("wb"))
    place = ("--address", f"unix:{directory}/{name}", "--announce", str(directory / f"{name}.at"))
    # Executed: in a fork of the warm server, the version would have been read already.
    command = [sys.executable, "-m", "tests.support.processes.other_version", version, module, *place, *words]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(end, process)
    announced(process, directory / f"{name}.at")
    return process, Path(log.name)


def cluster(stack: ExitStack, directory: Path, *, servers: str, chief: str) -> tuple[Process, Path]:
    """Starts a server and a chief of these versions; returns the chief, and the file that has what it says."""
    role(stack, directory, servers, "ps_server", "--index", "0")
    return role(stack, directory, chief, "chief", "--ps", f"unix:{directory}/ps-server", "--workers", "1")


def call(directory: Path, version: str, *words: str) -> tuple[int, str, float]:
    """Runs a caller of a version; returns its exit code, what it says, and how long it took from its first call on."""
    environment = {"LOCKSTEP_CHIEF": f"unix:{directory}/chief", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.processes.other_version", version, *words]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=40, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


@pytest.mark.parametrize(("client", "server"), [(OURS, NEWER), (NEWER, OURS)])
def test_a_worker_and_a_command_say_which_versions_met_and_what_to_do(socket_dir: Path, client: str, server: str) -> None:
    program = socket_dir / "train.py"
    program.write_text(WORKER)
    words = f"client speaks protocol {client[0]}.x, server {server[0]}.x; install the same major version of Lockstep on both"
    with ExitStack() as stack:
        cluster(stack, socket_dir, servers=server, chief=server)
        for caller in ((str(program),), ("lockstep", "status")):
            code, said, took_s = call(socket_dir, client, *caller)
            assert code == 1, said
            assert f"unix:{socket_dir}/chief: {words}" in said
            assert took_s < 20, "it does not try again what cannot succeed"


def test_a_chief_ends_at_a_parameter_server_of_another_version_and_says_which(socket_dir: Path) -> None:
    with ExitStack() as stack:
        chief, log = cluster(stack, socket_dir, servers=NEWER, chief=OURS)
        assert chief.wait(20) == 2
        assert f"unix:{socket_dir}/ps-server: client speaks protocol {MAJOR}.x, server {MAJOR + 1}.x; install the same" in log.read_text()


def test_a_newer_minor_version_is_a_warning_and_trains(socket_dir: Path) -> None:
    program = socket_dir / "train.py"
    program.write_text(WORKER)
    with ExitStack() as stack:
        cluster(stack, socket_dir, servers=OURS, chief=OURS)
        code, said, _ = call(socket_dir, NEXT, str(program))
        assert code == 0, said
        assert "ACCEPTED" in said
        assert f"client speaks protocol {NEXT}, server only {OURS}: what came after {OURS} is switched off; update the server" in said
