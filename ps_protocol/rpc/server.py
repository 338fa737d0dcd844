"""A gRPC server as every role has it: guards, the handshake, the health, one port, an orderly end. Knows no method of a role."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health import HealthServicer

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
from ps_protocol.rpc.admission import OpenCalls, admission_at
from ps_protocol.rpc.channel import server_options
from ps_protocol.rpc.door import CallThreads, Door, Methods, OneAnswer, at_once, by_thread, plain
from ps_protocol.rpc.server_stream import SAME_THREAD, Call, Handler, Peer
from ps_protocol.rpc.strangers import StrangerGuard
from ps_protocol.security.certificates import ServerCertificates
from ps_protocol.security.options import Security
from ps_protocol.security.permissions import HEALTH
from ps_protocol.wire.codec import decode_message


class Trial(Protocol):
    """A trial of a process's place for checkpoints."""

    @property
    def place(self) -> str:
        """The place as people name it."""

    def run(self, tag: str, *, is_last: bool) -> Sequence[str]:
        """Does what `TryCheckpoints` says. Blocks while the storage does."""


class RpcServer:
    """One server. `listen`, `start`, `stop` and `close` are called once each.

    `identity`: what it says of itself. `address`: where it will listen. `threads`: for calls that may wait.
    """

    def __init__(self, security: Security, *, identity: Identity, address: str) -> None:
        self._security, self._identity, self._address = security, identity, address
        self._strangers = StrangerGuard()
        self._admission = admission_at(address, security, identity=identity, strangers=self._strangers)
        self._health = Health()
        self.threads = CallThreads(server_name=identity.name)
        self._server = grpc.server(SAME_THREAD, options=server_options())

    def may_act_as(self, role: CallerRole, call: Call) -> bool:
        """Whether the caller of a call that was let in may act in this role."""
        return self._admission.may_act_as(role, call)

    def listen(self, methods: Methods, *, epoch: Callable[[], int], trial: Trial | None = None) -> str:
        """Opens the port and returns where it listens. Raises InvalidSpec if it cannot. `epoch`, `trial`: see `handshake_methods`."""
        shared = {**handshake_methods(self._identity, self.threads, epoch=epoch, trial=trial), **self._health.methods}
        door = Door({**methods, **shared}, server_name=self._identity.name, admission=self._admission)
        self._server.add_generic_rpc_handlers((door,))
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
        for service in services:
            self._health.set(service, is_serving=is_serving)

    def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets those under way finish for so long, and ends them."""
        self._strangers.stop()
        self._server.stop(grace_s).wait()
        self._admission.close()

    def close(self) -> None:
        """Waits for the threads of calls that have ended."""
        self.threads.close()


def add_port(server: grpc.Server, address: Address, *, security: Security) -> int:
    """Opens a port, encrypted if the server has a certificate, and returns its number.

    Raises RuntimeError if gRPC cannot, InvalidSpec for certificates that are not right.
    """
    if security.tls_cert is None or address.is_unix:
        port: int = server.add_insecure_port(str(address))
    else:
        port = server.add_secure_port(str(address), ServerCertificates(security).credentials())
    return port


def handshake_methods(identity: Identity, threads: CallThreads, *, epoch: Callable[[], int], trial: Trial | None = None) -> Methods:
    """Returns the methods by which a server says who it is; `epoch` is asked at each call, and must not block.

    `trial`: None if the process has no place for checkpoints.
    """

    def handshake(request: HandshakeRequest, call: Call) -> HandshakeReply:
        return answer(request, identity=identity, epoch=epoch())

    def try_checkpoints(request: TryCheckpointsRequest, call: Call) -> SeenPlace:
        if trial is None:
            return SeenPlace()
        return SeenPlace(place=trial.place, seen=tuple(trial.run(request.tag, is_last=request.is_last)))

    return {
        RPCS[HandshakeRequest].path: at_once(plain(HandshakeRequest, handshake)),
        RPCS[TryCheckpointsRequest].path: by_thread(plain(TryCheckpointsRequest, try_checkpoints), threads),
    }


class Health:
    """The service grpc.health.v1. Holds no thread for who watches. Thread-safe."""

    def __init__(self) -> None:
        self._states = HealthServicer()
        self.methods: Methods = {f"/{HEALTH}/Check": OpenCalls(self._begin_check), f"/{HEALTH}/Watch": self._begin_watch}

    def set(self, service: str, *, is_serving: bool) -> None:
        """Says whether a service is to be used."""
        self._states.set(service, pb.HealthCheckResponse.SERVING if is_serving else pb.HealthCheckResponse.NOT_SERVING)

    def _begin_check(self, peer: Peer, call: Call) -> Handler:
        def check(message: bytes) -> None:
            # For an unknown service it sets the status that the call ends with, and finds nothing.
            found = self._states.Check(decode_message(pb.HealthCheckRequest, message), call)
            if found.status:
                peer.send(found.SerializeToString())
            peer.end()

        return OneAnswer(check)

    def _begin_watch(self, peer: Peer, call: Call) -> Handler:
        def tell(state: pb.HealthCheckResponse | None) -> None:
            if state is not None:
                peer.send(state.SerializeToString())

        return OneAnswer(lambda message: self._states.Watch(decode_message(pb.HealthCheckRequest, message), call, tell))
