"""`lockstep up --hosts`: one command starts a cluster on several hosts, watches it there, and leaves nothing behind.

The hosts are this machine, by a program that stands for ssh: it runs the command in another directory with a bare environment, and a host
is lost when its connections are killed and no new one can be made.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.processes.commands import TRAIN, are_gone, lockstep, lockstep_here, read_until, run_up, up
from tests.support.repository import ROOT, printed
from tests.support.waiting import wait_until
from worker_client.cluster.chief import machine_name

pytest.importorskip("cryptography", reason="--hosts makes certificates, which needs the package cryptography")

SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
[ -e "$DOWN/$host" ] && { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
echo "Welcome to $host!"
cd /
exec env -i PATH="$PATH" HOME="$HOME" ON_HOST="$host" OF_TEST="$DOWN" sh -c "$*"
"""
pytestmark = pytest.mark.timeout(150)
ADDRESSES = "a=127.0.0.1,b=127.0.0.1,c=127.0.0.1"
# Says where it runs, and what there is beside its token. Finds a module of its own by the PYTHONPATH that is passed on.
WHERE = f"""import os, users_own
files = sorted(os.listdir(os.path.dirname(os.environ["LOCKSTEP_TOKEN_FILE"])))
print("on", os.environ["ON_HOST"], "in", os.getcwd(), "with", files, os.environ.get("RATE"), os.environ.get("SECRET"), flush=True)
{TRAIN}"""
SLOW = TRAIN.replace("        session.step(", "        __import__('time').sleep(0.05); session.step(")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "down").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOWN", str(tmp_path / "down"))
    return tmp_path


def on_host(host: str) -> Iterator[psutil.Process]:
    """The agents and guardians that run on a host of this test, and what they have started."""
    for one in psutil.process_iter():
        try:
            environment = one.environ()
            is_there = environment.get("ON_HOST") == host and environment.get("OF_TEST") == os.environ["DOWN"]
            if is_there and one.status() != psutil.STATUS_ZOMBIE:
                yield one
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def lose(host: str, hosts: Path) -> None:
    """The host ends: no process is left there, and it can be reached no more."""
    (hosts / "down" / host).touch()
    for one in list(on_host(host)):
        one.kill()


def test_the_documented_command_trains_on_several_hosts_and_each_process_has_its_own_secrets_and_what_is_passed_on_only(
    hosts: Path,
) -> None:
    (hosts / "own").mkdir()
    (hosts / "own" / "users_own.py").touch()
    (hosts / "train.py").write_text(WHERE)
    (hosts / "bin" / "lockstep").symlink_to(Path(sys.executable).parent / "lockstep")
    command = printed("lockstep up --hosts").splitlines()[1].replace("a,b", "a=127.0.0.1,b=127.0.0.1")
    flags = f"--max-steps 20 --host-env RATE,PYTHONPATH --host-dir {hosts} --run-dir run"
    command = command.replace("/shared/job", f"{hosts / 'kept'} {flags}")
    environment = {**os.environ, "RATE": "7", "SECRET": "x", "PYTHONPATH": str(hosts / "own")}
    ended = subprocess.run(["sh", "-c", command], cwd=hosts, env=environment, capture_output=True, text=True, timeout=60, check=False)
    out = ended.stdout
    assert ended.returncode == 0, out + ended.stderr
    said = re.findall(r"\[worker (\d)\] on (\w) in (\S+) with (\[.*?\]) (\S+) (\S+)", out)
    assert sorted(said) == [(str(index), "abab"[index], str(hosts), "['ca.pem', 'worker.token']", "7", "None") for index in range(4)]
    assert out.count("value -10.0") == 4 and "[lockstep] training finished" in out
    assert "value -10.0" in (hosts / "run" / "logs" / "worker-2.log").read_text()
    assert re.search(r"\[lockstep\] and for that, in another terminal: ssh -N -L (\d+):127.0.0.1:\1 a", out)
    assert "Traceback" not in out


