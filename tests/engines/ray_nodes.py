"""A real Ray of several nodes on this machine: each has a raylet and workers of its own, and is lost as a host is lost."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

# Ray's own words to nobody, and a dead node is noticed within seconds.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
}
_STORE_BYTES = 80 << 20


class RayNodes:
    """The nodes: a head that has no processors, and others with two each."""

    def __init__(self, cluster: Any, nodes: list[Any]) -> None:
        self._cluster, self._nodes = cluster, nodes
        self.address: str = cluster.address

    def kill_that_with(self, is_it: Callable[[list[str], dict[str, str]], bool]) -> None:
        """Kills all of the node that has a process of such a command and environment."""
        node = next(node for node in self._nodes if any(is_it(*words_of(process)) for process in self._of(node)))
        for process in self._of(node):
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.remove(node)

    def _of(self, node: Any) -> list[psutil.Process]:
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]


def words_of(process: psutil.Process) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a process; empty if it has ended."""
    try:
        return process.cmdline(), process.environ()
    except psutil.Error:
        return [], {}


@contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """Starts Ray, and ends it."""
    os.environ.update(_SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common})
    try:
        nodes = [cluster.add_node(num_cpus=2, **common) for _ in range(count)]
        cluster.wait_for_nodes()
        yield RayNodes(cluster, nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()
