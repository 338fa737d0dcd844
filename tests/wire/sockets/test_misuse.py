"""Misuse of data sockets: strangers that want a server's descriptors, and servers that send a caller elsewhere."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import LimitExceeded, Unavailable
from ps_protocol.process.listening import most_connections
from ps_protocol.roles.identity import Address
from ps_protocol.roles.shard import Invitation
from ps_protocol.sockets.data_socket import NONCE_BYTES, connect
from ps_protocol.sockets.listener import DataListener
from tests.support.waiting import wait_until

NONCE = b"n" * NONCE_BYTES
NUM_DESCRIPTORS = 256


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataListener]:
    """That of a server with few descriptors."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (NUM_DESCRIPTORS, NUM_DESCRIPTORS))
    made = DataListener(name="ps 0")
    made.start(Address(host="127.0.0.1"))
    yield made
    made.stop()


def num_open(connections: list[socket.socket]) -> int:
    """How many of them the server has not closed."""
    still = 0
    for connection in connections:
        try:
            still += connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            still += 1
        except OSError:
            pass
    return still


def test_strangers_leave_descriptors_for_checkpoints_and_memory(listener: DataListener) -> None:
    spare = NUM_DESCRIPTORS - most_connections()
    with contextlib.ExitStack() as stack:
        address = "127.0.0.1", listener.invite().port
        held = [stack.enter_context(socket.create_connection(address, timeout=5)) for _ in range(60)]
        wait_until(lambda: num_open(held) <= spare // 4, timeout_s=1.5, what="the server has closed most of them")


def test_callers_that_are_invited_and_wait_leave_descriptors_for_checkpoints_and_memory(listener: DataListener) -> None:
    spare = NUM_DESCRIPTORS - most_connections()
    with contextlib.ExitStack() as stack, pytest.raises(LimitExceeded, match="data sockets are waited for at once"):
        for _ in range(spare // 4):
            stack.enter_context(contextlib.closing(connect("127.0.0.1:1", listener.invite(), peer="ps 0")))


@contextlib.contextmanager
def listening(address: str | tuple[str, int]) -> Iterator[socket.socket]:
    """Something else of the caller's machine, which must hear nothing."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as own:
        own.bind(address)
        own.listen()
        own.setblocking(False)
        yield own


def test_a_server_cannot_send_its_callers_to_another_unix_socket(socket_dir: Path) -> None:
    with listening(f"{socket_dir}/other") as other:
        for address in ("10.0.0.1:5000", f"unix:{socket_dir}/ps0"):
            with pytest.raises(Unavailable):
                connect(address, Invitation(nonce=NONCE, path=f"{socket_dir}/other"), peer="ps 0")
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_server_on_a_unix_socket_cannot_send_its_callers_to_a_port(socket_dir: Path) -> None:
    with listening(("127.0.0.1", 0)) as other:
        with pytest.raises(Unavailable, match="none of its own"):
            connect(f"unix:{socket_dir}/ps0", Invitation(nonce=NONCE, port=other.getsockname()[1]), peer="ps 0")
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize(
    "invitation",
    [
        Invitation(nonce=NONCE),
        Invitation(nonce=NONCE, port=1 << 16),
        Invitation(nonce=NONCE, port=(1 << 32) - 1),
        Invitation(nonce=b"", port=5000),
        Invitation(nonce=bytes(1 << 20), port=5000),
        Invitation(nonce=NONCE, port=5000, path="/run/x\0"),
    ],
)
def test_an_invitation_that_cannot_be_one_is_refused(invitation: Invitation) -> None:
    with pytest.raises(Unavailable, match="none of its own"):
        connect("127.0.0.1:1", invitation, peer="ps 0")
