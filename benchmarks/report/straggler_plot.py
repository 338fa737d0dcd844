"""Draws what stragglers cost, with and without backup workers. Knows matplotlib, and imports it only when a plot is wanted."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report.straggler_figures import RunOfArm


def plot_stragglers(path: Path, *, title: str, arms: Mapping[str, Sequence[RunOfArm]], predicted_ms: Mapping[str, float]) -> None:
    """Draws, for each arm: how its step times are distributed, its mean step beside the predicted one, and the loss over time."""
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
    figure.savefig(path, dpi=130)
