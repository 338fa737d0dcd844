"""`lockstep up`: a whole cluster around any command, its output, its failures, and its end in every phase."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import worker_client
from lockstep.launcher.cluster import LocalCluster
from lockstep.launcher.failures import ClusterWatch
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import Supervisor
from lockstep.launcher.watch import newest_checkpoint, what_is_not_saved
from ps_protocol.process.history import read_history
from ps_protocol.roles.history import Begun, Counted
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


def test_workers_that_stop_by_themselves_end_the_training(tmp_path: Path) -> None:
    begin = time.monotonic()
    code, out = run_up("--workers", "2", "--", "10", worker=TRAIN, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "[worker 0] value -5.0" in out
    assert time.monotonic() - begin < 20.0


def test_a_training_whose_checkpoints_could_never_be_written_ends_with_1_and_says_why(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    arguments = ("--workers", "1", "--max-steps", "30", "--checkpoint-dir", str(place))
    # A directory that not even root can write to: there is a file where the files of ps 0 belong.
    broken = f"import pathlib, shutil\nshutil.rmtree({str(place)!r})\npathlib.Path({str(place)!r}).write_text('')\n{TRAIN}"
    code, out = run_up(*arguments, worker=broken, run_dir=tmp_path / "run")
    assert code == 1, out
    assert f"[lockstep] training finished, but no checkpoint could be written to {place}: " in out


def test_a_training_whose_end_could_not_be_saved_ends_with_1_and_says_what_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    arguments = ("--workers", "1", "--max-steps", "40", "--checkpoint-dir", str(place))
    # The first checkpoint is whole; where the last one belongs there is a file.
    slow = TRAIN.replace(
        "session.step({", f"__import__('time').sleep(0.1); open({str(place / 'step-000000040.incomplete')!r}, 'w'); session.step({{"
    )
    code, out = run_up(*arguments, worker=slow, run_dir=tmp_path / "run")
    assert code == 1, out
    assert f"[lockstep] training finished, but its end could not be saved to {place}: " in out
    assert "what it has learnt since step-000000000 is lost" in out


def test_a_last_checkpoint_that_takes_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAILPOINTS", "ps.save.before_write=delay:3")
    flags = LocalCluster._common_flags
    monkeypatch.setattr(LocalCluster, "_common_flags", lambda *arguments: [*flags(*arguments), "--enable-failpoints"])
    said: list[str] = []
    with Supervisor(log_directory=tmp_path / "logs", show_line=lambda name, line: None) as supervisor:
        spec = ClusterSpec(checkpoint_dir=tmp_path / "checkpoints", max_steps=3)
        started = LocalCluster(spec, supervisor=supervisor, note=said.append)
        started.start_roles()
        monkeypatch.delenv("LOCKSTEP_FAILPOINTS")
        watch = ClusterWatch(started, say=said.append)
        watch.ask_chief()
        with worker_client.connect(started.chief_address, cluster=started.name) as session:
            session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
            while not session.is_finished:
                session.step({"w": np.ones(4)})
        assert watch.finish_training(supervisor)
        assert what_is_not_saved(started, watch.ask_chief().status) == ""
        assert newest_checkpoint(started) == "step-000000003"
    assert [words for words in said if words.startswith("training is finished; the chief saves a last checkpoint, of step 3;")]


@pytest.mark.parametrize("chief_in_ps", [False, True])
def test_a_training_between_two_calls_to_the_chief_is_a_training(tmp_path: Path, chief_in_ps: bool) -> None:
    said: list[str] = []
    with Supervisor(log_directory=tmp_path / "logs", show_line=lambda name, line: None) as supervisor:
        spec = ClusterSpec(chief_in_ps=chief_in_ps, max_steps=3)
        started = LocalCluster(spec, supervisor=supervisor, note=said.append)
        started.start_roles()
        watch = ClusterWatch(started, say=said.append)
        poller = watch.ask_chief()
        wait_until(lambda: poller.status is not None, what="the chief is asked before the training")
        poller.close()  # and not again
        with worker_client.connect(started.chief_address, cluster=started.name) as session:
            session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
            while not session.is_finished:
                session.step({"w": np.ones(4)})
        wait_until(lambda: started.chief in supervisor.poll(timeout_s=0.05), what="the chief ends by itself")
        assert watch.finish_training(supervisor)
        assert started.trained_until() == (1, 3)


# So that it lasts.
SLOW_TRAIN = TRAIN.replace("        session.step(", "        __import__('time').sleep(0.05); session.step(")


def test_up_prints_its_process_ids_at_the_start_and_the_saved_checkpoint_at_the_end(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with up("--workers", "1", "--checkpoint-dir", str(place), worker=TRAIN, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "step 3")
        (said,) = [line for line in lines if "process ids: " in line]
        pids = {int(pid) for pid in re.findall(r"(?:ps 0|chief|worker 0) (\d+)", said)}
        assert len(pids) == 3 and pids <= {one.pid for one in descendants(process)}, said
        process.terminate()
        out, _ = process.communicate(timeout=50)
    assert re.search(rf"\[lockstep\] saved: step-\d+ in {place}; to continue from there, run the same command again", out), out


def test_a_program_whose_training_was_interrupted_says_so_and_fails(tmp_path: Path) -> None:
    worker = f"{TRAIN}".replace('    print("value"', "    print('END', session.end_reason, flush=True)\n    print(\"value\"")
    with up("--workers", "1", "--checkpoint-dir", str(tmp_path / "checkpoints"), worker=worker, run_dir=tmp_path / "run") as process:
        read_until(process, "step 3")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "[worker 0] END interrupted" in out
    assert re.search(r"TrainingInterrupted: training was interrupted at step \d+, before its end", out), out


@pytest.mark.parametrize(
    "flags", [[], ["--ps", "2", "--chief-in-ps", "--checkpoint-dir"], ["--ps", "1", "--chief-in-ps", "--checkpoint-dir"]]
)
def test_a_chief_that_somebody_asks_to_end_is_replaced_and_training_goes_on(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, str(tmp_path / "checkpoints")] if flags else flags
    with up("--workers", "1", "--max-steps", "60", *flags, worker=SLOW_TRAIN, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "step 7")
        (pid,) = re.findall(rf"(?:{'ps 0' if flags else 'chief'}) (\d+)", "".join(line for line in lines if "process ids" in line))
        os.kill(int(pid), signal.SIGTERM)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 0, out
    stopped = "before training was finished" if "1" in flags else "while .* kept running"
    assert re.search(rf"(chief|ps 0) \(pid \d+\) was stopped {stopped}", out), out
    assert "step 60" in out and "[lockstep] training finished" in out


def test_up_ends_with_workers_that_never_join_and_does_not_report_a_training(tmp_path: Path) -> None:
    code, out = run_up("--workers", "2", worker="print('nothing to do')", run_dir=tmp_path / "run")
    assert code == 0, out
    assert "[lockstep] all workers ended without any having joined a training" in out
    assert "training finished" not in out
    assert "[worker 1] nothing to do" in out


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
    code, out = run_up("--workers", "3", "--max-steps", "80", worker=WAITED_FOR, run_dir=tmp_path / "run")
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
    for index in range(3):
        assert re.search(rf"^\[worker {index}\] {index} 3 up-\w+ unix:/\S+/chief\.sock$", out, re.MULTILINE), out


def test_a_cluster_with_standbys_runs_to_its_end_and_its_history_has_both_servers_and_the_chiefs_steps(tmp_path: Path) -> None:
    history = tmp_path / "history"
    arguments = ("--workers", "2", "--max-steps", "5", "--standbys", "--history", str(history))
    code, out = run_up(*arguments, worker=TRAIN, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "[standby 0]" in out
    verdict = lockstep_here("audit", str(history))
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert "10 steps of servers computed again" in verdict.stdout, verdict.stdout
    written = [*read_history(history)]
    assert [one.role for one in written].count("ps-0") == 2
    assert [type(record.event) for one in written if one.role == "chief" for record in one.records] == [Begun, *[Counted] * 5]


@pytest.mark.timeout(120)
def test_a_history_stays_within_its_bound_and_what_is_left_of_it_is_clean(tmp_path: Path) -> None:
    history, bound = tmp_path / "history", 1 << 16
    arguments = ("--workers", "2", "--ps", "2", "--max-steps", "1200", "--history", str(history), "--history-max-bytes", str(bound))
    code, out = run_up(*arguments, worker=TRAIN, run_dir=tmp_path / "run")
    assert code == 0, out
    kept: dict[str, int] = {}
    for path in history.iterdir():
        kept[path.name.split(".")[0]] = kept.get(path.name.split(".")[0], 0) + path.stat().st_size
    assert len(kept) == 5 and max(kept.values()) <= bound, kept
    verdict = lockstep_here("audit", str(history))
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    since = re.search(r"steps of servers computed again, all from step (\d+) of epoch 1 on", verdict.stdout)
    assert since and 0 < int(since[1]) < 1190, verdict.stdout


def test_the_first_failure_is_named_at_the_end_with_its_last_line_and_becomes_the_exit_code(tmp_path: Path) -> None:
    worker = f"import os, sys\nif os.environ['LOCKSTEP_WORKER_INDEX'] == '1':\n    print('bad luck')\n    sys.exit(7)\n{TRAIN}"
    code, out = run_up("--workers", "2", worker=worker, run_dir=tmp_path / "run")
    assert code == 7, out
    assert re.search(
        r"\[lockstep\] worker 1 \(pid \d+\) failed: exit code 7: bad luck\n\[lockstep\] ending all: 1 worker is left, a step needs 2",
        out,
    )
    assert "--restart-workers" not in out  # it would fail again
    assert "lockstep.chief: parameter server does not answer" not in out  # that a server has ended with all others is no news


def test_workers_that_fail_together_are_all_counted_and_named(tmp_path: Path) -> None:
    worker = "import os; raise SystemExit('bad luck ' + os.environ['LOCKSTEP_WORKER_INDEX'])"
    code, out = run_up("--workers", "2", worker=worker, run_dir=tmp_path / "run")
    assert code == 1, out
    for index in range(2):
        assert re.search(rf"^\[lockstep\] worker {index} \(pid \d+\) failed: exit code 1: bad luck {index}$", out, re.MULTILINE), out
    assert "ending all: no worker is left, a step needs 2" in out


# Its first attempts fail alike, a later one in another way; then it trains.
FAILING = """
import os, pathlib, threading
print("attempt", flush=True)
attempts = pathlib.Path(os.environ["ATTEMPTS"])
with open(attempts / os.environ["LOCKSTEP_WORKER_INDEX"], "a") as file:
    file.write(".")
