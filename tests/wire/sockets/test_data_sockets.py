"""Payloads over data sockets: a server's checks of a raw one, a client's recovery from a broken one, and admission by the listener."""

import contextlib
import itertools
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import Cancelled, DeadlineExceeded, MalformedMessage, PsError, StepGone, Unavailable, Unimplemented
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.process.waiting import Progress
from ps_protocol.roles.identity import Address
from ps_protocol.roles.shard import Invitation, PushResult, ReadRequest, ShardStatusRequest
from ps_protocol.rpc import payloads
from ps_protocol.sockets import data_socket as sockets
from ps_protocol.sockets import listener as listeners
from ps_protocol.sockets.data_socket import DataSocket, connect
from ps_protocol.sockets.listener import DataListener
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.serving.calls import SERVICE
from ps_server.shard.handles import Reading
from tests.support.network import certificates
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import EPOCH, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

# Larger than what the kernel buffers, so that who does not read stops the sender.
LARGE = layout_of(variable("w", (4 << 20,)))
SMALL = layout_of(variable("w", (64,)))
TIMEOUT_S = 20.0


@contextlib.contextmanager
def a_shard(layout: Any = SMALL, **options: Any) -> Iterator[tuple[Trainer, CommandedShard]]:
    """A parameter server with variables, and a client of it that must use data sockets."""
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        with contextlib.closing(CommandedShard(server.address, least_socket_bytes=1, must_use_sockets=True, **options)) as shard:
            trainer = Trainer(shard, layout)
            trainer.create(1.0)
            yield trainer, shard


