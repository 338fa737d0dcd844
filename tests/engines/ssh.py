"""`lockstep up --hosts` on real ssh servers, one on each host of a network, with a client configuration that knows them."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.engines.demo import Command, Demo, recovery
from tests.engines.network import network, why_not
from tests.support.waiting import wait_until

LOCKSTEP = str(Path(sys.executable).parent / "lockstep")
_SERVER = """
Port 22
HostKey {directory}/host.key
AuthorizedKeysFile {directory}/user.key.pub
PidFile none
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
"""
_CLIENT = """
Host 10.77.0.*
  LogLevel ERROR
  IdentityFile {directory}/user.key
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
"""


class Ssh:
    """Hosts h1, h2, …, which `environment` reaches by ssh from one more, as a user's machine does."""

    survives: tuple[str, ...] = ("worker 2", "ps 1", "chief")
    ends_with: tuple[str, ...] = ()

    def __init__(self, directory: Path, stack: ExitStack, *, num_hosts: int = 3) -> None:
        self.directory, self._stack = directory, stack
        self.net = stack.enter_context(network(num_hosts, directory))
        # A program of this name is what a launcher calls.
        (directory / "bin").mkdir()
        program = directory / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/client "$@"\n')
        program.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / f"{name}.key")], check=True)
        for name, text in {"server": _SERVER, "client": _CLIENT}.items():
            (directory / name).write_text(text.format(directory=directory))
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.net.names:
            self.serve(name)

    @staticmethod
    def why_not() -> str:
        missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if shutil.which(tool) is None]
        return why_not() or (f"no {', '.join(missing)} in PATH; Debian has them in openssh-server and openssh-client" if missing else "")

    def serve(self, name: str) -> None:
        """Starts the server of a host, again after it was lost."""
        server = [str(shutil.which("sshd")), "-D", "-e", "-f", str(self.directory / "server")]
        self.net.start(name, *server, out=self.directory / f"{name}.out")
        wait_until(lambda: self._answers(name), what=f"{name} answers", timeout_s=20)

    def _answers(self, name: str) -> bool:
        return not subprocess.run(
            ["ssh", self.net.address(name), "true"], env=self.environment, capture_output=True, check=False
        ).returncode

    def greet(self) -> None:
        assert all(map(self._answers, self.net.names))

    def run(self, *flags: str, pace: float = 0.05, names: tuple[str, ...] = ()) -> Demo:
        at = ",".join(map(self.net.address, names or self.net.names))
        words = [LOCKSTEP, "demo", "--hosts", at, "--pace", str(pace), "--restart-workers", "9", *recovery(self.directory), *flags]
        command = Command(words, self.environment, self.directory, self._stack)
        self.ask_to_end = command.ask_to_end
        return command.run

    def run_again(self) -> None:
        raise AssertionError("it ends with no host")

    def lose(self, role: str) -> None:
        self.net.kill(self.net.host_of(role))

    def has_noticed(self, role: str, run: Demo) -> bool:
        return f"host {self.net.address(self.net.host_of(role))} is lost" in run.out

    def left(self) -> list[str]:
        return self.net.left()
