"""The benchmark runs, every role is measured, and every contribution counts. Its figures are not judged."""

import json

import pytest

from benchmarks.cluster_run import run_cluster
from benchmarks.figures import RunFigures
from benchmarks.peers.comparison import compare
from benchmarks.policies import main as policies
from benchmarks.sparse_table import main as sparse_table
from benchmarks.step import main
from benchmarks.workload import Workload


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


@pytest.mark.timeout(120)
def test_policies_are_measured_on_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "sync, 1 backup worker", "--only", "async"]
    arguments = ["--contributions", "12", "--pace", "0.001", "--slowdown", "2", "--workers", "3", "--ps", "1", "--margin", "1", "--json"]
    assert policies([*arguments, *only]) == 0
    sync, free = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (sync["policy"], free["policy"]) == ("sync, 1 backup worker", "async")
    assert sync["accepted"] == free["accepted"] == 12
    assert (sync["steps"], free["steps"]) == (6, 12)
    assert sync["mean_staleness"] == 0 < free["mean_staleness"]
    assert free["seconds"] > 0 and 0 < free["test_accuracy"] < 1


@pytest.mark.timeout(120)
def test_a_table_is_measured_in_rows_bytes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "20000", "--rows-per-push", "50", "--steps", "4", "--optimizer", "adam", "--json"]
    assert sparse_table(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["work"]["num_rows"] == 20000
    assert figures["rows_per_s"] > 0 and figures["create_s"] > 0
    # Rows of both workers, there and back. Whatever else this machine sends to itself counts too.
    assert figures["bytes_per_step"] > 49 * 2 * 2 * 64
    assert figures["ps_bytes"] > figures["ps_empty_bytes"] > 1 << 20


@pytest.mark.timeout(120)
def test_own_half_of_the_comparison_runs_beside_a_peer() -> None:
    work = Workload(total_bytes=4096, num_variables=4, num_workers=2, num_ps=1, num_steps=5)
    peer = RunFigures(step_s=[1.0] * 5, cpu_s_per_step={"worker": 1.0}, peak_rss_bytes={"worker": 1 << 20}, num_accepted=10)
    comparison = compare(work, "made up", run_peer=lambda: peer, run_own=lambda: run_cluster(work, is_tcp=True, timeout_s=100), repeat=1)
    assert comparison.own_runs[0].num_accepted == 10
    assert comparison.own_runs[0].cpu_s_per_step.keys() == {"ps", "chief", "worker"}
    assert comparison.peer_ms == 1000 and comparison.ratio == comparison.own_ms / 1000 > 0


def test_a_benchmark_that_cannot_run_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert policies(["--workers", "0", "--only", "async"]) == 1
    assert capsys.readouterr().err == "benchmarks.policies: --workers: got 0, want 1 or more\n"
