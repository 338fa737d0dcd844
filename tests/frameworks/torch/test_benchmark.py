"""The benchmark of whole PyTorch models, at its smallest."""

import json

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from benchmarks.__main__ import main


@pytest.mark.timeout(500)
def test_a_model_is_measured_beside_ddp_and_without_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--models", "cnn-0.6MiB", "--transports", "network", "--steps", "3", "--repeat", "1", "--json"]
    assert main(["run", "torch", *arguments]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["beside"] for report in reports] == ["ddp", "by-hand"]
    assert all(report["step_ms"] > 0 and report["cpu_ms"] > 0 and len(report["step_ratios"]) == 1 for report in reports)
