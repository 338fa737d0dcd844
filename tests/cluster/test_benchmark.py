"""The benchmark runs, every role is measured, and every contribution counts. Its figures are not judged."""

import json

import pytest

from benchmarks.step import main


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("transport", "roles"), [("grpc", {"chief", "ps", "worker"}), ("local", {"process"})])
def test_benchmark_measures_every_role(transport: str, roles: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bytes", "4096", "--variables", "4", "--workers", "2", "--ps", "2", "--steps", "5", "--unix"]
    assert main([*arguments, "--transport", transport, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_accepted"] == 10
    assert report["cpu_s_per_step"].keys() == report["peak_rss_bytes"].keys() == roles
    assert 0 < report["median_ms"] <= report["p90_ms"]
    assert min(report["peak_rss_bytes"].values()) > 1 << 20


def test_benchmark_refuses_a_workload_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bytes", "4", "--variables", "2"]) == 2
    assert "want more bytes" in capsys.readouterr().err
