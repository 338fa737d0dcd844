"""Compares two reports of the same suite: every figure that both have, and their ratio. Knows JSON; nothing of any suite."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report.figures import as_row

# Endings of figures' names. All other fields of a report describe the measurement, and must be the same in both.
_FIGURES = ("_ms", "_s", "_bytes", "_us", "ratio", "_cpu", "seconds", "accuracy", "cpu_s_per_step")
# Fields with such endings that are not figures.
_SETTINGS = ("total_bytes", "pace_s", "delay_s")


def read_report(path: Path) -> dict[str, Any]:
    """Reads a suite's JSON: one object, a list of rows, or one object per line. Raises OSError and ValueError."""
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except ValueError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    return found if isinstance(found, dict) else {"rows": found}


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns a table in Markdown. Raises ValueError if the two have no figure in common."""
    old, new = dict(_figures(before, "")), dict(_figures(after, ""))
    common = [name for name in old if name in new]
    if not common:
        raise ValueError("the two reports have no figure in common: they are of different suites or settings")
    rows = [as_row(["figure", "before", "after", "after / before"]), as_row(["---"] * 4)]
    for name in common:
        ratio = f"{new[name] / old[name]:.3f}" if old[name] else "–"
        rows.append(as_row([name, f"{old[name]:.6g}", f"{new[name]:.6g}", ratio]))
    rows += [f"only before: {name}" for name in old if name not in new]
    return rows + [f"only after: {name}" for name in new if name not in old]


def _figures(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _figures(inner, f"{name} {key}".strip())
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        for inner in value:
            yield from _figures(inner, f"{name} [{_setting(inner)}]".strip())
    elif isinstance(value, int | float) and not isinstance(value, bool) and _is_figure(name):
        yield name, float(value)


def _is_figure(name: str) -> bool:
    words = name.rpartition("]")[2].split()
    return any(word.endswith(_FIGURES) and word not in _SETTINGS for word in words)


def _setting(row: dict[str, Any]) -> str:
    """Returns the strings and whole numbers that identify a row."""
    identity = {key: value for key, value in row.items() if isinstance(value, str | int) and not isinstance(value, bool)}
    return ", ".join(f"{key} {value}" for key, value in identity.items() if key in _SETTINGS or not _is_figure(key))
