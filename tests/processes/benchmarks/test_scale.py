"""The benchmarks of scale and stragglers run in small, with real processes. Their figures are not judged."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks


@pytest.mark.timeout(120)
def test_every_worker_of_a_crowd_gets_its_token(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workers", "20", "--processes", "2", "--rounds", "2", "--look", "0.2", "--unix", "--json"]
    assert benchmarks(["run", "scale_workers", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["workers"], figures["processes"]) == (20, 2)
    assert len(figures["release_ms"]) == 2
    for first, half, last in zip(figures["first_token_ms"], figures["median_token_ms"], figures["release_ms"], strict=True):
        assert 0 < first <= half <= last
    assert figures["chief_peak_bytes"] >= figures["chief_bytes"] > 1 << 20
    assert figures["registration_s"] > 0 and figures["status_s"] > 0


@pytest.mark.timeout(120)
def test_life_of_a_cluster_of_several_servers_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ps", "3", "--bytes", "4096", "--variables", "8", "--workers", "1", "--steps", "5", "--look", "0.2", "--json"]
    assert benchmarks(["run", "scale_servers", *arguments]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["first_ps_s"] <= figures["last_ps_s"] <= figures["start_s"]
    assert figures["cpu_ms_a_step"].keys() == {"worker", "all ps", "chief"}
    assert min(figures[name] for name in ("connect_s", "join_s", "median_ms", "status_s")) > 0


@pytest.mark.timeout(120)
def test_stragglers_are_dropped_by_backups_alone_and_compared_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.csv"
    arguments = ["--workers", "3", "--backups", "1", "--steps", "12", "--pace", "0.002", "--delay", "0.03", "--probability", "0.3"]
    assert benchmarks(["run", "straggler", *arguments, "--repeat", "1", "--times", str(times), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    none, one = figures["arms"]
    assert (none["num_required"], one["num_required"]) == (3, 2)
    assert (none["num_accepted"], one["num_accepted"]) == (36, 24)
    assert none["num_dropped"] == 0 <= one["num_dropped"]
    assert none["predicted"]["dropped"] == 0 < none["predicted"]["mean_ms"]
    assert one["same_time"]["seconds"] == none["same_time"]["seconds"] > 0
    assert len(times.read_text().splitlines()) == 1 + 36


@pytest.mark.quick
def test_a_plot_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(["run", "straggler", "--plot", str(tmp_path / "absent" / "plot.png")]) == 2
    assert "--plot" in capsys.readouterr().err
