"""Open MPI on two hosts: its ranks are workers of one cluster, over TLS, which ends with them and leaves nothing behind."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.ssh import SshHosts, ssh_hosts, why_no_ssh
from tests.support.waiting import wait_until

if why := why_no_ssh() or ("" if shutil.which("mpirun") else "no mpirun in PATH; Debian has it in openmpi-bin"):
    pytest.skip(f"no Open MPI on hosts here: {why}", allow_module_level=True)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(2, tmp_path / "ssh") as made:
        yield made


def test_ranks_on_two_hosts_train_the_digits(hosts: SshHosts, tmp_path: Path) -> None:
    # mpirun itself runs on the first host, as on a login node that takes part.
    at = ",".join(hosts.net.address(name) for name in hosts.net.names)
    shell = f"ssh -F {tmp_path / 'ssh' / 'client'}"
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "--map-by", "node", "--host", at, "-x", "LOCKSTEP_UP"]
    network = ["--mca", "plm_rsh_agent", shell, "--mca", "oob_tcp_if_include", "10.77.0.0/24", "--wdir", str(tmp_path)]
    program = [sys.executable, "-m", "lockstep.demo.worker", "--least-accuracy", "0.95"]
    ended = subprocess.run(
        hosts.net.on("h1", *mpirun, *network, *program),
        env={**hosts.environment, "LOCKSTEP_UP": "--ps 2 --max-steps 400"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0 and "[lockstep] training finished" in ended.stdout, ended.stdout
    assert set(re.findall(r"worker \d joined on (\w+)", ended.stdout)) == {"h1", "h2"}, ended.stdout
    assert min(map(float, re.findall(r"finished at step \d+: test accuracy (\d\.\d+)", ended.stdout))) >= 0.95
    assert not list((tmp_path / "lockstep-runs").glob("mpi-*"))
    for name in hosts.net.names:
        wait_until(lambda name=name: "lockstep" not in hosts.run(name, "ps", "-eo", "args").stdout, what=f"nothing is left on {name}")  # type: ignore[misc]
