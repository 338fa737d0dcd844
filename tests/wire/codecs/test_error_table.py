"""Errors on their way from a server to a client, for every error."""

import logging
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import grpc
import pytest

from ps_protocol import errors
from ps_protocol.errors import PsError
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.door import Blocking, CallThreads, Door, at_once, by_thread
from ps_protocol.rpc.server_stream import Begin, Call
from ps_protocol.rpc.status import rebuild, status_of
from ps_protocol.v1.error_pb2 import ErrorDetails
from ps_protocol.wire.call_errors import MAX_TEXT_CHARACTERS
from tests.support.network.servers import serving

ERRORS = sorted(PsError.__subclasses__(), key=lambda error: error.__name__)
TEXT = "variable 'wä' has shape (3, 4),\nthe gradient has (4, 3)… push the gradient of 'wä' itself; 100 % of it"
FACTS = {"worker": "3", "host": "häst", "empty": ""}

# What the server raises at the next call; None: it answers.
Raising = list[BaseException | None]


def door(raising: Raising, threads: CallThreads) -> Door:
    def raise_it() -> bytes:
        if raising[0] is not None:
            raise raising[0]
        return ErrorDetails(reason="fine").SerializeToString()

    def down(messages: Iterator[bytes]) -> Generator[bytes, None, None]:
        yield b"first"
        yield raise_it()

    def up(messages: Iterator[bytes]) -> Generator[bytes, None, None]:
        next(messages)
        yield raise_it()

    def by_generator(serve: Callable[[Iterator[bytes]], Generator[bytes, None, None]]) -> Begin:
        return lambda peer, call: Blocking(peer, serve, threads=threads)

    def one(message: bytes, call: Call) -> bytes:
        return raise_it()

    methods = {
        "/test.Once/Call": at_once(one),
        "/test.One/Call": by_thread(one, threads),
        "/test.Down/Call": by_generator(down),
        "/test.Up/Call": by_generator(up),
    }
    return Door(methods, server_name="ps 0")


class Peer:
    """A server and what it shall raise."""

    def __init__(self, address: str, raising: Raising) -> None:
        self.raising = raising
        self._address = address
        self._connection = Connection(address, name="ps 0", service="test.One")

    def call(self, error: BaseException | None) -> PsError:
        """Returns what a client gets when the server raises `error`, and then sees that the server continues."""
        self.raising[0] = error
        caught = self._catch(self._call)
        self.raising[0] = None
        assert self._call().reason == "fine"
        return caught

    def raw(self, error: BaseException | None) -> Any:
        """Returns what gRPC itself makes of it."""
        self.raising[0] = error
        with pytest.raises(grpc.RpcError) as caught:
            call: Callable[..., bytes] = self._connection.channel.unary_unary("/test.One/Call")
            call(b"", timeout=10)
        return caught.value

    def call_stream(self, service: str, error: BaseException) -> PsError:
        self.raising[0] = error
        connection = Connection(self._address, name="ps 0", service=service)
        try:
            if service == "test.Down":
                return self._catch(lambda: connection.stream_down("Call", ErrorDetails(), list, timeout_s=10, awaited="x"))
            many = (bytes(1000) for _ in range(10))
            return self._catch(lambda: connection.stream_up("Call", many, ErrorDetails, timeout_s=10, awaited="x"))
        finally:
            connection.close()

    def close(self) -> None:
        self._connection.close()

    def _call(self) -> ErrorDetails:
        return self._connection.unary("Call", ErrorDetails(), ErrorDetails, timeout_s=10, awaited="an answer")

    @staticmethod
    def _catch(action: Callable[[], object]) -> PsError:
        with pytest.raises(PsError) as caught:
            action()
        return caught.value


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    raising: Raising = [None]
    with serving(door(raising, CallThreads(server_name="ps 0"))) as address:
        peer = Peer(address, raising)
        yield peer
        peer.close()


@pytest.mark.parametrize("error_type", ERRORS, ids=lambda error_type: str(error_type.__name__))
def test_every_error_arrives_as_it_was_raised_with_its_status_and_reason_for_other_clients(peer: Peer, error_type: type[PsError]) -> None:
    raw = peer.raw(error_type(TEXT, facts=FACTS))
    assert (raw.code(), raw.details()) == (grpc.StatusCode[error_type.status], TEXT)
    assert dict(raw.trailing_metadata() or ())["ps-reason"] == error_type.reason
    error = rebuild(raw, target="ps 0")
    assert type(error) is error_type
    assert (error.message, str(error), error.facts, error.reason) == (TEXT, TEXT, FACTS, error_type.reason)


@pytest.mark.parametrize("service", ["test.Down", "test.Up"])
def test_errors_of_streams_arrive_too(peer: Peer, service: str) -> None:
    error = peer.call_stream(service, errors.StepGone(TEXT, facts=FACTS))
    assert type(error) is errors.StepGone
    assert (error.message, error.facts) == (TEXT, FACTS)


def test_defect_is_answered_with_a_number_and_logged_once_under_it(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        error = peer.call(RuntimeError("secret of the server"))
    assert isinstance(error, errors.InternalError)
    match = re.fullmatch(r"internal error ([0-9a-f]{8}) \(see the log of ps 0\)", error.message)
    assert match, error.message
    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(records) == 1
    assert match[1] in records[0].getMessage()
    assert records[0].exc_info
    assert "secret of the server" in str(records[0].exc_info[1])


def test_expected_errors_are_not_logged(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        peer.call(errors.StepGone("gone"))
    assert not caplog.records


def test_long_text_is_cut_and_arrives(peer: Peer) -> None:
    error = peer.call(errors.ModelMismatch("ä" * 100_000, facts={"keep": "1", "long": "x" * 100_000, "also": "2"}))
    assert isinstance(error, errors.ModelMismatch)
    assert error.message == "ä" * (MAX_TEXT_CHARACTERS - 1) + "…"
    assert error.facts == {"keep": "1", "also": "2"}


def test_text_that_is_not_unicode_arrives_escaped(peer: Peer) -> None:
    error = peer.call(errors.InvalidSpec("name '\ud800'", facts={"name": "\ud800"}))
    assert isinstance(error, errors.InvalidSpec)
    assert (error.message, error.facts) == ("name '\\ud800'", {"name": "\\ud800"})


def test_unknown_reason_of_a_newer_server_keeps_text_and_reason(peer: Peer) -> None:
    newer = errors.InvalidSpec("use a newer client", facts=FACTS)
    newer.reason = "NOT_OF_THIS_WORLD"
    error = peer.call(newer)
    assert type(error) is PsError
    assert (error.message, error.reason, error.facts) == ("use a newer client", "NOT_OF_THIS_WORLD", FACTS)


def test_subclass_travels_as_its_nearest_known_error() -> None:
    class Special(errors.StepGone):
        """An error of some role's own."""

    assert status_of(Special("gone")) is grpc.StatusCode.FAILED_PRECONDITION


def test_errors_outside_calls_are_reported_too() -> None:
    assert isinstance(rebuild(grpc.RpcError("?"), target="ps 0"), errors.InternalError)
