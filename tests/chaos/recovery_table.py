"""`python -m tests.chaos.recovery_table`: the recovery times of the last `make chaos`, beside what is promised."""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from lockstep.cli.formatting import table
from tests.support.repository import ROOT

RUNS = ROOT / "lockstep-runs" / "chaos"
_HEADING = ("what happened", "runs", "median", "longest", "promised", "")


def rows_of(lines: Iterable[Mapping[str, float | str]]) -> list[tuple[str, ...]]:
    """Returns a row for each fault, by name, from the lines of recovery.jsonl."""
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for line in lines:
        found[str(line["fault"]), float(line["target_s"])].append(float(line["standstill_s"]))
    rows: list[tuple[str, ...]] = []
    for (fault, target_s), times in sorted(found.items()):
        words = "" if max(times) <= target_s else "MISSED"
        rows.append((fault, str(len(times)), f"{statistics.median(times):.1f} s", f"{max(times):.1f} s", f"{target_s:g} s", words))
    return rows


def main() -> None:
    """Prints the table and keeps it as recovery.txt; `--markdown` prints it as documents have it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    path = RUNS / "recovery.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = rows_of(lines)
    if parser.parse_args().markdown:
        print("\n".join("| " + " | ".join(row[:5]) + " |" for row in (_HEADING, ("---",) * 5, *rows)))
        return
    text = table([_HEADING, *rows], left=(0, 5))
    print(text)
    if lines:
        (RUNS / "recovery.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
