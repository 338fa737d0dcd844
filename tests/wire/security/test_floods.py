"""Limits of strangers' traffic to a port: a stranger that continues is cut and has to wait, and other callers notice nothing."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.process import descriptors
from ps_protocol.process.descriptors import EVERYWHERE, Network, network_of
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.rpc import strangers
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.rpc.client_stream import StreamEnded, open_stream
from ps_protocol.rpc.strangers import BUDGET_BYTES, StrangerGuard, Turnstile
from ps_protocol.security.options import Security
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.network.certificates import make
from tests.support.network.floods import CONTROL_KINDS, KINDS, Flood
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody can look at gRPC's connections")
HERE = network_of("127.0.0.1")
STATUS = "/ps_protocol.v1.ParameterService/GetShardStatus"


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    """A server of the test's own: whom it has wait, it has wait for some seconds."""
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0")) as running:
        yield running


def port_of(server: ParameterServer) -> int:
    return int(server.address.rpartition(":")[2])


def connect(port: int, *, host: str = "127.0.0.1", timeout_s: float = 20.0) -> socket.socket:
    """`host`: where the caller is, of the many addresses of loopback."""
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s, source_address=(host, 0))


def listening_socket(family: socket.AddressFamily) -> socket.socket:
    """Also of IPv6 it takes connections of IPv4."""
    if family == socket.AF_INET6:
        return socket.create_server(("::", 0), family=family, dualstack_ipv6=True)
    return socket.create_server(("127.0.0.1", 0))


def is_let_in(port: int, *, host: str = "127.0.0.1") -> bool:
    """Whether a connection is made; who has to wait hears nothing."""
    try:
        connect(port, host=host, timeout_s=0.2).close()
    except TimeoutError:
        return False
    return True


def flood_until_cut(kind: str, port: int, *, is_let_in: bool = False) -> int:
    """Returns how many bytes were sent."""
    one = Flood("127.0.0.1", port, KINDS[kind], tls=False, until=time.monotonic() + 30, is_let_in=is_let_in)
    one.run_once()
    assert one.num_cut
    return one.num_bytes


# Who has to wait.


def test_an_address_waits_once_it_fails_more_often_than_its_rate_allows() -> None:
    turnstile = Turnstile()
    for _ in range(15):
        turnstile.count(HERE, 1.0, 0.0)
    assert turnstile.waiting(0.0) == frozenset()
    turnstile.count(HERE, 1.0, 0.0)
    assert turnstile.waiting(0.0) == {HERE}
    assert turnstile.waiting(0.3) == frozenset()
    turnstile.count(HERE, 1.0, 0.3)
    assert turnstile.waiting(0.3) == {HERE}
    assert turnstile.waiting(10.0) == frozenset() and not turnstile.is_counting


@pytest.mark.parametrize(("number", "for_calls", "seconds"), [(1.0, 0.0, 1.25), (Turnstile.CUT, 0.0, 4.25), (1.0, 1.0, 16.25)])
def test_the_wait_of_an_address_is_bounded_however_often_it_connects(number: float, for_calls: float, seconds: float) -> None:
    turnstile = Turnstile()
    for _ in range(1_000):
        turnstile.count(HERE, number, 0.0, for_calls=for_calls)
    assert turnstile.waiting(seconds - 0.1) == {HERE}
    assert turnstile.waiting(seconds + 0.1) == frozenset()


def test_an_address_with_as_many_successes_as_failures_does_not_wait() -> None:
    turnstile = Turnstile()
    for _ in range(1_000):
        turnstile.count(HERE, 1.0, 0.0)
        turnstile.count(HERE, -1.0, 0.0)
    assert turnstile.waiting(0.0) == frozenset()


def test_an_address_waits_for_its_own_failures_only_unless_there_are_too_many() -> None:
    turnstile = Turnstile()
    for number in range(64):
        turnstile.count(network_of(f"10.0.0.{number}"), 16.0, 0.0)
    assert len(turnstile.waiting(0.0)) == 64
    turnstile.count(HERE, 16.0, 0.0)
    assert turnstile.waiting(0.0) == {*EVERYWHERE}


def test_a_connection_that_ended_unseen_counts_for_the_last_network() -> None:
    turnstile = Turnstile()
    turnstile.count(HERE, 1.0, 0.0)
    turnstile.count(None, 16.0, 0.0)
    assert turnstile.waiting(0.0) == {HERE}


def test_addresses_that_are_forgotten_are_those_that_counted_first() -> None:
    turnstile = Turnstile()
    turnstile.count(HERE, 16.0, 0.0)
    for number in range(5_000):
        turnstile.count(Network(number.to_bytes(16), 64), 1.0, 0.0)
    assert HERE not in turnstile.waiting(0.0)


