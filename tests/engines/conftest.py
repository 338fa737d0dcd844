"""Tests with real engines, which `make test-engines ENGINE=…` runs."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.demo import Engine
from tests.engines.kubernetes import Kubernetes
from tests.engines.mpi import Mpi
from tests.engines.ray_nodes import Ray
from tests.engines.slurm import Slurm
from tests.engines.ssh import Ssh
from tests.engines.torchrun import Torchrun

ENGINES: dict[str, type[Engine]] = {
    "ssh": Ssh,
    "slurm": Slurm,
    "ray": Ray,
    "torchrun": Torchrun,
    "mpi": Mpi,
    "kubernetes": Kubernetes,
}

ABSENT = {
    "skypilot": "SkyPilot has nodes of a cloud; tests/processes/cli/test_hosts.py runs its task here with the variables that it sets",
}


def pytest_configure(config: pytest.Config) -> None:
    for name in (*ENGINES, *ABSENT):
        config.addinivalue_line("markers", f"{name}: a test of this engine; `make test-engines ENGINE={name}` runs them")


def pytest_itemcollected(item: pytest.Item) -> None:
    """They need root and programs that are not Python's. Asked of the tests in this folder only."""
    item.add_marker("engine")
    for name in (*ENGINES, *ABSENT):  # a test names its engine in its parameter, or its module does
        if name in item.nodeid.rpartition("/")[2]:
            item.add_marker(name)


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """The engine of a name, started; skips the test where it cannot run."""
    if why := ABSENT.get(request.param):
        pytest.skip(why)
    made = ENGINES[request.param]
    if why := made.why_not():
        pytest.skip(f"no {request.param} here: {why}")
    with ExitStack() as stack:
        yield made(tmp_path, stack)
