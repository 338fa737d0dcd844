"""Ray: each process of the cluster runs in an actor of its own on a node of Ray, and `ray_bridge` passes on what it reads and writes."""

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec, Unavailable

KIND = EngineKind(module="ray")
# The socket of a bridge that runs already.
BRIDGE_VARIABLE = "LOCKSTEP_RAY_BRIDGE"
_REACH = Path(__file__).parent / "ray_reach.py"


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the cluster of Ray that this machine belongs to. Raises InvalidSpec if there is none, or Ray is not installed."""
    path, bridge = environment.get(BRIDGE_VARIABLE), None
    if not path:
        bridge, path = _start(environment)
    if not (hosts := _hosts(path)):
        raise Unavailable("--engine ray: no node of Ray has processors, or GPUs if workers need some; `ray status` shows what there is")
    return Engine(hosts=hosts, place=lambda count: _hosts(path, workers=count), held=bridge)


def _hosts(path: str, **asked: int) -> tuple[Host, ...]:
    """Asks a bridge for nodes: those that workers can run on, or that of each of so many `workers`. Raises Unavailable."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(path)
        asking.sendall(json.dumps(asked).encode())
        asking.shutdown(socket.SHUT_WR)
        answer = json.load(asking.makefile())
    if "failure" in answer:
        raise Unavailable(f"--engine ray: {answer['failure']}")
    reach = (sys.executable, "-I", "-S", str(_REACH), path)
    return tuple(Host(name=node["name"], address=node["address"], reach=(*reach, node["id"])) for node in answer["nodes"])


def _start(environment: Mapping[str, str]) -> "tuple[subprocess.Popen[bytes], str]":
    if find_spec("ray") is None:
        raise InvalidSpec(f"--engine ray: {sys.executable} has no Ray; pip install 'lockstep-ps[ray]'")
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
