"""A real Slurm on this machine: its controller, and a node on each host of a network. Everything it writes is in one directory."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.engines.network import Network, network, why_not
from tests.support.waiting import wait_until

_DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
_CPUS = 4
# A node that does not answer for 15 s is down; what is left of a job has 10 s to end.
_CONFIG = """
ClusterName=lockstep
SlurmctldHost={host}({gateway})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket
StateSaveLocation={state}/ctld
SlurmctldPidFile={state}/ctld.pid
SlurmctldLogFile={state}/ctld.log
SlurmdSpoolDir={state}/%n
SlurmdPidFile={state}/%n.pid
SlurmdLogFile={state}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=10
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000
{nodes}
PartitionName=all Nodes=h[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str:
    """Why Slurm cannot run here; empty: it can."""
    missing = [daemon for daemon in _DAEMONS if shutil.which(daemon) is None]
    return why_not() or (f"no {', '.join(missing)} in PATH; Debian has them in slurm-wlm and munge" if missing else "")


class Slurm:
    """A cluster of nodes h1, h2, …"""

    def __init__(self, net: Network, state: Path) -> None:
        self.net, self._state = net, state
        self.environment = {**os.environ, "SLURM_CONF": str(state / "slurm.conf")}

    def start(self, stack: ExitStack) -> None:
        """Returns once all nodes are idle."""
        state, nodes = self._state, self.net.names
        for name in ("ctld", *nodes):
            (state / name).mkdir()
        (state / "munge.key").write_bytes(os.urandom(128))
        (state / "munge.key").chmod(0o400)
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.net.address(name)} Port=17000 CPUs={_CPUS} RealMemory=4000 State=UNKNOWN"
            for name in nodes
        ]
        host, gateway = os.uname().nodename.partition(".")[0], self.net.gateway
        text = _CONFIG.format(host=host, gateway=gateway, state=state, nodes="\n".join(lines), num_nodes=len(nodes))
        (state / "slurm.conf").write_text(text)
        files = [f"--{kind}={state / f'munge.{kind}'}" for kind in ("socket", "pid-file", "log-file", "seed-file")]
        self._begin(stack, ["munged", "--foreground", "--force", f"--key-file={state / 'munge.key'}", *files])
        wait_until((state / "munge.socket").exists, what="munged serves")
        self._begin(stack, ["slurmctld", "-D", "-c"])
        for name in nodes:
            self.revive(name)
        wait_until(
            lambda: self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == list(nodes), what="nodes are idle", timeout_s=30
        )

    def _begin(self, stack: ExitStack, command: list[str]) -> None:
        with (self._state / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)

    def run(self, *command: str) -> str:
        """Runs a command of Slurm's, and returns what it prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout

    def revive(self, name: str) -> None:
        """Starts a node, again after its host was lost."""
        self.net.start(name, "slurmd", "-D", "-N", name, out=self._state / f"{name}.out", environment=self.environment)

    def is_down(self, name: str) -> bool:
        """Whether Slurm has noticed that a node is lost."""
        return "down" in self.run("sinfo", "-h", "-n", name, "-o", "%t")

    def submit(self, script: Path, out: Path, *flags: str) -> str:
        """Queues a script, and returns the number of its job."""
        return self.run("sbatch", "--parsable", f"--output={out}", *flags, str(script)).strip()

    def state_of(self, job: str) -> str:
        """For example RUNNING."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

    def await_end(self, job: str, *, timeout_s: float = 90.0) -> None:
        """Waits until a job has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.state_of(job) in ended, what=f"job {job} ends", timeout_s=timeout_s)


@contextmanager
def slurm(num_nodes: int, state: Path) -> Iterator[Slurm]:
    """Starts the nodes, and ends them with all that runs there."""
    with ExitStack() as stack:
        made = Slurm(stack.enter_context(network(num_nodes, state)), state)
        made.start(stack)
        yield made
