"""Calls and outcomes of closures as messages: unpacking a message gives what was packed, and malformed messages are refused."""

import json
import math
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import MalformedMessage
from worker_client.strategy.closures import Call, Outcome, pack_call, pack_outcome, unpack_call, unpack_outcome


def message(value: Any) -> list[Any]:
    return [np.frombuffer(json.dumps(value).encode(), np.uint8), np.zeros(2)]


def test_packed_calls_and_outcomes_are_unpacked_unchanged() -> None:
    call = unpack_call(pack_call(Call(function="f", args=(1, [2.0, ("x", None)]), kwargs={"a": {"b": True}})))
    assert (call.function, call.args, call.kwargs) == ("f", (1, [2.0, ("x", None)]), {"a": {"b": True}})
    assert unpack_outcome(pack_outcome(Outcome(value=(1, "x"), error=""))) == Outcome(value=(1, "x"), error="")


FIELDS: dict[str, Any] = {"function": "f", "args": {"tuple": []}, "kwargs": {"dict": {}}, "value": 1, "error": ""}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "x",
        1,
        math.inf,
        [],
        {},
        {"array": 0},
        {"array": 2},
        {"array": "a"},
        {"dict": []},
        {"dict": {}},
        {"dataset": [math.inf, math.inf, math.inf]},
        {"two": 1, "kinds": 2},
        {"dict": {**FIELDS, "args": {"array": 0}, "value": {"array": 9}}},
        {"dict": {**FIELDS, "kwargs": None, "error": {"dict": {}}}},
        {"dict": {**FIELDS, "function": 1, "error": 1}},
    ],
)
def test_malformed_calls_and_outcomes_are_refused(content: Any) -> None:
    """A worker ended with KeyError or TypeError, and a coordinator's thread for that worker, so that join() waited for ever."""
    for unpack in (unpack_call, unpack_outcome):
        with pytest.raises(MalformedMessage, match="a closure's message cannot be read"):
            unpack(message(content))


@pytest.mark.parametrize("values", [[np.array([255.0, 255.0])], [np.array([math.nan])], [np.zeros(0)], []])
def test_bytes_that_are_no_text_are_refused(values: list[Any]) -> None:
    for unpack in (unpack_call, unpack_outcome):
        with pytest.raises(MalformedMessage, match="a closure's message cannot be read"):
            unpack(values)
