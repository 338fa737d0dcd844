"""Asks who is at an address before any work is done there. Knows the handshake; nothing of the other services."""

import grpc

from ps_protocol.access import DEFAULT_ACCESS, Access
from ps_protocol.codec_handshake import decode_handshake_reply, encode_handshake_request
from ps_protocol.connection import translating
from ps_protocol.errors import InvalidSpec, ProtocolMismatch, Unavailable, Unimplemented, WrongCluster, WrongRole
from ps_protocol.handshake import HandshakeReply, HandshakeRequest, Role, name_of
from ps_protocol.tls_probe import may_be_tls, speaks_tls
from ps_protocol.v1 import handshake_service_pb2 as pb
from ps_protocol.version import PROTOCOL_VERSION, check_versions

_METHOD = "/ps_protocol.v1.HandshakeService/Handshake"


def handshake(
    channel: grpc.Channel,
    *,
    address: str,
    role: Role | None,
    index: int | None = None,
    cluster: str = "",
    timeout_s: float,
    access: Access = DEFAULT_ACCESS,
) -> HandshakeReply:
    """Returns who is at `address`, asking once; raises WrongCluster, WrongRole or ProtocolMismatch if it is not who is wanted.

    `role` None, `index` None and an empty `cluster` accept any; `access` is what the channel was opened with. Also Unavailable and
    DeadlineExceeded; InvalidSpec if the server speaks TLS and the caller does not, or the other way round.
    """
    target = f"{name_of(role, index) if role else 'the server'} at {address}"
    request = HandshakeRequest(cluster=cluster, expected_role=role, expected_index=index, version=PROTOCOL_VERSION)
    invoke = channel.unary_unary(
        _METHOD, request_serializer=pb.HandshakeRequest.SerializeToString, response_deserializer=pb.HandshakeResponse.FromString
    )
    try:
        with translating(target, awaited="the handshake", timeout_s=timeout_s):
            message = invoke(encode_handshake_request(request), timeout=timeout_s, metadata=access.metadata_for(address)())
        reply = decode_handshake_reply(message)
        check_versions(client=PROTOCOL_VERSION, server=reply.version)
    except (WrongCluster, WrongRole, ProtocolMismatch) as error:
        # The server does not know by which address it was called.
        raise type(error)(f"{address}: {error.message}", facts=error.facts) from None
    except Unimplemented:
        raise WrongRole(f"{address}: a gRPC server answers there, but not one of Lockstep's; check the address") from None
    except Unavailable as error:
        if not may_be_tls(error.message):
            raise
        if access.uses_tls(address) and access.security.tls_cert is None:
            raise Unavailable(f"{error.message} If it asks callers for certificates: pass --tls-cert and --tls-key") from None
        if not access.uses_tls(address) and speaks_tls(address):
            raise InvalidSpec(f"cannot talk to {target}: server speaks TLS; pass tls=True or --tls-ca") from None
        raise
    return reply
