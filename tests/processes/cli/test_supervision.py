"""Processes under supervision: their output, and that none outlives the launcher, however it ends."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.launcher.supervisor import Interrupted, LineSplitter, PrefixedOutput, Process, ProcessSpec, Supervisor, describe_end
from ps_protocol.process.output import BoundedOutput
from ps_protocol.security.tokens import new_token_lines, write_secret
from tests.support.examples import examples
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

MARK = "LOCKSTEP_SUPERVISION_TEST"

# Starts what its arguments say, COUNT times, prints the private directory and `started`, and then supervises for ever.
LAUNCHER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from lockstep.launcher.supervisor import ProcessSpec
from lockstep.launcher.supervisor import Interrupted, Supervisor
logs, count, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    with Supervisor(log_directory=logs, show_line=lambda name, line: print(name, line, flush=True)) as supervisor:
        print(supervisor.directory, flush=True)
        for index in range(count):
            supervisor.start(ProcessSpec(name=f"child {index}", command=[sys.executable, "-c", program], environment={}))
        print("started", flush=True)
        while True:
            supervisor.poll(timeout_s=1.0)
except Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""

# A child with two of its own: one in its process group, one that made itself a session, which no signal to the group reaches.
FAMILY = """
import subprocess, sys, threading
sleep = [sys.executable, "-c", "import threading; threading.Event().wait(300)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("ready", flush=True)
threading.Event().wait(300)
"""
STUBBORN = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: threading.Event().wait(300)
"""


@contextmanager
def launcher(logs: Path, program: str, *, count: int, mark: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", LAUNCHER, str(logs), str(count), program]
    with subprocess.Popen(command, env={**os.environ, MARK: mark, "PYTHONPATH": os.getcwd()}, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def carriers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_until(process: "subprocess.Popen[str]", *, is_last: Callable[[list[str]], bool]) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while not is_last(lines):
        line = process.stdout.readline()
        assert line, f"the launcher ended early: {lines}"
        lines.append(line.strip())
    return lines


def num_ready(lines: list[str]) -> int:
    return sum(line.endswith(" ready") for line in lines)


def supervise(supervisor: Supervisor, *, until: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < deadline
        supervisor.poll(timeout_s=0.05)


def start(supervisor: Supervisor, program: str, *, name: str = "child") -> Process:
    return supervisor.start(ProcessSpec(name=name, command=[sys.executable, "-c", program], environment={}))


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher(tmp_path, FAMILY, count=3, mark="family") as process:
        lines = read_until(process, is_last=lambda lines: num_ready(lines) == 3)
        directory = Path(lines[0])
        assert directory.stat().st_mode & 0o777 == 0o700
        # Launcher and guardian, and three families of three.
        assert len(carriers("family")) == 11
        process.kill()
        wait_until(lambda: not carriers("family"), timeout_s=5.0, what="all processes are gone")
        assert not directory.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_finds_nothing_in_the_directory_of_a_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path, FAMILY, count=1, mark="private") as process:
        directory = Path(read_until(process, is_last=lambda lines: num_ready(lines) == 1)[0])
        write_secret(directory / "tokens", new_token_lines())
        for command in (["ls", str(directory)], ["cat", str(directory / "tokens")]):
            tried = subprocess.run(command, user=65_534, group=65_534, extra_groups=[], cwd="/", capture_output=True, text=True)
            assert tried.returncode and not tried.stdout and "Permission denied" in tried.stderr


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3])
def test_nothing_outlives_a_launcher_that_is_killed_while_it_starts_processes(tmp_path: Path, delay_s: float) -> None:
    with launcher(tmp_path, FAMILY, count=20, mark=f"starting {delay_s}") as process:
        lines = read_until(process, is_last=lambda lines: len(lines) == 1)
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() >= begin + delay_s)
        process.kill()
        wait_until(lambda: not carriers(f"starting {delay_s}"), timeout_s=5.0, what="all processes are gone")
        assert not Path(lines[0]).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_the_kernel_ends_the_processes_if_guardian_and_launcher_are_killed(tmp_path: Path) -> None:
    with launcher(tmp_path, STUBBORN, count=3, mark="no guardian") as process:
        directory = Path(read_until(process, is_last=lambda lines: num_ready(lines) == 3)[0])
        (guardian,) = [one for one in carriers("no guardian") if any("guardian.py" in word for word in one.cmdline())]
        guardian.kill()
        process.kill()
        wait_until(lambda: not carriers("no guardian"), timeout_s=5.0, what="all processes are gone")
        directory.rmdir()  # nobody was left to do it


