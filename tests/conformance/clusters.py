"""Clusters to replay recorded cases on: objects in this process, servers in it, or processes. Asserts nothing."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from tests.support.cluster.here import ObjectCluster, ServedCluster
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.cluster.shape import Cluster, Shape

# A cluster until the block ends.
Start = Callable[[Shape], AbstractContextManager[Cluster]]


@contextmanager
def cluster_of_objects(shape: Shape) -> Iterator[Cluster]:
    """Parameter servers and a chief that are called, without any network."""
    with ExitStack() as stack:
        yield ObjectCluster(shape, stack)


@contextmanager
def cluster_of_servers(shape: Shape) -> Iterator[Cluster]:
    """Parameter servers and a chief that serve in this process."""
    with tempfile.TemporaryDirectory(prefix="ls-") as directory, ExitStack() as stack:
        yield ServedCluster(shape, stack, directory=Path(directory))


@contextmanager
def cluster_of_processes(shape: Shape) -> Iterator[Cluster]:
    """Parameter servers and a chief, each a process of its own."""
    with tempfile.TemporaryDirectory(prefix="ls-") as directory, ExitStack() as stack:
        yield ProcessCluster(Plan(**asdict(shape), transport="grpc"), stack, directory=Path(directory)).start()
