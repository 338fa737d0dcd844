"""Payloads over data sockets: what a server takes from a raw one, what a client does when one breaks, and whom the listener lets in."""

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import Cancelled, DeadlineExceeded, MalformedMessage, PsError, Unavailable, Unimplemented
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.roles.identity import Address
from ps_protocol.roles.shard import PushResult
from ps_protocol.rpc import payloads
from ps_protocol.sockets import data_socket as sockets
from ps_protocol.sockets import listener as listeners
from ps_protocol.sockets.data_socket import DataSocket, Invitation, connect
from ps_protocol.sockets.listener import DataListener
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.serving.calls import SERVICE
from tests.support import certificates
from tests.support.shards import EPOCH, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until
from tests.support.whole_shard import WholeGrpcShard

# Larger than what the kernel buffers, so that who does not read stops the sender.
LARGE = layout_of(variable("w", (4 << 20,)))
SMALL = layout_of(variable("w", (64,)))
TIMEOUT_S = 20.0


@contextlib.contextmanager
def a_shard(layout: Any = SMALL, **options: Any) -> Iterator[tuple[Trainer, WholeGrpcShard]]:
    """A parameter server with variables, and a client of it that must use data sockets."""
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        with contextlib.closing(WholeGrpcShard(server.address, least_socket_bytes=1, must_use_sockets=True, **options)) as shard:
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
def shard() -> Iterator[tuple[Trainer, WholeGrpcShard]]:
    with a_shard() as made:
        yield made


@pytest.mark.parametrize(("case", "sent"), BAD_PAYLOADS, ids=[case for case, _ in BAD_PAYLOADS])
def test_payload_that_is_not_what_the_stream_says_has_no_effect(shard: tuple[Trainer, WholeGrpcShard], case: str, sent: bytes) -> None:
    trainer, client = shard
    step = client.status().step or 0
    before = client.status().report.num_staged
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        raw.send(push_message(trainer, raw, 1, step=step))
        raw.socket.sendall(sent)
        raw.socket.shutdown(socket.SHUT_WR)
        answer = pb.PushResponse.FromString(next(raw.answers))
        assert answer.error.reason == "UNAVAILABLE", answer
        assert "data socket" in answer.error.message
        assert raw.socket.recv(1) == b"", "the server has closed it"
        assert client.status().report.num_staged == before
    assert trainer.train(step).step == step + 1


def test_payloads_follow_each_other_over_one_socket(shard: tuple[Trainer, WholeGrpcShard]) -> None:
    trainer, client = shard
    step = client.status().step or 0
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
def test_stream_that_names_no_socket_of_its_own_is_told_so(
    shard: tuple[Trainer, WholeGrpcShard], case: str, nonce: Callable[[Raw], bytes]
) -> None:
    trainer, client = shard
    with contextlib.closing(Raw(client.address, "Push")) as raw:
        raw.send(push_message(trainer, raw, 1, step=client.status().step or 0, nonce=nonce(raw)))
        assert pb.PushResponse.FromString(next(raw.answers)).error.reason == "MALFORMED_MESSAGE"


def test_a_socket_belongs_to_the_stream_that_named_it_first(shard: tuple[Trainer, WholeGrpcShard]) -> None:
    trainer, client = shard
    step = client.status().step or 0
    with contextlib.closing(Raw(client.address, "Push")) as raw, contextlib.closing(Raw(client.address, "Push")) as thief:
        raw.send(push_message(trainer, raw, 1, step=step))
        raw.socket.sendall(begin(1, NBYTES) + bytes(NBYTES) + end(1))
        assert pb.PushResponse.FromString(next(raw.answers)).reply.result == pb.PUSH_RESULT_STAGED
        thief.send(push_message(trainer, raw, 2, step=step))
        assert pb.PushResponse.FromString(next(thief.answers)).error.reason == "MALFORMED_MESSAGE"


def test_read_that_names_no_socket_of_its_own_is_told_so(shard: tuple[Trainer, WholeGrpcShard]) -> None:
    trainer, client = shard
    with contextlib.closing(Raw(client.address, "Read")) as raw:
        request = pb.ReadRequest(epoch=EPOCH, layout_hash=trainer.layout.hash, payload=pb.Payload(socket=bytes(16), number=1))
        raw.send(request.SerializeToString())
        assert pb.ReadResponse.FromString(next(raw.answers)).header.error.reason == "MALFORMED_MESSAGE"


def test_values_come_as_one_payload(shard: tuple[Trainer, WholeGrpcShard]) -> None:
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


