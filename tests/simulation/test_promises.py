"""The promises hold on simulated clusters under faults, seed by seed; and each deliberately broken copy of them is caught."""

import itertools

import pytest

from tests.simulation.__main__ import try_seeds
from tests.simulation.cluster import run
from tests.simulation.mutations import MUTATIONS
from tests.simulation.scenario import scenario_of

# Seeds that have found something once, with what it was.
KEPT = {
    11: "a chief that gives up since another is at work",
    36: "contributions that nobody applies fill a worker's places",
    37: "a chief takes over between the apply and the checkpoint that makes the step durable",
    103: "two chiefs that start at one moment choose one number",
    124: "a chief takes over while servers are being restored",
    176: "a worker registers before the servers are brought back, and joins after",
    284: "the newest checkpoint is rotten",
    322: "all processes are killed before anything of an epoch was saved",
}
_AT_ONCE = 25
_MAX_SEEDS = 150


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, 200, _AT_ONCE))
def test_promises_hold(first: int) -> None:
    _, broken = try_seeds(range(first, first + _AT_ONCE))
    assert not broken, "\n".join(f"python -m tests.simulation --seed {seed}: {words}" for seed, words in broken)


@pytest.mark.parametrize("seed", KEPT)
def test_what_was_found_once_is_mended(seed: int) -> None:
    run(scenario_of(seed))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_copy_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promises, break_it, fault = MUTATIONS[name]
    break_it(monkeypatch)
    suited = (seed for seed in range(1000, 100_000) if not fault or any(one.kind == fault for one in scenario_of(seed).faults))
    found = (words for seed in itertools.islice(suited, _MAX_SEEDS) for _, words in try_seeds([seed])[1])
    assert any(words[0] in promises for words in found), f"{_MAX_SEEDS} seeds do not find that {name}"


def test_same_seed_gives_the_same_run() -> None:
    assert run(scenario_of(65)).world.log == run(scenario_of(65)).world.log