def test_a_host_that_cannot_be_used_is_named_before_anything_starts(hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without_ssh:
        without_ssh.setenv("PATH", "/nowhere")
        code, out = run_up("--hosts", "a=127.0.0.1", worker=TRAIN, run_dir=hosts / "run")
    words = "lockstep up: host a cannot be reached: ssh: No such file or directory; install it on this machine"
    assert code == 2 and out.splitlines()[-1] == words and "Traceback" not in out, out
    (hosts / "down" / "b").touch()
    code, out = run_up("--hosts", ADDRESSES, worker=TRAIN, run_dir=hosts / "run")
    why = r"ssh ended with exit code 255: .*No route to host; try it:"
    assert code == 2 and re.match(f"lockstep up: host b does not run Lockstep's agent: {why}", out.splitlines()[-1]), out
    (hosts / "down" / "b").unlink()
    code, out = run_up("--hosts", "a=127.0.0.1", "--host-dir", "/nowhere", worker=TRAIN, run_dir=hosts / "run")
    assert code == 2 and "host a: no /nowhere: No such file or directory; copy the program there, or name its place with --host-dir" in out
    code, out = run_up("--hosts", "a=127.0.0.1", "--host-python", "/nowhere/python", worker=TRAIN, run_dir=hosts / "run")
    assert code == 2 and "host a does not run Lockstep's agent: ssh ended with exit code 127" in out
    code, out = run_up("--hosts", "a=127.0.0.1,b=127.0.0.1", worker="import nosuchmodule", run_dir=hosts / "run")
    assert code == 2 and re.search("host a: cannot start a worker: .*train.py imports nosuchmodule, and .* has no such module", out), out
    assert "begins to serve" not in out and "host b: " not in out, "no worker goes there"
    (hosts / "python").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -S "$@"\n')
    (hosts / "python").chmod(0o755)
    code, out = run_up("--hosts", "a=127.0.0.1", "--host-python", str(hosts / "python"), worker=TRAIN, run_dir=hosts / "run")
    assert code == 2 and re.search("host a: its Python, .*, has no grpc and no numpy; install lockstep-ps there by pip", out), out


def test_doctor_asks_each_host_whether_it_can_run_a_cluster(hosts: Path) -> None:
    (hosts / "down" / "b").touch()
    ended = lockstep("doctor", "--hosts", ADDRESSES, "--json", timeout_s=60)
    found = {one["check"]: one for one in json.loads(ended.stdout)["findings"] if one["check"].startswith("host ")}
    assert [found[f"host {name}"]["severity"] for name in "abc"] == ["ok", "fail", "ok"] and ended.returncode == 1
    assert "host b does not run Lockstep's agent: ssh ended with exit code 255" in found["host b"]["text"]
    (hosts / "bin" / "srun").symlink_to("/bin/true")
    ended = lockstep("doctor", "--engine", "slurm")
    assert ended.returncode == 1 and "this is no job of Slurm; ask for one" in ended.stdout, ended.stdout


def test_doctor_and_up_say_which_host_has_another_directory_for_checkpoints_or_cannot_write_there(hosts: Path) -> None:
    place = hosts / "kept"
    flags = ("--hosts", "a=127.0.0.1", "--checkpoint-dir", str(place))
    missing = lockstep("doctor", *flags)
    assert missing.returncode == 1 and f"cannot write to {place}: No such file or directory" in missing.stdout, missing.stdout
    place.mkdir()
    assert f"shares and writes {place}" in lockstep("doctor", *flags).stdout
    for before, words in {
        f"rm {place}/.lockstep-*": f"does not see {place}",  # as on a host where another directory has this name
        f"mkdir $(echo {place}/.lockstep-*)-a": f"cannot write to {place}: File exists; servers and chief write there",
    }.items():
        (hosts / "python").write_text(f'#!/bin/sh\n{before}\nexec {sys.executable} "$@"\n')
        (hosts / "python").chmod(0o755)
        found = lockstep("doctor", *flags, "--host-python", str(hosts / "python"))
        assert found.returncode == 1 and words in found.stdout, found.stdout
    assert [one.name[-2:] for one in place.iterdir()] == ["-a"], "nothing of the doctor's is left"


def test_status_names_the_hosts_ctrl_c_ends_all_with_a_checkpoint_and_a_killed_launcher_leaves_nothing_there(hosts: Path) -> None:
    place = hosts / "checkpoints"
    spread = ADDRESSES.replace("b=127.0.0.1", "b=127.0.0.2")
    flags = ("--hosts", spread, "--ps", "2", "--workers", "2", "--checkpoint-dir", str(place))
    with up(*flags, worker=SLOW, run_dir=hosts / "run") as process:
        (chief,) = re.findall(r"lockstep status --chief (\S+)", "\n".join(read_until(process, "[worker 0] step 5")))
        told = json.loads(lockstep_here("status", "--json", "--chief", chief).stdout)
        assert [one["address"].partition(":")[0] for one in told["shards"]] == ["127.0.0.1", "127.0.0.2"]
        assert [one["host"] for one in told["participants"]] == [machine_name()] * 2
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130 and "[lockstep] saved: step-" in out, out
    assert not [*on_host("a"), *on_host("b"), *on_host("c")]
    with up("--hosts", ADDRESSES.partition(",")[0], "--workers", "1", worker=SLOW, run_dir=hosts / "run") as process:
        read_until(process, "[worker 0] step 5")
        there = [*on_host("a")]
        assert there
        process.kill()
        wait_until(lambda: are_gone(there), what="nothing is left on the hosts", timeout_s=40)


def test_training_goes_on_where_the_host_of_a_worker_and_then_that_of_chief_server_and_worker_is_lost(hosts: Path) -> None:
    flags = ("--hosts", ADDRESSES, "--ps", "2", "--workers", "3", "--backup-workers", "1", "--restart-workers", "2", "--max-steps", "100")
    kept = ("--checkpoint-dir", str(hosts / "checkpoints"), "--checkpoint-steps", "10")
    with up(*flags, *kept, worker=SLOW, run_dir=hosts / "run") as process:
        read_until(process, "step 20")
        lose("c", hosts)
        lines = read_until(process, "worker 2 is started again, as pid")
        assert re.search(r"host c is lost.*\n.*worker 2 is started again, as pid \d+ \(start 1 of 2\)", "\n".join(lines)), lines
        lines += read_until(process, "step 40")
        assert "rolled back" not in "\n".join(lines), "no role was beside it"
        lose("a", hosts)
        lines += read_until(process, "chief ready address=")
        (port,) = re.findall(r"chief ready address=\S+:(\d+)", lines[-1])
        wait_until(lambda: f"127.0.0.1:{port}" in lockstep_here("ls").stdout, what="`lockstep ls` names where the chief is now")
        out, _ = process.communicate(timeout=100)
        out = "\n".join([*lines, out])
    assert process.returncode == 0, out
    assert "host a is lost: ssh ended with exit code" in out
    assert "adopted ps=0 address=127.0.0.1:" in out.partition("host a is lost")[2]
    assert "rolled back to step" in out and "[lockstep] training finished" in out
    assert len(re.findall(r"value -\d+", out)) == 3


def test_a_process_that_waits_for_room_on_its_host_gives_signs_of_life_and_is_not_lost(tmp_path: Path) -> None:
    waits = r"for n in $(seq 40); do read line; printf '\000'; done"
    begins = r"""printf 'welcome\n\036lockstep-agent\nj\000\000\000\015{"ended": 7}\n'"""
    path = tmp_path / "worker-2.task"
    path.write_text(json.dumps({"host": "c", "private": str(tmp_path), "returns": [], "reach": ["sh", "-c", f"{waits}; {begins}"]}))
    program = f"""
import pathlib
from lockstep.launcher import remote
remote.BEAT_S, remote.SILENT_S = 0.05, 1.0
remote.main(pathlib.Path({str(path)!r}))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (7, "welcome\n"), ended
    assert not path.exists()


def test_a_task_of_skypilot_trains_on_its_nodes_by_the_documented_file(hosts: Path) -> None:
    task = yaml.safe_load(printed("num_nodes"))
    assert {*task} == {"name", "num_nodes", "workdir", "setup", "run"} and task["workdir"] == "."
    (hosts / "train.py").write_text(TRAIN)
    (hosts / "bin" / "lockstep").symlink_to(Path(sys.executable).parent / "lockstep")
    script = task["run"].replace("s3://bucket/job", str(hosts / "kept")).replace("--ps 2", "--ps 1 --max-steps 20")
    addresses = [f"127.0.0.{number + 1}" for number in range(task["num_nodes"])]
    told = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NUM_NODES": str(task["num_nodes"])}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", script],
            env={**os.environ, **told, "SKYPILOT_NODE_RANK": str(rank)},
            cwd=hosts,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(task["num_nodes"])
    ]
    first, *others = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0, 0] and others == ["", ""], first
    assert first.count("value -10.0") == 3 and "[lockstep] training finished" in first and "Welcome to 127.0.0.2!" in first, first
    refused = lockstep("up", "--engine", "skypilot", "--", "python", "train.py")
    assert "--engine skypilot: this is no task of SkyPilot, in whose `run:` this command belongs" in refused.stderr
