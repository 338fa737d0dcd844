"""`lockstep up`: a whole cluster around any command, its output, its failures, and its end in every phase."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes.commands import IDLE, TRAIN, are_gone, descendants, lockstep_here, read_until, run_up, up
from tests.support.waiting import wait_until

FAMILY = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {IDLE!r}], start_new_session=True)\n{TRAIN}"


def socket_directory(lines: list[str]) -> Path:
    (address,) = {match[1] for line in lines if (match := re.search(r"lockstep status --chief unix:(\S+)", line))}
    return Path(address).parent


def test_training_runs_to_its_end(tmp_path: Path) -> None:
    code, out = run_up("--ps", "2", "--workers", "2", "--max-steps", "20", "--tcp", worker=TRAIN, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "\x1b" not in out, "no colour and no control sequence reaches a file"
    for index in range(2):
        assert f"[worker {index}] value -10.0" in out
        assert "value -10.0" in (tmp_path / "run" / "logs" / f"worker-{index}.log").read_text()
    assert "[lockstep] training finished" in out
    assert "--chief 127.0.0.1:" in out
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {
        "ps-0.log",
        "ps-1.log",
        "chief.log",
        "worker-0.log",
        "worker-1.log",
    }


def test_ctrl_c_whose_last_checkpoint_fails_says_how_many_steps_are_lost(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    # The first checkpoint is whole; where a later one belongs there is a file.
    slow = TRAIN.replace(
        "session.step({",
        f"__import__('time').sleep(0.1); open({str(place)!r} + f'/step-{{session.local_step + 1:09}}.incomplete', 'w'); session.step({{",
    )
    with up("--workers", "1", "--checkpoint-dir", str(place), worker=slow, run_dir=tmp_path / "run") as process:
        read_until(process, "step 5")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=50)
    end = re.search(r"training was interrupted at step (\d+)", out)
    assert process.returncode == 130 and end, out
    assert f"[lockstep] saved: step-000000000 in {place}; to continue" in out, out
    assert f"[lockstep] lost: {end[1]} steps since step-000000000" in out, out


def test_a_directory_that_cannot_be_made_is_reported_in_one_line() -> None:
    result = lockstep_here("up", "--run-dir", "/dev/null/x", "--", "true")
    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot write to /dev/null/x: Not a directory" in result.stderr
    assert len(result.stderr.splitlines()) == 1


WAITED_FOR = """
import time, numpy as np, lockstep
with lockstep.connect() as session:
    session.create_or_join({"w": np.zeros(1)}, optimizer=lockstep.sgd(1.0))
    while not session.is_finished:
        time.sleep(4 if session.worker_index == 1 and session.local_step == 5 else 0.02)
        session.step({"w": np.ones(1)})
