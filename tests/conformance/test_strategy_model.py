"""A model of the original's rules: it computes the recorded results, and our strategies compute the model's results of other cases."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.clusters import cluster_of_objects
from tests.conformance.replay import replay_file
from tests.conformance.replay_strategy import check_seen, play_alone
from tests.conformance.strategy_model import Model, make_case
from tests.support.repository import ROOT

RECORDED = json.loads((ROOT / "tests" / "conformance" / "cases" / "strategy.json").read_text(encoding="utf-8"))["cases"]

# With the recorded cases, which are played the same way, each operation comes often enough.
NUM_SEEDS = 20

pytestmark = pytest.mark.timeout(240)


def test_the_model_gives_what_was_recorded_of_the_original() -> None:
    num_operations = 0
    for number, case in enumerate(RECORDED):
        model = Model(case)
        for place, op in enumerate(case["operations"]):
            check_seen(f"case {number}, operations[{place}] {op['op']}", model.act(op), op["expect"])
            num_operations += 1
    assert num_operations == 783


@given(st.randoms(use_true_random=False))
def test_a_strategy_gives_what_the_model_says_of_any_case(rng: random.Random) -> None:
    play_alone(make_case(rng))


def test_workers_of_a_cluster_give_what_the_model_says_of_cases_of_other_seeds(tmp_path: Path) -> None:
    cases: list[Any] = [make_case(random.Random(seed)) for seed in range(NUM_SEEDS)]
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({"kind": "strategy", "cases": cases}), encoding="utf-8")
    assert replay_file(path, start=cluster_of_objects) == ("strategy", NUM_SEEDS, [])
