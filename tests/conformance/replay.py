"""Replays recorded cases of the original through a client, against real parameter servers and a real chief over gRPC.

    python tests/conformance/replay.py FILE…

Prints what failed, a line for each kind and a line of all; exits with 1 if anything failed. A file without cases is one failure.
Knows kinds of cases and how to run them.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file, Python finds what lies beside it and not the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ps_protocol.errors import PsError
from tests.conformance.checking import Mismatch
from tests.conformance.clusters import Start, cluster_of_processes
from tests.conformance.replay_accumulators import replay_dense, replay_sparse
from tests.conformance.replay_arrangement import replay_partitioner, replay_placement
from tests.conformance.replay_strategy import open_strategies
from tests.conformance.replay_sync import replay_sync_replicas, shape_of
from tests.conformance.replay_training import replay_moving_average, replay_optimizer
from tests.support.cluster.shape import Shape

Case = dict[str, Any]
Replay = Callable[[Case], None]

NUM_PARALLEL_CLUSTERS = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """How cases of a kind are replayed: `open` starts what they share, and `num_parallel` of them run at the same time."""

    open: Callable[[ExitStack, Start, Sequence[Case]], Replay]
    num_parallel: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that did not do what was recorded."""

    case: int
    text: str


def _in_one_cluster(replay: Callable[..., None]) -> Kind:
    """All cases in one cluster of two parameter servers, each with a name of its own."""

    def opened(stack: ExitStack, start: Start, cases: Sequence[Case]) -> Replay:
        observer = stack.enter_context(start(Shape(num_ps=2))).observer()
        numbers = itertools.count()
        return lambda case: replay(case, target=observer, name=f"case {next(numbers)}")

    return Kind(opened)


def _in_clusters(replay: Callable[..., None], shape_of: Callable[[Case], Shape] = lambda case: Shape(num_workers=1)) -> Kind:
    """A new cluster for each case, since a cluster trains one model. Most of the time is Python's start, so several at a time."""

    def opened(stack: ExitStack, start: Start, cases: Sequence[Case]) -> Replay:
        def one(case: Case) -> None:
            with start(shape_of(case)) as cluster:
                replay(case, cluster=cluster)

        return one

    return Kind(opened, num_parallel=NUM_PARALLEL_CLUSTERS)


KINDS: dict[str, Kind] = {
    "dense_accumulator": _in_one_cluster(replay_dense),
    "sparse_accumulator": _in_one_cluster(replay_sparse),
    "optimizer": _in_clusters(replay_optimizer),
    "moving_average": _in_clusters(replay_moving_average),
    "placement": _in_clusters(replay_placement, lambda case: Shape(num_ps=case["ps_tasks"], num_workers=1)),
    "partitioner": _in_clusters(replay_partitioner, lambda case: Shape(num_ps=2, num_workers=1)),
    "strategy": Kind(open_strategies),
    "sync_replicas": _in_clusters(replay_sync_replicas, shape_of),
}


def replay_file(path: Path, *, start: Start = cluster_of_processes) -> tuple[str, int, list[Failure]]:
    """Returns the file's kind, the number of its cases, and those that failed. Raises ValueError for a file that holds no cases."""
    kind, cases = _parse(path)
    if kind not in KINDS:
        return kind, len(cases), [Failure(index, f"no such kind; known are {', '.join(KINDS)}") for index in range(len(cases))]
    with ExitStack() as stack:
        replay = KINDS[kind].open(stack, start, cases)
        with ThreadPoolExecutor(KINDS[kind].num_parallel) as pool:
            results = list(pool.map(lambda numbered: _attempt(replay, *numbered), enumerate(cases)))
    return kind, len(cases), [failure for failure in results if failure is not None]


def _parse(path: Path) -> tuple[str, list[Case]]:
    """Raises ValueError, in words, for what is no file of the format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from error
    kind, cases = (content.get("kind"), content.get("cases")) if isinstance(content, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(cases, list) or not cases:
        raise ValueError('has no cases: want {"kind": "…", "cases": [{…}, …]}, with at least one')
    return kind, cases


def _attempt(replay: Replay, index: int, case: Case) -> Failure | None:
    try:
        replay(case)
    except (Mismatch, PsError) as error:
        return Failure(index, f"{type(error).__name__}: {error}")
    except Exception as error:
        # A case that this program cannot even play is a failed one, and the others shall still be played.
        return Failure(index, f"{type(error).__name__}: {error!r}")
    return None


def main(arguments: Sequence[str], *, start: Start = cluster_of_processes) -> int:
    """Replays the named files and returns the exit status."""
    parser = argparse.ArgumentParser(description="Replays recorded cases against real processes over gRPC.")
    parser.add_argument("files", nargs="+", metavar="FILE", type=Path, help="a file of the conformance format")
    num_passed = num_failed = 0
    for path in parser.parse_args(arguments).files:
        started = time.monotonic()
        try:
            kind, count, failures = replay_file(path, start=start)
        except ValueError as error:
            print(f"{path}: {error}; counted as failed", flush=True)
            num_failed += 1
            continue
        for failure in failures:
            print(f"  {kind} case {failure.case}: {failure.text}")
        print(f"{kind}: {count - len(failures)} of {count} passed ({time.monotonic() - started:.1f} s)", flush=True)
        num_passed, num_failed = num_passed + count - len(failures), num_failed + len(failures)
    print(f"{num_passed} passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
