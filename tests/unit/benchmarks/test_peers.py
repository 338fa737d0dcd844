"""The arithmetic and the words of the comparison with other systems, on made-up measurements. Installs and starts nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.harness.arguments import WrongArguments
from benchmarks.harness.workload import Workload
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.comparison import COLUMNS, Comparison, Contender, PeerFailed, by_turns, compare, missed_targets, rows_of
from benchmarks.peers.environments import NotInstallable, last_word, prepare
from benchmarks.peers.targets import BFLOAT16, GRPC, SHM, targets_of
from benchmarks.report.figures import RunFigures, as_row
from benchmarks.report.plot import check_plot
from benchmarks.suites.step.peers import panels

WORK = Workload(total_bytes=4096, num_variables=4, num_workers=2, num_ps=1, num_steps=3)


def _run(*step_ms: float, cpu_ms: float = 1.0, mib: int = 50, server: str = "ps") -> RunFigures:
    return RunFigures(
        step_s=[value / 1e3 for value in step_ms],
        cpu_s_per_step={"worker": cpu_ms / 1e3, server: 2 * cpu_ms / 1e3},
        peak_rss_bytes={"worker": mib << 20, server: (mib + 1) << 20},
        num_accepted=6,
        total_pss_bytes=3 * mib << 20,
        num_processes={"worker": 2, server: 1},
    )


def _comparison(
    runs: Mapping[str, Sequence[RunFigures]],
    *,
    own: Sequence[str] = (SHM, GRPC),
    size: str = "4KiB/4",
    workload: Workload = WORK,
    policy: str = "sync",
    missing: dict[str, str] | None = None,
) -> Comparison:
    own = [name for name in own if name in runs]
    return Comparison(size=size, workload=workload, policy=policy, own=own, runs=runs, missing=missing or {})


def _contender(name: str, run: Callable[[], RunFigures], *, is_own: bool = False) -> Contender:
    return Contender(name=name, is_own=is_own, run=run)


def test_ratio_is_of_the_medians_of_the_runs_medians() -> None:
    peer_runs = [_run(1, 10, 100), _run(20, 20, 20), _run(90, 90, 90)]
    own_runs = [_run(4, 5, 6), _run(1, 1, 1), _run(70, 80, 90)]
    comparison = _comparison({"other": peer_runs, SHM: own_runs})
    assert comparison.ms("other") == pytest.approx(20)
    assert comparison.ms(SHM) == pytest.approx(5)
    assert comparison.ratio(SHM, peer="other") == pytest.approx(0.25)
    assert comparison.ratio(SHM, peer="absent") is None


def test_the_runs_of_all_systems_alternate() -> None:
    order: list[str] = []

    def runner(name: str, ms: float) -> Callable[[], RunFigures]:
        def run() -> RunFigures:
            order.append(name)
            return _run(ms)

        return run

    own = [_contender(name, runner(name, 3), is_own=True) for name in (SHM, GRPC)]
    peers = [_contender("other", runner("other", 2))]
    comparison = compare("4KiB/4", WORK, policy="sync", contenders=by_turns(own, peers), repeat=2)
    assert order == [SHM, "other", GRPC] * 2
    assert comparison.own == [SHM, GRPC]
    assert comparison.ratio(GRPC, peer="other") == pytest.approx(1.5)


def test_a_peer_that_fails_is_left_out_and_the_others_continue() -> None:
    def fail() -> RunFigures:
        tries.append(1)
        raise PeerFailed("No matching distribution\n  found | at all")

    tries: list[int] = []
    contenders = [_contender(SHM, lambda: _run(1), is_own=True), _contender("mxnet", fail)]
    record = compare("4KiB/4", WORK, policy="sync", contenders=contenders, repeat=3).record()
    own, missing = (as_row(row) for row in rows_of(record))
    assert len(tries) == 1
    assert "missing: No matching distribution found / at all" in missing
    assert own.count("|") == missing.count("|") == len(COLUMNS) + 1
    assert len(record["systems"][SHM]["medians_ms"]) == 3
    assert "ms" not in record["systems"]["mxnet"]


def test_row_shows_ratios_cpu_of_all_processes_and_the_largest_memory() -> None:
    peer_runs = [_run(2, cpu_ms=cpu_ms, mib=mib, server="server") for cpu_ms, mib in ((1, 90), (5, 70), (3, 80))]
    record = _comparison({SHM: [_run(1)], "mxnet": peer_runs}, own=[SHM]).record()
    own, peer = (dict(zip(COLUMNS, row, strict=True)) for row in rows_of(json.loads(json.dumps(record))))
    assert (own["size"], own["variables"], own["ps"], own["policy"], own["system"]) == ("4 KiB", "4", "1", "sync", SHM)
    assert (own["ms a step"], own["/ mxnet"], own["/ gloo"]) == ("1.00", "0.5", "–")
    assert own["CPU ms/step: all"] == "4.0"
    assert (peer["… each"], peer["peak MiB: each"]) == ("server 6.0, worker 3.0", "server 91, worker 90")
    assert (peer["/ mxnet"], peer["targets"], peer["each run"], peer["memory of all, MiB"]) == ("–", "–", "2 2 2", "270")


def test_targets_are_judged_by_size_and_transport() -> None:
    runs = {SHM: [_run(1.9)], GRPC: [_run(5.1)], "tensorflow": [_run(10)], "mxnet": [_run(5)]}
    record = _comparison(runs).record()
    texts = {name: [target["text"] for target in record["systems"][name]["targets"]] for name in (SHM, GRPC)}
    assert texts == {
        SHM: ["≤ 0.2 of tensorflow: met", "≤ 1 of mxnet: met"],
        GRPC: ["≤ 0.5 of tensorflow: MISSED", "≤ 1 of mxnet: MISSED"],
    }
    num_judged, missed = missed_targets([record])
    assert num_judged == 4
    assert missed == [
        f"4KiB/4, {GRPC}: ≤ 0.5 of tensorflow: MISSED (0.51)",
        f"4KiB/4, {GRPC}: ≤ 1 of mxnet: MISSED (1.02)",
    ]


@pytest.mark.parametrize(("policy", "num_ps"), [("async", 1), ("sync", 2)])
def test_targets_are_for_one_server_and_sync_only(policy: str, num_ps: int) -> None:
    workload = Workload(total_bytes=4096, num_variables=4, num_workers=2, num_ps=num_ps, num_steps=3)
    comparison = _comparison({SHM: [_run(9)], "tensorflow": [_run(1)]}, policy=policy, workload=workload)
    assert missed_targets([comparison.record()]) == (0, [])


def test_large_models_have_targets_against_gloo_and_with_two_bytes_a_number() -> None:
    assert {(target.peer, target.at_most) for target in targets_of("64MiB/16", SHM)} == {("tensorflow", 0.2), ("gloo", 0.4), ("mxnet", 1.0)}
    assert [(target.peer, target.at_most) for target in targets_of("64MiB/16", BFLOAT16)] == [("tensorflow", 0.6)]
    assert [target.peer for target in targets_of("16MiB/16", GRPC)] == ["mxnet"]


def test_only_systems_with_servers_take_part_with_two_of_them() -> None:
    assert {name for name, peer in PEERS.items() if peer.takes_part(policy="sync", num_ps=2)} == {"tensorflow", "mxnet"}
    assert {name for name, peer in PEERS.items() if peer.takes_part(policy="async", num_ps=1)} == {"tensorflow"}
    assert PEERS["mxnet"].servers(2) == ["scheduler 0", "server 0", "server 1"]
    assert PEERS["gloo"].servers(1) == []


def test_plot_has_a_panel_for_each_lineup_and_gaps_for_what_is_missing() -> None:
    rows = [
        _comparison({SHM: [_run(1)], "gloo": [_run(2)]}).record(),
        _comparison({SHM: [_run(3)]}, size="1MiB/8", missing={"gloo": "no"}).record(),
        _comparison({SHM: [_run(5)]}, policy="async").record(),
    ]
    drawn = panels({"rows": rows})
    assert list(drawn) == ["sync, 1 server", "async, 1 server"]
    assert drawn["sync, 1 server"] == (["4 KiB / 4", "1 MiB / 8"], {SHM: [1, 3], PEERS["gloo"].title: [2, None]})


def test_a_failed_installation_reports_pips_last_error() -> None:
    assert last_word("Collecting x\nERROR: no version\nERROR: No matching distribution found for x\n\nhint: y") == (
        "No matching distribution found for x"
    )
    assert last_word("Traceback\nImportError: libz.so") == "ImportError: libz.so"


def test_an_environment_that_exists_is_not_installed_again(tmp_path: Path) -> None:
    python = tmp_path / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "peer" / ".installed").write_text("a==1\nb==2", encoding="utf-8")
    notes: list[str] = []
    assert prepare("peer", ("a==1", "b==2"), module="a", cache=tmp_path, note=notes.append) == python
    assert not notes


def test_an_environment_that_cannot_be_created_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "peer").write_text("a file where the environment should be", encoding="utf-8")
    with pytest.raises(NotInstallable):
        prepare("peer", ("a==1",), module="a", cache=tmp_path, note=lambda _: None)


@pytest.mark.parametrize("size", ["4096", "4 lightyears/4", "0/1", "4/4"])
def test_an_invalid_size_is_refused_before_anything_is_installed(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks(["run", "peers", "--sizes", size]) == 2
    assert "python -m benchmarks run peers: error: " in capsys.readouterr().err


def test_an_impossible_plot_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match="--plot"):
        check_plot(tmp_path / "missing" / "steps.png")
