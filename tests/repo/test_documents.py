"""The documents agree with the repository: links lead somewhere, commands and flags exist. Knows their words; runs no cluster."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _helps() -> dict[str, str]:
    words = [sys.executable, "-m", "tests.repo.command_helps"]
    helps: dict[str, str] = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout)
    return helps


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not target.startswith("https://") and not (page.parent / target).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    "page",
    [
        ROOT / name
        for name in (
            "docs/how-to/running.md",
            "docs/how-to/plan.md",
            "docs/explanation/scale.md",
            "docs/explanation/performance.md",
            "benchmarks/README.md",
            "README.md",
        )
    ],
    ids=_name,
)
def test_flags_exist(page: Path) -> None:
    known = {flag for text in _helps().values() for flag in re.findall(r"--[a-z][a-z-]+", text)}
    foreign = {"--build", "--scale", "--its"}  # docker's, and the example's own
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
    assert named <= known | foreign, named - known - foreign


def test_every_flag_of_the_servers_is_documented() -> None:
    text = (ROOT / "docs" / "how-to" / "running.md").read_text(encoding="utf-8")
    flags = {
        flag
        for command in ("ps", "chief", "up", "demo", "status", "policy", "set")
        for flag in re.findall(r"--[a-z][a-z-]+", _helps()[command])
    }
    assert flags - {"--help"} <= set(re.findall(r"--[a-z][a-z-]+", text)), flags - set(re.findall(r"--[a-z][a-z-]+", text))


def test_every_variable_that_the_code_reads_is_documented() -> None:
    text = (ROOT / "docs" / "how-to" / "running.md").read_text(encoding="utf-8")
    sources = (path for package in ("ps_server", "chief", "worker_client", "lockstep") for path in (ROOT / package).rglob("*.py"))
    read = {name for path in sources for name in re.findall(r"\bLOCKSTEP_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    internal = {"LOCKSTEP_RUN"}  # the launcher's mark on its own processes
    assert not {name for name in read - internal if name not in text}
