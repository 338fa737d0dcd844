"""Wire formats that a user may ask for."""

from typing import Any

import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import InvalidSpec
from worker_client import WireFormat, top_k
from worker_client.model.wire_format import wire_format

AS_IS, BFLOAT16, INT8, TOP_K = FloatEncoding.AS_IS, FloatEncoding.BFLOAT16, FloatEncoding.INT8_BLOCKS, FloatEncoding.TOP_K


@pytest.mark.parametrize(
    ("wire", "gradients", "variables", "feedback"),
    [
        (None, AS_IS, AS_IS, False),
        ("float32", AS_IS, AS_IS, False),
        ("bfloat16", BFLOAT16, BFLOAT16, False),
        ("bfloat16+feedback", BFLOAT16, BFLOAT16, True),
        ("int8", INT8, AS_IS, True),
        ("int4", FloatEncoding.INT4_BLOCKS, AS_IS, True),
        ("top_k:0.25", TOP_K, AS_IS, True),
        ("top_k:0.25+feedback:0.95", TOP_K, AS_IS, 0.95),
        ("top_k:0.25+no_feedback", TOP_K, AS_IS, False),
        (WireFormat(gradients="int8"), INT8, AS_IS, True),
        (WireFormat(gradients="bfloat16"), BFLOAT16, AS_IS, False),
        (WireFormat(variables="float16"), AS_IS, FloatEncoding.FLOAT16, False),
        (WireFormat(gradients=top_k(0.25), variables="bfloat16", error_feedback=False), TOP_K, BFLOAT16, False),
    ],
)
def test_names_of_wire_formats_are_understood(wire: Any, gradients: FloatEncoding, variables: FloatEncoding, feedback: float) -> None:
    format_ = wire_format(wire)
    assert (format_.gradient_encoding, format_.variable_encoding, format_.feedback) == (gradients, variables, feedback)
    assert format_.fraction == (0.25 if gradients is TOP_K else 0)


@pytest.mark.parametrize(
    "wire",
    [
        "",
        "bf16",
        "top_k",
        "top_k:",
        "top_k:2",
        "top_k:nan",
        "int8+so",
        "int8+feedback:",
        "int8+feedback:2",
        "int8+no_feedback:1",
        "int8+feedback:nan",
        "float32+feedback",
        7,
    ],
)
def test_unknown_names_of_wire_formats_are_refused(wire: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"wire|top_k"):
        wire_format(wire)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradients": "fp16"},
        {"gradients": None},
        {"variables": "int8"},
        {"variables": top_k(0.5)},
        {"error_feedback": 1.5},
        {"error_feedback": "all"},
        {"error_feedback": 0.5},
        {"error_feedback": True},
    ],
)
def test_impossible_wire_formats_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="wire"):
        WireFormat(**changes)


@pytest.mark.parametrize("fraction", [0, -1, 1.5, float("nan"), "0.1", True, None])
def test_a_top_k_fraction_outside_zero_and_one_is_refused(fraction: Any) -> None:
    with pytest.raises(InvalidSpec, match="fraction"):
        top_k(fraction)
