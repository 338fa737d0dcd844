"""What the contract suites run on: every implementation of the `Shard` Protocol."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.shard import Shard
from tests.contract.shards import TRANSPORTS, Trainer, open_shard


@pytest.fixture(params=TRANSPORTS)
def shard(request: pytest.FixtureRequest, socket_dir: Path) -> Iterator[Shard]:
    """A shard that nobody has adopted."""
    with open_shard(request.param, socket_dir=socket_dir) as opened:
        yield opened


@pytest.fixture
def trainer(shard: Shard) -> Trainer:
    """Chief and workers in one, for the shard."""
    return Trainer(shard)
