"""What the contract suites run on: every implementation of the `WholeShard` Protocol, and clusters in this process and behind gRPC."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.roles.shard import WholeShard
from tests.support.parameter_servers.shards import TRANSPORTS, Trainer, open_shard
from tests.support.sessions.clusters import AnyCluster, GrpcTestCluster, LocalTestCluster, Shape, Start


@pytest.fixture(params=TRANSPORTS)
def shard(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[WholeShard]:
    """A shard that nobody has adopted."""
    with open_shard(request.param, socket_dir=socket_dir) as opened:
        yield opened


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
