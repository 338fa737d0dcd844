"""What every server has, whatever its role: the service that tells callers who answers here. Knows the handshake; nothing else."""

from collections.abc import Callable

import grpc

from ps_protocol.roles.identity import HandshakeRequest, Identity, answer
from ps_protocol.rpc.status import answering
from ps_protocol.v1 import handshake_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.codec import decode_message

SERVICE = "ps_protocol.v1.HandshakeService"


def handshake_handler(identity: Identity, *, epoch: Callable[[], int]) -> grpc.GenericRpcHandler:
    """Returns the service for `server.add_generic_rpc_handlers((handler,))`; `epoch` is asked at each call, and must not block."""

    def handshake(data: bytes, context: grpc.ServicerContext) -> pb.HandshakeResponse:
        with answering(context, server_name=identity.name):
            request = codec.decode(HandshakeRequest, decode_message(pb.HandshakeRequest, data))
            reply: pb.HandshakeResponse = codec.encode(answer(request, identity=identity, epoch=epoch()))
            return reply

    # Takes bytes, so that what is no message at all is refused by us, with a reason.
    method: grpc.RpcMethodHandler[bytes, pb.HandshakeResponse] = grpc.unary_unary_rpc_method_handler(
        handshake, response_serializer=pb.HandshakeResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"Handshake": method})