class Raw:
    """A Push or Read stream and a data socket, both worked by hand."""

    def __init__(self, address: str, method: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._messages: list[bytes] = []
        self._more = threading.Semaphore(0)
        self._is_over = False
        unary: Any = self._channel.unary_unary(f"/{SERVICE}/OpenDataSocket")
        invited = pb.OpenDataSocketResponse.FromString(unary(b"", timeout=TIMEOUT_S))
        self.nonce = invited.nonce
        self.socket = socket.create_connection(("127.0.0.1", invited.port), timeout=TIMEOUT_S)
        self.socket.sendall(invited.nonce)
        assert self.socket.recv(1) == sockets.WELCOME
        stream: Any = self._channel.stream_stream(f"/{SERVICE}/{method}")
        self.answers: Any = stream(self._outgoing(), timeout=TIMEOUT_S)

    def send(self, message: bytes) -> None:
        self._messages.append(message)
        self._more.release()

    def is_closed_by_the_server(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:  # with bytes that the server had not read
            return True

    def close(self) -> None:
        self._is_over = True
        self._more.release()
        self.socket.close()
        self._channel.close()

    def _outgoing(self) -> Iterator[bytes]:
        while self._more.acquire() and not self._is_over:
            yield self._messages.pop(0)


def begin(number: int, num_bytes: int) -> bytes:
    return struct.pack("<QQ", number, num_bytes)


def end(number: int) -> bytes:
    return struct.pack("<Q", number)


def push_message(trainer: Trainer, raw: Raw, number: int, *, step: int = 0, nonce: bytes | None = None) -> bytes:
    header = codec.encode(trainer.header(1, step=step))
    header.content_bytes = trainer.layout.nbytes
    header.payload.CopyFrom(pb.Payload(socket=raw.nonce if nonce is None else nonce, number=number))
    message: bytes = pb.PushRequest(header=header).SerializeToString()
    return message


NBYTES = SMALL.nbytes
# Case, and what is sent on the socket before it is closed for writing.
BAD_PAYLOADS: list[tuple[str, bytes]] = [
    ("another number", begin(2, NBYTES) + bytes(NBYTES) + end(2)),
    ("another length", begin(1, NBYTES + 1) + bytes(NBYTES + 1) + end(1)),
    ("an absurd length", begin(1, 1 << 63)),
    ("another number at the end", begin(1, NBYTES) + bytes(NBYTES) + end(2)),
    ("half a beginning", begin(1, NBYTES)[:7]),
    ("half of the bytes", begin(1, NBYTES) + bytes(NBYTES // 2)),
    ("no end", begin(1, NBYTES) + bytes(NBYTES)),
    ("half an end", begin(1, NBYTES) + bytes(NBYTES) + end(1)[:3]),
    ("nothing", b""),
]


@pytest.fixture(scope="module")
def shard() -> Iterator[tuple[Trainer, CommandedShard]]:
    with a_shard() as made:
        yield made


@pytest.mark.parametrize(("case", "sent"), BAD_PAYLOADS, ids=[case for case, _ in BAD_PAYLOADS])
def test_payload_that_is_not_what_the_stream_says_has_no_effect(shard: tuple[Trainer, CommandedShard], case: str, sent: bytes) -> None:
    trainer, client = shard
    step = client.call(ShardStatusRequest()).step or 0
    before = client.call(ShardStatusRequest()).report.num_staged
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        raw.send(push_message(trainer, raw, 1, step=step))
        with contextlib.suppress(OSError):  # the server may have closed it already
            raw.socket.sendall(sent)
            raw.socket.shutdown(socket.SHUT_WR)
        answer = pb.PushResponse.FromString(next(raw.answers))
        assert answer.error.reason == "UNAVAILABLE", answer
        assert "data socket" in answer.error.message
        assert raw.is_closed_by_the_server()
        assert client.call(ShardStatusRequest()).report.num_staged == before
    assert trainer.train(step).step == step + 1


def test_payloads_follow_each_other_over_one_socket(shard: tuple[Trainer, CommandedShard]) -> None:
    trainer, client = shard
    step = client.call(ShardStatusRequest()).step or 0
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        for number in (1, 2):
            raw.send(push_message(trainer, raw, number, step=step))
            raw.socket.sendall(begin(number, NBYTES) + bytes(NBYTES) + end(number))
            assert pb.PushResponse.FromString(next(raw.answers)).reply.result == pb.PUSH_RESULT_STAGED
    assert trainer.train(step).step == step + 1


BAD_NAMES: list[tuple[str, Callable[[Raw], bytes]]] = [
    ("a nonce that nobody has", lambda raw: bytes(16)),
    ("a short nonce", lambda raw: raw.nonce[:15]),
    ("no nonce", lambda raw: b""),
]


@pytest.mark.parametrize(("case", "nonce"), BAD_NAMES, ids=[case for case, _ in BAD_NAMES])
def test_a_push_that_names_no_socket_of_its_own_is_refused(
    shard: tuple[Trainer, CommandedShard], case: str, nonce: Callable[[Raw], bytes]
) -> None:
    trainer, client = shard
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        raw.send(push_message(trainer, raw, 1, step=client.call(ShardStatusRequest()).step or 0, nonce=nonce(raw)))
        assert pb.PushResponse.FromString(next(raw.answers)).error.reason == "MALFORMED_MESSAGE"


def test_a_socket_belongs_to_the_stream_that_named_it_first(shard: tuple[Trainer, CommandedShard]) -> None:
    trainer, client = shard
    step = client.call(ShardStatusRequest()).step or 0
    with contextlib.closing(Raw(client.address, "Push")) as raw, contextlib.closing(Raw(client.address, "Push")) as thief:
        raw.send(push_message(trainer, raw, 1, step=step))
        raw.socket.sendall(begin(1, NBYTES) + bytes(NBYTES) + end(1))
        assert pb.PushResponse.FromString(next(raw.answers)).reply.result == pb.PUSH_RESULT_STAGED
        thief.send(push_message(trainer, raw, 2, step=step))
        assert pb.PushResponse.FromString(next(thief.answers)).error.reason == "MALFORMED_MESSAGE"


def test_a_read_that_names_no_socket_of_its_own_is_refused(shard: tuple[Trainer, CommandedShard]) -> None:
    trainer, client = shard
    with contextlib.closing(Raw(client.address, "Read")) as raw:
        request = pb.ReadRequest(epoch=EPOCH, layout_hash=trainer.layout.hash, payload=pb.Payload(socket=bytes(16), number=1))
        raw.send(request.SerializeToString())
        assert pb.ReadResponse.FromString(next(raw.answers)).header.error.reason == "MALFORMED_MESSAGE"


def test_variables_arrive_as_one_payload(shard: tuple[Trainer, CommandedShard]) -> None:
    trainer, client = shard
    with contextlib.closing(Raw(client.address, "Read")) as raw:
        request = pb.ReadRequest(epoch=EPOCH, layout_hash=trainer.layout.hash, payload=pb.Payload(socket=raw.nonce, number=7))
        raw.send(request.SerializeToString())
        header = pb.ReadResponse.FromString(next(raw.answers)).header
        assert header.by_socket and header.num_bytes == NBYTES
        wanted = begin(7, NBYTES) + trainer.read()[1].tobytes() + end(7)
        received = b""
        while len(received) < len(wanted):
            received += raw.socket.recv(len(wanted))
        assert received == wanted


def test_stale_contribution_is_answered_though_its_bytes_are_not_taken() -> None:
    with a_shard(LARGE) as (trainer, _):
        late = trainer.header(3, step=0)
        trainer.train(0)
        assert trainer.push(late).result is PushResult.STALE
        assert trainer.train(1).step == 2
        assert trainer.read(2)[0] == 2


def test_server_that_stops_reading_costs_the_caller_its_deadline_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client), contextlib.closing(Proxy(monkeypatch)):
        header, gradients = trainer.header(0), Segments([trainer.arena(1.0)])
        with pytest.raises(DeadlineExceeded):
            client.push_gradients(header, gradients, timeout_s=1.0)
        monkeypatch.undo()
        assert client.push_gradients(header, gradients).result is PushResult.STAGED


def test_closing_a_client_ends_a_payload_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client), contextlib.closing(Proxy(monkeypatch)) as proxy:
        ended: list[PsError] = []

        def push() -> None:
            with pytest.raises(PsError) as raised:
                trainer.push(trainer.header(0))
            ended.append(raised.value)

        thread = threading.Thread(target=push)
        thread.start()
        assert proxy.has_begun.wait(TIMEOUT_S)
        client.close()
        thread.join(TIMEOUT_S)
        assert [type(error) for error in ended] == [Cancelled]


@pytest.mark.parametrize("num_bytes", [0, 7, 16, 100], ids=["at once", "in its beginning", "after its beginning", "in its bytes"])
def test_read_whose_socket_breaks_is_unavailable_and_the_next_one_is_whole(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, _), contextlib.closing(Proxy(monkeypatch, breaks_after=num_bytes)):
        with pytest.raises(Unavailable, match="data socket"):
            trainer.read()
        monkeypatch.undo()
        step, memory = trainer.read()
        assert step == 0 and (memory.view(np.float32) == 1.0).all()


def test_bytes_that_a_socket_brought_without_the_end_of_their_payload_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    receive: Any = DataSocket.receive

    def lose_end(data_socket: DataSocket, *what: Any) -> bool:
        receive(data_socket, *what)
        raise Unavailable("the data socket was lost")

    with a_shard(LARGE) as (trainer, client):
        trainer.read()
        request, memory = ReadRequest(epoch=EPOCH, step=1, layout_hash=LARGE.hash), aligned_bytes(LARGE.nbytes)
        client.expect(request)
        trainer.train(0)
        monkeypatch.setattr(DataSocket, "receive", lose_end)
        with pytest.raises(Unavailable, match="data socket"):
            client.read(request, Segments([memory]))
        monkeypatch.undo()
        memory[:] = 255
        assert client.read(request, Segments([memory])) == 1
        assert memory.tobytes() == trainer.read(1)[1].tobytes()


def test_push_whose_socket_breaks_is_unavailable_and_counts_once_when_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client), contextlib.closing(Proxy(monkeypatch, breaks_after=0)):
        header = trainer.header(0)
        with pytest.raises(Unavailable, match="data socket"):
            trainer.push(header)
        assert client.call(ShardStatusRequest()).report.num_staged == 0
        monkeypatch.undo()
        assert trainer.push(header).result is PushResult.STAGED
        assert trainer.push(header).result is PushResult.DUPLICATE
        assert trainer.apply(header.push_id).step == 1


def test_without_access_to_the_data_port_grpc_carries_all_and_the_user_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(payloads, "connect", lambda address, invited, peer: connect(address, replace(invited, port=port), peer=peer))
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server, caplog.at_level(logging.WARNING):
        with contextlib.closing(CommandedShard(server.address, least_socket_bytes=1)) as client:
            trainer = Trainer(client, SMALL)
            trainer.create(1.0)
            assert trainer.train(0).step == 1
            assert trainer.read(1)[0] == 1
            assert client.transport == "grpc"
    assert len([record for record in caplog.records if "over gRPC, which is slower" in record.message]) == 1


def test_encoded_variables_and_contributions_arrive_as_over_grpc() -> None:
    with a_shard(LARGE, variables_encoding=FloatEncoding.BFLOAT16) as (trainer, client):
        with contextlib.closing(CommandedShard(client.address, variables_encoding=FloatEncoding.BFLOAT16)) as plain:
            for each in (client, plain):
                each.know_layout(LARGE)
            header = trainer.header(0)
            trainer.push(header, trainer.random(1))
            trainer.apply(header.push_id)
            into, other = aligned_bytes(LARGE.nbytes), aligned_bytes(LARGE.nbytes)
            for shard, memory in ((client, into), (plain, other)):
                assert shard.read(ReadRequest(epoch=EPOCH, step=1, layout_hash=LARGE.hash), Segments([memory])) == 1
            assert into.tobytes() == other.tobytes()
            assert (client.transport, plain.transport) == ("sockets", "grpc")


@pytest.mark.parametrize("way", ["sockets", "grpc"])
def test_each_megabyte_of_a_payload_counts_as_progress(way: str) -> None:
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        progress, must = Progress(), way == "sockets"
        options: dict[str, Any] = {"least_socket_bytes": 1 if must else None, "must_use_sockets": must, "progress": progress}
        with contextlib.closing(CommandedShard(server.address, **options)) as shard:
            trainer, counts = Trainer(shard, LARGE), [0]
            for transfer in (trainer.create, trainer.read, lambda: trainer.push(trainer.header(0))):
                transfer()
                counts.append(progress.num_pieces)
            least = {"sockets": 1, "grpc": 15}[way]
            created, read, pushed = (after - before for before, after in itertools.pairwise(counts))
            assert created >= 15 and read >= least and pushed >= 15


def test_an_encrypted_server_refuses_data_sockets_with_a_reason(tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    config = ParameterServerConfig(index=0, address="127.0.0.1:0", cluster="job", security=files.server())
    with (
        open_server(config) as server,
        contextlib.closing(CommandedShard(server.address, access=files.caller(), least_socket_bytes=1, must_use_sockets=True)) as client,
    ):
        with pytest.raises(Unimplemented, match="encrypted"):
            Trainer(client, SMALL).read()


def test_values_overwritten_while_they_are_sent_are_reported_as_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(reading: Reading) -> None:
        raise StepGone("overwritten")

    with a_shard(LARGE) as (trainer, _):
        trainer.read()
        monkeypatch.setattr(Reading, "check", check)
        with pytest.raises(StepGone, match="overwritten"):
            trainer.read()
        monkeypatch.undo()
        assert trainer.read()[0] == 0


def test_contribution_that_is_taken_back_at_its_end_has_no_effect(shard: tuple[Trainer, CommandedShard]) -> None:
    trainer, client = shard
    step = client.call(ShardStatusRequest()).step or 0
    before = client.call(ShardStatusRequest()).report.num_staged
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        raw.send(push_message(trainer, raw, 1, step=step))
        raw.socket.sendall(begin(1, NBYTES) + bytes(NBYTES) + end(0))
        assert pb.PushResponse.FromString(next(raw.answers)).error.reason == "TRUNCATED_STREAM"
        assert client.call(ShardStatusRequest()).report.num_staged == before


def test_an_expected_step_arrives_although_its_socket_is_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client):
        with contextlib.closing(Proxy(monkeypatch, breaks_after=24 + LARGE.nbytes)):
            trainer.read()
            monkeypatch.undo()
        client.expect(ReadRequest(epoch=EPOCH, step=1, layout_hash=LARGE.hash))
        trainer.train(0)
        assert trainer.read(1)[0] == 1


def test_server_that_comes_back_is_given_payloads_over_sockets_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        address = server.address
        client = CommandedShard(address, least_socket_bytes=1)
        trainer = Trainer(client, SMALL)
        trainer.create(1.0)
        trainer.train(0)
    with contextlib.closing(client):
        with pytest.raises(Unavailable):
            trainer.read()
        with open_server(ParameterServerConfig(index=0, address=address)):
            again = CommandedShard(address, least_socket_bytes=1)
            with contextlib.closing(again):
                Trainer(again, SMALL).create(1.0)
            received: list[int] = []
            receive: Any = DataSocket.receive

            def noting(*given: Any, **more: Any) -> Any:
                received.append(given[2])
                return receive(*given, **more)

            monkeypatch.setattr(DataSocket, "receive", noting)

            def reads() -> bool:
                try:
                    return trainer.read()[0] == 0
                except Unavailable:  # gRPC pauses before it connects again
                    return False

            wait_until(reads, what="the server that came back is read")
            assert received == [SMALL.nbytes]
    assert not [record for record in caplog.records if "slower" in record.message]


def test_a_data_socket_that_cannot_connect_is_tried_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []
    now = 0.0

    def fail(address: str, invited: Invitation, *, peer: str) -> DataSocket:
        attempts.append(now)
        raise Unavailable("a firewall")

    monkeypatch.setattr(payloads, "connect", fail)
    monkeypatch.setattr(payloads, "time", SimpleNamespace(monotonic=lambda: now + 1e6))
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        with contextlib.closing(CommandedShard(server.address, least_socket_bytes=1)) as client:
            trainer = Trainer(client, SMALL)
            trainer.create(1.0)
            for _ in range(200):
                trainer.read()
                now += 60.0
    assert 4 <= len(attempts) <= 12


class HangingInvitations:
    """Has servers not answer `OpenDataSocket` until it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._over = threading.Event()
        self.has_begun = threading.Event()
        invite = DataListener.invite

        def hang(listener: DataListener) -> Invitation:
            self.has_begun.set()
            self._over.wait(TIMEOUT_S)
            return invite(listener)

        monkeypatch.setattr(DataListener, "invite", hang)

    def close(self) -> None:
        self._over.set()


def test_server_that_is_stopped_while_a_socket_is_asked_for_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_TIMEOUT_S", 0.2)
    with a_shard() as (trainer, _):
        with contextlib.closing(HangingInvitations(monkeypatch)), pytest.raises(Unavailable):
            trainer.read()
        assert trainer.read()[0] == 0


def interrupt_when(has_begun: threading.Event) -> list[float]:
    """Presses Ctrl-C then; the time is in the list."""
    pressed: list[float] = []

    def press() -> None:
        assert has_begun.wait(TIMEOUT_S)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    return pressed


@pytest.mark.parametrize("what", ["push", "read", "opening"])
def test_interrupt_ends_a_payload_at_once_and_the_client_continues(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client):
        monkeypatch.setattr(payloads, "_TIMEOUT_S", TIMEOUT_S)
        hindrance = HangingInvitations(monkeypatch) if what == "opening" else Proxy(monkeypatch, passes_requests=what == "read")
        header, gradients = trainer.header(0), Segments([trainer.arena(1.0)])
        with contextlib.closing(hindrance):
            pressed = interrupt_when(hindrance.has_begun)
            with pytest.raises(KeyboardInterrupt):
                if what == "push":
                    client.push_gradients(header, gradients)
                else:
                    trainer.read()
            assert time.monotonic() - pressed[0] < 2.0
        monkeypatch.undo()
        assert client.push_gradients(header, gradients).result is PushResult.STAGED
        assert trainer.read()[0] == 0


# A connection alone.


class Interrupted(socket.socket):
    """A connection whose user is interrupted while it closes it, by a handler that closes it as well."""

    close_again: Callable[[], None] | None = None

    def shutdown(self, how: int) -> None:
        again, self.close_again = self.close_again, None
        if again is not None:
            again()
        super().shutdown(how)


def test_handler_of_a_signal_may_close_what_its_thread_is_closing() -> None:
    ours, theirs = socket.socketpair()
    with theirs, Interrupted(fileno=ours.detach()) as connection:
        data_socket = DataSocket(connection, nonce=bytes(16), peer="ps 0")
        connection.close_again = data_socket.close
        thread = threading.Thread(target=data_socket.close, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert data_socket.is_over


def test_a_wait_for_bytes_ends_when_they_have_arrived() -> None:
    ours, theirs = socket.socketpair()
    events: list[str] = []
    memory = memoryview(bytearray(8))
    with theirs, contextlib.closing(DataSocket(ours, nonce=bytes(16), peer="ps 0")) as data_socket:
        parts = iter([begin(1, 8), bytes(3), bytes(5) + end(1)])

        def send() -> None:
            events.append("wait")
            theirs.sendall(next(parts))

        filled = 0

        def fill(receive: Callable[[memoryview], int]) -> bool:
            nonlocal filled
            filled += receive(memory[filled:])
            return True

        assert data_socket.receive(1, 8, fill, on_wait=send, on_bytes=lambda: events.append("bytes"))
    assert events == ["wait", "bytes"] * 3


class Proxy:
    """Stands between a client and its server's listener: lets the nonce through, then nothing, or so many bytes until it breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks_after: int | None = None, passes_requests: bool = False) -> None:
        self._breaks_after, self._passes_requests = breaks_after, passes_requests
        self._kept: list[socket.socket] = []
        self.has_begun = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setattr(payloads, "connect", self._connect)

    def close(self) -> None:
        self._listening.close()
        for connection in self._kept:
            connection.close()

    def _connect(self, address: str, invited: Invitation, *, peer: str) -> DataSocket:
        threading.Thread(target=self._serve, args=(invited.port,), daemon=True).start()
        return connect(address, replace(invited, port=self._listening.getsockname()[1]), peer=peer)

    def _serve(self, port: int) -> None:
        with contextlib.suppress(OSError):
            down, _ = self._listening.accept()
            up = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
            self._kept += [down, up]
            up.sendall(down.recv(16))
            down.sendall(up.recv(1))
            if self._breaks_after is not None:
                up.settimeout(None)
                down.sendall(up.recv(self._breaks_after, socket.MSG_WAITALL))
                for connection in (down, up):
                    connection.shutdown(socket.SHUT_RDWR)
                return
            (up if self._passes_requests else down).recv(1, socket.MSG_PEEK)
            self.has_begun.set()


# The listener alone.


@pytest.fixture
def listener() -> Iterator[DataListener]:
    made = DataListener(name="ps 0")
    made.start(Address(host="127.0.0.1"))
    yield made
    made.stop()


def _address(invited: Invitation) -> tuple[str, int]:
    return "127.0.0.1", invited.port


def test_an_invited_connection_is_claimed_once(listener: DataListener) -> None:
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")):
        listener.claim(invited.nonce).close()
        with pytest.raises(MalformedMessage):
            listener.claim(invited.nonce)


def test_a_nonce_is_valid_for_one_connection(listener: DataListener) -> None:
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")):
        listener.invite()  # else no connection is taken at all
        with pytest.raises(Unavailable):
            connect("127.0.0.1:1", invited, peer="ps 0")
        listener.claim(invited.nonce).close()


def test_a_connection_without_a_nonce_is_dropped(listener: DataListener) -> None:
    invited = listener.invite()
    with socket.create_connection(_address(invited), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_nonce_may_arrive_in_two_pieces(listener: DataListener) -> None:
    invited = listener.invite()
    with socket.create_connection(_address(invited), timeout=TIMEOUT_S) as slow:
        slow.sendall(invited.nonce[:5])
        slow.sendall(invited.nonce[5:])
        assert slow.recv(1) == sockets.WELCOME
        listener.claim(invited.nonce).close()


def test_a_silent_connection_to_the_data_port_is_closed(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_STRANGER_S", 0.05)
    with socket.create_connection(_address(listener.invite()), timeout=TIMEOUT_S) as silent:
        assert silent.recv(1) == b""


def test_connections_without_a_nonce_do_not_keep_out_invited_ones(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_MAX_STRANGERS", 4)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(_address(listener.invite()), timeout=TIMEOUT_S))
        with contextlib.closing(connect("127.0.0.1:1", listener.invite(), peer="ps 0")) as found:
            listener.claim(found.nonce).close()


def test_an_invited_caller_behind_many_strangers_is_served(listener: DataListener) -> None:
    """They came while nobody was invited, and wait in the system's queue."""
    with contextlib.ExitStack() as stack:
        first = listener.invite()
        stack.enter_context(contextlib.closing(connect("127.0.0.1:1", first, peer="ps 0")))
        stack.enter_context(contextlib.closing(listener.claim(first.nonce)))
        strangers = [stack.enter_context(socket.create_connection(_address(first), timeout=TIMEOUT_S)) for _ in range(140)]
        for stranger in strangers:
            stranger.sendall(bytes(16))
        with contextlib.closing(connect("127.0.0.1:1", listener.invite(), peer="ps 0")) as found:
            listener.claim(found.nonce).close()
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it was refused when somebody was invited"


def test_an_invitation_to_the_data_port_expires(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_INVITED_S", 0.05)
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")) as unclaimed:
        wait_until(lambda: unclaimed.is_over, what="the connection that nobody claims is closed")
        with pytest.raises(MalformedMessage):
            listener.claim(invited.nonce)


def test_taken_data_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PsError, match=f"127.0.0.1:{port}"):
            DataListener(name="ps 0").start(Address(host="127.0.0.1"), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "::1"])
def test_listener_is_reached_from_wherever_grpc_is(host: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    made = DataListener(name="ps 0")
    made.start(Address(host=host))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(made.stop)
        hosts = {family_host for *_, (family_host, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
        for one in hosts if host in ("localhost", "::1") else ("127.0.0.1", "::1"):
            invited = made.invite()
            with contextlib.closing(connect(str(Address(host=str(one), port=1)), invited, peer="ps 0")):
                made.claim(invited.nonce).close()


def test_data_port_that_is_given_serves_all_addresses_of_a_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = DataListener(name="ps 0")
    made.start(Address(host="localhost"), port=port)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(made.stop)
        assert made.invite().port == port


def test_server_that_is_ending_is_asked_again_and_not_taken_for_one_without_sockets() -> None:
    made = DataListener(name="ps 0")
    made.start(Address(host="127.0.0.1"))
    made.stop()
    with pytest.raises(Unavailable):
        made.invite()
