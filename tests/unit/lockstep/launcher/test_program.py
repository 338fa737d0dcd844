"""What a worker's command lacks is seen without starting it, and what may be there all the same is not refused."""

import sys
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
    "passed/given.py": "",
    "uses_given.py": "import given\n",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passed").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
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
    assert what_lacks(command.split(), environment={}).startswith(words)


@pytest.mark.parametrize(
    "command",
    ["sh nosuch.py", PY, f"{PY} -c import_nosuch", f"{PY} -m own", *(f"{PY} {name}.py" for name in ("after_own", "after_code", "broken"))],
)
def test_what_may_be_there_once_the_program_runs_is_not_refused(command: str) -> None:
    assert what_lacks(command.split(), environment={}) == ""


def test_a_program_is_looked_for_in_the_path_that_the_worker_has(tmp_path: Path) -> None:
    (tmp_path / "passed" / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "passed" / "tool").chmod(0o755)
    assert what_lacks(["tool"], environment={"PATH": str(tmp_path / "passed")}) == ""
    assert what_lacks(["sh"], environment={"PATH": str(tmp_path / "passed")})


def test_a_program_behind_a_link_finds_the_modules_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "passed" / "linked.py").write_text("import given\n")
    (tmp_path / "linked.py").symlink_to(tmp_path / "passed" / "linked.py")
    assert what_lacks([PY, "linked.py"], environment={}) == ""


def test_modules_are_found_by_the_path_that_the_worker_has_and_none_is_imported() -> None:
    assert what_lacks([PY, "uses_given.py"], environment={"PYTHONPATH": "passed"}) == ""
    assert "given" not in sys.modules
