"""Clusters in this process: of objects that call each other, or of servers on Unix sockets. Asserts nothing."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import worker_client
from benchmarks.harness.relay import Relay
from chief.serving.in_process import InProcessChief
from lockstep.in_process import LEASE_S
from ps_protocol.roles.chief import Chief
from ps_server.serving.local import InProcessShard
from tests.support.chief.running_chief import RunningChief, parameter_server
from tests.support.cluster.shape import Cluster, ServingCluster, Shape, Start
from worker_client import Follower, Observer, Session
from worker_client.following.follower import parts_of
from worker_client.following.sources import ClusterSource
from worker_client.model.wire_format import wire_format
from worker_client.opening import LocalCluster, enter_locally


class ObjectCluster(Cluster):
    """Parameter servers and a chief that are called, without any network."""

    def __init__(self, shape: Shape, stack: ExitStack) -> None:
        super().__init__(stack)
        self.shards = [InProcessShard(index=index) for index in range(shape.num_ps)]
        self.chief = InProcessChief(self.shards, config=replace(shape.coordination(), lease_s=LEASE_S), clock=time.monotonic)

    def session(self, worker_index: int | None = None) -> Session:
        return self._stack.enter_context(closing(worker_client.local(self, worker_index=worker_index)))

    def observer(self) -> Observer:
        return self._stack.enter_context(closing(worker_client.observe_local(self)))

    def follower(self, wire: str = "bfloat16", **more: Any) -> Follower:
        return self._stack.enter_context(closing(follower_of(self, wire, **more)))

    def client(self) -> Chief:
        return self.chief


def follower_of(cluster: LocalCluster, wire: str, names: Any = None, tables: bool = False) -> Follower:
    """Returns a follower of a cluster of objects."""
    source = ClusterSource(*enter_locally(cluster))
    return Follower(source, encoding=wire_format(wire).variable_encoding, parts=parts_of(names), tables=tables)


class ServedCluster(ServingCluster):
    """Parameter servers and a chief that serve in this process. `has_relays`: what goes to and from each server passes through `relays`."""

    def __init__(self, shape: Shape, stack: ExitStack, *, directory: Path, transport: str = "grpc", has_relays: bool = False) -> None:
        servers = [stack.enter_context(parameter_server(index, address=f"unix:{directory}/ps{index}")) for index in range(shape.num_ps)]
        self.ps_addresses = [server.address for server in servers]
        self.relays = [stack.enter_context(Relay(address)) for address in self.ps_addresses] if has_relays else []
        coordination = shape.coordination()
        self.chief = stack.enter_context(
            RunningChief(
                *([relay.address for relay in self.relays] or self.ps_addresses),
                address=f"unix:{directory}/chief",
                **{field.name: getattr(coordination, field.name) for field in fields(coordination)},
            )
        )
        super().__init__(stack, chief_address=self.chief.address, transport=transport)


def start_over(ways: Sequence[str]) -> Any:
    """Returns the fixture `start`, which starts clusters that end with the test, in each of some ways: "in process", or a transport.

    What uses nothing but the calls of a session works over every transport once those calls do: in this process is enough for it.
    """

    @pytest.fixture(params=ways, name="start")
    def started(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Start]:
        numbers = itertools.count()
        with ExitStack() as stack:

            def of(shape: Shape) -> Cluster:
                if request.param == "in process":
                    return ObjectCluster(shape, stack)
                directory = socket_dir / str(next(numbers))
                directory.mkdir()
                return ServedCluster(shape, stack, directory=directory, transport=request.param.replace(" ", "_"))

            yield of

    return started


def also_over(*transports: str) -> pytest.MarkDecorator:
    """Marks a test whose claim is about bytes, or about threads of servers: it runs in this process and over transports."""
    return pytest.mark.parametrize("start", ["in process", *transports], indirect=True)
