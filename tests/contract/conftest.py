"""What the contract suites run on: every implementation of the `WholeShard` Protocol, and clusters in this process and behind gRPC."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.roles.shard import WholeShard
from tests.support.parameter_servers.shards import EACH_WAY, Trainer, shard_over
from tests.support.sessions.clusters import AnyCluster, GrpcTestCluster, LocalTestCluster, Shape, Start

shard = shard_over(EACH_WAY)


@pytest.fixture
def trainer(shard: WholeShard) -> Trainer:
    """Chief and workers in one, for the shard."""
    return Trainer(shard)


@pytest.fixture(params=["in process", "grpc", "shared memory"])
def start(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Start]:
    """Starts clusters, all of which end with the test."""
    with ExitStack() as stack:

        def started(shape: Shape) -> AnyCluster:
            if request.param == "in process":
                return LocalTestCluster(shape, stack)
            return GrpcTestCluster(shape, stack, directory=socket_dir, transport=request.param.replace(" ", "_"))

        yield started
