"""The one table between typed errors and gRPC statuses, applied by servers and reversed by clients. Knows no service.

A server wraps each method in `answering` (or `answering_aio`): a PsError ends the call with its status, its text, and the trailing metadata
"ps-reason" (for people and proxies) and "ps-error-bin" (ErrorDetails). `rebuild` makes the same error of it again at the client.
"""

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ps_protocol import errors
from ps_protocol.call_errors import fitting, typed_error
from ps_protocol.errors import InternalError, PsError
from ps_protocol.grpc_failures import from_status
from ps_protocol.v1 import error_pb2

log = logging.getLogger("lockstep.rpc")

REASON_KEY = "ps-reason"
DETAILS_KEY = "ps-error-bin"

_Code = grpc.StatusCode

STATUS: dict[type[PsError], grpc.StatusCode] = {
    # Wrong whatever the state.
    errors.InvalidSpec: _Code.INVALID_ARGUMENT,
    errors.ShapeMismatch: _Code.INVALID_ARGUMENT,
    errors.DtypeMismatch: _Code.INVALID_ARGUMENT,
    errors.IncompletePush: _Code.INVALID_ARGUMENT,
    errors.IndexOutOfRange: _Code.INVALID_ARGUMENT,
    errors.NonFiniteGradient: _Code.INVALID_ARGUMENT,
    errors.MalformedMessage: _Code.INVALID_ARGUMENT,
    errors.TruncatedStream: _Code.INVALID_ARGUMENT,
    errors.FrameOutOfOrder: _Code.INVALID_ARGUMENT,
    errors.PushIdReused: _Code.INVALID_ARGUMENT,
    errors.WorkerIndexOutOfRange: _Code.OUT_OF_RANGE,
    # There is none, or there is another one.
    errors.VariableNotFound: _Code.NOT_FOUND,
    errors.SlotNotFound: _Code.NOT_FOUND,
    errors.AccumulatorNotFound: _Code.NOT_FOUND,
    errors.AccumulatorExists: _Code.ALREADY_EXISTS,
    errors.VariableExists: _Code.ALREADY_EXISTS,
    errors.ModelMismatch: _Code.ALREADY_EXISTS,
    errors.WorkerIndexTaken: _Code.ALREADY_EXISTS,
    # Too much.
    errors.ClusterFull: _Code.RESOURCE_EXHAUSTED,
    errors.LimitExceeded: _Code.RESOURCE_EXHAUSTED,
    errors.TooManyPushes: _Code.RESOURCE_EXHAUSTED,
    # Wrong now; something else must be done first.
    errors.NotInitialized: _Code.FAILED_PRECONDITION,
    errors.NotInitializer: _Code.FAILED_PRECONDITION,
    errors.LayoutMismatch: _Code.FAILED_PRECONDITION,
    errors.LeaseExpired: _Code.FAILED_PRECONDITION,
    errors.StepGone: _Code.FAILED_PRECONDITION,
    errors.StepNotReady: _Code.FAILED_PRECONDITION,
    errors.StepAhead: _Code.FAILED_PRECONDITION,
    errors.StepMismatch: _Code.FAILED_PRECONDITION,
    errors.ContributionMissing: _Code.FAILED_PRECONDITION,
    errors.WrongCluster: _Code.FAILED_PRECONDITION,
    errors.WrongRole: _Code.FAILED_PRECONDITION,
    errors.ProtocolMismatch: _Code.FAILED_PRECONDITION,
    errors.TrainingFailed: _Code.FAILED_PRECONDITION,
    errors.CheckpointMismatch: _Code.FAILED_PRECONDITION,
    errors.CheckpointStorageMissing: _Code.FAILED_PRECONDITION,
    errors.DataMismatch: _Code.FAILED_PRECONDITION,
    # Storage.
    errors.CheckpointNotFound: _Code.NOT_FOUND,
    errors.StorageFull: _Code.RESOURCE_EXHAUSTED,
    # Not UNAVAILABLE: another attempt of the same call would only meet the same disk.
    errors.StorageFailed: _Code.FAILED_PRECONDITION,
    errors.DataLoss: _Code.DATA_LOSS,
    # Not let in.
    errors.Unauthenticated: _Code.UNAUTHENTICATED,
    errors.PermissionDenied: _Code.PERMISSION_DENIED,
    # Fenced: start again.
    errors.EpochMismatch: _Code.ABORTED,
    errors.Superseded: _Code.ABORTED,
    # The call did not come through.
    errors.Unavailable: _Code.UNAVAILABLE,
    errors.ShuttingDown: _Code.UNAVAILABLE,
    errors.DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    errors.Cancelled: _Code.CANCELLED,
    errors.Unimplemented: _Code.UNIMPLEMENTED,
    errors.InternalError: _Code.INTERNAL,
}


@contextlib.contextmanager
def answering(context: grpc.ServicerContext, *, server_name: str = "the server") -> Iterator[None]:
    """Ends the call with the status of whatever error the block raises; `server_name` says in whose log a defect's details are."""
    try:
        yield
    except PsError as error:
        _abort(context, error)
    except grpc.RpcError:
        # The request iterator ends so when the client has gone: nobody is left to be answered.
        if context.is_active():
            _abort(context, defect(server_name))
        raise
    except Exception:
        _abort(context, defect(server_name))


@contextlib.asynccontextmanager
async def answering_aio(context: "grpc.aio.ServicerContext[object, object]", *, server_name: str = "the server") -> AsyncIterator[None]:
    """Does for asyncio what `answering` does for threads."""
    try:
        yield
    except PsError as error:
        await context.abort(*_answer(error))
    except grpc.aio.AbortError:
        raise
    except Exception:
        await context.abort(*_answer(defect(server_name)))


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


def _abort(context: grpc.ServicerContext, error: PsError) -> NoReturn:
    code, text, metadata = _answer(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, text)


def defect(server_name: str) -> InternalError:
    """Logs the exception that is being handled, and returns what the caller is told of it."""
    number = secrets.token_hex(4)
    log.exception("internal error number=%s", number)
    return InternalError(f"internal error {number} (see the log of {server_name})")


def _answer(error: PsError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    # Somebody may keep the error, and shall not keep with it all that it came through.
    error.__traceback__ = None
    text, facts = fitting(error)
    details = error_pb2.ErrorDetails(reason=error.reason, facts=facts)
    return status_of(error), text, ((REASON_KEY, error.reason), (DETAILS_KEY, details.SerializeToString()))


def status_of(error: PsError) -> grpc.StatusCode:
    """Returns the status that the error travels with."""
    return next((STATUS[base] for base in type(error).__mro__ if base in STATUS), _Code.INTERNAL)


def rebuild(error: grpc.RpcError, *, target: str, awaited: str = "an answer", timeout_s: float | None = None) -> PsError:
    """Returns the typed error behind a failed call.

    `target` says who was called, for example "ps 0 at 127.0.0.1:5000"; `awaited` what for, and `timeout_s` how long: for the texts of
    errors that gRPC itself reports.
    """
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
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
