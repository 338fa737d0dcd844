"""Open MPI, whose ranks are workers of one cluster: mpirun itself runs on the first host, as on a login node that takes part."""

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.engines.demo import Command, Demo, recovery
from tests.engines.ssh import Ssh


class Mpi:
    """Two hosts, with a rank on each."""

    survives: tuple[str, ...] = ()
    ends_with: tuple[str, ...] = ("worker 1",)

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._hosts, self._directory, self._stack = Ssh(directory, stack, num_hosts=2), directory, stack
        self.left, self.lose = self._hosts.left, self._hosts.lose

    @staticmethod
    def why_not() -> str:
        return Ssh.why_not() or ("" if shutil.which("mpirun") else "no mpirun in PATH; Debian has it in openmpi-bin")

    def run(self, *flags: str, pace: float = 0.05) -> Demo:
        at = ",".join(map(self._hosts.net.address, self._hosts.net.names))
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", "--map-by", "node", "--host", at, "-x", "LOCKSTEP_UP"]
        shell = f"ssh -F {self._directory / 'client'}"
        network = ["--mca", "plm_rsh_agent", shell, "--mca", "oob_tcp_if_include", "10.77.0.0/24", "--wdir", str(self._directory)]
        program = [sys.executable, "-m", "lockstep.demo.worker", "--pace", str(pace), "--least-accuracy", "0.95"]
        up = " ".join(["--ps", "2", "--max-steps", "400", *recovery(self._directory), *flags])
        command = self._hosts.net.on("h1", *mpirun, *network, *program)
        self._command = Command(command, {**self._hosts.environment, "LOCKSTEP_UP": up}, self._directory, self._stack)
        return self._command.run

    def run_again(self) -> None:
        assert self._command.run.await_end() != 0
        self._hosts.serve("h2")
        self._command.begin()

    def ask_to_end(self) -> None:
        self._hosts.net.terminate("mpirun")

    def has_noticed(self, role: str, run: Demo) -> bool:
        raise AssertionError("no run goes on without a host")
