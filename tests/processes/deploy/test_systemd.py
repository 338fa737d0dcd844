"""Units of `lockstep systemd` as local processes: they train to the end, and what is started again as systemd would goes on."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep import certs
from tests.support.network.servers import free_ports
from tests.support.processes.commands import TRAIN, lockstep_here
from tests.support.processes.warm import WarmPopen, read_early
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytest.importorskip("cryptography", reason="certificates need the package cryptography")
pytestmark = pytest.mark.timeout(150)


@contextmanager
def running(unit: Path, secrets: Path, out: Path, *, instance: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a unit's command with its environment and credentials, and nothing else."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    given = dict(text.strip('"').replace("%i", instance).split("=", 1) for name, _, text in lines if name == "Environment")
    (command,) = (shlex.split(text) for name, _, text in lines if name == "ExecStart")
    credentials = out.parent / f"{out.name}.credentials"
    credentials.mkdir(exist_ok=True)
    for name, _, text in lines:
        if name == "LoadCredential":
            (credentials / text.partition(":")[0]).write_bytes((secrets / Path(text).name).read_bytes())
            (credentials / text.partition(":")[0]).chmod(0o600)
    environment = {name: text.replace("%d", str(credentials)).replace("%%", "%") for name, text in given.items()}
    with out.open("ab") as sink:
        full = {**read_early(os.environ), "PATH": os.environ["PATH"], **environment}
        process = WarmPopen([word.replace("$$", "$") for word in command], cwd=ROOT, env=full, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_units_train_to_the_end_through_a_chief_that_is_killed_and_started_again(tmp_path: Path) -> None:
    port = free_ports(3)
    chief, *servers = (f"127.0.0.1:{port + index}" for index in range(3))
    certs.create(tmp_path / "certs", cluster="job")
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--address", chief, "--ps", ",".join(servers), "--workers", "2", "--cluster", "job", "--max-steps", "200"]
    flags += ["--certs-dir", str(tmp_path / "certs"), "--checkpoint-dir", str(tmp_path / "kept"), "--out", str(tmp_path / "units")]
    ended = lockstep_here("systemd", *flags, "--", sys.executable, str(tmp_path / "train.py"))
    assert ended.returncode == 0, ended.stderr
    unit = {path.name.removeprefix("lockstep-job-").removesuffix(".service"): path for path in (tmp_path / "units").iterdir()}
    out = {name: tmp_path / f"{name}.out" for name in ("ps-0", "ps-1", "chief", "worker-0", "worker-1")}

    def words() -> str:
        return "\n".join(path.read_text() for path in out.values() if path.exists())

    with ExitStack() as stack:
        for name in ("ps-0", "ps-1"):
            stack.enter_context(running(unit[name], tmp_path / "certs", out[name]))
        with running(unit["chief"], tmp_path / "certs", out["chief"]):
            workers = [
                stack.enter_context(running(unit["worker@"], tmp_path / "certs", out[f"worker-{index}"], instance=str(index)))
                for index in range(2)
            ]
            wait_until(lambda: "state=TRAINING" in words(), what=f"it trains\n{words()}", timeout_s=60)
        stack.enter_context(running(unit["chief"], tmp_path / "certs", out["chief"]))
        wait_until(lambda: all(worker.poll() is not None for worker in workers), what="the workers end", timeout_s=90)
        assert [worker.returncode for worker in workers] == [0, 0], words()
    assert "training is finished at step 200" in words() and words().count("value -100.0") == 2, words()
    assert (tmp_path / "kept").is_dir()