def test_processes_can_be_started_after_the_guardian_was_killed() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    shim = ROOT / "lockstep" / "launcher" / "guarded_exec.py"
    try:
        command = [sys.executable, "-I", "-S", str(shim), str(writing), str(os.getpid()), "0", sys.executable, "-c", "print('runs')"]
        done = subprocess.run(command, pass_fds=(writing,), capture_output=True, text=True, timeout=30, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", "")


def test_the_guardian_alone_ends_processes_that_refuse_the_kernels_death_signal(tmp_path: Path) -> None:
    refuse = f"import ctypes, sys\nif sys.platform == 'linux': ctypes.CDLL(None).prctl(1, 0)\n{STUBBORN}"
    with launcher(tmp_path, refuse, count=2, mark="refusing") as process:
        read_until(process, is_last=lambda lines: num_ready(lines) == 2)
        process.kill()
        wait_until(lambda: not carriers("refusing"), timeout_s=5.0, what="all processes are gone")


def test_a_launcher_within_a_launcher_ends_with_the_outer_one(tmp_path: Path) -> None:
    inner = f"import sys\nsys.argv = ['inner', {str(tmp_path / 'inner')!r}, '2', {FAMILY!r}]\n{LAUNCHER}"
    with launcher(tmp_path / "outer", inner, count=1, mark="nested") as process:
        lines = read_until(process, is_last=lambda lines: num_ready(lines) == 2)
        directories = [Path(line.split()[-1]) for line in lines if "/lockstep-" in line]
        assert len(directories) == 2
        process.kill()
        wait_until(lambda: not carriers("nested"), timeout_s=5.0, what="all processes are gone")
        wait_until(lambda: not any(directory.exists() for directory in directories), what="both directories are removed")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_even_stubborn_processes_within_two_seconds(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    with launcher(tmp_path, STUBBORN, count=3, mark=number.name) as process:
        directory = Path(read_until(process, is_last=lambda lines: num_ready(lines) == 3)[0])
        begin = time.monotonic()
        process.send_signal(number)
        assert process.wait(5.0) == exit_code
        assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
        # On a busy machine the launcher does not wait for its guardian, which does the rest.
        wait_until(lambda: not carriers(number.name), timeout_s=5.0, what="all processes are gone")
        assert not directory.exists()


def test_a_signal_ends_a_launcher_whose_guardian_takes_its_time(tmp_path: Path) -> None:
    """The guardian continues by itself."""
    with launcher(tmp_path, STUBBORN, count=1, mark="guardian") as process:
        directory = Path(read_until(process, is_last=lambda lines: num_ready(lines) == 1)[0])
        (guardian,) = [one for one in psutil.Process(process.pid).children() if "guardian.py" in " ".join(one.cmdline())]
        guardian.suspend()
        try:
            process.send_signal(signal.SIGINT)
            assert process.wait(4.0) == 130  # 2 s promised; the machine may be busy
        finally:
            guardian.resume()
        wait_until(lambda: not directory.exists(), what="the guardian has cleaned up")


def test_a_second_interrupt_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None) as supervisor:
        child = start(supervisor, STUBBORN)
        supervise(supervisor, until=lambda: list(child.last_lines) == ["ready"])
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            supervise(supervisor, until=lambda: False)
        os.kill(os.getpid(), signal.SIGINT)
        begin = time.monotonic()
        supervisor.stop(grace_s=30.0)
        assert time.monotonic() - begin < 5.0
        assert child.returncode == -signal.SIGKILL


def test_a_stopped_process_is_ended_too(tmp_path: Path) -> None:
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None) as supervisor:
        child = start(supervisor, STUBBORN)
        supervise(supervisor, until=lambda: list(child.last_lines) == ["ready"])
        os.kill(child.pid, signal.SIGSTOP)
        supervisor.stop(grace_s=0.1)
        assert child.returncode == -signal.SIGKILL


def test_child_processes_in_a_processs_group_end_with_the_process(tmp_path: Path) -> None:
    leave = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait(300)']).pid)"
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None) as supervisor:
        child = start(supervisor, leave)
        supervise(supervisor, until=lambda: not child.is_running)
        assert child.returncode == 0
        (pid,) = child.last_lines
        wait_until(lambda: not is_running(int(pid)), what="the grandchild is gone")


def test_output_is_shown_and_logged_to_the_last_byte(tmp_path: Path) -> None:
    shown: list[tuple[str, str]] = []
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: shown.append((name, line))) as supervisor:
        child = start(
            supervisor, "import sys; print('one'); print('two', file=sys.stderr); print('x' * 200_000); print('end', end='')", name="ps 0"
        )
        supervise(supervisor, until=lambda: not child.is_running)
    assert [line for _, line in shown if line.strip("x")] == ["one", "two", "end"]
    assert sum(len(line) for _, line in shown) == 3 + 3 + 200_000 + 3
    assert {name for name, _ in shown} == {"ps 0"}
    assert (tmp_path / "ps-0.log").read_text() == f"one\ntwo\n{'x' * 200_000}\nend"


def test_how_a_program_ended_is_one_line_whatever_it_printed_last(tmp_path: Path) -> None:
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None) as supervisor:
        child = start(supervisor, r"import sys; sys.stdout.write('bad \x1b[2J\x0bdata\u2028\n'); sys.exit(3)")
        supervise(supervisor, until=lambda: not child.is_running)
    assert child.end_text == "exit code 3: bad ?[2J?data"


