"""The port of a server, encrypted if the server has a certificate. Knows grpc and certificates; no service."""

import grpc

from ps_protocol.addresses import Address
from ps_protocol.security_options import Security
from ps_protocol.tls import ServerCertificates


def add_port(server: grpc.Server, address: Address, *, security: Security) -> int:
    """Opens the port and returns its number. Raises RuntimeError if gRPC cannot, InvalidSpec for certificates that are not right."""
    if security.tls_cert is None or address.is_unix:
        port: int = server.add_insecure_port(str(address))
    else:
        port = server.add_secure_port(str(address), ServerCertificates(security).credentials())
    return port
