"""The user's choice of encodings for gradients and variables. Knows names and numbers; encodes nothing."""

import math
from dataclasses import dataclass

from ps_protocol.encodings.formats import FORMATS, FloatEncoding, Packed
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass

_BOTH_WAYS = {one.name: one.encoding for one in FORMATS.values() if one.is_for_variables}
# Of variables, it is how they moved, where the optimizer moves them so that 4 bits say that exactly.
_VARIABLES = {**_BOTH_WAYS, "int4": FloatEncoding.INT4_BLOCKS}
# The formats that need no number beside their name.
_GRADIENTS = {one.name: one.encoding for one in FORMATS.values() if not isinstance(one.coding, Packed)}
_TOP_K = "top_k:"
_FEEDBACK = "feedback"


@light_dataclass(frozen=True, slots=True)
class TopK:
    """Sends only the share `fraction` of elements, those of largest magnitude in each chunk. See `top_k`."""

    fraction: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not is_number or not 0 < self.fraction <= 1:
            raise InvalidSpec(f"top_k: got fraction {self.fraction!r}, want a number > 0 and <= 1, for example top_k(0.01)")


def top_k(fraction: float) -> TopK:
    """Returns the choice to send only the share `fraction` (0 to 1) of a gradient's elements, in two bytes each.

    They are those of largest magnitude in each chunk of 4,096, with values of 4 bits that share a scale. Source: SparseLoCo, arXiv
    2508.15706, which has 2 bits; with 4 a position and a value fill two bytes. Raises InvalidSpec. For `WireFormat(gradients=top_k(0.01))`.
    """
    return TopK(fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """The encoding of float32 elements of gradients and variables; other types, rows of tables and updates of buffers are not encoded.

    `gradients`: the name of a format, such as "float32" (not encoded), "bfloat16", "int8" or "int4", or `top_k(fraction)`. `variables`: a
    format that is not for gradients only; or "int4": the difference to the step before, where 4 bits an element say that exactly, as after
    `outer_optimizer(…, bits=4)`, else the variables as they are. `error_feedback`: how much of what encoding lost of earlier gradients is
    added to the next one: all (True or 1), nothing (False or 0) or a share, so that what is old fades (SparseLoCo, arXiv 2508.15706); None:
    the format's default, all for those of gradients only, else nothing. It takes two arrays of the model's size at the worker.
    Raises InvalidSpec.
    """

    gradients: str | TopK = "float32"
    variables: str = "float32"
    error_feedback: bool | float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.gradients, TopK) and (not isinstance(self.gradients, str) or self.gradients not in _GRADIENTS):
            names = ", ".join(repr(name) for name in _GRADIENTS)
            raise InvalidSpec(f"wire: gradients {self.gradients!r}, want one of {names} or top_k(fraction)")
        if not isinstance(self.variables, str) or self.variables not in _VARIABLES:
            names = ", ".join(repr(name) for name in _VARIABLES)
            raise InvalidSpec(f"wire: variables {self.variables!r}, want one of {names}; the others are for gradients")
        feedback = self.error_feedback
        if feedback is not None and not (isinstance(feedback, (bool, int, float)) and 0 <= feedback <= 1):
            raise InvalidSpec(f"wire: error_feedback {feedback!r}, want True, False, a share from 0 to 1, or None")
        if self.error_feedback and self.gradients == "float32":
            raise InvalidSpec("wire: error_feedback without an encoding of gradients: nothing is lost; choose one, or leave it out")

    @property
    def gradient_encoding(self) -> FloatEncoding:
        """The encoding of gradients."""
        return FloatEncoding.TOP_K if isinstance(self.gradients, TopK) else _GRADIENTS[self.gradients]

    @property
    def variable_encoding(self) -> FloatEncoding:
        """The encoding of variables."""
        return _VARIABLES[self.variables]

    @property
    def fraction(self) -> float:
        """The share of elements that is sent; 0 unless `gradients` is a TopK."""
        return self.gradients.fraction if isinstance(self.gradients, TopK) else 0.0

    @property
    def feedback(self) -> float:
        """The share of what encoding lost of earlier gradients that is added to the next one."""
        return float(FORMATS[self.gradient_encoding].feeds_errors_back if self.error_feedback is None else self.error_feedback)


def wire_format(wire: "str | WireFormat | None") -> WireFormat:
    """Returns a user's choice as a `WireFormat`; raises InvalidSpec.

    None: no encoding. A str, also from LOCKSTEP_WIRE: the name of a format, for example "top_k:0.01". Halves are for both directions; other
    formats are for gradients, and variables are not encoded. "+feedback", "+feedback:0.95" or "+no_feedback" may
    follow.
    """
    if isinstance(wire, WireFormat):
        return wire
    if wire is None:
        return WireFormat()
    if not isinstance(wire, str):
        raise InvalidSpec(f"wire: got a {type(wire).__name__}, want a str or a WireFormat")
    name, _, feedback = wire.partition("+")
    if feedback.partition(":")[0] in ("", _FEEDBACK) or feedback == f"no_{_FEEDBACK}":
        chosen = _share(feedback)
        if name in _BOTH_WAYS:
            return WireFormat(gradients=name, variables=name, error_feedback=chosen)
        if name in _GRADIENTS:
            return WireFormat(gradients=name, error_feedback=chosen)
        if name.startswith(_TOP_K):
            return WireFormat(gradients=top_k(_fraction(name.removeprefix(_TOP_K))), error_feedback=chosen)
    names = ", ".join(repr(name) for name in _GRADIENTS)
    raise InvalidSpec(f"wire: got {wire!r}, want one of {names}, or for example 'top_k:0.01'")


def _share(feedback: str) -> bool | float | None:
    """Returns the `error_feedback` that is spelled so."""
    word, colon, share = feedback.partition(":")
    return _fraction(share) if colon else word == _FEEDBACK if word else None


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
