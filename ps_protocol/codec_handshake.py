"""Protobuf to checked values and back, for the handshake. Knows messages; no RPC."""

from ps_protocol import codec
from ps_protocol.handshake import HandshakeReply, HandshakeRequest, Identity, Role
from ps_protocol.v1 import handshake_service_pb2 as pb
from ps_protocol.version import ProtocolVersion


def encode_handshake_request(request: HandshakeRequest) -> pb.HandshakeRequest:
    """Encodes what the caller believes to be at the address."""
    return pb.HandshakeRequest(
        cluster=request.cluster,
        expected_role="ROLE_UNSPECIFIED" if request.expected_role is None else f"ROLE_{request.expected_role.name}",
        expected_index=request.expected_index,
        version=_encode_version(request.version),
    )


def decode_handshake_request(message: pb.HandshakeRequest) -> HandshakeRequest:
    """Decodes what the caller believes to be at the address."""
    codec.require(message, "version")
    return HandshakeRequest(
        cluster=message.cluster,
        expected_role=codec.decode_choice(Role, message.expected_role, field="expected_role") if message.expected_role else None,
        expected_index=message.expected_index if message.HasField("expected_index") else None,
        version=_decode_version(message.version),
    )


def encode_handshake_reply(reply: HandshakeReply) -> pb.HandshakeResponse:
    """Encodes what is at the address."""
    return pb.HandshakeResponse(
        cluster=reply.identity.cluster,
        role=f"ROLE_{reply.identity.role.name}",
        index=reply.identity.index,
        version=_encode_version(reply.version),
        process_incarnation=reply.identity.process_incarnation,
        epoch=reply.epoch,
        warning=reply.warning,
    )


def decode_handshake_reply(message: pb.HandshakeResponse) -> HandshakeReply:
    """Decodes what is at the address."""
    identity = Identity(
        cluster=message.cluster,
        role=codec.decode_choice(Role, message.role, field="role"),
        index=message.index,
        process_incarnation=message.process_incarnation,
    )
    return HandshakeReply(identity=identity, version=_decode_version(message.version), epoch=message.epoch, warning=message.warning)


def _encode_version(version: ProtocolVersion) -> pb.ProtocolVersion:
    return pb.ProtocolVersion(major=version.major, minor=version.minor)


def _decode_version(message: pb.ProtocolVersion) -> ProtocolVersion:
    return ProtocolVersion(major=message.major, minor=message.minor)
