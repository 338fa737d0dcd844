"""Callers without a token, or with a lesser role's, cannot hold a server's threads or call in the chief's name."""

import contextlib
import itertools
import logging
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.process.listening import allow_many_connections
from ps_protocol.roles.shard import AdoptRequest, ShardStatusRequest
from ps_protocol.rpc import admission
from ps_protocol.rpc.channel import DEFAULT_ACCESS, MAX_CALLS_A_CONNECTION, Access, server_options
from ps_protocol.rpc.client_stream import Stream, StreamEnded, open_stream
from ps_protocol.rpc.door import Door, at_once
from ps_protocol.rpc.server_stream import never_waiting
from ps_protocol.security.certificates import ServerCertificates
from ps_protocol.security.options import Security
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.chief.eras import fence
from tests.support.network.certificates import Files, make
from tests.support.network.floods import KINDS, RST_STREAM
from tests.support.network.servers import serving
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

# How a client begins TLS: a record of 512 bytes, of which these are the first.
CLIENT_HELLO = bytes([0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3])
HEALTH = "/grpc.health.v1.Health"
STATUS = "/ps_protocol.v1.ParameterService/GetShardStatus"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[ParameterServer]:
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as running:
        yield running


@contextlib.contextmanager
def stranger(server: ParameterServer) -> Iterator[grpc.Channel]:
    with DEFAULT_ACCESS.open_channel(server.address) as channel:
        yield channel


def ask(stream: Stream, message: bytes = b"") -> bytes:
    stream.send(message)
    return stream.receive()


def num_rpc_threads() -> int:
    return sum(thread.name.startswith("rpc") for thread in threading.enumerate())


def test_question_without_end_holds_no_thread(server: ParameterServer) -> None:
    with stranger(server) as channel, contextlib.ExitStack() as stack:
        before = num_rpc_threads()
        streams = [open_stream(channel, f"{HEALTH}/Check") for _ in range(admission.MAX_OPEN_CALLS)]
        for stream in streams:
            stack.callback(stream.end)
        assert ask(streams[-1]) == b"\x08\x01"
        # Threads begin calls, a few at a time, and none stays with one.
        assert num_rpc_threads() <= before + 32


def test_refused_calls_make_no_thread(server: ParameterServer) -> None:
    with stranger(server) as channel:
        before = num_rpc_threads()
        # One alone first: gRPC resets calls beyond 16 on a connection whose caller has not acknowledged its settings yet.
        for num_calls in (1, 100):
            for stream in [open_stream(channel, "/ps_protocol.v1.ParameterService/Push") for _ in range(num_calls)]:
                with pytest.raises(StreamEnded) as ended:
                    stream.receive()
                assert ended.value.code is grpc.StatusCode.UNAUTHENTICATED
        assert num_rpc_threads() <= before


