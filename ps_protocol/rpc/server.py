"""A gRPC server as every role has it: guards, the handshake, the health, one port, an orderly end. Knows no method of a role."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ps_protocol.errors import InvalidSpec
from ps_protocol.process.listening import check_address_is_free
from ps_protocol.roles.identity import (
    Address,
    HandshakeReply,
    HandshakeRequest,
    Identity,
    SeenPlace,
    TryCheckpointsRequest,
    answer,
    parse_address,
)
from ps_protocol.roles.request import RPCS, CallerRole
from ps_protocol.rpc.admission import interceptors
from ps_protocol.rpc.channel import server_options
from ps_protocol.rpc.status import answering
from ps_protocol.rpc.strangers import StrangerGuard
from ps_protocol.security.certificates import ServerCertificates
from ps_protocol.security.options import Security
from ps_protocol.wire import codec

SERVICE = "ps_protocol.v1.HandshakeService"
# A call holds a thread while it lasts, but for streams that events serve; `ShareMemory` is one that does, for each worker, and so does
# watching the health. Threads are made as they are needed; more calls at once than this wait, which takes no memory for tensors.
MAX_THREADS = 4_096


class Trial(Protocol):
    """A trial of a process's place for checkpoints."""

    @property
    def place(self) -> str:
        """The place as people name it."""

    def run(self, tag: str, *, is_last: bool) -> Sequence[str]:
        """Does what `TryCheckpoints` says. Blocks while the storage does."""


class RpcServer:
    """One server. `listen`, `start`, `stop` and `close` are called once each.

    `address`: where it will listen. `max_calls`: more calls at once are refused instead of queued; None: they wait.
    """

    def __init__(self, security: Security, *, cluster: str, address: str, max_calls: int | None = None) -> None:
        self._security, self._address = security, address
        self._strangers = StrangerGuard()
        self._guards = interceptors(security, cluster=cluster, address=address, strangers=self._strangers)
        self._health = health.HealthServicer()
        self._executor = futures.ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._executor, options=server_options(), maximum_concurrent_rpcs=max_calls, interceptors=[*self._guards]
        )

    def may_act_as(self, role: CallerRole, context: grpc.ServicerContext) -> bool:
        """Whether the caller of a call that was let in may act in this role."""
        return all(guard.may_act_as(role, context) for guard in self._guards)

    def listen(self, identity: Identity, *handlers: grpc.GenericRpcHandler, epoch: Callable[[], int], trial: Trial | None = None) -> str:
        """Opens the port and returns where it listens. Raises InvalidSpec if it cannot. `epoch`, `trial`: see `handshake_handler`."""
        self._server.add_generic_rpc_handlers((*handlers, handshake_handler(identity, epoch=epoch, trial=trial)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        check_address_is_free(self._address)
        address = parse_address(self._address, is_bind=True)
        try:
            port = add_port(self._server, address, security=self._security)
        except RuntimeError as error:
            raise InvalidSpec(f"cannot listen at {self._address}: {error}") from None
        if address.is_unix:
            return str(address)
        self._strangers.start(port)
        return str(dataclasses.replace(address, port=port))

    def start(self) -> None:
        """Begins to serve."""
        self._server.start()

    def report_health(self, *services: str, is_serving: bool) -> None:
        """Says to health checks whether services are to be used; "" is the server as a whole."""
        states = health_pb2.HealthCheckResponse
        for service in services:
            self._health.set(service, states.SERVING if is_serving else states.NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets those under way finish for so long, and ends them."""
        self._strangers.stop()
        self._server.stop(grace_s).wait()
        for guard in self._guards:
            guard.close()

    def close(self) -> None:
        """Waits for the threads of calls that have ended."""
        self._executor.shutdown()


def add_port(server: grpc.Server, address: Address, *, security: Security) -> int:
    """Opens a port, encrypted if the server has a certificate, and returns its number.

    Raises RuntimeError if gRPC cannot, InvalidSpec for certificates that are not right.
    """
    if security.tls_cert is None or address.is_unix:
        port: int = server.add_insecure_port(str(address))
    else:
        port = server.add_secure_port(str(address), ServerCertificates(security).credentials())
    return port


def handshake_handler(identity: Identity, *, epoch: Callable[[], int], trial: Trial | None = None) -> grpc.GenericRpcHandler:
    """Returns the service for `server.add_generic_rpc_handlers((handler,))`; `epoch` is asked at each call, and must not block.

    `trial`: None if the process has no place for checkpoints.
    """

    def handshake(request: HandshakeRequest, context: grpc.ServicerContext) -> HandshakeReply:
        return answer(request, identity=identity, epoch=epoch())

    def try_checkpoints(request: TryCheckpointsRequest, context: grpc.ServicerContext) -> SeenPlace:
        if trial is None:
            return SeenPlace()
        return SeenPlace(place=trial.place, seen=tuple(trial.run(request.tag, is_last=request.is_last)))

    methods = plain_methods({HandshakeRequest: handshake, TryCheckpointsRequest: try_checkpoints}, server_name=identity.name)
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def plain_methods(
    answers: Mapping[type, Callable[[Any, grpc.ServicerContext], Any]], *, server_name: str
) -> "dict[str, grpc.RpcMethodHandler[bytes, bytes]]":
    """Returns the handlers of RPCs with one message each way, by their names: each request is decoded, answered, and the answer encoded.

    They take bytes, so that what is no message at all is refused by us, with a reason.
    """

    def method(request_type: type, answer: Callable[[Any, grpc.ServicerContext], Any]) -> "grpc.RpcMethodHandler[bytes, bytes]":
        def serve(data: bytes, context: grpc.ServicerContext) -> bytes:
            with answering(context, server_name=server_name):
                found = answer(codec.decode_request(request_type, data), context)
                packed: bytes = codec.encode_answer(request_type, found).SerializeToString()
                return packed

        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(serve)
        return handler

    return {RPCS[request_type].name: method(request_type, answer) for request_type, answer in answers.items()}
