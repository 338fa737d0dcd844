"""Processes of two versions of the protocol: the caller reports at once both versions and what to do, whichever is newer."""

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from ps_protocol.roles.identity import PROTOCOL_VERSION
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.repository import ROOT

OTHER = "tests.support.processes.other_version"
OURS, MAJOR = str(PROTOCOL_VERSION), PROTOCOL_VERSION.major
NEWER, NEXT = f"{MAJOR + 1}.0", f"{MAJOR}.{PROTOCOL_VERSION.minor + 1}"
WORKER = """
import numpy as np, lockstep
with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(2)}, optimizer=lockstep.sgd(1.0))
    print(session.step({"w": np.ones(2)}).outcome.name)
"""


def cluster(stack: ExitStack, directory: Path, *, servers: str, chief: str) -> ProcessCluster:
    """Starts a server and a chief of these versions."""
    wrapper = {name: (OTHER, version) for name, version in (("ps 0", servers), ("chief", chief))}
    # Not forked: there the version would have been read already.
    found = ProcessCluster(Plan(num_workers=1, wrapper=wrapper, is_warm=False), stack, directory=directory).start()
    found.await_(lambda: "chief ready" in found.text_of("chief") and "ps 0 ready" in found.text_of("ps 0"), what="both serve")
    return found


def call(directory: Path, version: str, *words: str) -> tuple[int, str, float]:
    """Runs a caller of a version; returns its exit code, what it says, and how long it took from its first call on."""
    environment = {"LOCKSTEP_CHIEF": f"unix:{directory}/chief", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", OTHER, version, *words]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=40, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def test_a_worker_and_a_command_say_which_versions_met_and_what_to_do(socket_dir: Path) -> None:
    program = socket_dir / "train.py"
    program.write_text(WORKER)
    words = f"client speaks protocol {MAJOR}.x, server {MAJOR + 1}.x; install the same major version of Lockstep on both"
    with ExitStack() as stack:
        cluster(stack, socket_dir, servers=NEWER, chief=NEWER)
        for caller in ((str(program),), ("lockstep", "status")):
            code, said, took_s = call(socket_dir, OURS, *caller)
            assert code == 1, said
            assert f"unix:{socket_dir}/chief: {words}" in said
            assert took_s < 20, "it does not try again what cannot succeed"


def test_a_chief_ends_at_a_parameter_server_of_another_version_and_says_which(socket_dir: Path) -> None:
    with ExitStack() as stack:
        found = cluster(stack, socket_dir, servers=NEWER, chief=OURS)
        found.await_death("chief", code=2)
        words = f"{found.address('ps 0')}: client speaks protocol {MAJOR}.x, server {MAJOR + 1}.x; install the same"
        assert words in found.text_of("chief")


def test_a_newer_minor_version_is_a_warning_and_trains(socket_dir: Path) -> None:
    program = socket_dir / "train.py"
    program.write_text(WORKER)
    with ExitStack() as stack:
        cluster(stack, socket_dir, servers=OURS, chief=OURS)
        code, said, _ = call(socket_dir, NEXT, str(program))
        assert code == 0, said
        assert "ACCEPTED" in said
        assert f"client speaks protocol {NEXT}, server only {OURS}: what came after {OURS} is switched off; update the server" in said
