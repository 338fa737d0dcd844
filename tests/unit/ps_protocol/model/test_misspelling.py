"""The nearest name is looked for with bounded work, whatever name comes."""

from collections.abc import Sequence

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model import misspelling
from ps_protocol.model.misspelling import did_you_mean
from ps_protocol.model.optimizers import OptimizerSpec, constant


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many names were compared in each look."""
    asked: list[int] = []

    def look(name: str, known: Sequence[str], *, n: int) -> list[str]:
        asked.append(len(known))
        return []

    monkeypatch.setattr(misspelling, "get_close_matches", look)
    return asked


def test_the_nearest_name_is_suggested_and_no_name_if_none_is_near() -> None:
    assert did_you_mean("momentom", ("nesterov", "momentum")) == "; did you mean 'momentum'?"
    assert did_you_mean("x", ("nesterov", "momentum")) == ""


def test_a_name_of_a_megabyte_is_refused_without_comparing_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """15 MB took a chief seven seconds, in which it answered nobody."""
    asked = recorded(monkeypatch)
    with pytest.raises(InvalidSpec, match="unknown hyper-parameter"):
        OptimizerSpec(name="sgd", learning_rate=constant(0.1), hyperparameters={"n" * 1_000_000: 1.0})
    assert did_you_mean("n" * 1_000_000, ["n"]) == ""
    assert asked == []


def test_only_the_first_thousand_of_very_many_names_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recorded(monkeypatch)
    did_you_mean("v", (f"v{number}" for number in range(100_000)))
    assert asked == [1_000]
