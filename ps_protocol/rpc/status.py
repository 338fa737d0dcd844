"""The one table between typed errors and gRPC statuses, applied by servers and reversed by clients. Knows no service."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable

import grpc
from google.protobuf.message import DecodeError

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
from ps_protocol.rpc.channel import MAX_MESSAGE_BYTES
from ps_protocol.v1 import error_pb2
from ps_protocol.wire.call_errors import fitting, typed_error

# Typed errors and plain words for what gRPC itself reports: no answer, or an answer that is not ours.


# What gRPC's text contains -> what it means, and what to do. The first that occurs counts.
_CAUSES: tuple[tuple[str, str], ...] = (
    # A new one may come at any moment, without a restart.
    ("certificate has expired", "its certificate has expired; replace it by a new one, which it takes without a restart"),
    ("certificate is not yet valid", "its certificate is not valid yet; check the clocks of both machines"),
    ("http1.x server", "what listens there speaks HTTP/1.1, not gRPC; check the address"),
    ("Connection refused", "connection refused; is it started?"),
    ("No such file or directory", "there is no such socket; is it started?"),
    ("Permission denied", "permission denied; is the socket another user's?"),
    ("Domain name not found", "the name is unknown; check the address, or wait for its DNS entry"),
    ("address lookup failed", "the name cannot be looked up; check the address and the DNS"),
    ("DNS resolution failed", "the name cannot be looked up; check the address and the DNS"),
    ("No route to host", "no route to host; check the address and the network"),
    ("Network is unreachable", "the network is unreachable; check the address and the network"),
    ("keepalive", "no answer any more; is its process or machine stopped, or the network cut?"),
    ("ping timeout", "no answer any more; is its process or machine stopped, or the network cut?"),
    # A link that is cut; once in a while also a connection that was refused before gRPC looked why.
    ("Timeout occurred: FD shutdown", "no connection; is it started, and is the network to it there?"),
    # The attempt to connect was given up before anything came back.
    ("andshaker shutdown", "no answer; is its machine up, the address right, the network cut?"),
    ("imed out", "no answer; is its machine up, the address right, the network cut?"),
    ("imeout occurred", "no answer; is its machine up, the address right, the network cut?"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC; check the address"),
    ("onnection reset", "the connection was lost; did it end?"),
    ("Socket closed", "the connection was lost; did it end?"),
    # A reader at that moment gets "socket closed"; a later call finds it closed.
    ("FD shutdown", "the connection was lost; did it end?"),
    ("FD Shutdown", "the connection was lost; did it end?"),
    ("Endpoint closing", "the connection was lost; did it end?"),
    ("ransport closed", "the connection was lost; did it end?"),
    ("roken pipe", "the connection was lost; did it end?"),
    ("GOAWAY", "the connection was lost; did it end?"),
)

# What gRPC says of a server's certificate where a new one, or the right time, makes it good.
_OUT_OF_DATE = ("certificate has expired", "certificate is not yet valid")
# Connections that come to nothing however often they are tried, unless somebody else answers in the server's place for a while.
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
        is_out_of_date = any(fragment in details for fragment in _OUT_OF_DATE)
        for fragment, (error_type, words) in _HOPELESS.items():
            if fragment in details and not is_out_of_date:
                return error_type(f"cannot talk to {target}: {words}", facts={"failed": "connection"})
        return Unavailable(f"cannot reach {target}: {_cause(details)}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = "in time" if timeout_s is None else f"within {timeout_s:.3g} s"
        return DeadlineExceeded(
            f"{target}: waited for {awaited}, which did not come {limit}; raise the timeout, or see what it is busy with"
        )
    if code is grpc.StatusCode.CANCELLED:
        # A server that ends cancels its calls, and gRPC says no more than that.
        why = details if details not in ("", "CANCELLED") else "it is ending, or the caller gave up"
        return Cancelled(f"{target}: the call was cancelled while it waited for {awaited}: {why}")
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


# A PsError ends a call with its status, its text, and the trailing metadata "ps-reason" (for people and proxies) and "ps-error-bin"
# (ErrorDetails). `rebuild` makes the same error of it again at the client.


log = logging.getLogger("lockstep.rpc")

REASON_KEY = "ps-reason"
DETAILS_KEY = "ps-error-bin"


def set_status(context: grpc.ServicerContext, error: PsError) -> None:
    """Has a call end with the error's status when its handler ends it."""
    ending_with(error)(context)


def ending_with(error: PsError) -> Callable[[grpc.ServicerContext], None]:
    """Returns what does that for any call: for an error that many calls end with."""
    code, text, metadata = _answer(error)

    def set_it(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(metadata)
        context.set_code(code)
        context.set_details(text)

    return set_it


def defect(server_name: str) -> InternalError:
    """Logs the exception that is being handled, and returns the error that the caller gets."""
    number = secrets.token_hex(4)
    log.exception("internal error number=%s", number)
    return InternalError(f"internal error {number} (see the log of {server_name})")


def _answer(error: PsError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    # A caller may keep the error, and must not keep every frame of its traceback with it.
    error.__traceback__ = None
    text, facts = fitting(error)
    details = error_pb2.ErrorDetails(reason=error.reason, facts=facts)
    return status_of(error), text, ((REASON_KEY, error.reason), (DETAILS_KEY, details.SerializeToString()))


def status_of(error: PsError) -> grpc.StatusCode:
    """Returns the status that the error travels with."""
    return grpc.StatusCode[error.status]


def rebuild(error: grpc.RpcError, *, target: str, awaited: str = "an answer", timeout_s: float | None = None) -> PsError:
    """Returns the typed error behind a failed call.

    `target` says who was called, for example "ps 0 at 127.0.0.1:5000"; `awaited` what for, and `timeout_s` how long: for the texts of
    errors that gRPC itself reports.
    """
    if not isinstance(error, grpc.Call):
        return InternalError(f"{target}: {error!r}")
    metadata = error.trailing_metadata() or ()
    return from_ending(error.code(), error.details() or "", tuple(metadata), target=target, awaited=awaited, timeout_s=timeout_s)


def from_ending(
    code: grpc.StatusCode,
    text: str,
    metadata: Iterable[tuple[str, str | bytes]],
    *,
    target: str,
    awaited: str = "an answer",
    timeout_s: float | None = None,
) -> PsError:
    """Returns the typed error behind the end of a call: its status, its text and its trailing metadata. See `rebuild`."""
    details = _details(metadata)
    if details is None:
        return from_status(code, text, target=target, awaited=awaited, timeout_s=timeout_s)
    return typed_error(details.reason, text, dict(details.facts))


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> error_pb2.ErrorDetails | None:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return error_pb2.ErrorDetails.FromString(value)
    return None
