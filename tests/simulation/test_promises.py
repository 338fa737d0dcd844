"""The promises hold on simulated clusters under faults, seed by seed; and each deliberately broken copy of them is caught."""

import itertools
from dataclasses import replace

import pytest

from tests.simulation.__main__ import problem_of, try_seeds, try_unlocked
from tests.simulation.cluster import run
from tests.simulation.kept import kept
from tests.simulation.mutations import MUTATIONS
from tests.simulation.scenario import Scenario, scenario_of

# `make simulate` tries 20,000.
_NUM_SEEDS, _NUM_UNLOCKED = 10, 4
_MAX_SCENARIOS = 150


@pytest.mark.shows("F16")
@pytest.mark.timeout(120)
def test_the_promises_hold_in_every_simulated_scenario() -> None:
    _, broken = try_seeds(range(_NUM_SEEDS))
    assert not broken, "\n".join(f"python -m tests.simulation --seed {seed}: {words}" for seed, words in broken)


@pytest.mark.timeout(120)
def test_the_promises_hold_in_every_simulated_scenario_without_locking() -> None:
    _, broken = try_unlocked(range(_NUM_UNLOCKED))
    assert not broken, "\n".join(f"python -m tests.simulation --unlocked --seed {seed}: {words}" for seed, words in broken)


@pytest.mark.parametrize("scenario", [pytest.param(scenario, id=what.replace(" ", "-")) for what, scenario in kept()])
def test_every_scenario_that_once_broke_a_promise_keeps_it(scenario: Scenario) -> None:
    run(scenario)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_detects_every_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    mutation.break_it(monkeypatch)
    suited = (scenario for seed in range(mutation.first_seed, 100_000) if (scenario := mutation.suit(scenario_of(seed))) is not None)
    found = (problem_of(scenario) for scenario in itertools.islice(suited, _MAX_SCENARIOS))
    assert any(words[:1] in mutation.promises for words in found if words), f"{_MAX_SCENARIOS} scenarios do not find that {name}"


@pytest.mark.parametrize("has_standbys", [False, True])
def test_same_seed_gives_the_same_run(has_standbys: bool) -> None:
    scenario = replace(scenario_of(65), has_standbys=has_standbys)
    assert run(scenario).world.log == run(scenario).world.log