def test_a_connection_has_a_limit_of_concurrent_calls() -> None:
    """Else one connection could bring thousands, and the others would not be read until each of those was refused."""
    begun: list[Callable[[None], None]] = []

    def serve(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
        begun.append(send_response)

    server = grpc.server(futures.ThreadPoolExecutor(1), options=server_options())
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Ask": grpc.stream_stream_rpc_method_handler(never_waiting(serve))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with DEFAULT_ACCESS.open_channel(f"127.0.0.1:{port}") as full, DEFAULT_ACCESS.open_channel(f"127.0.0.1:{port}") as other:
        invoke: Any = full.unary_stream("/test/Ask")
        calls = [invoke(b"", timeout=60) for _ in range(MAX_CALLS_A_CONNECTION + 20)]
        wait_until(lambda: len(begun) == MAX_CALLS_A_CONNECTION, timeout_s=20, what="as many as may be are begun")
        invoke = other.unary_stream("/test/Ask")
        calls.append(invoke(b"", timeout=60))
        wait_until(lambda: len(begun) == MAX_CALLS_A_CONNECTION + 1, timeout_s=20, what="that of another connection is begun, and no more")
        for call in calls:
            call.cancel()
    server.stop(None).wait()


def frames(connection: socket.socket) -> Iterator[tuple[int, int]]:
    """Yields kind and stream of each frame that comes."""
    with connection.makefile("rb") as file:
        while head := file.read(9):
            file.read(int.from_bytes(head[:3]))
            yield head[3], int.from_bytes(head[5:])


@pytest.mark.shows("F36")
def test_connection_that_acknowledges_no_settings_begins_no_more_calls() -> None:
    """Until then gRPC lets the headers of each call unfold to 16 MiB, and giving them to Python takes milliseconds."""
    sizes: list[int] = []

    def serve(requests: Any, context: grpc.ServicerContext, send_response: Callable[[None], None]) -> None:
        sizes.append(sum(len(value) for _, value in context.invocation_metadata()))
        send_response(None)

    server = grpc.server(futures.ThreadPoolExecutor(1), options=server_options())
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Check": grpc.stream_stream_rpc_method_handler(never_waiting(serve))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    kind, num_chunks = KINDS["hpack unfolded"], MAX_CALLS_A_CONNECTION // 8 + 1
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(kind.greeting + b"".join(itertools.islice(kind.chunks(), 1 + num_chunks)))
        ended: set[int] = set()
        for frame_kind, stream in frames(connection):
            ended |= {stream} if frame_kind == RST_STREAM else set()
            if len(ended) == 1 + num_chunks * 8:
                break
        wait_until(lambda: len(sizes) >= MAX_CALLS_A_CONNECTION, timeout_s=20, what="as many as may be are begun")
        assert len(sizes) == MAX_CALLS_A_CONNECTION
    assert max(sizes) > 15 << 20
    server.stop(None).wait()


@pytest.mark.shows("F27")
def test_connections_leave_descriptors_for_other_things() -> None:
    """Strangers can hold connections. Beyond the limit they are cut, and when some have gone there is room again."""
    options = dict(server_options())
    assert 0 < options["grpc.max_allowed_incoming_connections"] < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[*(options | {"grpc.max_allowed_incoming_connections": 2}).items()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def is_greeted(connection: socket.socket) -> bool:
        with contextlib.suppress(ConnectionError):
            return bool(connection.recv(9))
        return False

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=20)

    with connect() as first, connect() as second, connect() as third:
        assert (is_greeted(first), is_greeted(second), is_greeted(third)) == (True, True, False)
        first.close()

        def is_next_greeted() -> bool:
            with connect() as connection:
                return is_greeted(connection)

        wait_until(is_next_greeted, timeout_s=20, what="there is room for another connection")
    server.stop(None).wait()


def test_refused_calls_are_in_the_log_but_do_not_fill_it(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as running:
        for _ in range(20):
            with DEFAULT_ACCESS.open_channel(running.address) as channel, pytest.raises(grpc.RpcError):
                invoke: Any = channel.unary_unary(STATUS)
                invoke(b"", timeout=10)
        claim_to_be_the_chief(files.caller("observer", tls=False), running.address, incarnation=1)

        def lines() -> list[str]:
            return [record.getMessage() for record in caplog.records if "refused a call" in record.getMessage()]

        wait_until(lambda: bool(lines()), timeout_s=20, what="the log says so")
    assert len(lines()) == 1
    assert "missing token" in lines()[0] and "peer=ipv4:127.0.0.1:" in lines()[0]


class _BlockedLog(logging.Handler):
    """As a pipe that nobody reads any more."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written_to, self.may_go_on = threading.Event(), threading.Event()
        self.has_held_up = False

    def emit(self, record: logging.LogRecord) -> None:
        self.is_written_to.set()
        self.has_held_up = not self.may_go_on.wait(20)


def test_log_that_nobody_reads_holds_up_no_call(files: Files) -> None:
    blocked, log = _BlockedLog(), logging.getLogger("lockstep.rpc")
    security = Security(token_file=files.directory / "tokens")
    log.addHandler(blocked)
    try:
        with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as running:
            with DEFAULT_ACCESS.open_channel(running.address) as channel:
                for _ in range(3):
                    with pytest.raises(StreamEnded, match="missing token"):
                        open_stream(channel, STATUS).receive()
            assert blocked.is_written_to.wait(20)
            assert heard_ago(files.caller("observer", tls=False), running.address) is None
            assert not blocked.has_held_up
    finally:
        blocked.may_go_on.set()
        log.removeHandler(blocked)


def test_the_newest_of_too_many_health_checks_is_answered() -> None:
    """The oldest of too many questions is ended, and the newest is answered."""
    door = Door({"/test/Ask": admission.OpenCalls(at_once(lambda message, call: message), limit=2)}, server_name="the server")
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with serving(door) as address, DEFAULT_ACCESS.open_channel(address) as channel:
        begin: Any = channel.stream_stream("/test/Ask")
        silent = [begin(iter(messages.get, None), timeout=30) for _ in range(6)]
        wait_until(lambda: sum(call.done() for call in silent) == 4, timeout_s=20, what="all but the newest are ended")
        assert {call.code() for call in silent if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert ask(open_stream(channel, "/test/Ask"), b"hello") == b"hello"
        for call in silent:
            call.cancel()
            messages.put(None)


@pytest.mark.parametrize(("message", "code"), [(b"\xff", grpc.StatusCode.INVALID_ARGUMENT), (b"\x0a\x06absent", grpc.StatusCode.NOT_FOUND)])
def test_bad_question_for_the_health_is_answered_in_the_right_way(server: ParameterServer, message: bytes, code: grpc.StatusCode) -> None:
    with stranger(server) as channel:
        with pytest.raises(StreamEnded) as ended:
            ask(open_stream(channel, f"{HEALTH}/Check"), message)
        assert ended.value.code is code


def test_standing_question_for_the_health_needs_a_token(server: ParameterServer, files: Files) -> None:
    with stranger(server) as channel:
        with pytest.raises(StreamEnded) as ended:
            ask(open_stream(channel, f"{HEALTH}/Watch"))
        assert ended.value.code is grpc.StatusCode.UNAUTHENTICATED
        metadata = files.caller("observer", tls=False).metadata_for(server.address)()
        stream = open_stream(channel, f"{HEALTH}/Watch", metadata=metadata)
        assert ask(stream)
        stream.end()


def test_connection_that_says_nothing_is_cut() -> None:
    options = dict(server_options())
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[*(options | {"grpc.server_handshake_timeout_ms": 200}).items()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        while connection.recv(4096):
            pass  # its greeting; then the end
    server.stop(None).wait()


def test_a_tls_handshake_that_comes_byte_by_byte_is_cut_and_delays_no_other(files: Files) -> None:
    options = dict(server_options()) | {"grpc.server_handshake_timeout_ms": 1_000}
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[*options.items()])
    port = server.add_secure_port("127.0.0.1:0", ServerCertificates(files.server()).credentials())
    server.start()
    with files.caller().open_channel(f"127.0.0.1:{port}") as channel:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.settimeout(0.05)
            with pytest.raises(ConnectionError):
                for byte in itertools.chain(CLIENT_HELLO, itertools.repeat(0)):
                    connection.send(bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1):
                            raise ConnectionResetError
                    if byte:  # the others are served meanwhile
                        assert code_of(channel) is grpc.StatusCode.UNIMPLEMENTED
    server.stop(None).wait()


def code_of(channel: grpc.Channel) -> grpc.StatusCode:
    """How a call of a method that there is not ends."""
    invoke: Any = channel.unary_unary("/test/Nothing")
    with pytest.raises(grpc.RpcError) as refused:
        invoke(b"", timeout=10)
    code: grpc.StatusCode = refused.value.code()
    return code


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many_connections()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_descriptors")
@pytest.mark.parametrize("num_connections", [500, pytest.param(5_000, marks=pytest.mark.chaos)])
def test_idle_connections_keep_nobody_from_calling(num_connections: int) -> None:
    """Before they are there, while they are, and for new callers, too."""
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0")) as server, contextlib.ExitStack() as stack:
        shard = stack.enter_context(contextlib.closing(CommandedShard(server.address)))
        port = int(server.address.rpartition(":")[2])
        for number in range(num_connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            if number % 250 == 0:
                assert shard.call(ShardStatusRequest())
        assert shard.call(ShardStatusRequest())
        other = stack.enter_context(contextlib.closing(CommandedShard(server.address)))
        assert other.call(ShardStatusRequest())


def claim_to_be_the_chief(access: Access, address: str, *, incarnation: int) -> None:
    with access.open_channel(address) as channel:
        message = pb.GetShardStatusRequest(fence=codec.encode(fence(1, incarnation))).SerializeToString()
        invoke: Any = channel.unary_unary(STATUS)
        invoke(message, metadata=access.metadata_for(address)(), timeout=10)


def heard_ago(access: Access, address: str) -> float | None:
    with contextlib.closing(CommandedShard(address, access=access)) as shard:
        return shard.call(ShardStatusRequest()).chief_heard_ago_s


def test_no_role_but_the_chief_makes_a_chief_seem_alive(files: Files, tmp_path: Path) -> None:
    """Else who may only look could keep the successor of a chief that is gone waiting for ever."""
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as running:
        chief, address = files.caller("chief", tls=False), running.address
        with contextlib.closing(CommandedShard(address, access=chief)) as shard:
            shard.call(AdoptRequest(fence=fence(1, 7)))
        since = heard_ago(chief, address)
        assert since is not None
        wait_until(lambda: (heard_ago(chief, address) or 0.0) > since + 0.05, timeout_s=10, what="the chief has been silent for a while")
        for role in ("worker", "observer", "admin", "ps"):
            silent = heard_ago(chief, address) or 0.0
            claim_to_be_the_chief(files.caller(role, tls=False), address, incarnation=7)
            assert (heard_ago(chief, address) or 0.0) >= silent, role
        claim_to_be_the_chief(chief, address, incarnation=7)
        assert (heard_ago(chief, address) or 0.0) < silent
