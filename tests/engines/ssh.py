"""Real ssh servers, one on each host of a network, and a client configuration that knows them. Everything is in one directory."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engines.network import Network, network, why_not
from tests.support.waiting import wait_until

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


def why_no_ssh() -> str:
    """Why there can be no ssh servers here; empty: there can."""
    missing = [tool for tool in ("sshd", "ssh", "ssh-keygen") if shutil.which(tool) is None]
    return why_not() or (f"no {', '.join(missing)} in PATH; Debian has them in openssh-server and openssh-client" if missing else "")


class SshHosts:
    """Hosts h1, h2, …, which `environment` reaches by ssh from one more, as a user's machine does."""

    def __init__(self, net: Network, directory: Path) -> None:
        self.net, self._directory = net, directory
        # A program of this name is what a launcher calls.
        (directory / "bin").mkdir()
        program = directory / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/client "$@"\n')
        program.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def start(self) -> None:
        """Returns once all hosts answer."""
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._directory / f"{name}.key")], check=True)
        for name, text in {"server": _SERVER, "client": _CLIENT}.items():
            (self._directory / name).write_text(text.format(directory=self._directory))
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.net.names:
            server = [str(shutil.which("sshd")), "-D", "-e", "-f", str(self._directory / "server")]
            self.net.start(name, *server, out=self._directory / f"{name}.out")
            wait_until(lambda name=name: not self.run(name, "true").returncode, what=f"{name} answers", timeout_s=20)  # type: ignore[misc]

    def run(self, name: str, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command there by ssh."""
        address = self.net.address(name)
        return subprocess.run(["ssh", address, *command], env=self.environment, capture_output=True, text=True, check=False)


@contextmanager
def ssh_hosts(num_hosts: int, directory: Path) -> Iterator[SshHosts]:
    """Starts the hosts, and ends them with all that runs there."""
    with network(num_hosts, directory) as net:
        made = SshHosts(net, directory)
        made.start()
        yield made
