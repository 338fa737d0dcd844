"""`lockstep plan`: plans from words and from computing times, errors for mistakes, and the times of a cluster of real processes."""

import json
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from lockstep.planning.times import HEADER, parse_times
from lockstep.timeline import Timeline
from ps_protocol.model.variables import Array
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import lockstep_here
from tests.support.processes.processes import speaking
from tests.support.waiting import wait_until

COMPARED = "ssp:2,async,outer:8,outer:8:0.5"
STEPS, COMPUTING_S = 12, (0.05, 0.12)


def test_a_plan_from_a_distribution(tmp_path: Path) -> None:
    arguments = ["--replicas-to-aggregate", "10", "--latency", "lognormal:1,0.1", "--stragglers", "0.05,2"]
    result = lockstep_here("plan", *arguments, "--steps", "50", "--apply", "0.01", "--backup-workers", "0,1,2", "--compare", COMPARED)
    assert result.returncode == 0, result.stderr
    assert "recommended: b = " in result.stdout and "--backup-workers" in result.stdout
    assert all(name in result.stdout for name in ("ssp(2)", "async", "outer ", "outer, 0.5 s of grace"))


def test_a_recording_for_perfetto_is_refused_and_the_way_to_computing_times_named(tmp_path: Path) -> None:
    recording = tmp_path / "trace.json"
    recording.write_text(json.dumps(Timeline().trace(cluster="c")))
    ended = lockstep_here("plan", str(recording))
    assert ended.returncode == 2
    assert "this is a recording of `lockstep trace`, for Perfetto; want computing times" in ended.stderr
    assert "`lockstep plan --record times.csv` makes them" in ended.stderr


def test_a_plan_from_computing_times_as_text_and_as_json(tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    rows = [f"{worker},{step},{9.0 if worker == 3 else 1.0}" for step in range(5) for worker in range(4)]
    times.write_text("\n".join([HEADER, *rows]))
    text = lockstep_here("plan", str(times), "--steps", "30").stdout
    assert "4 workers; computing: 20 measured times of 4 workers" in text
    assert "recommended: b = 1" in text and "--workers 4 --backup-workers 1" in text
    plain = json.loads(lockstep_here("plan", str(times), "--steps", "30", "--json").stdout)
    assert plain["recommended_backups"] == 1
    assert [row["step_s"] for row in plain["rows"]] == pytest.approx([9.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "want one of TIMES, --latency and --record"),
        ("none.csv", "none.csv: No such file or directory"),
        ("--latency constant:1", "how many workers? give --workers T or --replicas-to-aggregate R"),
        ("--latency uniform:1 --workers 2", "want constant:SECONDS or lognormal:MEDIAN,SIGMA or"),
        ("--latency constant:1 --workers 2 --replicas-to-aggregate 2", "give one of them"),
        ("--latency constant:1 --workers 0", "--workers: got 0, want 1 or more"),
        ("--latency constant:1 --workers 20000", "workers: got 20000, want 1 to 10000"),
        ("--latency constant:1 --workers 4 --backup-workers 1,x", "--backup-workers: got '1,x'"),
        ("--latency constant:1 --workers 4 --backup-workers 4", "backups: got 4, want 0 to 3 with 4 workers"),
        ("--latency constant:1 --workers 4 --stragglers 0.1", "--stragglers: want P,FACTOR"),
        ("--latency constant:1 --workers 4 --compare sync", "--compare: got 'sync', want ssp:AHEAD or async or outer:R or outer:R:GRACE_S"),
        ("--latency constant:1 --workers 4 --compare outer:5", "contributions a step needs: got 5, want 1 to 4"),
        ("--latency constant:1 --workers 4 --failures 10", "--failures: want EVERY,RESTART"),
        ("--latency constant:1 --workers 4 --apply nan", "apply: got nan, want 0 or more seconds"),
        ("--record times.csv", "give --chief ADDRESS or set LOCKSTEP_CHIEF"),
        ("--record times.csv --for 0", "--for: got 0, want 0.001 or more seconds"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments: str, words: str) -> None:
    result = lockstep_here("plan", *arguments.split())
    assert result.returncode == 2, result.stderr
    assert words in result.stderr and len(result.stderr.splitlines()) == 1


def test_an_absent_chief_leaves_no_file(tmp_path: Path, socket_dir: Path) -> None:
    result = lockstep_here("plan", "--record", str(tmp_path / "times.csv"), "--chief", f"unix:{socket_dir}/none.sock")
    assert result.returncode == 1 and "No chief answers" in result.stderr
    assert not list(tmp_path.iterdir())


def work(chief: str, index: int) -> None:
    """Trains; each gradient takes a known time to compute."""
    with worker_client.connect(chief, worker_index=index, timeout_s=20) as session:
        values: dict[str, Array] = {"w": np.zeros(4)}
        session.create_or_join(values, optimizer=worker_client.sgd(0.5), timeout_s=20)
        while True:
            end = time.monotonic() + COMPUTING_S[index]
            while time.monotonic() < end:
                np.linalg.norm(np.ones(1000))
            if session.step({"w": np.ones(4)}, timeout_s=20).is_finished:
                return


def test_the_times_of_a_running_cluster_can_be_planned_with(tmp_path: Path, socket_dir: Path) -> None:
    recorded = tmp_path / "times.csv"
    with ExitStack() as stack:
        running = ServedCluster(Shape(num_ps=2, num_workers=2, max_steps=STEPS), stack, directory=socket_dir)
        words = ("-m", "lockstep", "plan", "--record", recorded, "--chief", running.chief_address)
        with speaking(*words, stdout=subprocess.PIPE) as recording:
            wait_until(recorded.exists, timeout_s=20, what="the recording has begun")
            threads = [threading.Thread(target=work, args=(running.chief_address, index)) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=40)
            output, errors = recording.communicate(timeout=20)
    assert recording.returncode == 0, errors
    rows = list(parse_times(recorded.read_text().splitlines(), name="times"))
    assert f"{len(rows)} times of 2 workers" in output
    for index in range(2):
        times = [row.seconds for row in rows if row.worker == index]
        assert len(times) >= 2
        assert np.median(times) > COMPUTING_S[index] - 0.02  # how much longer is the machine's affair
    assert "recommended: b = " in lockstep_here("plan", str(recorded), "--steps", "10").stdout
