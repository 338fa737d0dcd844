"""What a worker's command lacks is seen without starting it, and what may be there all the same is not refused."""

import os
import sys
import warnings
from pathlib import Path

import pytest

from lockstep.launcher.program import what_lacks

PY = sys.executable
PROGRAMS = {
    "lacks.py": '"""Trains."""\nfrom __future__ import annotations\nimport os, numpy as np\nfrom nosuch.part import x\n',
    "own.py": "import sys\nsys.path.append('elsewhere')\n",
    "after_own.py": "import own\nimport nosuch\n",
    "after_code.py": "import sys\nsys.path.append('elsewhere')\nimport nosuch\n",
    "broken.py": "import (",
    "escape.py": "import sys\nx = '\\d'\n",
    "deep.py": f"import nosuch\nx = {'-' * 200_000}1\n",
    "long.py": f"import nosuch\n#{'-' * (1 << 18)}\n",
    "tried.py": "try:\n    import nosuch\nexcept ImportError:\n    pass\n",
    "typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import nosuch\n",
    "relative.py": "from . import nosuch\n",
    "main.py": "import __main__, sys\n",
    "a space.py": "\ufeff'Trains.'\r\nimport sys\r\n",
    "parts/first.py": "",
    "after_part.py": "import parts.first\nimport nosuch\n",
    "queue.py": "import sys\nsys.path.append('elsewhere')\n",
    "after_shadow.py": "import queue\nimport nosuch\n",
    "after_installed.py": "import pytest\nimport nosuch\n",
    "passed/given.py": "",
    "uses_given.py": "import given\n",
}
# Of programs that lack `nosuch` at most: what may be there once they run.
RUNS = [name for name in PROGRAMS if name.endswith(".py") and "/" not in name and name not in ("lacks.py", "uses_given.py")]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, newline="")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nosuch", "there is no program 'nosuch' (looked in PATH)"),
        ("lacks.py", "'lacks.py' cannot be run as a program; a Python file is run by: … -- python lacks.py"),
        (f"{PY} nosuch.py", "there is no file nosuch.py in "),
        (f"{PY} lacks.py", f"lacks.py imports nosuch, and {PY} has no such module"),
        (f"{PY} uses_given.py", f"uses_given.py imports given, and {PY} has no such module"),
        (f"{PY} -m nosuch.train", f"{PY} has no module nosuch"),
    ],
)
def test_a_missing_program_file_or_module_is_named(command: str, words: str) -> None:
    assert what_lacks(command.split(), environment=os.environ).startswith(words)


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "nosuch.py"],
        *([PY, *words.split()] for words in ("", "-c import_nosuch", "-u nosuch.py", "-X dev nosuch.py", "-m own", "-m pdb nosuch.py")),
        *([PY, name] for name in RUNS),
    ],
    ids=lambda command: " ".join(command[1:]),
)
def test_what_may_be_there_once_the_program_runs_is_not_refused(command: list[str]) -> None:
    with warnings.catch_warnings(action="error"):  # nor does the program's own code warn the launcher
        assert what_lacks(command, environment=os.environ) == ""


def test_a_pipe_is_left_for_the_program_to_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert what_lacks([PY, "pipe.py"], environment=os.environ) == ""


def test_a_finder_that_fails_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builds:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            raise ImportError("the build failed")

    monkeypatch.setattr(sys, "meta_path", [Builds(), *sys.meta_path])
    assert what_lacks([PY, "-m", "nosuch"], environment=os.environ) == ""


def test_a_program_is_looked_for_in_the_path_that_the_worker_has(tmp_path: Path) -> None:
    (tmp_path / "passed" / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "passed" / "tool").chmod(0o755)
    assert what_lacks(["tool"], environment={"PATH": str(tmp_path / "passed")}) == ""
    assert what_lacks(["sh"], environment={"PATH": str(tmp_path / "passed")})


def test_a_program_behind_a_link_finds_the_modules_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "passed" / "linked.py").write_text("import given\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "passed" / "linked.py")
    assert what_lacks([PY, "linked.py"], environment=os.environ) == ""


def test_a_program_whose_python_may_look_elsewhere_is_not_refused_and_none_is_imported() -> None:
    assert what_lacks([PY, "uses_given.py"], environment={**os.environ, "PYTHONPATH": "passed"}) == ""
    assert what_lacks([PY, "passed/../after_own.py"], environment=os.environ) == ""
    assert not {"given", "own"} & sys.modules.keys()
