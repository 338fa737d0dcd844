"""Runs a workload once on a peer, each role in its own process. Knows processes and ports; nothing of the peers' programs."""

import dataclasses
import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.processes import Processes
from benchmarks.harness.runs import measured
from benchmarks.harness.workload import NUM_WARMUP_STEPS, Workload
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.role import RoleWork
from benchmarks.report.figures import RunFigures
from lockstep.launcher.supervisor import Process


def run_peer(peer: Peer, workload: Workload, *, policy: str, python: Path, timeout_s: float) -> RunFigures:
    """Starts the peer's processes, runs the workload once, ends them all. Raises LaunchFailed with the output of what failed."""
    with Processes(is_quiet=True) as processes:
        # A port for each server, or for the scheduler that informs the others, and one for each worker.
        ports = _free_ports(workload.num_ps + workload.num_workers)
        launch = _Launch(peer, workload, policy, python, processes, ports=ports)
        servers = [launch.start(name) for name in peer.servers(workload.num_ps)]
        for index in range(workload.num_workers):
            launch.start(f"worker {index}")
        figures = measured(processes, servers, workload, timeout_s=timeout_s)
        processes.supervisor.stop(grace_s=0.0)  # they would run for ever, and some react slowly to SIGTERM
    return figures


@dataclasses.dataclass(frozen=True, slots=True)
class _Launch:
    """Starts the processes of one run."""

    peer: Peer
    workload: Workload
    policy: str
    python: Path
    processes: Processes
    ports: Sequence[int]

    def start(self, name: str) -> Process:
        """Starts a process under a name such as "worker 0" or "ps 0"."""
        kind, _, index = name.partition(" ")
        work = RoleWork(
            kind=kind,
            index=int(index),
            num_workers=self.workload.num_workers,
            num_servers=self.workload.num_ps,
            num_elements=self.workload.num_elements,
            num_variables=self.workload.num_variables,
            num_warmup_steps=NUM_WARMUP_STEPS,
            num_steps=self.workload.num_steps,
            ports=list(self.ports),
            directory=str(self.processes.directory),
        )
        command = [str(self.python), "-m", self.peer.program, json.dumps(dataclasses.asdict(work)), *self.peer.arguments[self.policy]]
        return self.processes.start(name, command, environment=self._environment(kind))

    def _environment(self, kind: str) -> dict[str, str | None]:
        no_proxies: dict[str, str | None] = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"))
        return {
            **no_proxies,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GLOO_SOCKET_IFNAME": "lo",
            "DMLC_ROLE": kind,
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self.ports[0]),
            "DMLC_NUM_SERVER": str(self.workload.num_ps),
            "DMLC_NUM_WORKER": str(self.workload.num_workers),
        }


def _free_ports(count: int) -> list[int]:
    """Returns ports that are free now: the peers cannot choose a free port by themselves."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
