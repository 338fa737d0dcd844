"""Typed errors and plain words for what gRPC itself reports: nobody answered, or none of ours. Knows no channel and no service."""

import grpc

from ps_protocol.channel import MAX_MESSAGE_BYTES
from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidSpec,
    LimitExceeded,
    MalformedMessage,
    PsError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

# What gRPC's text contains -> what it means, and what to do. The first that occurs counts.
_CAUSES: tuple[tuple[str, str], ...] = (
    ("http1.x server", "what listens there speaks HTTP/1.1, not gRPC; check the address"),
    ("Connection refused", "connection refused; is it started?"),
    ("No such file or directory", "there is no such socket; is it started?"),
    ("Permission denied", "permission denied; is the socket another user's?"),
    ("Domain name not found", "the name is unknown; check the address, or wait for its DNS entry"),
    ("address lookup failed", "the name cannot be looked up; check the address and the DNS"),
    ("DNS resolution failed", "the name cannot be looked up; check the address and the DNS"),
    ("No route to host", "no route to host; check the address and the network"),
    ("Network is unreachable", "the network is unreachable; check the address and the network"),
    ("keepalive", "it stopped answering (keepalive); is the process or the machine stopped?"),
    ("ping timeout", "it stopped answering (keepalive); is the process or the machine stopped?"),
    # A connection that has failed before gRPC looked why; for want of time it is "FD Shutdown (connect() timed out)".
    ("Timeout occurred: FD shutdown", "connection refused; is it started?"),
    ("imed out", "no answer to the attempt to connect; check the address and firewalls"),
    ("imeout occurred", "no answer to the attempt to connect; check the address and firewalls"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC; check the address"),
    ("onnection reset", "the connection was lost; did it end?"),
    ("Socket closed", "the connection was lost; did it end?"),
    # Whoever reads when it is cut hears that the socket was closed, and who comes later, that it is.
    ("FD shutdown", "the connection was lost; did it end?"),
    ("FD Shutdown", "the connection was lost; did it end?"),
    ("Endpoint closing", "the connection was lost; did it end?"),
    ("ransport closed", "the connection was lost; did it end?"),
    ("roken pipe", "the connection was lost; did it end?"),
    ("GOAWAY", "the connection was lost; did it end?"),
)

# Connections that come to nothing however often they are tried.
_HOPELESS: dict[str, tuple[type[PsError], str]] = {
    "WRONG_VERSION_NUMBER": (InvalidSpec, "server is not using TLS; pass tls=False, or leave out --tls-ca"),
    "CERTIFICATE_VERIFY_FAILED": (Unauthenticated, "its certificate is not of the authority that was given; check --tls-ca (tls_ca=)"),
    "Hostname Verification Check failed": (
        Unauthenticated,
        "its certificate is for other names than this address; make one with `lockstep certs create --host`, or pass --tls-server-name",
    ),
}


def from_status(code: grpc.StatusCode, details: str, *, target: str, awaited: str, timeout_s: float | None) -> PsError:
    """Returns the error for a call to `target` that ended with `code`; `details` is gRPC's own text."""
    if code is grpc.StatusCode.UNAVAILABLE:
        for fragment, (error_type, words) in _HOPELESS.items():
            if fragment in details:
                return error_type(f"cannot talk to {target}: {words}")
        return Unavailable(f"cannot reach {target}: {_cause(details)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = "in time" if timeout_s is None else f"within {timeout_s:.3g} s"
        return DeadlineExceeded(
            f"{target}: waited for {awaited}, which did not come {limit}; raise the timeout, or see what it is busy with"
        )
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"{target}: the call was cancelled while it waited for {awaited}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unimplemented(
            f"{target}: {details}: it is an older version, has another role, or is no Lockstep server; check the address and the versions"
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        hint = f"; a message may have {MAX_MESSAGE_BYTES} bytes at most" if "larger than max" in details else ""
        return LimitExceeded(f"{target}: {details}{hint}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return MalformedMessage(f"{target}: {details}")
    return InternalError(f"{target}: {code.name}: {details}")


def _cause(details: str) -> str:
    for fragment, words in _CAUSES:
        if fragment in details:
            return words
    return details or "no cause was given"
