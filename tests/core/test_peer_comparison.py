"""The arithmetic and the words of the comparison with other systems, on made-up measurements. Installs and starts nothing."""

import json
from pathlib import Path

import pytest

from benchmarks.figures import RunFigures
from benchmarks.peers.__main__ import main
from benchmarks.peers.comparison import COLUMNS, Comparison, as_row, compare
from benchmarks.peers.environments import NotInstallable, last_word, prepare
from benchmarks.plot import CannotPlot, check_plot
from benchmarks.workload import Workload

WORK = Workload(total_bytes=4096, num_variables=4, num_workers=2, num_ps=1, num_steps=3)


def _run(*step_ms: float, cpu_ms: float = 1.0, mib: int = 50, server: str = "ps") -> RunFigures:
    return RunFigures(
        step_s=[value / 1e3 for value in step_ms],
        cpu_s_per_step={"worker": cpu_ms / 1e3, server: 2 * cpu_ms / 1e3},
        peak_rss_bytes={"worker": mib << 20, server: (mib + 1) << 20},
        num_accepted=6,
    )


def test_ratio_is_of_the_medians_of_the_runs_medians() -> None:
    peer_runs = [_run(1, 10, 100), _run(20, 20, 20), _run(90, 90, 90)]
    own_runs = [_run(4, 5, 6), _run(1, 1, 1), _run(70, 80, 90)]
    comparison = Comparison(workload=WORK, peer="other", peer_runs=peer_runs, own_runs=own_runs)
    assert comparison.peer_ms == pytest.approx(20)
    assert comparison.own_ms == pytest.approx(5)
    assert comparison.ratio == pytest.approx(0.25)


def test_runs_are_made_by_turns() -> None:
    order: list[str] = []

    def run(name: str, ms: float) -> RunFigures:
        order.append(name)
        return _run(ms)

    comparison = compare(WORK, "other", run_peer=lambda: run("peer", 2), run_own=lambda: run("own", 3), repeat=3)
    assert order == ["peer", "own"] * 3
    assert comparison.ratio == pytest.approx(1.5)


def test_row_shows_the_median_cpu_and_the_largest_memory_of_each_role() -> None:
    peer_runs = [_run(2, cpu_ms=cpu_ms, mib=mib, server="server") for cpu_ms, mib in ((1, 90), (5, 70), (3, 80))]
    cells = Comparison(workload=WORK, peer="other", peer_runs=peer_runs, own_runs=[_run(1)]).cells()
    assert len(cells) == len(COLUMNS)
    assert cells[:6] == ["4 KiB", "4", "other", "2.00", "1.00", "0.50"]
    assert cells[6:] == ["server 6.0, worker 3.0", "ps 2.0, worker 1.0", "server 91, worker 90", "ps 51, worker 50"]


def test_a_missing_peer_has_a_row_that_says_why() -> None:
    missing = Comparison(workload=WORK, peer="other", missing="No matching distribution\n  found | at all")
    row = as_row(missing.cells())
    assert "missing: No matching distribution found / at all" in row
    assert row.count("|") == len(COLUMNS) + 1
    assert missing.record()["missing"] and "ratio" not in missing.record()


def test_record_keeps_every_runs_median() -> None:
    comparison = Comparison(workload=WORK, peer="other", peer_runs=[_run(2), _run(4)], own_runs=[_run(1), _run(2)])
    record = json.loads(json.dumps(comparison.record()))
    assert (record["peer_ms"], record["own_ms"], record["ratio"]) == (3, 1.5, 0.5)
    assert record["peer_runs"]["medians_ms"] == [2, 4] and record["own_runs"]["medians_ms"] == [1, 2]


def test_pips_last_error_is_the_reason() -> None:
    assert last_word("Collecting x\nERROR: no version\nERROR: No matching distribution found for x\n\nhint: y") == (
        "No matching distribution found for x"
    )
    assert last_word("Traceback\nImportError: libz.so") == "ImportError: libz.so"


def test_an_environment_that_stands_is_not_installed_again(tmp_path: Path) -> None:
    python = tmp_path / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "peer" / ".installed").write_text("a==1\nb==2", encoding="utf-8")
    notes: list[str] = []
    assert prepare("peer", ("a==1", "b==2"), module="a", cache=tmp_path, note=notes.append) == python
    assert not notes


def test_an_environment_that_cannot_be_made_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "peer").write_text("a file where the environment should be", encoding="utf-8")
    with pytest.raises(NotInstallable):
        prepare("peer", ("a==1",), module="a", cache=tmp_path, note=lambda _: None)


@pytest.mark.parametrize("size", ["4096", "4 lightyears/4", "0/1", "4/4"])
def test_what_is_no_size_is_refused_before_anything_is_installed(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sizes", size]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.peers: ")


def test_a_plot_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CannotPlot):
        check_plot(tmp_path / "missing" / "steps.png")
