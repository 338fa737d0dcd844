"""`python -m tests.chaos.recovery_table`: the recovery times of the last `make chaos`, beside what is promised."""

import json
from pathlib import Path

from lockstep.status_text import table

RUNS = Path(__file__).resolve().parents[2] / "lockstep-runs" / "chaos"


def main() -> None:
    """Prints the table, the worst of each fault, and keeps it as recovery.txt."""
    path = RUNS / "recovery.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    worst: dict[str, tuple[float, float, int]] = {}
    for line in lines:
        seconds, _, count = worst.get(line["fault"], (0.0, 0.0, 0))
        worst[line["fault"]] = (max(seconds, line["standstill_s"]), line["target_s"], count + 1)
    rows = [("fault", "runs", "longest standstill", "promised", "")]
    for fault, (seconds, target_s, count) in sorted(worst.items()):
        rows.append((fault, str(count), f"{seconds:.2f} s", f"{target_s:g} s", "" if seconds <= target_s else "MISSED"))
    text = table(rows, left=(0, 4))
    print(text)
    if lines:
        (RUNS / "recovery.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
