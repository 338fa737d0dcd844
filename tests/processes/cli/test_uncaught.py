"""Errors that a program does not catch: its user sees the program's own lines, once."""

from pathlib import Path

import pytest

from tests.support.processes.commands import run_up
from tests.support.processes.processes import run

PROGRAM = """
import numpy as np
import lockstep

def main():
    with lockstep.{opened} as session:
        session.create_or_join({{"w": np.zeros((4, 2))}}, optimizer=lockstep.sgd(0.1))
        session.step({{"w": np.ones((2, 4))}})

main()
"""
WANT = """Traceback (most recent call last):
  File "{path}", line 10, in <module>
    main()
  File "{path}", line 8, in main
    session.step({{"w": np.ones((2, 4))}})
ps_protocol.errors.ShapeMismatch: gradient for 'w': shape (2, 4), variable (4, 2); nothing is broadcast; push the gradient of 'w'
"""


def _run(tmp_path: Path, program: str, *flags: str) -> tuple[str, str]:
    path = tmp_path / "train.py"
    path.write_text(program)
    done = run(*flags, path)
    assert done.returncode == 1
    return done.stderr, str(path)


def test_a_traceback_ends_at_the_users_line(tmp_path: Path) -> None:
    error, path = _run(tmp_path, PROGRAM.format(opened="local()"))
    assert error == WANT.format(path=path)


def test_developers_see_all_lines_of_a_traceback(tmp_path: Path) -> None:
    error, _ = _run(tmp_path, PROGRAM.format(opened="local()"), "-X", "dev")
    assert "worker_client/session/session.py" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lockstep.adam(-1.0)", "InvalidSpec: optimizer 'adam': learning_rate = -1.0, want >= 0"),
        ("lockstep.connect('nowhere')", "want host:port or unix:/path"),
        ("lockstep.custom_optimizer('v - lr * gg', 0.1)", "InvalidSpec: formula, line 1, column 10: unknown name 'gg'"),
    ],
)
def test_a_wrong_argument_is_reported_below_its_line(tmp_path: Path, line: str, words: str) -> None:
    error, path = _run(tmp_path, f"import lockstep\n{line}\n")
    *frames, last = error.splitlines()
    assert [frame for frame in frames if frame.startswith("  File")] == [f'  File "{path}", line 2, in <module>']
    assert words in last


def test_errors_that_a_program_was_dealing_with_are_shown_and_threads_are_trimmed_too(tmp_path: Path) -> None:
    program = """
import threading, lockstep
def work():
    try:
        {}["missing"]
    except KeyError:
        lockstep.sgd(-1.0)
thread = threading.Thread(target=work)
thread.start()
thread.join()
raise SystemExit(1)
"""
    error, path = _run(tmp_path, program)
    assert "KeyError: 'missing'" in error and "During handling of the above exception" in error
    assert "worker_client" not in error and f'"{path}", line 7, in work' in error


def test_a_mistake_of_the_program_is_shown_once_not_by_every_worker(tmp_path: Path) -> None:
    code, out = run_up("--workers", "3", worker=PROGRAM.format(opened="connect()"), run_dir=tmp_path / "run")
    assert code == 1, out
    assert out.count("session.step({") <= 2, out  # twice where two workers print at the same moment
    assert "worker_client/" not in out and "Its last lines:\n[lockstep]     ps_protocol.errors.ShapeMismatch: gradient for 'w'" in out