def test_all_addresses_of_one_ipv6_network_count_as_one_caller() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") != network_of("2001:db8:1::1")
    assert network_of("127.0.0.1") != network_of("127.0.0.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


# What descriptors show.


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_are_seen_counted_and_cut(family: socket.AddressFamily) -> None:
    with listening_socket(family) as listening:
        port = listening.getsockname()[1]
        assert descriptors.listening_at(port) == [listening.fileno()]
        with connect(port) as caller, listening.accept()[0] as made:
            assert descriptors.caller_at(made.fileno(), port=port) == caller.getsockname()
            assert descriptors.caller_at(caller.fileno(), port=port) is None
            assert descriptors.caller_at(listening.fileno(), port=port) is None
            number, before, num_sent = descriptors.look(made.fileno()) or (0, 0, 0)
            caller.sendall(bytes(1_000))
            made.sendall(bytes(500))
            caller.recv(500)
            after = (number, before + 1_000, num_sent + 500)
            wait_until(lambda: descriptors.look(made.fileno()) == after, timeout_s=20, what="it is counted")
            assert not descriptors.cut(made.fileno(), number=number + 1)
            assert descriptors.cut(made.fileno(), number=number)
            with pytest.raises(ConnectionError):
                made.recv(1)
            with pytest.raises(ConnectionError):
                caller.recv(1)


def test_descriptors_of_other_things_are_no_connections() -> None:
    with open("/dev/null", "rb") as file:
        assert descriptors.look(file.fileno()) == (0, 0, 0)
    assert descriptors.look(1_000_000) is None
    with contextlib.ExitStack() as stack:
        for one in socket.socketpair():
            assert descriptors.look(stack.enter_context(one).fileno()) == (0, 0, 0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("networks", [(HERE,), EVERYWHERE])
def test_a_shut_out_address_waits_and_its_open_connections_continue(family: socket.AddressFamily, networks: tuple[Network, ...]) -> None:
    with listening_socket(family) as listening:
        port = listening.getsockname()[1]
        with connect(port) as caller, listening.accept()[0] as made:
            for network in networks:
                descriptors.shut_out(listening.fileno(), network, is_out=True)
            assert not is_let_in(port)
            assert is_let_in(port, host="127.0.0.2") is (networks == (HERE,))
            caller.sendall(b"still here")
            assert made.recv(99) == b"still here"
            for network in networks:
                descriptors.shut_out(listening.fileno(), network, is_out=False)
            assert is_let_in(port)


# What a server does with it.


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing"])
@pytest.mark.shows("F36")
def test_connection_that_floods_is_cut_and_others_are_answered(kind: str, server: ParameterServer) -> None:
    with contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(ShardStatusRequest())
        flood_until_cut(kind, port_of(server))
        assert shard.call(ShardStatusRequest())


@pytest.mark.shows("F36")
def test_calls_without_a_message_let_no_connection_in_where_everybody_may_call(server: ParameterServer) -> None:
    """Else it could send 17 MiB of them, as one may whose messages are known."""
    assert flood_until_cut("calls", port_of(server)) < 8 << 20


def test_flood_stops_no_caller(server: ParameterServer) -> None:
    """Without the guard, next to nothing is answered while it lasts."""
    words = [sys.executable, "-m", "tests.support.network.floods", server.address, "priority", "--seconds", "2"]
    num_answers = 0
    with contextlib.closing(CommandedShard(server.address)) as shard, subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            shard.call(ShardStatusRequest())
            num_answers += 1
        process.communicate(timeout=30)
    assert num_answers >= 50


def test_an_address_whose_connections_fail_too_often_waits_and_another_does_not(server: ParameterServer) -> None:
    port = port_of(server)
    with contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(ShardStatusRequest())

        def come_in_vain() -> bool:
            with contextlib.ExitStack() as stack, contextlib.suppress(TimeoutError):
                for _ in range(30):
                    stack.enter_context(connect(port, timeout_s=0.2))
                time.sleep(0.1)  # the stranger's own pause: a connection that is over before a look at it counts for nothing
            return not is_let_in(port)

        wait_until(come_in_vain, timeout_s=20, what="the address has to wait")
        assert is_let_in(port, host="127.0.0.2")
        assert shard.call(ShardStatusRequest())
        wait_until(lambda: is_let_in(port), timeout_s=30, what="it may come again")


@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_an_authorised_connection_that_then_sends_frames_that_carry_nothing_is_cut(
    kind: str, server: ParameterServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 17 MiB; here after 1."""
    monkeypatch.setattr(strangers, "SURPLUS_BYTES", 1 << 20)
    with contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(ShardStatusRequest())
        flood_until_cut(kind, port_of(server), is_let_in=True)
        assert shard.call(ShardStatusRequest())
        wait_until(lambda: "and few calls and messages" in caplog.text, timeout_s=20, what="the guard says so")


def test_an_authorised_caller_may_send_any_number_of_messages(server: ParameterServer) -> None:
    """Also such as are nonsense: it is known by then who sends them."""
    with contextlib.closing(CommandedShard(server.address)) as shard, DEFAULT_ACCESS.open_channel(server.address) as channel:
        shard.call(ShardStatusRequest())
        call: Any = channel.unary_unary(STATUS)
        for _ in range(3):
            call(bytes(0))
        for _ in range(5):
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                call(bytes([0xFF]) * BUDGET_BYTES)


def test_caller_whose_bytes_are_tensors_is_never_cut(
    server: ParameterServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it gives and takes: 80 MiB each way, where 8 MiB of anything else are too many."""
    monkeypatch.setattr(strangers, "SURPLUS_BYTES", 8 << 20)
    with contextlib.closing(CommandedShard(server.address)) as shard:
        trainer = Trainer(shard, layout_of(variable("w", (4 << 20,))))
        trainer.create()
        for step in range(5):
            header = trainer.header(step=step)
            trainer.push(header)
            trainer.apply(header.push_id, step=step)
            assert trainer.read(step + 1)[0] == step + 1
    assert "cut" not in caplog.text


def test_first_call_may_be_as_large_as_any(server: ParameterServer) -> None:
    with DEFAULT_ACCESS.open_channel(server.address) as channel, pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
        call: Any = channel.unary_unary(STATUS)
        call(bytes([0xFF]) * (8 << 20), timeout=20)


def test_calls_that_are_refused_are_answered_until_they_are_too_many(tmp_path: Path) -> None:
    security = Security(token_file=make(tmp_path / "job").directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as server:
        with DEFAULT_ACCESS.open_channel(server.address) as channel:
            codes = []
            while grpc.StatusCode.UNAVAILABLE not in codes:
                with pytest.raises(StreamEnded) as ended:
                    open_stream(channel, STATUS).receive()
                codes.append(ended.value.code)
            assert codes[:100] == [grpc.StatusCode.UNAUTHENTICATED] * 100


def test_questions_for_the_health_are_answered_at_a_usual_rate(server: ParameterServer) -> None:
    with DEFAULT_ACCESS.open_channel(server.address) as channel:
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        for _ in range(100):
            assert call(b"", timeout=20)


def test_guard_finds_new_connections_also_where_thousands_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the lowest free descriptors, and at so many of the others each time."""
    monkeypatch.setattr(strangers, "_NUM_NEW", 4)
    monkeypatch.setattr(strangers, "BUDGET_BYTES", 16 << 10)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        guard = StrangerGuard()
        guard.start(port)
        stack.callback(guard.stop)
        made = []
        for _ in range(50):
            stack.enter_context(connect(port))
            made.append(stack.enter_context(listening.accept()[0]))
        for one in made[10:20]:
            one.close()
        caller = stack.enter_context(connect(port))
        stack.enter_context(listening.accept()[0])
        caller.sendall(bytes(32 << 10))
        with pytest.raises(ConnectionError):
            caller.recv(1)


def test_a_caller_behind_a_gap_of_free_descriptors_is_not_forgotten_before_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages would count for nothing then, and its connection would be cut."""
    looked: set[int] = set()
    find = StrangerGuard._found

    def found(guard: StrangerGuard, descriptor: int, number: int, now: float) -> Any:
        looked.add(descriptor)
        return find(guard, descriptor, number, now)

    monkeypatch.setattr(StrangerGuard, "_found", found)
    monkeypatch.setattr(strangers, "_LISTING_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        port = listening.getsockname()[1]
        guard = StrangerGuard()
        guard.start(port)
        stack.callback(guard.stop)
        wait_until(lambda: bool(looked), timeout_s=10, what="the guard has listed what is open")
        fillers = [os.dup(listening.fileno()) for _ in range(400)]
        caller = stack.enter_context(connect(port))
        accepted = stack.enter_context(listening.accept()[0])
        for filler in fillers:
            os.close(filler)
        received = guard.admit(f"ipv4:127.0.0.1:{caller.getsockname()[1]}")
        received.num_bytes += 1
        wait_until(lambda: accepted.fileno() in looked, timeout_s=10, what="a listing has found the connection")
        assert guard.admit(f"ipv4:127.0.0.1:{caller.getsockname()[1]}") is received
