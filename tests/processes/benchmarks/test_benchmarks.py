"""The benchmark runs, every role is measured, and every contribution counts. Its figures are not judged."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.peers.targets import BFLOAT16, SHM

SMALL = ["--bytes", "4096", "--variables", "4", "--workers", "2", "--steps", "5"]
ROLES = {"chief", "ps", "worker"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("asked", "used", "roles"),
    [
        (["--transport", "shm", "--policy", "async", "--ps", "1"], ["shared_memory"], ROLES),
        (["--transport", "grpc", "--security", "mtls"], ["grpc"], ROLES),
        pytest.param(["--transport", "grpc", "--ps", "2", "--unix"], ["grpc"], ROLES, marks=pytest.mark.quick),
        (["--transport", "auto", "--unix", "--chief-in-ps"], ["shared_memory"], {"ps", "worker"}),
        (["--transport", "local", "--policy", "async", "--ps", "2"], ["local"], {"process"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_benchmark_measures_every_role_and_says_what_carried_it(
    asked: list[str], used: list[str], roles: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks(["run", "step", *SMALL, *asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["transport_used"] == used
    assert report["num_accepted"] == 10
    assert report["cpu_s_per_step"].keys() == report["peak_rss_bytes"].keys() == report["pss_bytes"].keys() == roles
    assert 0 < report["median_ms"] <= report["p90_ms"]
    assert min(report["peak_rss_bytes"].values()) > 1 << 20
    assert max(report["pss_bytes"].values()) > 1 << 20
    # Looked at one after the other, so that a role may have let go of something in between.
    assert report["total_pss_bytes"] > 0.9 * max(report["pss_bytes"].values())


def test_each_durability_is_measured_on_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--sizes", "4KiB/4", "--saves", "1", "--between", "5", "--repeat", "1"]
    assert benchmarks(["run", "durability", *few, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert min(report[f"{name}_ms"] for name in ("none", "interval", "step", "copy")) > 0
    assert report["steps_between"] == 5 and "excess_ms" in report
    assert benchmarks(["run", "durability", "--between", "3"]) == benchmarks(["run", "durability", "--sizes", "4"]) == 2


@pytest.mark.quick
def test_a_benchmark_refuses_an_invalid_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(["run", "step", "--bytes", "4", "--variables", "2"]) == 2
    assert "want more bytes" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_policies_are_measured_on_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "sync, 1 backup worker", "--only", "async"]
    arguments = ["--contributions", "12", "--pace", "0.001", "--slowdown", "2", "--workers", "3", "--ps", "1", "--margin", "1", "--json"]
    assert benchmarks(["run", "policies", *arguments, *only]) == 0
    sync, free = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (sync["policy"], free["policy"]) == ("sync, 1 backup worker", "async")
    assert sync["accepted"] == free["accepted"] == 12
    assert (sync["steps"], free["steps"]) == (6, 12)
    assert sync["mean_staleness"] == 0 < free["mean_staleness"]
    assert free["seconds"] > 0 and 0 < free["test_accuracy"] < 1


@pytest.mark.timeout(120)
def test_a_table_is_measured_in_rows_bytes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rows", "20000", "--rows-per-push", "50", "--steps", "4", "--optimizer", "adam", "--json"]
    assert benchmarks(["run", "sparse_table", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["work"]["num_rows"] == 20000
    assert figures["rows_per_s"] > 0 and figures["create_s"] > 0
    # Rows of both workers, there and back. Whatever else this machine sends to itself counts too.
    assert figures["bytes_per_step"] > 49 * 2 * 2 * 64
    assert figures["ps_bytes"] > figures["ps_empty_bytes"] > 1 << 20


@pytest.mark.timeout(120)
def test_own_half_of_the_comparison_runs_beside_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "peers.json"
    arguments = ["--sizes", "4KiB/4", "--peers", "--lineups", "sync", "--steps", "3", "--repeat", "1", "--own", SHM, BFLOAT16]
    assert benchmarks(["run", "peers", *arguments, "--json", str(kept)]) == 0
    systems = json.loads(kept.read_text(encoding="utf-8"))["rows"][0]["systems"]
    assert {name: system["transports"] for name, system in systems.items()} == {
        SHM: ["shared_memory"],
        BFLOAT16: ["grpc"],
    }
    assert all(system["ms"] > 0 and system["cpu_ms_per_step"].keys() == ROLES for system in systems.values())
    assert f"| sync | {BFLOAT16} |" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_a_table_and_its_page_show_the_measured_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, text = tmp_path / "bench.json", tmp_path / "page.md"
    few = ["--sizes", "4KiB/4", "--transports", "shm", "local", "--ps", "1", "--policies", "sync", "--steps", "3"]
    assert benchmarks(["run", "table", *few, "--json", str(kept)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 KiB")]
    text.write_text("<!-- figures: table -->\n<!-- end of figures -->\n", encoding="utf-8")
    assert benchmarks(["run", "page", str(kept), "--page", str(text)]) == 0
    assert len(rows) == 2 and all(row in text.read_text(encoding="utf-8") for row in rows)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_profile_sees_the_chain_of_a_step_from_both_ends(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(["run", "profile", "--size", "4KiB/4", "--transports", transport, "--steps", "5", "--json"]) == 0
    (path,) = json.loads(capsys.readouterr().out)["paths"]
    parts = {(part["who"], part["part"]) for part in path["parts"]}
    assert {("worker 0", "push"), ("worker 0", "commit and token"), ("worker 0", "compute"), ("ps", "apply")} <= parts
    assert (("ps", "receive") in parts) == (("ps", "send") in parts) == (transport == "grpc")
    assert path["cpu_ms"].keys() == {"ps 0", "chief", "worker 0", "worker 1"}


@pytest.mark.quick
def test_a_benchmark_that_cannot_run_reports_the_reason_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(["run", "policies", "--workers", "0", "--only", "async"]) == 2
    assert capsys.readouterr().err == "benchmarks policies: --workers: got '0', want a whole number from 1 to 100000\n"


@pytest.mark.timeout(240)
def test_followers_are_measured_by_what_they_got(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rates", "3e-6", "1e-3", "--sizes", "256KiB", "--followers", "3", "--processes", "2", "--networks", "1Gbit", "--ps", "2"]
    few += ["--relays", "2"]
    assert benchmarks(["run", "fresh", *few, "--steps", "4", "--pause", "0.05", "--turns", "2", "--wholes", "1", "--json"]) == 0
    refined, learned, linked, relayed, turned, dense = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert 0 < refined["share"] < learned["share"] <= 1
    assert refined["patches"] and not learned["patches"]
    # The same share of changes gives the same bytes, whatever lies before the followers.
    assert linked["followers"] == 3 and linked["whole_by_bytes"] == pytest.approx(refined["whole_by_bytes"], rel=0.3)
    assert len(linked["observer_s"]) == len(linked["http_s"]) == 1
    assert (relayed["followers"], relayed["relays"]) == (3, 2)
    assert relayed["patches"] and relayed["direct_delay_p50_ms"] > 0
    assert len(turned["ratios"]) == 2
    assert dense["bytes_a_step"] == dense["whole_bytes"] == 128 << 10
