"""The report of the benchmark of a link, and its reason for a skip where no link can be made."""

import argparse
import shutil

import pytest

from benchmarks.suites.wire import shaped

FIGURES = {"transport": "sockets", "encoding": "float32", "bytes": 100_000_000, "up_s": 10.0, "first_up_s": 16.0, "down_s": None}


def test_goodput_is_a_share_of_the_link() -> None:
    row = shaped.row_of(FIGURES, mbit=100)
    assert (row["up_share"], row["first_up_share"], row["down_share"]) == (0.8, 0.5, None)
    assert "| 100 Mbit/s" in shaped.in_words({"rows": [row]})
    assert "80.0% | 50.0%" in shaped.in_words({"rows": [row]})


def test_without_the_tools_it_is_skipped_and_says_which_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert shaped.run(argparse.Namespace()) == 0
    assert "skipped: no tc on this machine" in capsys.readouterr().out
