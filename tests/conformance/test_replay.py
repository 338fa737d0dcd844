"""Recorded cases of the original: all of them replayed in this process, and some by the program, against real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clusters import cluster_in_this_process
from tests.conformance.replay import replay_file
from tests.support.repository import ROOT

CASES = ROOT / "tests" / "conformance" / "cases"

pytestmark = pytest.mark.timeout(240)


def _replay(*files: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "tests/conformance/replay.py", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)


def _written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", sorted(path.stem for path in CASES.glob("*.json")))
def test_recorded_cases_come_out_as_in_the_original(kind: str) -> None:
    found, num_cases, failures = replay_file(CASES / f"{kind}.json", start=cluster_in_this_process)
    assert (found, failures) == (kind, [])
    assert num_cases >= 12


@pytest.mark.parametrize("kind", ["optimizer", "sync_replicas"])
def test_a_case_comes_out_against_real_processes(kind: str, tmp_path: Path) -> None:
    content = json.loads((CASES / f"{kind}.json").read_text(encoding="utf-8"))
    result = _replay(_written(tmp_path / "first.json", {**content, "cases": content["cases"][:1]}))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{kind}: 1 of 1 passed")
    assert result.stdout.splitlines()[-1] == "1 passed, 0 failed"


def test_what_does_not_come_out_is_told_and_is_the_exit_status(tmp_path: Path) -> None:
    content = json.loads((CASES / "dense_accumulator.json").read_text(encoding="utf-8"))
    content["cases"] = content["cases"][:2]
    place = next(index for index, op in enumerate(content["cases"][1]["ops"]) if op["op"] == "num_accumulated")
    content["cases"][1]["ops"][place]["expect"] += 1
    result = _replay(_written(tmp_path / "wrong.json", content), _written(tmp_path / "unknown.json", {"kind": "new", "cases": [{}]}))
    assert result.returncode == 1
    assert f"dense_accumulator case 1: Mismatch: ops[{place}] num_accumulated" in result.stdout
    assert "new case 0: no such kind" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 passed, 2 failed"


def test_a_file_that_holds_no_cases_is_told_as_failed_and_the_others_are_played(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{broken", encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    content = json.loads((CASES / "dense_accumulator.json").read_text(encoding="utf-8"))
    result = _replay(
        tmp_path / "missing.json",
        tmp_path / "broken.json",
        tmp_path / "list.json",
        _written(tmp_path / "kind.json", {"kind": "optimizer"}),
        _written(tmp_path / "empty.json", {"kind": "optimizer", "cases": []}),
        _written(tmp_path / "odd.json", {"kind": "dense_accumulator", "cases": [3]}),
        _written(tmp_path / "good.json", {**content, "cases": content["cases"][:1]}),
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert "missing.json: cannot be read: No such file or directory" in result.stdout
    assert "broken.json: is no JSON" in result.stdout
    for name in ("list", "kind", "empty"):
        assert f"{name}.json: has no cases: want" in result.stdout
    assert "dense_accumulator: 1 of 1 passed" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 passed, 6 failed"
