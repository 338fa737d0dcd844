"""Clusters for tests, in this process or with real servers, with one interface. Knows how to start and end them; asserts nothing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.chief.running_chief import RunningChief
from tests.support.processes.processes import Process, announced, start_role
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
    """Parameter servers and a chief on Unix sockets, all in this process. `transport` is that of the sessions."""

    def __init__(self, shape: Shape, stack: ExitStack, *, directory: Path, transport: str = "grpc") -> None:
        self._stack = stack
        self._transport = transport
        self.ps_addresses = [start_ps(index, stack, directory=directory) for index in range(shape.num_ps)]
        self.chief = run_chief(shape, stack, ps_addresses=self.ps_addresses, directory=directory)
        self.chief_address = self.chief.address

    def session(self, worker_index: int | None = None) -> Session:
        session = worker_client.connect(self.chief_address, worker_index=worker_index, timeout_s=20, transport=self._transport)
        self._stack.callback(session.close)
        return session

    def observer(self) -> Observer:
        observer = worker_client.observe(self.chief_address, timeout_s=20)
        self._stack.callback(observer.close)
        return observer


def start_over(ways: Sequence[str]) -> Any:
    """Returns the fixture `start`, which starts clusters that end with the test, in each of some ways: "in process", or a transport.

    What uses nothing but the calls of a session works over every transport once those calls do: in this process is enough for it.
    """

    @pytest.fixture(params=ways, name="start")
    def started(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Start]:
        with ExitStack() as stack:

            def of(shape: Shape) -> AnyCluster:
                if request.param == "in process":
                    return LocalTestCluster(shape, stack)
                return GrpcTestCluster(shape, stack, directory=socket_dir, transport=request.param.replace(" ", "_"))

            yield of

    return started


def run_chief(shape: Shape, stack: ExitStack, *, ps_addresses: list[str], directory: Path) -> RunningChief:
    """Starts a chief in this process; returns once it serves."""
    coordination = {name: value for name, value in asdict(shape).items() if name != "num_ps"}
    return stack.enter_context(RunningChief(*ps_addresses, address=f"unix:{directory}/chief", **coordination))


def start_ps(index: int, stack: ExitStack, *, directory: Path) -> str:
    """Starts a parameter server in this process and returns its address."""
    server = ParameterServer(ParameterServerConfig(index=index, address=f"unix:{directory}/ps{index}", cluster="lockstep"))
    server.start()
    stack.callback(server.stop, 0.0)
    return server.address


def start_ps_process(index: int, stack: ExitStack, *, directory: Path) -> Process:
    """Starts a parameter server as a process of its own at unix:DIRECTORY/psINDEX; returns once it serves."""
    path = directory / f"ps{index}.address"
    process = start_role(stack, "ps_server", "--index", index, "--address", f"unix:{directory}/ps{index}", announce=path)
    announced(process, path)
    return process


def start_chief(shape: Shape, stack: ExitStack, *, ps_addresses: list[str], directory: Path) -> Process:
    """Starts a chief's process; `announced` tells when it serves."""
    options = {
        "--replicas-to-aggregate": shape.replicas_to_aggregate or (None if shape.total_num_replicas else 1),
        "--workers": shape.total_num_replicas,
        "--max-steps": shape.max_steps,
        "--lease": shape.lease_s,
    }
    words = ["--ps", ",".join(ps_addresses), *(["--reject-nonfinite"] if shape.reject_nonfinite else [])]
    for flag, value in options.items():
        words += [flag, str(value)] if value is not None else []
    return start_role(stack, "chief", "--address", f"unix:{directory}/chief", *words, announce=directory / "chief.address")
