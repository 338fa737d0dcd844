"""Open MPI, whose ranks are workers of one cluster: mpirun itself runs on the first host, as on a login node that takes part."""

import shutil
import subprocess
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

    def greet(self) -> None:
        assert self.run_printed("mpirun -n 2 --host a:1,b:1 hostname", out=self._directory / "greeting") == 0

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

    def run_printed(self, command: str, *, out: Path) -> int:
        """Runs a command of the pages for the hosts a and b on the first host, in the directory, and returns its exit code."""
        for name, host in zip("ab", self._hosts.net.names, strict=True):
            command = command.replace(f"{name}:", f"{self._hosts.net.address(host)}:")
        shell = {"plm_rsh_agent": f"ssh -F {self._directory / 'client'}", "oob_tcp_if_include": "10.77.0.0/24"}
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment = {**self._hosts.environment, **{f"OMPI_MCA_{name}": text for name, text in shell.items()}, **root}
        words = self._hosts.net.on("h1", "sh", "-c", command.replace("python ", f"{sys.executable} "))
        with out.open("wb") as sink:
            process = subprocess.Popen(words, cwd=self._directory, env=environment, stdout=sink, stderr=sink)
            self._stack.callback(process.kill)
            return process.wait(150)

    def run_again(self) -> None:
        assert self._command.run.await_end() != 0
        self._hosts.serve("h2")
        self._command.begin()

    def ask_to_end(self) -> None:
        self._hosts.net.terminate("mpirun")

    def has_noticed(self, role: str, run: Demo) -> bool:
        raise AssertionError("no run goes on without a host")
