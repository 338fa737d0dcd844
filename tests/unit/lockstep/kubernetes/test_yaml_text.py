"""YAML for people: whatever is written is read back the same, by a parser that others wrote."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.kubernetes.yaml_text import yaml_of
from tests.support.examples import examples

TEXTS = st.text(max_size=20)
NODES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS.filter(lambda key: not key.startswith("#")), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=examples(40))
@given(st.dictionaries(st.sampled_from(["a", "b/c.d", "on", "1", ""]), NODES, min_size=1))
def test_what_is_written_is_read_back(document: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_of([document])) == document


@pytest.mark.parametrize(
    "text", ["yes", "NO", "on", "null", "~", "1", "1e3", "0x1f", "1_000", "12:30", "", "- a", "a: b", "a #b", "{", "*a", "a,"]
)
def test_a_text_that_might_be_something_else_is_quoted(text: str) -> None:
    assert f'"{text}"' in yaml_of([{"value": text}])
    assert yaml.safe_load(yaml_of([[{"value": text}]])) == [{"value": text}]


def test_short_values_stand_on_one_line_and_comments_before_their_key() -> None:
    document = {"# Why.": None, "kind": "Service", "ports": [{"name": "grpc", "port": 5000}], "pods": {"# Inner.": None, "replicas": 1}}
    assert yaml_of([document, {"a": 1}]).splitlines() == [
        "# Why.",
        "kind: Service",
        "ports: [{name: grpc, port: 5000}]",
        "pods:",
        "  # Inner.",
        "  replicas: 1",
        "---",
        "a: 1",
    ]
