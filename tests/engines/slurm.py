"""A real Slurm on this machine, with a node on each host of a network, which runs the documented script. Writes to one directory."""

import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from tests.engines.demo import Demo, recovery
from tests.engines.network import network, why_not
from tests.engines.ssh import LOCKSTEP
from tests.support.repository import printed
from tests.support.waiting import wait_until

_DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
_CPUS = 4
# The exit codes of jobs that have ended.
_ENDED = {"COMPLETED": 0, "FAILED": 1, "CANCELLED": 1, "TIMEOUT": 1, "NODE_FAIL": 1}
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
GresTypes=gpu
{nodes}
PartitionName=all Nodes=h[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Nodes h1, h2 and h3. It queues a job again whose script is lost with its node."""

    survives: tuple[str, ...] = ("worker 2", "ps 1")
    ends_with: tuple[str, ...] = ("chief",)

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.net, self.directory, self._state = stack.enter_context(network(3, directory)), directory, directory / "slurm"
        self.environment = {**os.environ, "SLURM_CONF": str(self._state / "slurm.conf")}
        self.left = self.net.left
        self._start(stack)

    @staticmethod
    def why_not() -> str:
        missing = [daemon for daemon in _DAEMONS if shutil.which(daemon) is None]
        return why_not() or (f"no {', '.join(missing)} in PATH; Debian has them in slurm-wlm and munge" if missing else "")

    def _start(self, stack: ExitStack) -> None:
        """Returns once all nodes are idle."""
        state, nodes = self._state, self.net.names
        state.mkdir()
        for name in ("ctld", *nodes):
            (state / name).mkdir()
        (state / "munge.key").write_bytes(os.urandom(128))
        (state / "munge.key").chmod(0o400)
        has = f"Port=17000 CPUs={_CPUS} RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
        lines = [f"NodeName={name} NodeHostname={name} NodeAddr={self.net.address(name)} {has}" for name in nodes]
        host, gateway = os.uname().nodename.partition(".")[0], self.net.gateway
        text = _CONFIG.format(host=host, gateway=gateway, state=state, nodes="\n".join(lines), num_nodes=len(nodes))
        (state / "slurm.conf").write_text(text)
        # No GPUs, but Slurm counts them: it says which of them a step has, by the order of their devices.
        (state / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        files = [f"--{kind}={state / f'munge.{kind}'}" for kind in ("socket", "pid-file", "log-file", "seed-file")]
        self._begin(stack, ["munged", "--foreground", "--force", f"--key-file={state / 'munge.key'}", *files])
        wait_until((state / "munge.socket").exists, what="munged serves")
        self._begin(stack, ["slurmctld", "-D", "-c"])
        for name in nodes:
            self._revive(name)
        wait_until(
            lambda: self.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == list(nodes), what="nodes are idle", timeout_s=30
        )

    def _begin(self, stack: ExitStack, command: list[str]) -> None:
        with (self._state / f"{command[0]}.out").open("ab") as out:
            daemon = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)

    def command(self, *command: str) -> str:
        """Runs a command of Slurm's, and returns what it prints."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False).stdout

    def _revive(self, name: str) -> None:
        """Starts a node, again after its host was lost."""
        self.net.start(name, "slurmd", "-D", "-N", name, out=self._state / f"{name}.out", environment=self.environment)

    def greet(self) -> None:
        assert len(self.command("srun", "--nodes=3", "hostname").split()) == 3

    def run(self, *flags: str, pace: float = 0.05, limits: tuple[str, ...] = ("--time=10",)) -> Demo:
        words = " ".join([LOCKSTEP, "demo", "--pace", str(pace), *recovery(self.directory), *flags])
        text = re.sub("--checkpoint-dir [^ ]+ -- python train.py", "", printed("#SBATCH").replace("lockstep up", words))
        assert "#SBATCH --no-kill" in text and "train.py" not in text
        script, out = self.directory / "job.sh", self.directory / "out"
        script.write_text(text)
        self.job = self.command("sbatch", "--parsable", f"--output={out}", f"--chdir={self.directory}", *limits, str(script)).strip()
        return Demo(out, lambda: _ENDED.get(self.state))

    def limit_time(self) -> None:
        """Leaves the job less than two minutes. Slurm looks every 30 s whether to warn, and warns up to 30 s too early."""
        self.command("scontrol", "update", f"jobid={self.job}", "TimeLimit=2")

    @property
    def state(self) -> str:
        """That of the job, for example RUNNING."""
        return self.command("squeue", "-h", "-t", "all", "-j", self.job, "-o", "%T").strip()

    def begin_anew(self) -> None:
        """Has a job that is queued again begin soon, with ten minutes: it would wait for two minutes."""
        wait_until(lambda: self.state == "PENDING", what="it is queued again", timeout_s=120)
        # Not in the second in which it has ended: a node takes no job whose credential it has revoked then, and times are in whole seconds.
        self.command("scontrol", "update", f"jobid={self.job}", "StartTime=now+2", "TimeLimit=10")

    def run_again(self) -> None:
        self.begin_anew()
        wait_until(lambda: self._is_down("h1"), what="Slurm notices it", timeout_s=60)
        self._revive("h1")

    def ask_to_end(self) -> None:
        self.command("scancel", self.job)

    def lose(self, role: str) -> None:
        self.net.kill(self.net.host_of(role))

    def has_noticed(self, role: str, run: Demo) -> bool:
        return self._is_down(self.net.host_of(role))

    def _is_down(self, name: str) -> bool:
        return "down" in self.command("sinfo", "-h", "-n", name, "-o", "%t")
