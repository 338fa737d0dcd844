"""The hosts of a cluster: which process runs where, and how it is started there. Knows commands and files; starts nothing.

A process on another host is a process of this one that stands for it (`remote.py`): the launcher watches, signals and restarts both alike.
"""

import base64
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lockstep
from lockstep.launcher.remote import EXIT_HOST_LOST
from lockstep.launcher.supervisor import Process, ProcessSpec
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.security.tokens import write_secret

# Asks for no password, bears a link that is silent for 45 s, and says nothing but errors.
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=9", "LogLevel=ERROR")
_SSH = ("ssh", *(word for option in _SSH_OPTIONS for word in ("-o", option)))
_HERE = Path(__file__).parent


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that processes run on. `address`: where the other hosts reach it. `reach`: the command that has a shell there run a text.

    `hidden`: variables that this command must not see. `orphaned`: the command that is run there if the launcher is lost, once its
    processes have ended; empty: none.
    """

    name: str
    address: str
    reach: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Returns the hosts of `NAME,NAME=ADDRESS,…`: by the name that ssh knows, with the address that others use. Raises InvalidSpec."""
    hosts: list[Host] = []
    for word in text.split(",") if text else ():
        name, equals, address = word.strip().partition("=")
        address = address or name.rpartition("@")[2]
        if not name or name.startswith("-") or (equals and not word.strip().rpartition("=")[2]) or ":" in address:
            raise InvalidSpec(f"--hosts: got {word!r}, want a name that ssh knows, or NAME=ADDRESS, separated by commas")
        hosts.append(Host(name=name, address=address, reach=(*_SSH, name)))
    if twice := {host.name for host in hosts if [other.name for other in hosts].count(host.name) > 1}:
        raise InvalidSpec(f"--hosts: {min(twice)} occurs twice")
    return tuple(hosts)


class Hosts:
    """Places processes on hosts: the first has the chief, parameter servers and workers take turns, and a standby is not beside its twin.

    `python` and `cwd`: the Python that has Lockstep on each host, and the directory that programs run in there. `places`: the host of each
    worker, if something else has chosen them.
    """

    def __init__(self, hosts: Sequence[Host], *, python: str, cwd: str, places: Sequence[Host] = ()) -> None:
        self._hosts, self._places = tuple(hosts), tuple(places)
        self._placed: dict[str, Host] = {}
        self._lost: set[str] = set()
        self._python, self._cwd = python or sys.executable, cwd or str(Path.cwd())

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def of(self, name: str) -> Host:
        """Returns the host of a process such as "ps 1". It stays there until that host is lost, and goes to one that is left then."""
        if (placed := self._placed.get(name)) is not None and placed.name not in self._lost:
            return placed
        kind, _, index = name.partition(" ")
        place = int(index or 0) + (kind == "standby")
        hosts = self._places if kind == "worker" and self._places else self._hosts
        first = hosts[place % len(hosts)]
        left = [host for host in self._hosts if host.name not in self._lost] or [first]
        host = self._placed[name] = left[place % len(left)] if first.name in self._lost else first
        return host

    def has_lost(self, name: str) -> bool:
        """Whether a process was placed on a host that is lost, and goes to another one."""
        return (placed := self._placed.get(name)) is not None and placed.name in self._lost and len(self._lost) < len(self._hosts)

    def see_end(self, process: Process) -> bool:
        """Notes that a process has ended. True: with its host, so it goes to another one, and nothing is started there any more."""
        host = self._placed[process.name]
        if process.returncode == EXIT_HOST_LOST:
            self._lost.add(host.name)
        return self.of(process.name) is not host

    def carried(
        self,
        spec: ProcessSpec,
        *,
        host: Host,
        private: Path,
        files: Sequence[str] = (),
        returns: Sequence[str] = (),
        look_for: Sequence[Path] | None = None,
    ) -> ProcessSpec:
        """Returns the local process that stands for `spec` on a host.

        `private`: the launcher's private directory. `files`: names there that the host gets; `returns`: names there that the host gives.
        `look_for`: it asks whether that could run there, or, without a command, any process: the host must see these files of the launcher.
        """
        task = {
            "host": host.name,
            "reach": [*host.reach, shlex.join([self._python, "-P", "-m", "lockstep.launcher.agent"])],
            "name": spec.name,
            "version": lockstep.__version__,
            "cwd": self._cwd,
            "look_for": None if look_for is None else [str(path) for path in look_for],
            "command": list(spec.command),
            "environment": dict(spec.environment),
            "python": sys.executable,
            "private": str(private),
            "files": {name: base64.b64encode((private / name).read_bytes()).decode() for name in files},
            "returns": list(returns),
            "exit_code": int(ExitCode.USAGE),
            "orphaned": list(host.orphaned),
        }
        path = self.task_of(spec.name, private=private)
        write_secret(path, json.dumps(task))
        return replace(
            spec,
            command=[sys.executable, "-I", "-S", str(_HERE / "remote.py"), str(path)],
            environment=dict.fromkeys(host.hidden),
            host=host.name,
        )

    @staticmethod
    def task_of(name: str, *, private: Path) -> Path:
        """Returns the file with the orders of a process, which begins on its host after finding it, and then removes it."""
        return private / f"{name.replace(' ', '-')}.task"
