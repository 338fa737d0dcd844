"""Hosts of this machine's own: network namespaces on one bridge, each with an address, a name and a table of processes. Needs root.

There is one such network at a time on a machine: another run waits for its end. Files are common to all, and so is shared memory, which is
not found: the hosts seem to be one, and do not see each other's processes.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

_NET, _BRIDGE = "10.77.0", "lockstep-br"
# Gives what runs on a host its name, its table of names, and its own processes, which end with the first of them: a shell that waits
# until it is alone there.
_ENTER = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
_NAMED = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; "$@"; code=$?; '
_NAMED += "while set -- /proc/[0-9]*; [ $# -gt 1 ]; do sleep 0.1; done; exit $code"
TOOLS = ("ip", "tc", "nsenter", "unshare")


def why_not() -> str:
    """Why there can be no hosts here; empty: there can."""
    if os.geteuid():
        return "hosts in network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"no {', '.join(missing)} in PATH; Debian has them in iproute2 and util-linux" if missing else ""


class Network:
    """Hosts h1, h2, … with addresses of their own; this machine is `gateway`."""

    gateway = f"{_NET}.254"

    def __init__(self, num_hosts: int, directory: Path) -> None:
        self.names = tuple(f"h{index + 1}" for index in range(num_hosts))
        self._table = directory / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        self._table.write_text("\n".join(lines) + "\n")
        # By host, what was started there last.
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def address(name: str) -> str:
        """Where the others reach a host."""
        return f"{_NET}.{name[1:]}"

    def host_of(self, role: str) -> str:
        """Where a launcher puts a process such as "worker 2"."""
        return self.names[int(role.partition(" ")[2] or 0) % len(self.names)]

    def terminate(self, program: str) -> None:
        """Asks all processes of a program to end."""
        for one in self._processes():
            if one.info["name"] == program:
                one.terminate()

    def left(self) -> list[str]:
        """The commands of Lockstep that run on the hosts."""
        found = [" ".join(one.info["cmdline"] or ()) for one in self._processes()]
        return [words for words in found if re.search(r"lockstep[ ./]|ps_server|-m chief", words) and not words.startswith("unshare")]

    def _processes(self) -> list[psutil.Process]:
        spaces, found = {Path(f"/run/netns/lockstep-{name}").stat().st_ino for name in self.names}, []
        for one in psutil.process_iter(["cmdline", "name"]):  # read now: it may have ended later
            with suppress(OSError):
                if Path(f"/proc/{one.pid}/ns/net").stat().st_ino in spaces:
                    found.append(one)
        return found

    def on(self, name: str, *command: str) -> list[str]:
        """Returns the command that runs another one on a host; whatever that starts ends with it."""
        return ["nsenter", f"--net=/run/netns/lockstep-{name}", *_ENTER, "sh", "-c", _NAMED, "-", name, str(self._table), *command]

    def limit(self, name: str, rate: str) -> None:
        """Limits what a host sends and gets, such as to "100mbit"."""
        shape = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        subprocess.run(["tc", "qdisc", "replace", "dev", f"lockstep-v{name[1:]}", *shape], check=True, capture_output=True)
        there = ("nsenter", f"--net=/run/netns/lockstep-{name}", "tc", "qdisc", "replace", "dev", "eth0", *shape)
        subprocess.run(there, check=True, capture_output=True)

    def start(self, name: str, *command: str, out: Path, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Starts the one command that a host runs at a time, with all that it starts; `out` gets what they say."""
        with out.open("ab") as stream:
            self.processes[name] = subprocess.Popen(
                self.on(name, *command), stdout=stream, stderr=stream, env=environment, cwd=cwd, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """What a lost host is: all that runs there is killed."""
        if (process := self.processes.pop(name, None)) is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def cut(self, name: str) -> None:
        """Unplugs a host: packets vanish, and connections hang."""
        _ip("link", "set", f"lockstep-v{name[1:]}", "nomaster")

    def join(self, name: str) -> None:
        """Plugs it in again."""
        _ip("link", "set", f"lockstep-v{name[1:]}", "master", _BRIDGE)


@contextmanager
def network(num_hosts: int, directory: Path) -> Iterator[Network]:
    """Makes the hosts, and removes them."""
    made = Network(num_hosts, directory)
    with ExitStack() as stack:
        lock = stack.enter_context(Path(tempfile.gettempdir(), f"{_BRIDGE}.lock").open("wb"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        _make(stack, ("link", "add", _BRIDGE, "type", "bridge"), ("link", "del", _BRIDGE))
        _ip("addr", "add", f"{made.gateway}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        # Where a firewall sees bridged packets, as beside Docker, these are let through.
        rule = ("FORWARD", "-i", _BRIDGE, "-o", _BRIDGE, "-j", "ACCEPT")
        if shutil.which("iptables") and not subprocess.run(["iptables", "-I", *rule], capture_output=True, check=False).returncode:
            stack.callback(subprocess.run, ["iptables", "-D", *rule], capture_output=True, check=False)
        for name in made.names:
            space, link = f"lockstep-{name}", f"lockstep-v{name[1:]}"
            _make(stack, ("netns", "add", space), ("netns", "del", space))
            # The link would go with the host, but only once nothing runs there any more.
            _make(stack, ("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space), ("link", "del", link))
            _ip("link", "set", link, "master", _BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{made.address(name)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")
            stack.callback(made.kill, name)
        yield made


def _make(stack: ExitStack, make: Sequence[str], remove: Sequence[str]) -> None:
    with suppress(subprocess.CalledProcessError):  # what an earlier run has left
        _ip(*remove)
    _ip(*make)
    stack.callback(_ip, *remove)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
