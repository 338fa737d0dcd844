"""Draws figures into a PNG and its dark twin `…-dark.png`. Imports matplotlib, of the extra `bench`, only when a plot is wanted."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import WrongArguments
from benchmarks.report.straggler_figures import RunOfArm


def check_plot(path: Path) -> None:
    """Raises WrongArguments before the measurement, which takes minutes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongArguments("--plot needs matplotlib: run `.venv/bin/pip install '.[bench]'`")
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise WrongArguments(f"--plot {path}: want a name that ends in .png, in a directory that exists")


def plot_panels(path: Path, *, title: str, panels: Mapping[str, tuple[Sequence[str], Mapping[str, Sequence[float | None]]]]) -> None:
    """Draws the milliseconds of a step: for each panel its sizes, and a bar in each for each series, on a logarithmic axis. None: no bar.

    All panels have the same colours for the same series.
    """
    _save_twins(path, lambda: _panels(title, panels), dpi=120)


def _panels(title: str, panels: Mapping[str, tuple[Sequence[str], Mapping[str, Sequence[float | None]]]]) -> Any:
    from matplotlib.figure import Figure

    widest = max((len(sizes) * (2 + len(series)) for sizes, series in panels.values()), default=1)
    figure = Figure(figsize=(max(7.0, 0.28 * widest), 0.9 + 3.6 * len(panels)), layout="constrained")
    grid = figure.subplots(max(1, len(panels)), 1, squeeze=False)
    colours = {name: f"C{index % 10}" for index, name in enumerate(dict.fromkeys(name for _, series in panels.values() for name in series))}
    for axes, (name, (sizes, series)) in zip(grid[:, 0], panels.items(), strict=False):
        _draw(axes, sizes, series, colours=colours)
        axes.set_title(name, fontsize=10, loc="left")
    handles = {label: handle for axes in grid[:, 0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=11)
    return figure


def plot_stragglers(path: Path, *, title: str, arms: Mapping[str, Sequence[RunOfArm]], predicted_ms: Mapping[str, float]) -> None:
    """Draws, for each arm, the distribution of its step times, its mean step beside the predicted one, and the loss over time."""
    _save_twins(path, lambda: _stragglers(title, arms, predicted_ms), dpi=130)


def _stragglers(title: str, arms: Mapping[str, Sequence[RunOfArm]], predicted_ms: Mapping[str, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.2), layout="constrained")
    spread, means, losses = figure.subplots(1, 3)
    for index, (name, runs) in enumerate(arms.items()):
        step_ms = np.sort(1e3 * np.concatenate([run.step_s for run in runs]))
        spread.plot(step_ms, np.arange(1, len(step_ms) + 1) / len(step_ms), label=name, color=f"C{index}")
        measured = means.bar(index - 0.2, step_ms.mean(), 0.38, color=f"C{index}")
        means.bar_label(measured, fmt="%.0f", fontsize=8)
        if name in predicted_ms:
            bar = means.bar(index + 0.2, predicted_ms[name], 0.38, color=f"C{index}", alpha=0.4, hatch="//")
            means.bar_label(bar, fmt="%.0f", fontsize=8)
        for run in runs:
            losses.plot([look.at for look in run.looks], [look.loss for look in run.looks], color=f"C{index}", alpha=0.8)
    spread.set(xlabel="ms of a step", ylabel="share of steps that took no longer", ylim=(0, 1.02))
    means.set(ylabel="mean ms of a step; hatched: lockstep plan")
    means.set_xticks(range(len(arms)), labels=list(arms))
    losses.set(xlabel="seconds of training", ylabel="loss on the test examples", yscale="log")
    for axes in (spread, means, losses):
        axes.spines[["top", "right"]].set_visible(False)
    spread.legend(loc="lower right", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def plot_utilisation(path: Path, rows: Sequence[Mapping[str, Any]], *, apart: str) -> None:
    """Draws, for each link and wire format, by inner steps, the characters a second as a share of those that workers `apart` train with."""
    _save_twins(path, lambda: _utilisation(rows, apart), dpi=120)


def _utilisation(rows: Sequence[Mapping[str, Any]], apart: str) -> Any:
    from matplotlib.figure import Figure

    links, wires = ([*dict.fromkeys(row[name] for row in rows if row["every"])] for name in ("link", "wire"))
    most = {(row["link"], row["seed"]): row["characters_per_s"] for row in rows if row["steps"] == apart}
    share = [(row, row["characters_per_s"] / most[row["link"], row["seed"]]) for row in rows if row["steps"] != apart]
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, link in enumerate(links):
        for wire, mark in zip(wires, "os^D", strict=False):
            drawn = [(row["every"], of) for row, of in share if (row["link"], row["wire"]) == (link, wire) and row["every"]]
            axes.plot(*zip(*drawn, strict=True), f"{mark}-", color=f"C{index}", label=f"{link}, {wire}")
        for row, of in share:
            if row["link"] == link and not row["every"]:
                style = "--" if row["wire"] else ":"
                axes.axhline(of, color=f"C{index}", linestyle=style, linewidth=1, label=f"{link}, {row['steps']}")
    axes.set(xscale="log", yscale="log", xlabel="inner steps of an outer one", ylabel="share of the time that workers compute")
    ticks = [*dict.fromkeys(row["every"] for row in rows if row["every"])]
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1.0], labels=["1 %", "3 %", "10 %", "30 %", "100 %"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _save_twins(path: Path, draw: Callable[[], Any], *, dpi: int) -> None:
    import matplotlib.style

    draw().savefig(path, dpi=dpi)
    dark = dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#1e2129")  # as the site in its dark colours
    with matplotlib.style.context(["dark_background", dark | {"axes.prop_cycle": matplotlib.rcParamsDefault["axes.prop_cycle"]}]):
        draw().savefig(path.with_stem(f"{path.stem}-dark"), dpi=dpi)


def _draw(axes: Any, sizes: Sequence[str], series: Mapping[str, Sequence[float | None]], *, colours: Mapping[str, str]) -> None:
    width = 0.84 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        left = [place - 0.42 + width * (index + 0.5) for place in range(len(sizes))]
        drawn = [(x, value) for x, value in zip(left, values, strict=True) if value is not None]
        bars = axes.bar([x for x, _ in drawn], [value for _, value in drawn], width * 0.92, label=name, color=colours[name])
        axes.bar_label(bars, fmt="%.3g", fontsize=6, rotation=90, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_ylabel("median ms of a step")
    axes.set_xticks(range(len(sizes)), labels=sizes)
    axes.spines[["top", "right"]].set_visible(False)