def count(index):
    return len((attempts / str(index)).read_text()) if (attempts / str(index)).exists() else 0
if os.environ["LOCKSTEP_WORKER_INDEX"] == "0" and count(0) < 3:
    raise ValueError("the same again")
while count(0) < 3:
    threading.Event().wait(0.01)
if count(1) < 2 and os.environ["LOCKSTEP_WORKER_INDEX"] == "1":
    raise ValueError("something else")
"""


def test_workers_that_fail_in_several_ways_are_restarted_and_up_ends(tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--restart-workers", "2", "--max-steps", "5")
    code, out = run_up(*arguments, worker=FAILING + TRAIN, run_dir=tmp_path / "run", ATTEMPTS=str(tmp_path))
    assert code == 0, out
    said = [line for line in out.splitlines() if "worker 0 is started again" in line]
    assert [re.sub(r"pid \d+", "pid", line).partition("pid")[2] for line in said] == [" (start 1 of 2)", ", in 0.5 s (start 2 of 2)"]
    assert out.splitlines().count("[worker 0] ValueError: the same again") == 2
    assert out.splitlines().count("[worker 1] ValueError: something else") == 1


@pytest.mark.parametrize(("what", "num_writes"), [("b'x' * 65536", 1600), ("os.urandom(65536)", 100), ("b'\\n' * 65536", 3)])
def test_a_program_that_never_stops_printing_does_not_stop_the_launcher(tmp_path: Path, what: str, num_writes: int) -> None:
    # Nobody reads what it prints, as in a terminal after Ctrl-S.
    ready = tmp_path / "ready"
    worker = f"import os\nfor number in range(10**9):\n    os.write(1, {what})\n    if number == {num_writes}: open({str(ready)!r}, 'w')"
    with up("--workers", "2", worker=worker, run_dir=tmp_path / "run") as process:
        wait_until(ready.exists, timeout_s=50, what="a worker has printed much")
        assert psutil.Process(process.pid).memory_info().rss < 200 << 20
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_a_worker_that_is_killed_and_missed_costs_no_step_where_there_are_checkpoints(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with up("--workers", "2", "--checkpoint-dir", str(place), worker=TRAIN, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "[worker 1] step 3")
        victim = next(one for one in descendants(process) if one.environ().get("LOCKSTEP_WORKER_INDEX") == "1")
        victim.kill()
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 137, [*lines, out]
    ended = re.search(r"training was interrupted at step (\d+): worker 1 failed first: killed by SIGKILL", out)
    saved = re.search(rf"\[lockstep\] saved: step-0*(\d+) in {place}; to continue from there, run the same command again", out)
    assert ended and saved and saved[1] == ended[1] != "0", out
    assert "ending all: 1 worker is left, a step needs 2" in out
    assert "start with --restart-workers N, --backup-workers B or --min-replicas M" in out


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_that_all_fail_cost_no_step_where_there_are_checkpoints(tmp_path: Path, num_workers: int) -> None:
    place = tmp_path / "checkpoints"
    worker = TRAIN.replace("        print(", "        assert session.local_step < 20, 'a mistake'\n        print(", 1)
    arguments = ("--workers", str(num_workers), "--max-steps", "50", "--checkpoint-dir", str(place))
    code, out = run_up(*arguments, worker=worker, run_dir=tmp_path / "run")
    assert code == 1 and "AssertionError: a mistake" in out, out
    assert f"saved: step-{20:09} in {place}" in out, out


@pytest.mark.parametrize("flags", [["--backup-workers", "1"], ["--min-replicas", "2", "--lease", "1"]])
def test_a_worker_killed_in_the_middle_of_training_is_survived_if_others_will_do(tmp_path: Path, flags: list[str]) -> None:
    with up("--workers", "3", *flags, "--max-steps", "100", worker=TRAIN, run_dir=tmp_path / "run") as process:
        lines = read_until(process, "[worker 1] step")
        victim = next(one for one in descendants(process) if one.environ().get("LOCKSTEP_WORKER_INDEX") == "1")
        victim.kill()
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 0, [*lines, out]
    assert re.search(r"worker 1 \(pid \d+\) failed: killed by SIGKILL", out)
    if "--backup-workers" in flags:
        # Within the second in which others may fail as well, training may have ended.
        assert "training continues: 2 workers are left, a step needs 2" in out or "failed on the way, within the backups: worker 1" in out
        assert "training finished; failed on the way, within the backups: worker 1 (killed by SIGKILL)" in out
    assert "training finished" in out


@pytest.mark.parametrize(("flags", "module"), [([], "ps_server"), (["--chief-in-ps"], "lockstep.combined")])
def test_a_parameter_server_that_is_killed_ends_everything_with_a_message(tmp_path: Path, flags: list[str], module: str) -> None:
    with up("--ps", "2", "--workers", "1", *flags, worker=TRAIN, run_dir=tmp_path / "run") as process:
        read_until(process, "[worker 0] step")
        everybody = descendants(process)
        next(one for one in everybody if module in one.cmdline()).kill()
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGKILL
    assert re.search(r"ps \d \(pid \d+\) failed: killed by SIGKILL; its log: \S+ps-\d\.log\n", out), out
    assert "its part of the model is lost with it: there are no checkpoints to go back to" in out
    assert are_gone(everybody)


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
    assert are_gone(everybody)
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
    assert are_gone(everybody)


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


def test_a_server_whose_twin_came_back_empty_is_not_reported_as_replaceable(tmp_path: Path) -> None:
    with up("--standbys", worker=TRAIN, run_dir=tmp_path / "run") as process:
        read_until(process, "[worker 0] step")
        for flag, words in (("ps0", "standby 0 has the same, and training continues"), ("standby0", "the model is lost")):
            victim = next(one for one in descendants(process) if any(f"/{flag}.sock" in word for word in one.cmdline()[:6]))
            victim.kill()
            read_until(process, words)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 1, out
    assert "was restarted and has lost its variables" in out


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