def test_push_whose_socket_breaks_is_unavailable_and_counts_once_when_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_shard(LARGE) as (trainer, client), contextlib.closing(Proxy(monkeypatch, breaks_after=0)):
        header = trainer.header(0)
        with pytest.raises(Unavailable, match="data socket"):
            trainer.push(header)
        assert client.status().report.num_staged == 0
        monkeypatch.undo()
        assert trainer.push(header).result is PushResult.STAGED
        assert trainer.push(header).result is PushResult.DUPLICATE
        assert trainer.apply(header.push_id).step == 1


def test_without_a_way_to_the_data_port_grpc_carries_all_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(payloads, "connect", lambda address, invited, peer: connect(address, replace(invited, port=port), peer=peer))
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server, caplog.at_level(logging.WARNING):
        with contextlib.closing(WholeGrpcShard(server.address, least_socket_bytes=1)) as client:
            trainer = Trainer(client, SMALL)
            trainer.create(1.0)
            assert trainer.train(0).step == 1
            assert trainer.read(1)[0] == 1
            assert not client.uses_sockets
    assert len([record for record in caplog.records if "over gRPC, which is slower" in record.message]) == 1


def test_encoded_variables_and_contributions_arrive_as_over_grpc() -> None:
    with a_shard(LARGE, variables_encoding=FloatEncoding.BFLOAT16) as (trainer, client):
        with contextlib.closing(WholeGrpcShard(client.address, variables_encoding=FloatEncoding.BFLOAT16)) as plain:
            for each in (client, plain):
                each.know_layout(LARGE)
            header = trainer.header(0)
            trainer.push(header, trainer.random(1))
            trainer.apply(header.push_id)
            into, other = aligned_bytes(LARGE.nbytes), aligned_bytes(LARGE.nbytes)
            for shard, memory in ((client, into), (plain, other)):
                assert shard.read_variables(Segments([memory]), epoch=EPOCH, step=1, layout_hash=LARGE.hash) == 1
            assert into.tobytes() == other.tobytes()
            assert client.uses_sockets and not plain.uses_sockets


def test_encrypted_server_has_no_data_sockets_and_says_so(tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    config = ParameterServerConfig(index=0, address="127.0.0.1:0", cluster="job", security=files.server())
    with (
        open_server(config) as server,
        contextlib.closing(WholeGrpcShard(server.address, access=files.caller(), least_socket_bytes=1, must_use_sockets=True)) as client,
    ):
        with pytest.raises(Unimplemented, match="encrypted"):
            Trainer(client, SMALL).read()


class Proxy:
    """Stands between a client and its server's listener: lets the nonce through, then nothing, or so many bytes until it breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks_after: int | None = None) -> None:
        self._breaks_after = breaks_after
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
                down.sendall(up.recv(self._breaks_after, socket.MSG_WAITALL))
                for connection in (down, up):
                    connection.shutdown(socket.SHUT_RDWR)
                return
            down.recv(1, socket.MSG_PEEK)
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


def test_invited_connection_is_claimed_once(listener: DataListener) -> None:
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")):
        listener.claim(invited.nonce).close()
        with pytest.raises(MalformedMessage):
            listener.claim(invited.nonce)


def test_nonce_is_good_for_one_connection(listener: DataListener) -> None:
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")):
        with pytest.raises(Unavailable):
            connect("127.0.0.1:1", invited, peer="ps 0")
        listener.claim(invited.nonce).close()


def test_stranger_is_dropped(listener: DataListener) -> None:
    invited = listener.invite()
    with socket.create_connection(_address(invited), timeout=TIMEOUT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_nonce_may_come_in_two_pieces(listener: DataListener) -> None:
    invited = listener.invite()
    with socket.create_connection(_address(invited), timeout=TIMEOUT_S) as slow:
        slow.sendall(invited.nonce[:5])
        slow.sendall(invited.nonce[5:])
        assert slow.recv(1) == sockets.WELCOME
        listener.claim(invited.nonce).close()


def test_silent_stranger_is_cut(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_STRANGER_S", 0.05)
    with socket.create_connection(_address(listener.invite()), timeout=TIMEOUT_S) as silent:
        assert silent.recv(1) == b""


def test_strangers_do_not_keep_out_who_is_invited(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_MAX_STRANGERS", 4)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(_address(listener.invite()), timeout=TIMEOUT_S))
        with contextlib.closing(connect("127.0.0.1:1", listener.invite(), peer="ps 0")) as found:
            listener.claim(found.nonce).close()


def test_invitation_ends(listener: DataListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_INVITED_S", 0.05)
    invited = listener.invite()
    with contextlib.closing(connect("127.0.0.1:1", invited, peer="ps 0")) as unclaimed:
        wait_until(lambda: unclaimed.is_over, what="the connection that nobody claims is closed")
        with pytest.raises(MalformedMessage):
            listener.claim(invited.nonce)


def test_taken_data_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PsError, match="data sockets"):
            DataListener(name="ps 0").start(Address(host="127.0.0.1"), port=port)
