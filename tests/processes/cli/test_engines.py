"""`lockstep up --engine`: the cluster runs in a job of an engine, which says where, warns it, and runs it again.

Programs stand for Slurm's: every node is this machine. `make test-engines` has the real engines.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep import connect
from lockstep import errors as lockstep_errors
from lockstep.launcher.engines import ranks, torchrun
from tests.support.processes.commands import TRAIN, lockstep, read_until, up

pytest.importorskip("cryptography", reason="several hosts need certificates, which the package cryptography makes")
pytestmark = pytest.mark.timeout(150)

SRUN = """#!/bin/sh
for word in "$@"; do case $word in --nodelist=*) node=${word#--nodelist=};; --gpus-per-node=*) GPUS_OF=${word#*=};; esac; done
while [ "$1" != sh ]; do shift; done
case "$GPUS_OF:$SLURM_GPUS_PER_TASK" in :|2:) ;; *) echo "srun: this step has the first GPU, and not $GPUS_OF"; exit 1 ;; esac
ON_NODE=$node CUDA_VISIBLE_DEVICES=4,5 exec "$@"
"""
SCONTROL = """#!/bin/sh
case "$*" in
"show config") while [ -e "$STATE.busy" ]; do sleep 0.1; done; echo "TaskPlugin              = task/none" ;;
"show hostnames node[1-2]") echo 127.0.0.1; echo localhost ;;
"requeue 77") echo requeued >> "$STATE" ;;
*) echo "scontrol: error: $*" >&2; exit 1 ;;
esac
"""
SLOW = TRAIN.replace("        session.step(", "        __import__('time').sleep(0.05); session.step(")
SINFO = """#!/bin/sh
echo "short 0/2/0/2"; echo "gpu 3/0/1/4"
"""
WHERE = f"""import os
where = os.environ["ON_NODE"], os.environ["CUDA_VISIBLE_DEVICES"]
os.write(1, f"on {{' '.join(where)}} with {{os.environ['RATE']}}\\n".encode())
{SLOW}"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a job's script."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "sinfo": SINFO}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    said = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
    for name, text in {**said, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "STATE": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, text)
    return tmp_path