"""


def test_what_all_workers_wait_for_is_said_once(tmp_path: Path) -> None:
    code, out = run_up("--workers", "2", "--max-steps", "30", worker=WAITED_FOR, run_dir=tmp_path / "run")
    assert code == 0, out
    # On a busy machine it may also say that it waits for the first worker to begin.
    waits = re.findall(r"^.*\bWaiting \d+ s for worker .*$", out, re.MULTILINE)
    assert len(waits) == 1 and waits[0].startswith("[lockstep] ") and "for worker 1 " in waits[0], out
    assert "[lockstep] training continues at step " in out


def test_each_worker_gets_its_own_index_and_no_environment_variables_of_another_cluster(tmp_path: Path) -> None:
    worker = "import os; print(*(os.environ[f'LOCKSTEP_{name}'] for name in ('WORKER_INDEX', 'NUM_WORKERS', 'CLUSTER', 'CHIEF')))"
    others = {"LOCKSTEP_CHIEF": "10.0.0.1:1", "LOCKSTEP_MAX_STEPS": "nonsense", "LOCKSTEP_ADVERTISE": "nonsense"}
    worker += "; assert 'LOCKSTEP_HISTORY' not in os.environ"
    code, out = run_up("--workers", "3", worker=worker, run_dir=tmp_path / "run", **others, LOCKSTEP_HISTORY=str(tmp_path / "history"))
    assert code == 0, out
    assert "[lockstep] all workers ended without any having joined a training" in out and "training finished" not in out
    for index in range(3):
        assert re.search(rf"^\[worker {index}\] {index} 3 up-\w+ unix:/\S+/chief\.sock$", out, re.MULTILINE), out


@pytest.mark.timeout(120)
def test_a_history_stays_within_its_bound_and_what_is_left_of_it_is_clean(tmp_path: Path) -> None:
    history, bound = tmp_path / "history", 1 << 16
    arguments = ("--workers", "2", "--ps", "2", "--max-steps", "200", "--history", str(history), "--history-max-bytes", str(bound))
    code, out = run_up(*arguments, worker=TRAIN.replace("(4)", "(100)"), run_dir=tmp_path / "run")
    assert code == 0, out
    kept: dict[str, int] = {}
    for path in history.iterdir():
        kept[path.name.split(".")[0]] = kept.get(path.name.split(".")[0], 0) + path.stat().st_size
    assert len(kept) == 5 and max(kept.values()) <= bound, kept
    verdict = lockstep_here("audit", str(history))
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    since = re.search(r"steps of servers computed again, all from step (\d+) of epoch 1 on", verdict.stdout)
    assert since and 0 < int(since[1]) < 190, verdict.stdout


def test_a_program_that_never_stops_printing_does_not_stop_the_launcher(tmp_path: Path) -> None:
    # Nobody reads what it prints, as in a terminal after Ctrl-S.
    ready = tmp_path / "ready"
    worker = f"import os\nfor number in range(10**9):\n    os.write(1, b'x' * 65536)\n    if number == 1000: open({str(ready)!r}, 'w')"
    with up("--workers", "1", worker=worker, run_dir=tmp_path / "run") as process:
        memory = psutil.Process(process.pid).memory_info
        before = memory().rss
        wait_until(ready.exists, timeout_s=50, what="a worker has printed much")
        assert memory().rss < before + (30 << 20), "of 65 MB that were printed"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_worker_that_is_killed_and_missed_costs_no_step_where_there_are_checkpoints(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with up("--workers", "2", "--checkpoint-dir", str(place), worker=TRAIN, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "[worker 1] step 3")
        (pid,) = re.findall(r"process ids: .*worker 1 (\d+)", "\n".join(lines))
        os.kill(int(pid), signal.SIGKILL)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 137, [*lines, out]
    ended = re.search(r"training was interrupted at step (\d+): worker 1 failed first: killed by SIGKILL", out)
    saved = re.search(rf"\[lockstep\] saved: step-0*(\d+) in {place}; to continue from there, run the same command again", out)
    assert ended and saved and saved[1] == ended[1] != "0", out
    assert "ending all: 1 worker is left, a step needs 2" in out
    assert "start with --restart-workers N, --backup-workers B or --min-replicas M" in out


def test_a_parameter_server_that_is_killed_ends_everything_with_a_message(tmp_path: Path) -> None:
    with up("--ps", "2", "--workers", "1", worker=TRAIN, run_dir=tmp_path / "run") as process:
        read_until(process, "[worker 0] step")
        everybody = descendants(process)
        next(one for one in everybody if "ps_server" in one.cmdline()).kill()
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert re.search(r"ps \d \(pid \d+\) failed: killed by SIGKILL; its log: \S+ps-\d\.log\n", out), out
    assert "its part of the model is lost with it: there are no checkpoints to go back to" in out
    assert are_gone(everybody)


# Worker 1 ends at step 10, with exit code 0 and without a goodbye.
LEAVES = "        if os.environ['LOCKSTEP_WORKER_INDEX'] == '1' and session.local_step == 10: os._exit(0)\n        print("


def test_training_is_ended_when_a_worker_leaves_too_few_behind(tmp_path: Path) -> None:
    # The lease is long: nobody shall have to wait for its end.
    arguments, worker = ("--workers", "2", "--lease", "300", "--max-steps", "50"), "import os" + TRAIN.replace("        print(", LEAVES, 1)
    code, out = run_up(*arguments, worker=worker, run_dir=tmp_path / "run")
    assert code == 1, out
    assert "[lockstep] worker 1 ended with exit code 0 while 1 of 2 workers still run; a step needs 2" in out
    assert "[lockstep] training ended early at step 10: too few workers are left" in out
    assert "[worker 0] value -5.0" in out, "the worker that waited was released, and ended by itself"
    assert "training finished" not in out


def test_a_role_that_does_not_start_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('broken by a test')\n")
    begin = time.monotonic()
    code, out = run_up(worker=TRAIN, run_dir=tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert code == 1, out
    assert "[lockstep] ps 0 ended while starting: exit code 1. Its last lines:" in out
    assert "[lockstep]     ImportError: broken by a test" in out
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize(
    ("phase", "number", "code"), [("starting", signal.SIGTERM, 143), ("training", signal.SIGINT, 130), ("waiting", signal.SIGTERM, 143)]
)
def test_a_signal_ends_everything_soon_in_every_phase(tmp_path: Path, number: signal.Signals, code: int, phase: str) -> None:
    sign: dict[str, tuple[str, str]] = {"starting": (TRAIN, "logs:"), "training": (TRAIN, "step 3"), "waiting": (f"{IDLE}", "idle")}
    worker, text = sign[phase]
    if phase == "waiting":  # one worker is there, and waits for the other's contribution
        worker = f"import os\nif os.environ['LOCKSTEP_WORKER_INDEX'] == '0':\n    {IDLE}\nprint('waits', flush=True)\n{TRAIN}"
    with up("--workers", "2", worker=worker, run_dir=tmp_path / "run") as process:
        lines = read_until(process, text)
        wait_until(lambda: len(descendants(process)) > 1, what="a process has been started")
        everybody = descendants(process)
        begin = time.monotonic()
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
        # A program that does not look gets SIGINT after 5 s; the machine may be busy.
        assert time.monotonic() - begin < (9.0 if phase == "waiting" else 4.0)
    assert process.returncode == code, [*lines, out]
    assert f"ended by {number.name}" in out and "Traceback" not in out.split("[lockstep] ended by")[-1]
    # After a signal the launcher does not wait until the system has ended what it killed.
    wait_until(lambda: are_gone(everybody), timeout_s=2.0, what="every process has ended")
    assert phase == "starting" or not socket_directory(lines).exists()


@pytest.mark.parametrize("phase", ["starting", "training"])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path, phase: str) -> None:
    with up("--ps", "2", "--workers", "2", worker=FAMILY, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "logs:" if phase == "starting" else "step 3")
        wait_until(lambda: len(descendants(process)) > 1, what="a process has been started")
        everybody = descendants(process)
        process.kill()
        wait_until(lambda: are_gone(everybody), timeout_s=5.0, what="every process has ended")
        if phase == "training":
            assert len(everybody) >= 8  # guardian, 2 ps, chief, 2 workers, 2 of theirs
            wait_until(lambda: not socket_directory(lines).exists(), what="the sockets are removed")


def test_an_output_that_is_closed_ends_everything(tmp_path: Path) -> None:
    with up(worker=TRAIN, run_dir=tmp_path / "run") as process:
        read_until(process, "step 3")
        everybody = descendants(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(5.0) == 128 + signal.SIGPIPE
    wait_until(lambda: are_gone(everybody), timeout_s=2.0, what="every process has ended")


def test_neither_a_python_file_of_the_user_nor_another_python_in_the_path_is_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python").write_text("#!/bin/sh\necho the wrong one\nexit 1\n")
    (other / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    for name in ("chief.py", "ps_server.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')\n")
    command = [sys.executable, "-P", "-m", "lockstep", "up", "--", "python", "-c", "import sys; print('came', sys.executable)"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stdout
    assert f"[worker 0] came {sys.executable}" in result.stdout
    assert len(list((tmp_path / "lockstep-runs").glob("*/logs/worker-0.log"))) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "what should the workers run?"),
        (["--"], "what should the workers run?"),
        (["--workers", "2", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--", "README.md"], "'README.md' cannot be run as a program; a Python file is run by: … -- python README.md"),
        (["--workers", "0", "--", "python"], "--workers: got '0', want a whole number from 1 to 100000"),
        (["--workers", "many", "--", "python"], "--workers: got 'many', want a whole number from 1 to 100000"),
        (["--ps", "-1", "--", "python"], "--ps: got '-1'"),
        (["--max-steps", "0", "--", "python"], "--max-steps: got '0'"),
        (["--lease", "0", "--", "python"], "--lease: got '0', want a number of seconds > 0"),
        (["--workers", "2", "--backup-workers", "2", "--", "python"], "--backup-workers: got 2, want 0 to 1"),
        (["--standbys", "--chief-in-ps", "--", "python"], "--standbys: the chief has none"),
        (["--wrokers", "2", "--", "python"], "--wrokers"),
    ],
)
def test_impossible_arguments_are_reported_before_anything_starts(arguments: list[str], words: str) -> None:
    result = lockstep_here("up", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
