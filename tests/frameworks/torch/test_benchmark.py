"""The benchmarks of PyTorch models, at their smallest."""

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


@pytest.mark.timeout(500)
def test_outer_steps_are_measured_beside_gradients_of_each_step_and_under_faults(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--workers", "2", "--batches", "20", "--every", "10", "--seeds", "0", "--fragments", "2", "--faults", "1"]
    assert main(["run", "outer", *few, "--wires", "float32", "int8, bfloat16", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    gradients, ddp, alone, plain, small, parts, beside, steady, harmed = rows
    assert gradients["bytes"] == pytest.approx(10 * plain["bytes"], rel=1e-2)
    assert gradients["loss"] == pytest.approx(ddp["loss"], rel=1e-3)
    assert alone["bytes"] == 0 < small["bytes"] < plain["bytes"] / 2
    # Fragments end with a whole step.
    assert parts["bytes"] == beside["bytes"] == pytest.approx(1.5 * plain["bytes"], rel=1e-2)
    assert steady["longest_s"] > 0 < harmed["longest_s"]
    for row in rows:
        assert 2.0 < row["loss"] < 4.5, "the model has learned nothing, or its loss is not that of characters"
        assert row["characters_per_s"] > 0
