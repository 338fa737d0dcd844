"""Draws bars into a PNG. Knows matplotlib, which only the extra `bench` brings, and imports it only when a plot is wanted."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path


class CannotPlot(Exception):
    """There can't be a plot; the text says what to do."""


def check_plot(path: Path) -> None:
    """Raises CannotPlot now rather than after minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotPlot("--plot needs matplotlib: run `.venv/bin/pip install '.[bench]'`")
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise CannotPlot(f"--plot {path}: want a name that ends in .png, in a directory that exists")


def plot_steps(path: Path, *, title: str, sizes: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draws the milliseconds of a step: a group of bars for each size, a bar for each series, on a logarithmic axis. None: no bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(7.0, 1.8 * len(sizes)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        left = [place - 0.4 + width * (index + 0.5) for place in range(len(sizes))]
        drawn = [(x, value) for x, value in zip(left, values, strict=True) if value is not None]
        bars = axes.bar([x for x, _ in drawn], [value for _, value in drawn], width * 0.92, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("median ms of a step (less is better)")
    axes.set_xticks(range(len(sizes)), labels=sizes)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
