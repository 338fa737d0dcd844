"""The chief over gRPC, with real parameter servers: its answers to workers, and calls that must not harm it."""

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chief.serving.service import SERVICE
from ps_protocol.errors import (
    PsError,
    Superseded,
    TrainingFailed,
    Unavailable,
    WrongCluster,
    WrongRole,
)
from ps_protocol.roles.chief import (
    ClusterState,
    DeregisterRequest,
    ModelState,
    TokenResult,
)
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import AdoptRequest, ShutdownRequest
from ps_protocol.rpc.channel import DEFAULT_ACCESS, MAX_CALLS_A_CONNECTION
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import RunningChief, Worker, client_of, cluster, parameter_server
from tests.support.network.servers import unused_address
from tests.support.network.talk import Talk
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.waiting import wait_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_caller_that_is_cut_off_is_forgotten_and_gets_its_token_when_it_asks_again() -> None:
    with cluster(total_num_replicas=2) as chief, client_of(chief) as client, Worker(client) as first, Worker(client) as second:
        first.join_model()
        second.join_model()
        first.commit(first.push())
        with DEFAULT_ACCESS.open_channel(chief.address) as channel:
            talk = Talk(channel)
            talk.ask(1, token=pb.DequeueTokenRequest(participant=codec.encode(first.participant), request_id=1))
            wait_until(lambda: client.status().participants[0].is_waiting)
            talk.call.cancel()
            wait_until(lambda: not client.status().participants[0].is_waiting, what="the chief forgets the caller")
        second.commit(second.push())
        reply = first.wait()
        assert (reply.result, reply.step) == (TokenResult.TOKEN, 1)


def test_two_hundred_blocked_callers_are_released_together() -> None:
    num_workers = 200
    with cluster(replicas_to_aggregate=1) as chief, ExitStack() as stack:
        # More calls than one connection may have at once.
        clients = [stack.enter_context(client_of(chief)) for _ in range(num_workers // (MAX_CALLS_A_CONNECTION - 4) + 1)]
        client = clients[0]
        workers = [Worker(clients[index % len(clients)]) for index in range(num_workers + 1)]
        workers[0].join_model()
        released_at: list[float] = []
        with ThreadPoolExecutor(num_workers) as pool:

            def wait(worker: Worker) -> None:
                assert worker.wait().step == 1
                released_at.append(time.monotonic())

            waits = [pool.submit(wait, worker) for worker in workers[1:]]
            wait_until(lambda: sum(participant.is_waiting for participant in client.status().participants) == num_workers, timeout_s=30)
            start = time.monotonic()
            workers[0].commit(workers[0].push())
            for future in waits:
                future.result(timeout=20)
        assert max(released_at) - start < 5.0
        for worker in workers:
            worker.__exit__()


def test_while_a_parameter_server_is_absent_the_chief_answers_and_says_which() -> None:
    absent = unused_address()
    with RunningChief(absent) as chief, client_of(chief) as client, DEFAULT_ACCESS.open_channel(chief.address) as channel:
        wait_until(lambda: "connection refused" in client.status().waiting_for)
        status = client.status()
        assert status.state is ClusterState.CONNECTING
        assert re.match(
            rf"Waiting \d+ s for ps 0 \(.*\). Start what is missing, or check addresses. \(ps 0: {absent}\)", status.waiting_for
        )
        with pytest.raises(Unavailable, match=rf"Waiting \d+ s for ps 0 .*{absent}"):
            Worker(client)  # nobody is taken in before the chief knows who was here before
        health = health_pb2_grpc.HealthStub(channel)
        assert [health.Check(health_pb2.HealthCheckRequest(service=name)).status for name in ("", SERVICE)] == [SERVING, NOT_SERVING]
        with parameter_server(address=absent):
            wait_until(lambda: client.status().state is ClusterState.WAITING_FOR_MODEL, what="the chief finds the server")
            wait_until(lambda: health.Check(health_pb2.HealthCheckRequest(service=SERVICE)).status == SERVING)
            assert Worker(client).join_model().state is ModelState.INITIALIZE


def test_a_chief_does_not_take_servers_from_one_that_lives_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chief.shards.work._GIVE_UP_S", 0.5)
    with parameter_server() as server, RunningChief(server.address) as first, client_of(first) as client, Worker(client) as worker:
        worker.join_model()
        worker.wait(worker.push())
        with RunningChief(server.address) as second:
            refusal = second.ended()
            assert isinstance(refusal, TrainingFailed)
            assert f"ps 0 at {server.address} obeys another chief at {first.address} (incarnation 1)" in str(refusal)
        assert worker.wait(worker.push()).step == 2


@pytest.mark.parametrize(
    ("index", "name", "error"), [(1, "lockstep", WrongRole), (0, "other", WrongCluster)], ids=["wrong index", "wrong cluster"]
)
def test_a_server_that_is_not_the_expected_one_is_refused_with_its_address(index: int, name: str, error: type[PsError]) -> None:
    with parameter_server(index, cluster=name) as server, RunningChief(server.address) as chief:
        refusal = chief.ended()
        assert isinstance(refusal, error)
        assert str(refusal).startswith(f"{server.address}: this is ps {index}")


def test_a_failing_chief_ends_all_servers_also_the_one_that_was_restarted(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix:{socket_dir / 'ps'}"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(parameter_server(0))
        lost = stack.enter_context(contextlib.ExitStack())
        first = lost.enter_context(parameter_server(1, address=address))
        chief = stack.enter_context(RunningChief(other.address, first.address))
        client = stack.enter_context(client_of(chief))
        with Worker(client) as worker:
            worker.join_model()
            lost.close()
            second = stack.enter_context(parameter_server(1, address=address))
            wait_until(lambda: client.status().state is ClusterState.FAILED, timeout_s=20, what="the chief sees that its shard is new")
            client.call(DeregisterRequest(participant=worker.participant))
        assert chief.ended() == 1
        assert "was restarted and has lost its variables" in other.wait()
        assert "was restarted and has lost its variables" in second.wait()
    assert "could not be told to end" not in caplog.text


def test_a_server_ends_for_no_other_chief_than_its_own() -> None:
    with parameter_server() as server, contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(AdoptRequest(fence=fence(1, 2)))
        for another in (NOBODY, fence(1, 1), fence(1, 2, life=8)):
            with pytest.raises(Superseded):
                shard.call(ShutdownRequest(fence=another, reason="not mine"))
        assert shard.call(AdoptRequest(fence=fence(1, 2))).step is None


def test_a_stop_sends_blocked_workers_to_the_next_chief_and_ends_within_two_seconds() -> None:
    with cluster(total_num_replicas=2) as chief, client_of(chief) as client, Worker(client) as worker, ThreadPoolExecutor(1) as pool:
        worker.join_model()
        blocked = pool.submit(worker.wait)
        wait_until(lambda: client.status().participants[0].is_waiting)
        start = time.monotonic()
        chief.request_stop()
        with pytest.raises(Unavailable):
            blocked.result(timeout=5)
        assert chief.ended() == 0
        assert time.monotonic() - start < 4.0  # 2 s promised; the machine may be busy