def test_an_output_that_nobody_reads_any_more_ends_the_run(tmp_path: Path) -> None:
    def closed(name: str, line: str) -> None:
        raise BrokenPipeError

    with Supervisor(log_directory=tmp_path, show_line=closed) as supervisor:
        child = start(supervisor, FAMILY)
        with pytest.raises(Interrupted) as caught:
            supervise(supervisor, until=lambda: False)
    assert caught.value.exit_code == 128 + signal.SIGPIPE
    assert not child.is_running


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None) as supervisor:
        child = supervisor.start(ProcessSpec(name="child", command=["/no/such/program"], environment={}))
        supervise(supervisor, until=lambda: not child.is_running)
        assert child.returncode == 127
        assert list(child.last_lines) == ["cannot start '/no/such/program': No such file or directory"]


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: None):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)] == before


def test_lines_are_cut_at_every_kind_of_end() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"one\ntwo\r\n10%\r20%\r")) == ["one", "two", "10%"]
    assert list(splitter.feed(b"\nth\xff")) == ["20%"]
    assert list(splitter.finish()) == ["th\N{REPLACEMENT CHARACTER}"]
    assert list(splitter.finish()) == []


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * 50_000)]
    assert sum(map(len, lines)) > 300_000


BEGIN = "Traceback (most recent call last):"
PRINTED = st.one_of(
    st.sampled_from(
        [f"{BEGIN}\n", '  File "train.py", line 9\n', "    train()\n", "ValueError: no\n", "ValueError: yes\n", "\r\n", "50%\r"]
    ),
    st.text(max_size=5),
).map(str.encode)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from(["worker 0", "worker 1", "ps 0"]), st.one_of(PRINTED, st.binary(max_size=9), st.none()))))
def test_whatever_processes_print_each_line_is_shown_once_with_its_name(events: list[tuple[str, bytes | None]]) -> None:
    """None: the process ends, and the next one of its name may run an edited program."""
    memory = io.StringIO()
    with BoundedOutput(memory) as stream:
        shown, splitters, written = PrefixedOutput(stream), defaultdict[str, LineSplitter](LineSplitter), defaultdict[str, bytes](bytes)
        want: dict[str, list[str]] = defaultdict(list)
        for name, data in [*events, *((name, None) for name in ("worker 0", "worker 1", "ps 0"))]:
            for line in splitters[name].finish() if data is None else splitters[name].feed(data):
                shown.line(name, line)
            written[name] += data or b""
            if data is None:
                splitters.pop(name)
                lines = re.split("\r\n|\n|\r", written.pop(name).decode(errors="replace"))
                want[name] += lines[:-1] if not lines[-1] else lines
    for name, lines in want.items():
        got = [line for line in memory.getvalue().split("\n") if line.startswith(f"[{name}] ")]
        assert got == [f"[{name}] {line}" for line in lines]


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(PRINTED, st.integers(1, 500)), max_size=20))
def test_the_work_for_a_line_does_not_grow_with_what_was_printed_before(pieces: list[tuple[bytes, int]]) -> None:
    num_calls, num_lines = 0, 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    with BoundedOutput(io.StringIO()) as stream:
        shown, splitter = PrefixedOutput(stream), LineSplitter()
        sys.setprofile(profile)
        try:
            for data, count in pieces:
                for line in splitter.feed(data * count):
                    shown.line("worker 0", line)
                    num_lines += 1
        finally:
            sys.setprofile(None)
    assert num_calls <= 40 * (num_lines + len(pieces) + 1)


NEWLINES = "import os\nwhile True: os.write(1, b'\\n' * 4096)"


def test_however_many_processes_print_newlines_a_turn_of_the_loop_shows_few(tmp_path: Path) -> None:
    lines: list[str] = []
    with Supervisor(log_directory=tmp_path, show_line=lambda name, line: lines.append(name)) as supervisor:
        for index in range(8):
            start(supervisor, NEWLINES, name=f"child {index}")
        supervise(supervisor, until=lambda: len({*lines}) == 8)  # all print by now
        for _ in range(10):
            lines.clear()
            supervisor.poll(timeout_s=1.0)
            assert len(lines) <= 8192 and len({*lines}) == 8, "a little of each"


def test_a_process_whose_grandchild_never_stops_printing_is_over_with_what_the_pipe_held(tmp_path: Path) -> None:
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {NEWLINES!r}], start_new_session=True)"
    num_lines, num_before = 0, 0

    def count(name: str, line: str) -> None:
        nonlocal num_lines
        num_lines += 1

    with Supervisor(log_directory=tmp_path, show_line=count) as supervisor:
        child = start(supervisor, leave)
        while child.is_running:
            num_before = num_lines
            supervisor.poll(timeout_s=1.0)
    assert num_lines - num_before <= 65_536 + 8192


def test_colours_are_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    for memory in (plain, terminal):
        with BoundedOutput(memory) as stream:
            PrefixedOutput(stream).line("worker 1", "hello")
    assert plain.getvalue() == "[worker 1] hello\n"
    assert "\x1b[" in terminal.getvalue() and "hello" in terminal.getvalue()


def test_the_exit_status_of_a_process_is_described() -> None:
    assert describe_end(3) == "exit code 3"
    assert describe_end(-9) == "killed by SIGKILL"
    assert describe_end(-100) == "killed by signal 100"
