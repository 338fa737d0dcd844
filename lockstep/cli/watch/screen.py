"""Formats a cluster as the lines of `lockstep top`, for a given size of the terminal. Pure: knows no terminal and no clock."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.cli.formatting import bytes_text, duration_text, printable, table

Point = tuple[float, int, float | None]

_BARS = "▁▂▃▄▅▆▇█"
_BOLD, _RED, _YELLOW, _GREEN, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
# The scale of a curve ends at this quantile, so that one slow step does not flatten the others.
_MOST = 0.97
_MAX_METRICS = 8
_LABEL = 14


def frame(
    seen: Mapping[str, Any],
    *,
    speed: Sequence[Point],
    metrics: Mapping[str, Sequence[Point]],
    width: int,
    height: int,
    has_colours: bool = False,
    gone_since: str = "",
) -> list[str]:
    """Returns at most `height` lines of at most `width` characters.

    `seen`: the content of the page's feed. `gone_since`: since when the chief has not answered; empty: it does answer.
    """
    paint = _Paint(has_colours)
    width = max(20, width - 1)
    lines = [*_head(seen, width, paint, gone_since), "", *_progress(seen, width), *_curves(speed, metrics, width), *_steps(seen, width)]
    left = height - len(lines) - 2
    servers = _servers(seen)
    workers = _workers(seen, most=max(3, left - len(servers) - 3))
    for block in (workers, servers):
        lines += ["", *(line if line.startswith("\x1b") else line[:width] for line in block)]
    return lines[: max(1, height)]


class _Paint:
    def __init__(self, has_colours: bool) -> None:
        self._has_colours = has_colours

    def __call__(self, text: str, *codes: str) -> str:
        return f"{''.join(codes)}{text}{_PLAIN}" if self._has_colours and text else text


def _head(seen: Mapping[str, Any], width: int, paint: _Paint, gone_since: str) -> list[str]:
    title = f"{printable(seen['cluster'])}  {seen['state'].replace('_', ' ')}" + (f"  epoch {seen['epoch']}" if seen["epoch"] > 1 else "")
    if gone_since:
        ended = seen["state"] in ("finished", "failed")
        words = "the chief has ended" if ended else f"NOT ANSWERING since {gone_since}"
        first = paint(f"{title}  {words}"[:width], _BOLD, *([] if ended else [_RED]))
    else:
        first = paint(title[:width], _BOLD)
    tone = _RED if seen["state"] == "failed" else _YELLOW if seen["is_waiting"] else _GREEN
    headline = textwrap.wrap(printable(seen["headline"]), width)[:4]
    hint = textwrap.wrap(printable(seen["hint"]), width)[:2]
    return [first, *(paint(line, tone) for line in headline), *hint]


def _progress(seen: Mapping[str, Any], width: int) -> list[str]:
    step, most, speed = seen["step"], seen["max_steps"], seen["steps_per_s"]
    parts = [f"step {step:,}" + (f" of {most:,}" if most else ""), f"{_rate(speed)} steps/s", f"policy {seen['policy']}"]
    if most and seen["is_held_up"]:
        parts.insert(2, "time left unknown while training waits")
    elif seen["eta_s"] is not None:
        parts.insert(2, f"{duration_text(seen['eta_s'])} left")
    if seen["has_common_steps"]:
        parts.append(f"has {seen['contributions']} of {seen['needs']} contributions")
    lines = ["  ".join(parts)[:width]]
    if most:
        done = min(1.0, step / most)
        room = max(10, width - 8)
        lines.append(f"[{'█' * round(done * room)}{'░' * (room - round(done * room))}] {100 * done:3.0f} %")
    dropped = seen["stale"] + seen["late"]
    counted = f"contributions: {seen['accepted']:,} counted, {dropped:,} dropped"
    if dropped and seen["num_backups"]:
        counted += f" (as it should be: a step takes the first {seen['needs']})"
    lines.append(counted)
    lines.append(_cost(seen["cost"]))
    checkpoint, kept = seen["checkpoint"], []
    if checkpoint and checkpoint["tag"]:
        kept.append(f"checkpoint: step {checkpoint['step']:,}, {duration_text(checkpoint['age_s'] or 0.0)} old")
    if checkpoint and checkpoint["failure"]:
        kept.append(f"CHECKPOINT FAILED: {printable(checkpoint['failure'])}")
    if seen["rollbacks"]:
        kept.append(f"rollbacks: {seen['rollbacks']}")
    return [line[:width] for line in (*lines, "  ".join(kept)) if line]


def _cost(cost: Mapping[str, Any]) -> str:
    roles = ", ".join(f"{role} {duration_text(seconds)}" for role, seconds in cost["cpu_s"].items())
    since = "in the last hour" if cost["is_of_last_hour"] else "so far"
    return f"CPU {since}: {roles}  sent {bytes_text(cost['sent_bytes'])}, received {bytes_text(cost['received_bytes'])}"


def _curves(speed: Sequence[Point], metrics: Mapping[str, Sequence[Point]], width: int) -> list[str]:
    room = max(10, width - _LABEL - 12)
    rows = [("steps/s", speed), *list(metrics.items())[:_MAX_METRICS]]
    lines = []
    for name, points in rows:
        values = [value for _, _, value in points if value is not None]
        if values:
            lines.append(f"{printable(name)[:_LABEL]:<{_LABEL}} {values[-1]:>10.4g} {sparkline(_squeezed(values, room))}"[:width])
    if len(metrics) > _MAX_METRICS:
        lines.append(f"… and {len(metrics) - _MAX_METRICS} more metrics, on the page")
    return lines


def _steps(seen: Mapping[str, Any], width: int) -> list[str]:
    rows = seen["steps"]["rows"]
    if not rows:
        return []
    room = max(10, width - _LABEL - 12)
    times = [sum(row[1:5]) for row in rows]
    top = sorted(times)[int(_MOST * (len(times) - 1))]
    shown = times[-room:]
    parts = [sum(row[column] for row in rows) for column in (1, 2, 3, 4)]
    whole = sum(parts) or 1.0
    words = ("reading", "computing", "waiting", "applying")
    shares = ", ".join(f"{word} {100 * part / whole:.0f} %" for word, part in zip(words, parts, strict=True))
    bar = sparkline(shown, low=0.0, high=top)
    return [
        f"{'step times':<{_LABEL}} {duration_text(sorted(times)[len(times) // 2]):>10} {bar}"[:width],
        f"{'':<{_LABEL + 11}} {shares}"[:width],
    ]


def _workers(seen: Mapping[str, Any], *, most: int) -> list[str]:
    columns = seen["workers"]["columns"]
    people = [dict(zip(columns, row, strict=True)) for row in seen["workers"]["rows"]]
    # Workers with problems come first where there is not room for all.
    if len(people) > most:
        people = sorted(people, key=lambda one: (one["state"] == "live", -(one["share_last"] or 0.0)))
    rows = [("worker", "doing", "contr/s", "last in", "counted", "stale", "late", "heard of", "CPU", "by", "where")]
    for one in people[:most]:
        doing = one["phase"] + (f": {one['failure']}" if one["failure"] else "")
        rows.append(
            (
                f"{one['kind']} {one['index']}",
                printable(doing[:40]),
                _rate(one["per_s"]),
                "–" if one["share_last"] is None else f"{100 * one['share_last']:.0f} %",
                f"{one['accepted']:,}",
                f"{one['stale']:,}",
                f"{one['late']:,}",
                f"{duration_text(one['seen_ago_s'] or 0.0)} ago",
                "–" if one["cpu_s"] is None else duration_text(one["cpu_s"]),
                printable(one["transport"].replace("_", " ") or "–"),
                printable(f"{one['host']} pid {one['pid']}"),
            )
        )
    if len(rows) == 1:
        return ["no worker has joined yet"]
    lines = table(rows, left=(0, 1, 9, 10)).splitlines()
    hidden = seen["num_participants"] - len(rows) + 1
    return [*lines, f"… and {hidden} more"] if hidden > 0 else lines


def _servers(seen: Mapping[str, Any]) -> list[str]:
    rows = [("server", "state", "step", "variables", "memory", "CPU", "last apply", "waiting", "standby")]
    for one in seen["servers"]:
        rows.append(
            (
                f"ps {one['index']}",
                "answers" if one["is_reachable"] else "DOES NOT ANSWER",
                "–" if one["step"] is None else f"{one['step']:,}",
                "–" if one["variables_bytes"] is None else bytes_text(one["variables_bytes"]),
                "–" if one["allocated_bytes"] is None else bytes_text(one["allocated_bytes"]),
                "–" if one["cpu_s"] is None else duration_text(one["cpu_s"]),
                "–" if one["apply_s"] is None else duration_text(one["apply_s"]),
                "–" if one["staged"] is None else str(one["staged"]),
                "yes" if one["standby"] else "MISSING" if one["standby_missing"] else "none",
            )
        )
    return table(rows, left=(0, 1)).splitlines()


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Returns one character for each value; a larger value has a taller bar."""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int((value - low) / span * len(_BARS))))] for value in values)


def _squeezed(values: Sequence[float], room: int) -> list[float]:
    """Returns at most `room` values: the means of neighbouring ones."""
    if len(values) <= room:
        return list(values)
    edges = [index * len(values) // room for index in range(room + 1)]
    return [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