def test_a_job_trains_on_its_nodes_with_the_gpus_and_environment_of_its_tasks_and_is_queued_again_when_its_time_is_up(job: Path) -> None:
    slurm = {"SLURM_GPUS_PER_TASK": "a100:1", "SLURM_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "7"}
    flags = ("--engine", "slurm", "--host-env", "CUDA_VISIBLE_DEVICES", "--checkpoint-dir", str(job / "kept"))  # nodes have fewer than 8
    with up(*flags, worker=WHERE, run_dir=job / "run", RATE="7", **slurm) as process:
        lines = read_until(process, "step 5", times=3)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
    out = "\n".join([*lines, out])
    assert sorted(re.findall("on .* with .*", out)) == [f"on {where} with 7" for where in ("127.0.0.1 4", "127.0.0.1 5", "localhost 4")]
    assert process.returncode == 128 + signal.SIGUSR1, out
    assert "job 77 goes into the queue again, and will continue from its newest checkpoint" in out, out
    assert "[lockstep] saved: step-" in out and (job / "state").exists(), out


def test_a_job_without_checkpoints_is_not_queued_again(job: Path) -> None:
    with up("--engine", "slurm", worker=TRAIN, run_dir=job / "run") as process:
        read_until(process, "logs:")
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, out
    assert "into the queue" not in out and not (job / "state").exists(), out


def test_all_tasks_of_one_srun_but_the_first_leave_the_work_to_it(job: Path) -> None:
    ended = lockstep("up", "--engine", "slurm", "--", "python", "train.py", SLURM_PROCID="2")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_cluster_on_one_machine_of_a_job_says_how_to_use_the_others(job: Path) -> None:
    with up(worker=TRAIN, run_dir=job / "run", SLURM_JOB_NUM_NODES="3") as process:
        read_until(process, "[lockstep] this cluster is on this machine alone; --engine slurm has one on all nodes of the job")
        process.terminate()
        process.communicate(timeout=60)


def test_who_waits_for_an_engine_that_does_not_answer_is_told_so(job: Path) -> None:
    (busy := job / "state.busy").touch()
    with up("--engine", "slurm", worker=TRAIN, run_dir=job / "run") as process:
        read_until(process, "no answer yet from the engine slurm, for ")
        busy.unlink()
        read_until(process, "logs:")
        process.terminate()
        process.communicate(timeout=60)


def test_what_is_no_job_is_refused_in_a_line(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(*flags: str, nodes: str = "node[1-2]") -> str:
        ended = lockstep("up", *flags, "--", "python", "train.py", SLURM_JOB_NODELIST=nodes)
        assert ended.returncode == 2 and not ended.stdout
        return ended.stderr

    assert "--hosts: the --engine says which machines there are; leave out one of the two" in refusal("--engine", "slurm", "--hosts", "a")
    known = "slurm, ray, ray_train, skypilot, torchrun, mpi"
    assert f"--engine: got 'slrm', want one of {known}; did you mean 'slurm'?" in refusal("--engine", "slrm")
    assert "--engine: kubernetes runs no `lockstep up`; `lockstep k8s render` writes" in refusal("--engine", "kubernetes")
    assert "has no Ray; pip install 'lockstep-ps[ray]'" in refusal("--engine", "ray"), "the environment of these tests has none"
    wrong = refusal("--engine", "slurm", nodes="other")
    assert wrong == "lockstep up: --engine slurm: scontrol show hostnames other failed: scontrol: error: show hostnames other\n"
    for name, text in {"RANK": "0", "SIZE": "2", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)
    assert "--workers: got 3, and mpi has started 2" in refusal("--engine", "mpi", "--workers", "3")
    monkeypatch.delenv("SLURM_JOB_ID")
    none = refusal("--engine", "slurm")
    assert "--engine slurm: this is no job of Slurm; ask for one: sbatch, salloc or srun" in none
    assert none.endswith("; free nodes by partition: short 2 of 2, gpu 0 of 4\n"), none


class Store:
    """What torchrun's store is to its ranks."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.set = self.kept.__setitem__
        self.get = self.kept.__getitem__
        self.delete_key = self.kept.pop

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def test_ranks_of_torchrun_find_their_cluster_again_and_another_number_of_ranks_gets_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    monkeypatch.setattr(torchrun, "_store", lambda found, environment: store)
    monkeypatch.chdir(tmp_path)

    def found(size: str, rank: str) -> tuple[str, int]:
        said = {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment = {**os.environ, **said, "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCKSTEP_UP": "--checkpoint-dir kept"}
        variables = torchrun.join(environment)
        assert (variables["LOCKSTEP_WORKER_INDEX"], variables["LOCKSTEP_NUM_WORKERS"]) == (rank, size)
        return variables["LOCKSTEP_CHIEF"], json.loads(store.kept["launcher"])["pid"]

    pids = set()
    try:
        first, pid = found("1", "0")
        pids.add(pid)
        assert found("1", "0") == (first, pid), "rank 0 was started again"
        second, other = found("2", "0")
        pids.add(other)
        assert second != first and other != pid and not psutil.pid_exists(pid)
        assert found("2", "1") == (second, other)
        assert "cluster-1" not in store.kept
    finally:
        for one in pids:
            ranks._end(one)


RANK = """
import os
import sys
import numpy as np
import lockstep
given = dict(os.environ)
for _ in range(int(sys.argv[1])):
    with lockstep.connect() as session:
        session.create_or_join({"w": np.zeros(4)}, optimizer=lockstep.sgd(0.5))
        while not session.is_finished:
            session.step({"w": np.ones(4)})
        # In one write, also where Python writes each argument of print() by itself: the launcher's lines go to the same pipe.
        line = f"rank {os.environ['OMPI_COMM_WORLD_RANK']} is worker {session.worker_index} value {session.read()['w'][0]}\\n"
        os.write(1, line.encode())
assert dict(os.environ) == given
"""


def run_ranks(numbers: tuple[int, ...], flags: str, directory: Path) -> tuple[list[str], list[int]]:
    """Runs some of two ranks of mpirun; returns what they have said, and their exit codes."""

    def environment(rank: int) -> dict[str, str]:
        said = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77"}
        return {**os.environ, **said, "LOCKSTEP_UP": flags}

    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, "2"],
            env=environment(rank),
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in numbers
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    return said, [rank.returncode for rank in ranks]


def test_ranks_of_mpi_meet_in_a_directory_train_in_one_cluster_after_the_other_and_leave_no_token_there(tmp_path: Path) -> None:
    said, codes = run_ranks((1, 0), "--max-steps 20", tmp_path)
    assert codes == [0, 0], said
    assert [said[1 - rank].count(f"rank {rank} is worker {rank} value -10.0") for rank in range(2)] == [2, 2], said
    assert said[1].count("[lockstep] training finished") == 2, "what the launcher says, rank 0's output has"
    assert not list((tmp_path / "lockstep-runs").glob("mpi-*"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--ps x", "lockstep up: --ps: got 'x', want a whole number >= 1"),
        ("--ps '2", 'LOCKSTEP_UP: got "--ps \'2", want words as in a shell: No closing quotation'),
        ("--workers 3", "lockstep up: --workers: got 3, and mpi has started 2"),
    ],
)
def test_wrong_flags_end_rank_0_and_so_its_mpirun_with_a_sentence_and_no_traceback(tmp_path: Path, flags: str, words: str) -> None:
    (said,), codes = run_ranks((0,), flags, tmp_path)
    assert codes == [1] and words in said and "Traceback" not in said, said


def test_a_program_may_catch_that_rank_0_could_not_start_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {f"OMPI_COMM_WORLD_{name}": text for name, text in {"RANK": "0", "SIZE": "1", "LOCAL_SIZE": "1"}.items()}
    for name, text in {**rank, "PMIX_NAMESPACE": "77", "LOCKSTEP_UP": "--ps 'x"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lockstep_errors.ClusterNotStarted, match="LOCKSTEP_UP: got"):
        connect()


def test_a_process_that_a_worker_of_ray_train_starts_is_told_that_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"Backend": object, "BackendConfig": object}
    content: dict[str, Any] = {"ray": {}, "ray.train": {}, "ray.train.backend": names, "lockstep.ray_train": {}}
    for name, members in content.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    del sys.modules["lockstep.ray_train"]  # imported anew, and what was there before comes back after the test
    monkeypatch.setenv("LOCKSTEP_RAY_TRAIN", "0 10.0.0.1")
    with pytest.raises(lockstep_errors.InvalidSpec, match="LOCKSTEP_RAY_TRAIN: this is not the process of the worker itself"):
        connect()
