"""Scenarios that found a defect once, shrunk, each with the defect; they stay when the meaning of seeds changes. Knows a file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ps_protocol.model.data import DataSpec
from ps_protocol.model.merging import MergeName, MergeSpec
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import DEFAULT_POLICY
from tests.simulation.scenario import Fault, Scenario
from tests.simulation.world import NetworkSpec

FILE = Path(__file__).with_name("kept.jsonl")


def keep(scenario: Scenario, what: str) -> None:
    """Adds one."""
    fields = {**asdict(scenario), "durability": scenario.durability.value if scenario.durability else None}
    with FILE.open("a") as file:
        file.write(json.dumps({"what": what, **fields}, default=lambda kind: kind.name) + "\n")


def kept() -> Iterator[tuple[str, Scenario]]:
    """Yields what each has found, and the scenario."""
    for line in FILE.read_text().splitlines():
        fields = json.loads(line)
        yield fields.pop("what"), _scenario(fields)


def _scenario(fields: Mapping[str, Any]) -> Scenario:
    given = dict(fields)
    given["durability"] = Durability(given["durability"]) if given["durability"] else None
    given["network"] = NetworkSpec(**given["network"])
    given["faults"] = tuple(Fault(**{**fault, "target": tuple(fault["target"])}) for fault in given["faults"])
    given["data"] = DataSpec(**given["data"]) if given["data"] else None
    given["policy"] = _policy(given["policy"]) if "policy" in given else DEFAULT_POLICY
    return Scenario(**given)


def _policy(fields: Mapping[str, Any]) -> PolicySpec:
    kinds = {"name": PolicyName[fields["name"]], "tokens": TokenMode[fields["tokens"]], "too_stale": TooStale[fields["too_stale"]]}
    merge = fields.get("merge")
    merged = {"merge": MergeSpec(name=MergeName[merge["name"]], number=merge["number"])} if merge else {}
    return PolicySpec(**{**fields, **kinds, **merged})
