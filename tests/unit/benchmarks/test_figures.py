"""Arguments of benchmarks, and the sums and tables of their figures, from made-up measurements. Starts nothing."""

import argparse
import importlib
import io
import json
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES, main, pulsing
from benchmarks.harness.process_memory import peak_rss_bytes, pss_bytes
from benchmarks.harness.seams import SEAMS, Interval, Recorder, SeamGone, find, read_intervals
from benchmarks.harness.setting import Setting, WrongTransport
from benchmarks.report.compare import compare, read_report
from benchmarks.report.figures import RunFigures, summary
from benchmarks.report.page import fill
from benchmarks.report.profile_figures import parts_of, process_rows
from benchmarks.suites.step import table
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("transport", "used", "is_fine"),
    [
        ("shm", ["shared_memory", "shared_memory"], True),
        ("shm", ["shared_memory", "grpc"], False),
        ("grpc", ["grpc"], True),
        ("grpc", ["shared_memory"], False),
        ("auto", ["shared_memory", "grpc"], True),
        ("auto", [], False),
        ("local", ["local"], True),
    ],
)
def test_a_transport_that_was_asked_for_and_not_used_fails_loudly(transport: str, used: list[str], is_fine: bool) -> None:
    setting = Setting(transport=transport)
    if is_fine:
        setting.check(used)
    else:
        with pytest.raises(WrongTransport):
            setting.check(used)


def test_workers_get_transport_and_wire_format_whatever_the_shells_variables_are() -> None:
    assert Setting(transport="shm").environment == {"LOCKSTEP_TRANSPORT": "shared_memory", "LOCKSTEP_WIRE": None}
    assert Setting(transport="grpc", wire="bfloat16").environment == {"LOCKSTEP_TRANSPORT": "grpc", "LOCKSTEP_WIRE": "bfloat16"}
    assert Setting(transport="grpc", is_unix=True, wire="float16").title == "grpc unix float16"


def test_the_table_encodes_what_is_sent_over_sockets_and_grpc() -> None:
    parser = argparse.ArgumentParser()
    table.add_arguments(parser)
    options = parser.parse_args(["--sizes", "4KiB/4", "--ps", "1", "--policies", "sync", "--wire", "bfloat16"])
    encoded = {name for name, _, setting in table.cases_of(options) if setting.wire == "bfloat16"}
    assert encoded == {"sockets", "grpc", "grpc-unix"}


@pytest.mark.parametrize("asked", [{"transport": "pigeon"}, {"wire": "int3"}, {"transport": "local", "wire": "bfloat16"}])
def test_an_impossible_setting_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"transport|wire"):
        Setting(**asked)  # type: ignore[arg-type]


def test_cpu_of_all_counts_every_process_of_a_role() -> None:
    run = RunFigures(
        step_s=[0.002],
        cpu_s_per_step={"ps": 0.004, "worker": 0.001},
        peak_rss_bytes={},
        num_accepted=3,
        num_processes={"ps": 2, "worker": 3},
    )
    assert run.total_cpu_s_per_step == pytest.approx(0.011)
    assert summary([run])["total_cpu_s_per_step"] == pytest.approx(0.011)


def test_shared_pages_are_counted_in_parts() -> None:
    assert 0 < pss_bytes() <= peak_rss_bytes()
    assert pss_bytes(1 << 30) == 0


def test_a_profile_leaves_out_intervals_outside_steps_and_lists_a_second_call_as_its_own_part() -> None:
    steps = [Interval("step", float(at), at + 0.9, 0.1) for at in (1, 2, 3)]
    pushes = [Interval("push", at + 0.1 * turn, at + 0.1 * turn + 0.05, 0.01) for at in (0, 1, 2, 3) for turn in (1, 2)]
    rare = [Interval("norms", 1.5, 1.6, 0.0)]
    first, second = parts_of([*pushes, *rare], steps, who="ps")
    assert (first["part"], first["begin_ms"], first["ms"], first["cpu_ms"]) == ("push", 100.0, 50.0, 10.0)
    assert (second["part"], second["begin_ms"]) == ("push (2)", 200.0)


