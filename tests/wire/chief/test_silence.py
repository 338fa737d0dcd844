"""The calls that a parameter server counts as a sign of its chief, and its warning about silence."""

import logging
import queue
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server import server as server_module
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from ps_server.serving.streams import IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.raw_shard import RawShard
from tests.support.parameter_servers.serving import serving_shard

APPLY = ApplyRequest(fence=fence(1, 1), step=0, contributors=(PushId(worker=0, incarnation=1, sequence=1),))


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def store(clock: list[float]) -> ServedShard:
    return ServedShard(index=0, process_incarnation=7, clock=lambda: clock[0])


@pytest.fixture
def shard(store: ServedShard) -> Iterator[RawShard]:
    streams = IdleStreams()
    with serving_shard(store, streams) as address, RawShard(address) as raw:
        yield raw


@pytest.mark.parametrize(
    ("method", "message", "is_of_the_chief"),
    [
        ("AdoptShard", pb.AdoptShardRequest(fence=codec.encode(fence(1, 1))), True),
        ("Command", pb.CommandRequest(apply=codec.encode(APPLY)), True),
        ("GetShardStatus", pb.GetShardStatusRequest(fence=codec.encode(fence(1, 1))), True),
        ("GetShardStatus", pb.GetShardStatusRequest(), False),
        ("AdoptShard", pb.AdoptShardRequest(fence=codec.encode(fence(1, 0))), False),
        ("Read", pb.ReadRequest(epoch=1), False),
        ("ReadMetrics", pb.ReadMetricsRequest(epoch=1), False),
    ],
    ids=["AdoptShard", "Command", "GetShardStatus", "another's status", "a former chief", "Read", "ReadMetrics"],
)
def test_only_calls_in_the_name_of_the_chief_that_has_the_server_are_a_sign_of_its_life(
    store: ServedShard, shard: RawShard, clock: list[float], method: str, message: pb.AdoptShardRequest, is_of_the_chief: bool
) -> None:
    store.call(AdoptRequest(fence=fence(1, 1)))
    clock[0] = 5.0
    shard.call(method, message.SerializeToString())
    assert store.call(ShardStatusRequest()).chief_heard_ago_s == (0.0 if is_of_the_chief else 5.0)


class _Clock:
    """The server's clock and its queue of reasons to end: each wait takes as long as it may, and the last one gives a reason."""

    def __init__(self, server: ParameterServer) -> None:
        self.now, self._server, self._num_waits = 0.0, server, 0

    def get(self, *, timeout: float) -> str:
        self._num_waits += 1
        if self._num_waits > 12:
            return "the test"
        with grpc.insecure_channel(self._server.address) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        self.now += timeout
        raise queue.Empty


def test_a_server_that_nobody_adopts_warns_though_its_health_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock: list[_Clock] = []
    monkeypatch.setattr(server_module, "time", type("time", (), {"monotonic": staticmethod(lambda: clock[0].now if clock else 0.0)}))
    server = ParameterServer(ParameterServerConfig(index=0))
    clock.append(_Clock(server))
    server.start()
    try:
        monkeypatch.setattr(server, "_ending", clock[0])
        with caplog.at_level(logging.WARNING, logger="ps_server.server"):
            assert server.wait() == "the test"
    finally:
        server.stop(0.0)
    said = [record.getMessage() for record in caplog.records if record.name == "lockstep.server" and record.levelno == logging.WARNING]
    assert said == [f"no chief has adopted this parameter server for 10 s; is the chief started with --ps naming {server.address}?"]
