"""The paths of the repository and of recorded data, and programs of its pages. Runs nothing."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the original did with generated input, recorded.
RECORDED_CASES = ROOT / "tests" / "conformance" / "cases"


def program_of_page(page: str, words: str, *, language: str = "python") -> str:
    """Returns the block of a page that has these words."""
    pieces = re.split(r"^```(\w*)\n", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (program,) = (block for of, block in zip(pieces[1::4], pieces[2::4], strict=True) if of == language and words in block)
    return program


def printed(words: str) -> str:
    """Returns the block of the page on running that has these words, such as a command."""
    return program_of_page("docs/how-to/running.md", words, language="")
