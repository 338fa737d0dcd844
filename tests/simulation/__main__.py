"""`python -m tests.simulation --seeds 20000`: runs so many seeds on all processors, and reports coverage and broken promises."""

import argparse
import gc
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.cluster import run, shrunk
from tests.simulation.kept import keep
from tests.simulation.oracle import BrokenPromise
from tests.simulation.scenario import Scenario, scenario_of, unlocked

_AT_ONCE = 50
_MAX_SHOWN, _MAX_WORDS = 40, 300
# What a night must have reached, or it has not tried what it was meant to try.
SOMETIMES = (
    *("request lost", "request sent twice", "answer lost after the work was done", "message late", "checkpoint whole"),
    *("worker came back under a new epoch", "worker superseded", "step gone before it was read", "a chief found itself superseded"),
    *("contribution STALE", "contribution LATE", "contribution DUPLICATE", "worker found the chief at another address"),
    *("chief killed while it made a checkpoint whole", "parameter server killed while it wrote", "rolled back"),
    *("failed, with words, since nothing was saved", "first values came too late", "training data gone through"),
    *("contribution without a gradient", "worker 1 ahead of the slowest", "shards were read at two steps"),
    *("worker went over to another server", "a standby was brought back between two steps"),
    *("worker gave two servers different gradients", "chief asked to end"),
    *("another policy holds", "training finished", "ChangeSettingsRequest carried out", "SaveCheckpointRequest carried out"),
    *(
        "checkpoint is a delta",
        "restored from a delta",
        "worker waited for training data",
        "a chief found what another had trained",
        "a chief found an interrupted step",
    ),
)
SOMETIMES_UNLOCKED = (
    *("request lost", "request sent twice", "answer lost after the work was done", "message late", "checkpoint whole", "rolled back"),
    *("worker came back under a new epoch", "worker superseded", "contribution DUPLICATE", "worker found the chief at another address"),
    *("worker went over to another server", "a chief found what another had trained"),
)


def problem_of(scenario: Scenario) -> str:
    """Returns the promise that does not hold in this scenario, in words; empty: all hold."""
    try:
        run(scenario)
    except BrokenPromise as error:
        return str(error)
    except Exception as error:  # a defect of the code under test, or of the simulation: both are to be looked at
        return f"{type(error).__name__}: {error}"
    return ""


def try_seeds(
    seeds: Sequence[int], suit: Callable[[Scenario], Scenario] = lambda scenario: scenario
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Runs the scenarios of seeds, made to suit; returns what they have reached, and those that broke a promise, with words."""
    reached: Counter[str] = Counter()
    broken = []
    for seed in seeds:
        try:
            cluster = run(suit(scenario_of(seed)))
        except BrokenPromise as error:
            broken.append((seed, str(error)))
        except Exception as error:  # a defect of the code under test, or of the simulation: both are to be looked at
            broken.append((seed, f"{type(error).__name__}: {error}"))
        else:
            reached += cluster.world.seen
            reached["rolled back"] += cluster.oracle.num_rollbacks
            reached["steps applied"] += cluster.oracle.num_applied
    return reached, broken


def try_unlocked(seeds: Sequence[int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """As `try_seeds`, under async without locking."""
    return try_seeds(seeds, unlocked)


def main() -> int:
    """Returns 0 if all promises held and all was reached that must be, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates clusters under faults, by seed.")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one for each processor)")
    parser.add_argument("--seed", type=int, help="one seed alone: its log, then shrunk if it breaks a promise")
    parser.add_argument("--unlocked", action="store_true", help="all of them under async without locking, which no seed has by itself")
    parser.add_argument("--keep", metavar="WORDS", help="with --seed: keep the shrunk scenario as a test, with what it has found")
    flags = parser.parse_args()
    _prepare()
    if flags.seed is not None:
        scenario = scenario_of(flags.seed)
        return _show(unlocked(scenario) if flags.unlocked else scenario, flags.keep)
    seeds = range(flags.first, flags.first + flags.seeds)
    return _try_all(seeds, jobs=flags.jobs, is_unlocked=flags.unlocked)


def _try_all(seeds: Sequence[int], *, jobs: int, is_unlocked: bool) -> int:
    began, reached = time.monotonic(), Counter[str]()
    broken: list[tuple[int, str]] = []
    parts = [seeds[start : start + _AT_ONCE] for start in range(0, len(seeds), _AT_ONCE)]
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        for part_reached, part_broken in pool.map(try_unlocked if is_unlocked else try_seeds, parts):
            reached += part_reached
            for seed, words in part_broken[: max(0, _MAX_SHOWN - len(broken))]:
                print(f"seed {seed}: {words[:_MAX_WORDS]}", flush=True)
            broken += part_broken
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.0f} s, commit {_commit()}: {len(broken)} broke a promise")
    for what, count in sorted(reached.items()):
        print(f"  {count:10,} {what}")
    missing = [what for what in (SOMETIMES_UNLOCKED if is_unlocked else SOMETIMES) if not reached[what]]
    if missing:
        print(f"never reached: {', '.join(missing)}")
    if broken:
        print(f"look at one with: python -m tests.simulation --seed {broken[0][0]}")
    return 1 if broken or missing else 0


def _prepare() -> None:
    """Few of the objects here are garbage in cycles: looking for them all the time takes a fourth of the time."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _show(scenario: Scenario, what: str | None) -> int:
    seed = scenario.seed
    try:
        cluster = run(scenario)
    except Exception as error:
        scenario = shrunk(scenario, breaks=lambda smaller: bool(problem_of(smaller)))
        print(f"seed {seed}: {error}\n{scenario.words}\nit takes: {[*scenario.faults]}")
        if what:
            keep(scenario, what)
        try:
            run(scenario)
        except Exception as shorter:
            print("\n".join([f"{type(shorter).__name__}: {shorter}", *getattr(shorter, "__notes__", ())]))
        return 1
    print("\n".join([scenario.words, *cluster.world.log]))
    return 0


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
