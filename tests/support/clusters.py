"""Clusters for tests, in this process or with real servers, behind one face. Knows how to start and end them; asserts nothing."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import worker_client
from lockstep.in_process import InProcessCluster
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.repository import ROOT
from tests.support.waiting import wait_until
from worker_client import Observer, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster is to be."""

    num_ps: int = 1
    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None
    max_steps: int | None = None
    lease_s: float = 10.0
    reject_nonfinite: bool = False


class AnyCluster(Protocol):
    """A running cluster; everything opened through it is closed with it."""

    def session(self, worker_index: int | None = None) -> Session:
        """Returns another worker's session, without a model."""

    def observer(self) -> Observer:
        """Returns an observer."""


Start = Callable[[Shape], AnyCluster]


class LocalTestCluster:
    """A cluster of objects in this process."""

    def __init__(self, shape: Shape, stack: ExitStack) -> None:
        self._stack = stack
        self._cluster = InProcessCluster(
            num_ps=shape.num_ps,
            replicas_to_aggregate=shape.replicas_to_aggregate,
            total_num_replicas=shape.total_num_replicas,
            max_steps=shape.max_steps,
            reject_nonfinite=shape.reject_nonfinite,
        )

    def session(self, worker_index: int | None = None) -> Session:
        session = worker_client.local(self._cluster, worker_index=worker_index)
        self._stack.callback(session.close)
        return session

    def observer(self) -> Observer:
        observer = worker_client.observe_local(self._cluster)
        self._stack.callback(observer.close)
        return observer


class GrpcTestCluster:
    """Parameter servers on Unix sockets in this process, and a chief as a process of its own. `transport` is that of the sessions."""

    def __init__(self, shape: Shape, stack: ExitStack, *, directory: Path, transport: str = "grpc") -> None:
        self._stack = stack
        self._transport = transport
        self.ps_addresses = [start_ps(index, stack, directory=directory) for index in range(shape.num_ps)]
        self.chief = start_chief(shape, stack, ps_addresses=self.ps_addresses, directory=directory)
        self.chief_address = announced(self.chief, directory / "chief.address")

    def session(self, worker_index: int | None = None) -> Session:
        session = worker_client.connect(self.chief_address, worker_index=worker_index, timeout_s=20, transport=self._transport)
        self._stack.callback(session.close)
        return session

    def observer(self) -> Observer:
        observer = worker_client.observe(self.chief_address, timeout_s=20)
        self._stack.callback(observer.close)
        return observer


def start_ps(index: int, stack: ExitStack, *, directory: Path) -> str:
    """Starts a parameter server in this process and returns its address."""
    server = ParameterServer(ParameterServerConfig(index=index, address=f"unix:{directory}/ps{index}", cluster="lockstep"))
    server.start()
    stack.callback(server.stop, 0.0)
    return server.address


def start_ps_process(index: int, stack: ExitStack, *, directory: Path) -> "subprocess.Popen[bytes]":
    """Starts a parameter server as a process of its own at unix:DIRECTORY/psINDEX; returns once it serves."""
    command = [sys.executable, "-m", "ps_server", "--index", str(index), "--address", f"unix:{directory}/ps{index}"]
    process = subprocess.Popen([*command, "--announce", str(directory / f"ps{index}.address")], cwd=ROOT)
    stack.callback(end, process)
    announced(process, directory / f"ps{index}.address")
    return process


def start_chief(shape: Shape, stack: ExitStack, *, ps_addresses: list[str], directory: Path) -> "subprocess.Popen[bytes]":
    """Starts a chief's process; `announced` tells when it serves."""
    options = {
        "--replicas-to-aggregate": shape.replicas_to_aggregate,
        "--workers": shape.total_num_replicas,
        "--max-steps": shape.max_steps,
        "--lease": shape.lease_s,
    }
    command = [sys.executable, "-m", "chief", "--address", f"unix:{directory}/chief", "--announce", str(directory / "chief.address")]
    command += ["--ps", ",".join(ps_addresses), *(["--reject-nonfinite"] if shape.reject_nonfinite else [])]
    for flag, value in options.items():
        command += [flag, str(value)] if value is not None else []
    chief = subprocess.Popen(command, cwd=ROOT)
    stack.callback(end, chief)
    return chief


def announced(process: "subprocess.Popen[bytes]", path: Path) -> str:
    """Returns the address that a server has announced, once it serves."""
    wait_until(lambda: path.exists() or process.poll() is not None, timeout_s=20, what=f"{path} is announced")
    assert path.exists(), f"the process ended with {process.returncode} instead of announcing {path}"
    return path.read_text().strip()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and waits for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
