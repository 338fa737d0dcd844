"""A real Ray of several nodes on this machine: each has a raylet and workers of its own, and is lost as a host is lost."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from tests.engines.demo import Command, Demo, recovery
from tests.engines.ssh import LOCKSTEP

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


def _is(role: str, command: list[str], environment: dict[str, str]) -> bool:
    """Whether a process of such a command and environment is one such as "worker 2"."""
    kind, _, index = role.partition(" ")
    if kind == "worker":
        return "lockstep.demo.worker" in command and environment.get("LOCKSTEP_WORKER_INDEX", index) == (index or None)
    return "chief" in command if kind == "chief" else "ps_server" in command and command[command.index("--index") + 1] == index


class Ray:
    """A head that has no processors, and three nodes with two each."""

    survives: tuple[str, ...] = ("worker 2", "ps 1", "chief")
    ends_with: tuple[str, ...] = ()

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.cluster = stack.enter_context(ray_cluster(3))
        self._nodes = list(self.cluster.worker_nodes)

    @staticmethod
    def why_not() -> str:
        return "" if find_spec("ray") else "Ray is not installed: `make test-engines ENGINE=ray` has it"

    def greet(self) -> None:
        program = "import ray; ray.init(); ray.get([ray.remote(lambda: None).remote() for _ in range(3)])"
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "RAY_ADDRESS": self.cluster.address}, check=True)

    def run(self, *flags: str, pace: float = 0.05) -> Demo:
        words = [LOCKSTEP, "demo", "--engine", "ray", "--workers", "3", "--pace", str(pace), "--restart-workers", "9"]
        environment = {**os.environ, "RAY_ADDRESS": self.cluster.address}
        command = Command([*words, *recovery(self._directory), *flags], environment, self._directory, self._stack)
        self.ask_to_end, command.run.num_places = command.ask_to_end, self._num_places
        return command.run

    def run_again(self) -> None:
        raise AssertionError("it ends with no host")

    def lose(self, role: str) -> None:
        node = next(node for node in self._nodes if self._has(node, role))
        for process in _all_of(node):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)
        self._nodes.remove(node)

    def has_noticed(self, role: str, run: Demo) -> bool:
        return "is lost" in run.out

    def _num_places(self) -> int:
        return sum(any(self._has(node, f"worker {index}") for index in range(3)) for node in self._nodes)

    def _has(self, node: Any, role: str) -> bool:
        return any(_is(role, *words_of(process)) for process in _all_of(node))

    def left(self) -> list[str]:
        return left_on_nodes()


def _all_of(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def left_on_nodes() -> list[str]:
    """The commands that Ray's actors have started for Lockstep."""
    from lockstep.launcher.engines.ray_bridge import FUNCTION_VARIABLE
    from lockstep.launcher.engines.ray_train import WORKERS_VARIABLE

    words = map(words_of, psutil.process_iter())
    return [" ".join(command) for command, environment in words if {FUNCTION_VARIABLE, WORKERS_VARIABLE} & environment.keys()]


def words_of(process: psutil.Process) -> tuple[list[str], dict[str, str]]:
    """Returns the command and the environment of a process; empty if it has ended."""
    try:
        return process.cmdline(), process.environ()
    except psutil.Error:
        return [], {}


@contextmanager
def ray_cluster(count: int) -> Iterator[Any]:
    """Starts Ray, and ends it."""
    os.environ.update(_SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=2, num_gpus=2, **common)  # GPUs that Ray counts, and nobody has
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
