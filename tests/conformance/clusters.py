"""Clusters to replay recorded cases on: objects in this process, servers on loopback in it, or processes. Asserts nothing."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import worker_client
from chief.config import parse_config
from chief.options import CoordinationConfig
from chief.serving.in_process import InProcessChief
from lockstep.in_process import LEASE_S
from ps_protocol.roles.chief import Chief
from ps_protocol.rpc.chief import GrpcChief
from ps_server.serving.local import InProcessShard
from tests.support.chief.running_chief import RunningChief, parameter_server
from tests.support.processes.processes import Process, announced, start_role
from worker_client import Observer, Session

START_TIMEOUT_S = 60.0


class Cluster(Protocol):
    """A running cluster."""

    def connect(self, worker_index: int | None = None) -> Session:
        """Returns another worker's session."""

    def observe(self) -> Observer:
        """Returns an observer."""

    def ask_chief(self) -> AbstractContextManager[Chief]:
        """Returns the chief, for questions of the test."""


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """A cluster whose chief serves at an address."""

    address: str

    def connect(self, worker_index: int | None = None) -> Session:
        return worker_client.connect(self.address, worker_index=worker_index)

    def observe(self) -> Observer:
        return worker_client.observe(self.address)

    def ask_chief(self) -> AbstractContextManager[Chief]:
        return contextlib.closing(GrpcChief(self.address))


@dataclass(frozen=True, slots=True)
class CalledCluster:
    """A cluster of objects."""

    chief: InProcessChief
    shards: Sequence[InProcessShard]

    def connect(self, worker_index: int | None = None) -> Session:
        return worker_client.local(self, worker_index=worker_index)

    def observe(self) -> Observer:
        return worker_client.observe_local(self)

    def ask_chief(self) -> AbstractContextManager[Chief]:
        return contextlib.nullcontext(self.chief)


# With so many parameter servers and these flags of the chief, until the block ends.
Start = Callable[[int, Sequence[str]], AbstractContextManager[Cluster]]


def _sized(chief_flags: Sequence[str]) -> Sequence[str]:
    """Accumulators need no workers; a chief must be told of some."""
    return chief_flags or ("--workers", "1")


def _coordination(addresses: Sequence[str], chief_flags: Sequence[str]) -> CoordinationConfig:
    return parse_config(["--ps", ",".join(addresses), *_sized(chief_flags)], environment={}).coordination


@contextmanager
def cluster_of_objects(num_ps: int, chief_flags: Sequence[str]) -> Iterator[Cluster]:
    """Parameter servers and a chief that are called, without any network."""
    shards = [InProcessShard(index=index) for index in range(num_ps)]
    coordination = _coordination([f"localhost:{1 + index}" for index in range(num_ps)], chief_flags)
    yield CalledCluster(InProcessChief(shards, config=replace(coordination, lease_s=LEASE_S), clock=time.monotonic), shards)


@contextmanager
def cluster_of_threads(num_ps: int, chief_flags: Sequence[str]) -> Iterator[Cluster]:
    """Parameter servers and a chief that serve in this process."""
    with ExitStack() as stack:
        addresses = tuple(stack.enter_context(parameter_server(index)).address for index in range(num_ps))
        coordination = _coordination(addresses, chief_flags)
        options = {field.name: getattr(coordination, field.name) for field in fields(coordination)}
        yield ServedCluster(stack.enter_context(RunningChief(*addresses, **options)).address)


@contextmanager
def cluster_of_processes(num_ps: int, chief_flags: Sequence[str]) -> Iterator[Cluster]:
    """Parameter servers and a chief, each a process of its own."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        servers = [_start(stack, "ps_server", "--index", str(index), announce=directory / f"ps{index}") for index in range(num_ps)]
        # All at once: most of the time is Python's own start.
        addresses = [_address(process, path) for process, path in servers]
        chief, path = _start(stack, "chief", "--ps", ",".join(addresses), *_sized(chief_flags), announce=directory / "chief")
        yield ServedCluster(_address(chief, path))


def _start(stack: ExitStack, module: str, *words: str, announce: Path) -> tuple[Process, Path]:
    log = stack.enter_context(announce.with_suffix(".log").open("wb"))
    return start_role(stack, module, "--address", "127.0.0.1:0", *words, announce=announce, log=log), announce


def _address(process: Process, path: Path) -> str:
    try:
        return announced(process, path, timeout_s=START_TIMEOUT_S)
    except AssertionError:
        said = path.with_suffix(".log").read_text(encoding="utf-8")
        raise RuntimeError(f"{path.name} did not start: {said[-2000:]}") from None
