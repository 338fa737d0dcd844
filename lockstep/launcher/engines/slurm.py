"""Slurm: a job is an allocation of nodes, and each process of the cluster is a job step of its own on one of them.

Works in the script of a job, in `salloc`, and as the program of one `srun`, whose first task launches the cluster.
"""

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec

KIND = EngineKind(program="srun")
# A step beside the others, on all that the job has of a node: the job belongs to one cluster, which shares the processors.
_STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--quiet", "--job-name=lockstep")
_UNBOUND = "--cpu-bind=none"
# GPUs of each worker. Slurm would give each step as many, the first ones of its node, also where those are another worker's.
_GPUS = "SLURM_GPUS_PER_TASK"
_ANSWER_S = 30.0
# Slurm keeps a job whose script was lost with its node, if the job may lose nodes (--no-kill). Where the script has ended, so has the job.
_ORPHANED = "sleep 15; scontrol show job {job} | grep -q JobState=RUNNING && scontrol requeue {job}"


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the job that this process is part of. Raises InvalidSpec if there is none, or Slurm does not answer."""
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        raise InvalidSpec(
            "--engine slurm: this is no job of Slurm; ask for one: sbatch, salloc or srun with --nodes=2 … lockstep up --engine slurm …"
            f"{_what_is_free()}"
        )
    # A batch script is a step, too, with one task.
    task = int(environment.get("SLURM_PROCID") or 0)
    num_workers = int(environment.get("SLURM_NTASKS") or environment.get("SLURM_JOB_NUM_NODES") or 0)
    worker_gpus = int(environment.get(_GPUS, "0").rpartition(":")[2])  # it may have a type: a100:2
    tasks = _tasks(environment.get("SLURM_TASKS_PER_NODE", "")) if worker_gpus else []
    return Engine(
        hosts=_hosts(job, nodes, [worker_gpus * number for number in tasks]) if task == 0 else (),
        num_workers=num_workers,
        worker_gpus=worker_gpus,
        is_launcher=task == 0,
        run_again=lambda: _output("scontrol", "requeue", job),
        again_words=f"job {job} goes into the queue again, and will continue from its newest checkpoint",
    )


def _hosts(job: str, nodes: str, gpus: Sequence[int]) -> tuple[Host, ...]:
    """Returns the nodes of a job. `gpus`: how many the job has of each, if it has asked for some for each task."""
    # Where nothing binds steps to processors, srun warns of being asked not to.
    binds = re.search(r"^TaskPlugin\s*=\s*(task/none|\(null\))", _output("scontrol", "show", "config"), re.MULTILINE) is None
    step = (*_STEP, _UNBOUND) if binds else _STEP
    orphaned = ("sh", "-c", _ORPHANED.format(job=job))
    hosts = []
    for name, number in zip_longest(_output("scontrol", "show", "hostnames", nodes).split(), gpus):
        has = (f"--gpus-per-node={number}",) if number else ()
        hosts.append(
            Host(name=name, address=name, reach=(*step, *has, f"--nodelist={name}", "sh", "-c"), hidden=(_GPUS,), orphaned=orphaned)
        )
    return tuple(hosts)


def _what_is_free() -> str:
    """Returns the partitions that a job could name, and how many of their nodes are free now; empty: Slurm does not say."""
    try:
        found = [line.split() for line in _output("sinfo", "--noheader", "--format=%R %F").splitlines()]
    except InvalidSpec:
        return ""
    # Nodes are counted as allocated/idle/other/all.
    words = [f"{name} {counts.split('/')[1]} of {counts.split('/')[3]}" for name, counts in found]
    return f"; free nodes by partition: {', '.join(words)}" if words else ""


def _tasks(text: str) -> list[int]:
    """Returns how many tasks each node has, by a text such as 2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=_ANSWER_S).stdout
    except FileNotFoundError as error:
        raise InvalidSpec(f"--engine slurm: there is no {command[0]} in PATH") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidSpec(f"--engine slurm: waited {_ANSWER_S:g} s in vain for an answer to {shlex.join(command)}") from error
    except subprocess.CalledProcessError as error:
        raise InvalidSpec(f"--engine slurm: {shlex.join(command)} failed: {error.stderr.strip()}") from error
