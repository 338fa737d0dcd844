"""Ray: each process of the cluster runs in an actor of its own on a node of Ray, and `ray_bridge` passes on what it reads and writes."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass

# The socket of a bridge that runs already.
BRIDGE_VARIABLE = "LOCKSTEP_RAY_BRIDGE"
_REACH = Path(__file__).parent / "ray_reach.py"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """A cluster of Ray. `bridge`: the process with the bridge, which ends with this one."""

    hosts: tuple[Host, ...]
    bridge: "subprocess.Popen[bytes] | None"
    num_workers: int = 0
    is_launcher: bool = True
    starts_workers: bool = False

    @property
    def again_words(self) -> str:
        """What follows: `run_again` does nothing."""
        return "start it again to continue from its newest checkpoint"

    def run_again(self) -> None:
        """Does nothing: Ray has no queue."""


def engine(environment: Mapping[str, str]) -> Ray:
    """Returns the cluster of Ray that this machine belongs to. Raises InvalidSpec if there is none, or Ray is not installed."""
    path, bridge = environment.get(BRIDGE_VARIABLE), None
    if not path:
        bridge, path = _start(environment)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(path)
        asking.sendall(b"{}")
        asking.shutdown(socket.SHUT_WR)
        nodes = json.load(asking.makefile())
    if not nodes:
        raise Unavailable("--engine ray: no node of Ray has processors, or GPUs if workers need some; `ray status` shows what there is")
    reach = (sys.executable, "-I", "-S", str(_REACH), path)
    hosts = tuple(Host(name=node["name"], address=node["address"], reach=(*reach, node["id"])) for node in nodes)
    return Ray(hosts=hosts, bridge=bridge)


def _start(environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], str]":
    # Of a session of its own: it outlives an interrupt, at which the cluster still saves a checkpoint.
    bridge = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep.launcher.engines.ray_bridge"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert bridge.stdout is not None
    if not (path := bridge.stdout.readline().decode().strip()):
        bridge.wait()
        raise InvalidSpec("--engine ray: no connection to Ray; its words are above")
    return bridge, path
