"""Real servers implement every method of the protos."""

from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from ps_protocol.roles.chief import ClusterState
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.network.servers import free_ports

SERVICES = {
    "ps": (
        *(parameter_service_pb2.DESCRIPTOR, accumulator_service_pb2.DESCRIPTOR, board_service_pb2.DESCRIPTOR),
        handshake_service_pb2.DESCRIPTOR,
    ),
    "chief": (chief_service_pb2.DESCRIPTOR, handshake_service_pb2.DESCRIPTOR),
}
METHODS = [
    (role, method)
    for role, files in SERVICES.items()
    for file in files
    for service in file.services_by_name.values()
    for method in service.methods
]
NO_MESSAGE = b"\xff"  # cannot be decoded, so the answer is an error at once
ANSWERED_WITHIN = {"Push", "Read"}  # the stream continues


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        cluster = ProcessCluster(Plan(port=free_ports(2)), stack, directory=tmp_path_factory.mktemp("served")).start()
        cluster.await_status(lambda status: status.state is ClusterState.WAITING_FOR_MODEL, what="all serve")
        yield {"ps": cluster.address("ps 0"), "chief": cluster.chief_address}


@pytest.mark.parametrize(("role", "method"), METHODS, ids=lambda value: getattr(value, "name", value))
def test_every_rpc_is_served(role: str, method: MethodDescriptor, addresses: dict[str, str]) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    with DEFAULT_ACCESS.open_channel(addresses[role]) as channel:
        # On the wire every kind of call is a stream each way.
        call = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
        if method.name in ANSWERED_WITHIN:
            assert b"MALFORMED_MESSAGE" in b"".join(call(iter([NO_MESSAGE]), timeout=20))
            return
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([NO_MESSAGE]), timeout=20))
    error = caught.value
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
    assert ("ps-reason", "MALFORMED_MESSAGE") in error.trailing_metadata()
