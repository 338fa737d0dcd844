"""The paths of the repository and of recorded data. Knows paths; reads nothing."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the original did with generated input, recorded.
RECORDED_CASES = ROOT / "tests" / "conformance" / "cases"
