"""Errors within streams that go on: what would otherwise end a call with a status. Knows the message; no stream."""

from ps_protocol.errors import PsError
from ps_protocol.status import fitting, typed_error
from ps_protocol.v1 import error_pb2


def encode_call_error(error: PsError) -> error_pb2.CallError:
    """Encodes an error."""
    text, facts = fitting(error)
    return error_pb2.CallError(reason=error.reason, message=text, facts=facts)


def decode_call_error(message: error_pb2.CallError) -> PsError:
    """Returns the error again, to be raised."""
    return typed_error(message.reason, message.message, dict(message.facts))
