"""What the chaos tests share: a cluster of a test's own, and the table of recovery times."""

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.plan import Plan
from tests.support.repository import ROOT

RECOVERY_TIMES = ROOT / "lockstep-runs" / "chaos" / "recovery.jsonl"
Started = Callable[[Plan], Cluster]
Record = Callable[..., None]


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs those marked `quick`, `make chaos` all. Asked of the tests in this folder only."""
    if item.get_closest_marker("quick") is None:
        item.add_marker("chaos")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What must end with the test."""
    with ExitStack() as found:
        yield found


@pytest.fixture
def start(stack: ExitStack, tmp_path: Path, socket_dir: Path) -> Started:
    """Starts the cluster of a plan; several, one after the other, share checkpoints."""
    return lambda plan: Cluster(plan, stack, directory=tmp_path / "run", sockets=socket_dir).start()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, where a cluster of `start` has its checkpoints."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this system lets nobody mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def filled(disk: Path) -> Path:
    """Fills all that is free of a disk with a file, and returns that."""
    filler = disk / "somebody-elses"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Adds a line to the table of recovery times: what happened, how long nobody got a step done, and what is promised."""

    def add(fault: str, *, standstill_s: float, target_s: float) -> None:
        assert math.isfinite(standstill_s), f"{fault}: nothing came after it"
        RECOVERY_TIMES.parent.mkdir(parents=True, exist_ok=True)
        line = {"fault": fault, "standstill_s": round(standstill_s, 2), "target_s": target_s, "test": request.node.name}
        with RECOVERY_TIMES.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return add
