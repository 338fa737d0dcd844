"""Recorded cases of the original: all replayed on objects in this process, some over gRPC, some by the program against real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clusters import cluster_of_objects, cluster_of_servers
from tests.conformance.replay import main, replay_file
from tests.support.repository import ROOT

CASES = ROOT / "tests" / "conformance" / "cases"

# What a network adds to a case is shown for every kind of session and call in tests/contract; here, that the replays reach it.
NUM_OVER_GRPC = 2

pytestmark = pytest.mark.timeout(240)


def _replay_here(*files: Path) -> int:
    """The exit status of the program, whose clusters are objects."""
    return main([*map(str, files)], start=cluster_of_objects)


def _written(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", sorted(path.stem for path in CASES.glob("*.json")))
def test_recorded_cases_give_the_results_of_the_original(kind: str) -> None:
    found, num_cases, failures = replay_file(CASES / f"{kind}.json", start=cluster_of_objects)
    assert (found, failures) == (kind, [])
    assert num_cases >= 12


@pytest.mark.parametrize("kind", sorted(path.stem for path in CASES.glob("*.json")))
def test_the_first_cases_of_each_kind_give_the_same_results_over_grpc(kind: str, tmp_path: Path) -> None:
    content = json.loads((CASES / f"{kind}.json").read_text(encoding="utf-8"))
    file = _written(tmp_path / f"{kind}.json", {**content, "cases": content["cases"][:NUM_OVER_GRPC]})
    assert replay_file(file, start=cluster_of_servers) == (kind, NUM_OVER_GRPC, [])


def test_recorded_cases_give_the_same_results_against_real_processes(tmp_path: Path) -> None:
    content = json.loads((CASES / "sync_replicas.json").read_text(encoding="utf-8"))
    file = _written(tmp_path / "sync_replicas.json", {**content, "cases": content["cases"][:1]})
    command = [sys.executable, "tests/conformance/replay.py", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("sync_replicas: 1 of 1 passed")
    assert result.stdout.splitlines()[-1] == "1 passed, 0 failed"


def test_a_case_with_another_result_is_reported_and_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((CASES / "dense_accumulator.json").read_text(encoding="utf-8"))
    content["cases"] = content["cases"][:2]
    place = next(index for index, op in enumerate(content["cases"][1]["ops"]) if op["op"] == "num_accumulated")
    content["cases"][1]["ops"][place]["expect"] += 1
    unknown = _written(tmp_path / "unknown.json", {"kind": "new", "cases": [{}]})
    assert _replay_here(_written(tmp_path / "wrong.json", content), unknown) == 1
    out = capsys.readouterr().out
    assert f"dense_accumulator case 1: Mismatch: ops[{place}] num_accumulated" in out
    assert "new case 0: no such kind" in out
    assert out.splitlines()[-1] == "1 passed, 2 failed"


def test_a_file_without_cases_counts_as_failed_and_the_others_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{broken", encoding="utf-8")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    content = json.loads((CASES / "dense_accumulator.json").read_text(encoding="utf-8"))
    status = _replay_here(
        tmp_path / "missing.json",
        tmp_path / "broken.json",
        tmp_path / "list.json",
        _written(tmp_path / "kind.json", {"kind": "optimizer"}),
        _written(tmp_path / "empty.json", {"kind": "optimizer", "cases": []}),
        _written(tmp_path / "odd.json", {"kind": "dense_accumulator", "cases": [3]}),
        _written(tmp_path / "good.json", {**content, "cases": content["cases"][:1]}),
    )
    out, err = capsys.readouterr()
    assert (status, err) == (1, "")
    assert "missing.json: cannot be read: No such file or directory" in out
    assert "broken.json: is no JSON" in out
    for name in ("list", "kind", "empty"):
        assert f"{name}.json: has no cases: want" in out
    assert "dense_accumulator: 1 of 1 passed" in out
    assert out.splitlines()[-1] == "1 passed, 6 failed"
