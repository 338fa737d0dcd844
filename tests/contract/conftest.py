"""What the contract suites run on: every implementation of the `Shard` Protocol, and clusters in this process and behind gRPC."""

import importlib

import pytest

from ps_protocol.roles.shard import Shard
from tests.support.cluster.here import start_over
from tests.support.parameter_servers.shards import WITHOUT_SOCKETS, Trainer, shard_over

# Modules about something else than these say so: `shard = shard_over(TRANSPORTS)`, `start = start_over(["in process", "grpc"])`.
shard = shard_over(WITHOUT_SOCKETS)
# That all calls mean the same over a transport is what the contract of shards and `test_session` show; single tests say `also_over` too.
start = start_over(["in process"])


@pytest.fixture
def trainer(shard: Shard) -> Trainer:
    """Chief and workers in one, for the shard."""
    return Trainer(shard)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said after 2 s is said after 0.2 s, and what is looked for every 3 s every 0.3 s."""
    for module, names in {
        "ps_protocol.process.waiting": ("FIRST_NOTICE_S", "_FIRST_SLICE_S", "_LATER_SLICE_S"),
        "worker_client.strategy.workers": ("FIRST_NOTICE_S",),
        "worker_client.strategy.coordinator": ("CLOSED_LOOK_S",),
    }.items():
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", getattr(importlib.import_module(module), name) / 10)
