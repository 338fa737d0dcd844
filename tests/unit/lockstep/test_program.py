"""How the `lockstep` command ends as a program."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, os, sys
from unittest import mock
import lockstep.__main__
atexit.register(print, "at exit")
print("said")
lockstep.__main__.main = lambda: int(sys.argv[1])
lockstep.__main__.program()
"""


@pytest.mark.parametrize(("code", "out"), [(130, "said\n"), (143, "said\n"), (0, "said\nat exit\n"), (2, "said\nat exit\n")])
def test_program_that_a_signal_ends_does_not_wait_for_what_python_does_at_its_end(code: int, out: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(code)], stdout=subprocess.PIPE, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (code, out)


def test_a_program_that_ends_leaves_its_modules_to_no_collection() -> None:
    program = PROGRAM.replace('"at exit"', '"at exit"), atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects()))')
    ended = subprocess.run([sys.executable, "-c", program, "0"], stdout=subprocess.PIPE, text=True, timeout=20)
    assert ended.stdout == "said\nTrue\nat exit\n"
