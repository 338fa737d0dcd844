"""The paths of the repository and of recorded data, and programs of its pages. Runs nothing."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the original did with generated input, recorded.
RECORDED_CASES = ROOT / "tests" / "conformance" / "cases"


def program_of_page(page: str, words: str) -> str:
    """Returns the block of Python of a page that has these words."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (program,) = (block for block in blocks if words in block)
    return str(program)
