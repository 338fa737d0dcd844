"""Errors within streams that continue, and the parts of any error that travel: reason, text and facts, cut to fit. No streams here."""

from ps_protocol.errors import ERRORS, PsError
from ps_protocol.v1 import error_pb2

# Text and facts travel in headers, which the peer limits; a character of the text may take 9 bytes there.
MAX_TEXT_CHARACTERS = 1_500
MAX_FACTS_BYTES = 2_048

_BY_REASON = {error.reason: error for error in ERRORS}


def encode_call_error(error: PsError) -> error_pb2.CallError:
    """Encodes an error."""
    text, facts = fitting(error)
    return error_pb2.CallError(reason=error.reason, message=text, facts=facts)


def decode_call_error(message: error_pb2.CallError) -> PsError:
    """Returns the error again, to be raised."""
    return typed_error(message.reason, message.message, dict(message.facts))


def fitting(error: PsError) -> tuple[str, dict[str, str]]:
    """Returns an error's text and facts as they may travel: cut to what fits into headers."""
    text = _encodable(error.message)
    if len(text) > MAX_TEXT_CHARACTERS:
        text = text[: MAX_TEXT_CHARACTERS - 1] + "…"
    return text, _fitting_facts(error.facts)


def typed_error(reason: str, message: str, facts: dict[str, str]) -> PsError:
    """Returns the error of a reason."""
    if reason in _BY_REASON:
        return _BY_REASON[reason](message, facts=facts)
    # A newer server's reason: its text is still the best there is, and a program may look at `reason`.
    unknown = PsError(message, facts=facts)
    unknown.reason = reason
    return unknown


def _fitting_facts(facts: dict[str, str]) -> dict[str, str]:
    room, kept = MAX_FACTS_BYTES, {}
    for name, value in ((name, _encodable(value)) for name, value in facts.items()):
        size = len(name.encode()) + len(value.encode()) + 8
        if size <= room:
            kept[name] = value
            room -= size
    return kept


def _encodable(text: str) -> str:
    # A name with a lone surrogate may be quoted in a text; it must not turn the answer into another error.
    return text.encode(errors="backslashreplace").decode()