def test_a_profile_shows_processes_and_then_parts_in_their_order() -> None:
    part = {"who": "worker 0", "part": "push", "begin_ms": 1.0, "ms": 2.0, "cpu_ms": 0.5, "share": 1.0}
    whole = {**part, "part": "step", "begin_ms": 0.0, "ms": 9.0}
    rows = list(process_rows({"cpu_ms": {"ps 0": [2.0, 1.0], "worker 0": [1.0, 1.0]}, "parts": [part, whole]}))
    assert ["all", "3.00", "2.00", "5.00"] in rows
    assert rows[-1] == ["worker 0", "push", "1.00", "2.00", "0.50"]


def test_a_recorder_counts_a_part_within_itself_once_and_keeps_what_it_has_seen(tmp_path: Path) -> None:
    recorder = Recorder()
    assert recorder.note("push", lambda: recorder.note("push", lambda: recorder.note("read", lambda: 7))) == 7
    recorder.write(tmp_path / "seen.json")
    assert [interval.part for interval in read_intervals(tmp_path / "seen.json")] == ["read", "push"]


def test_table_fits_its_columns_and_its_plot_has_a_bar_for_each_transport() -> None:
    row = {
        "name": "shm",
        "total_bytes": 4096,
        "num_variables": 4,
        "num_workers": 2,
        "num_ps": 1,
        "num_steps": 5,
        "policy": "sync",
        "median_ms": 1.0,
        "p90_ms": 2.0,
        "total_cpu_s_per_step": 0.003,
        "total_pss_bytes": 5 << 20,
        "cpu_s_per_step": {"worker": 0.001, "ps": 0.001},
        "peak_rss_bytes": {"worker": 1 << 20, "ps": 2 << 20},
    }
    cells = table.cells(row)
    assert len(cells) == len(table.COLUMNS)
    assert cells[-3:] == ["ps 1.00, worker 1.00", "ps 2, worker 1", "5"]
    assert table.panels({"rows": [row]}) == {"1 parameter server, sync": (["4 KiB / 4"], {"shm": [1.0]})}


def test_a_page_is_filled_between_its_marks_and_again() -> None:
    page = "before\n<!-- figures: peers -->\nold\n<!-- end of figures -->\nafter\n"
    once = fill(page, {"peers": "new"})
    assert once == "before\n<!-- figures: peers -->\nnew\n<!-- end of figures -->\nafter\n"
    assert fill(once, {"peers": "new", "table": "not on this page"}) == once


def test_every_seam_of_the_profile_is_there() -> None:
    assert all(callable(function) for _, _, function in map(find, SEAMS))


@pytest.mark.parametrize("seam", ["ps_server.absent:Store.apply", "ps_server.config:Absent.apply", "ps_server.config:absent"])
def test_a_seam_that_is_gone_is_an_error_not_a_part_of_no_time(seam: str) -> None:
    with pytest.raises(SeamGone, match=seam):
        Recorder().wrap(seam, "part")


def test_two_reports_are_compared_row_by_row_by_what_was_measured(tmp_path: Path) -> None:
    def report(name: str, *rows: tuple[str, float]) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"rows": [{"transport": kind, "median_ms": ms, "num_steps": 5} for kind, ms in rows]}))
        return path

    before, after = report("a.json", ("shm", 2.0), ("grpc", 8.0)), report("b.json", ("grpc", 4.0), ("local", 1.0))
    assert compare(read_report(before), read_report(after))[2:] == [
        "| rows [transport grpc, num_steps 5] median_ms | 8 | 4 | 0.500 |",
        "only before: rows [transport shm, num_steps 5] median_ms",
        "only after: rows [transport local, num_steps 5] median_ms",
    ]
    assert main(["compare", str(before), str(after)]) == 0
    assert main(["compare", str(before), str(report("c.json"))]) == 2


def test_every_suite_is_listed_and_has_a_main(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SUITES)
    assert all(callable(importlib.import_module(f"benchmarks.{module}").run) for module, _ in SUITES.values())
    assert main(["run", "nothing"]) == main(["nonsense"]) == 2


def test_work_without_figures_is_shown_as_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cli.progress._QUIET_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with pulsing("installing"):
        wait_until(lambda: bool(stream.getvalue()), what="it is said")
    assert stream.getvalue().startswith("installing: at work for ")
