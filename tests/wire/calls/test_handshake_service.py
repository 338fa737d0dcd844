"""The handshake over the wire."""

import contextlib
import logging
from collections.abc import Callable

import grpc
import pytest

from ps_protocol import errors
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.door import CallThreads, Door
from ps_protocol.rpc.server import handshake_methods
from tests.support.network.servers import serving, unary, unused_address
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import HANDSHAKE, RawShard

PS = Identity(cluster="job-a", role=Role.PARAMETER_SERVER, index=1, process_incarnation=7)
CHIEF = Identity(cluster="job-a", role=Role.CHIEF, index=0, process_incarnation=8)


@pytest.fixture
def serve() -> Callable[[Identity], contextlib.AbstractContextManager[str]]:
    threads = CallThreads(server_name="the server")
    return lambda identity: serving(Door(handshake_methods(identity, threads, epoch=lambda: 4), server_name="the server"))


Serve = Callable[[Identity], contextlib.AbstractContextManager[str]]


def test_clients_learn_the_servers_identity(serve: Serve) -> None:
    with serve(PS) as address:
        shard = CommandedShard(address, index=1, cluster="job-a")
        assert shard.handshake() == HandshakeReply(identity=PS, version=PROTOCOL_VERSION, epoch=4, warning="")
        shard.close()
    with serve(CHIEF) as address:
        chief = GrpcChief(address, cluster="job-a")
        assert chief.handshake(5.0).identity == CHIEF
        chief.close()


def test_a_caller_that_expects_nothing_accepts_any_server(serve: Serve) -> None:
    with serve(PS) as address, contextlib.closing(Connection(address, name="the server", service="")) as connection:
        assert connection.handshake(None, index=None, cluster="", timeout_s=5).identity == PS


def test_a_wrong_index_role_or_cluster_is_reported_with_the_address(serve: Serve) -> None:
    with serve(PS) as address:
        for client, error, words in (
            (CommandedShard(address, index=0), errors.WrongRole, f"{address}: this is ps 1, not ps 0"),
            (GrpcChief(address), errors.WrongRole, f"{address}: this is ps 1, not the chief"),
            (CommandedShard(address, cluster="job-b"), errors.WrongCluster, f"{address}: this is ps 1 of cluster 'job-a', not 'job-b'"),
        ):
            with pytest.raises(error) as caught:
                client.handshake()
            assert caught.value.message.startswith(words)
            assert caught.value.facts["index"] == "1"
            client.close()


def test_garbage_is_refused_with_a_reason_and_not_logged(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), serve(PS) as address, RawShard(address) as raw:
        for garbage in (b"\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
            refused = raw.call("", garbage, path=HANDSHAKE)
            assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
            assert "bytes are not a HandshakeRequest" in refused.text
        # The server continues.
        assert raw.handshake().code is grpc.StatusCode.OK
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


def test_server_of_another_kind_is_recognised() -> None:
    with serving(unary("other.Service", Call=lambda request, context: request)) as address:
        shard = CommandedShard(address, index=0)
        with pytest.raises(errors.WrongRole, match="a gRPC server answers there, but not one of Lockstep's"):
            shard.handshake()
        shard.close()


def test_an_absent_server_is_reported_within_the_timeout() -> None:
    chief = GrpcChief(unused_address())
    with pytest.raises(errors.Unavailable, match=r"cannot reach the chief at 127\.0\.0\.1:\d+: connection refused; is it started\?"):
        chief.handshake(2.0)
    chief.close()
