"""Summarizes a profile: for each part of a step its begin, duration and CPU time. Knows intervals and rows; no process."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.seams import Interval


def parts_of(intervals: Sequence[Interval], steps: Sequence[Interval], *, who: str) -> list[dict[str, Any]]:
    """Summarizes intervals by part and by occurrence in a step (first push, second push), in the usual order of their begin.

    `steps` are worker 0's, one after the other. An interval belongs to the step in which it begins; one that begins in no step is left out.
    Each row has medians over the steps with the part: `begin_ms` after the step's begin, `ms`, and `cpu_ms` of its own thread, without
    helper threads. `share`: the fraction of steps that have the part.
    """
    found: dict[tuple[str, int], list[tuple[float, Interval]]] = {}
    ordered, at = sorted(intervals, key=lambda each: each.begin), 0
    for step in steps:
        turns: dict[str, int] = {}
        while at < len(ordered) and ordered[at].begin < step.begin:
            at += 1
        while at < len(ordered) and ordered[at].begin <= step.end:
            each = ordered[at]
            turn = turns[each.part] = turns.get(each.part, 0) + 1
            found.setdefault((each.part, turn), []).append((each.begin - step.begin, each))
            at += 1
    parts = [_part(who, part, turn, seen, num_steps=len(steps)) for (part, turn), seen in found.items()]
    return sorted((part for part in parts if part["share"] >= 0.5), key=lambda part: part["begin_ms"])


def _part(who: str, part: str, turn: int, seen: Sequence[tuple[float, Interval]], *, num_steps: int) -> dict[str, Any]:
    return {
        "who": who,
        "part": part if turn == 1 else f"{part} ({turn})",
        "begin_ms": round(1e3 * statistics.median(begin for begin, _ in seen), 3),
        "ms": round(1e3 * statistics.median(each.end - each.begin for _, each in seen), 3),
        "cpu_ms": round(1e3 * statistics.median(each.cpu_s for _, each in seen), 3),
        "share": len(seen) / num_steps,
    }


def process_rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the rows of both tables of one path for Markdown: processes, then parts in order."""
    yield ["process", "user, ms a step", "system, ms a step", "both"]
    yield ["---"] * 4
    for name, (user, system) in found["cpu_ms"].items():
        yield [name, f"{user:.2f}", f"{system:.2f}", f"{user + system:.2f}"]
    total = [sum(both[kind] for both in found["cpu_ms"].values()) for kind in (0, 1)]
    yield ["all", f"{total[0]:.2f}", f"{total[1]:.2f}", f"{sum(total):.2f}"]
    yield [""]
    yield ["who", "part", "begins at, ms", "takes, ms", "CPU of its thread, ms"]
    yield ["---"] * 5
    for part in sorted(found["parts"], key=lambda part: (part["begin_ms"], -part["ms"])):
        if part["part"] != "step":
            yield [part["who"], part["part"], f"{part['begin_ms']:.2f}", f"{part['ms']:.2f}", f"{part['cpu_ms']:.2f}"]
