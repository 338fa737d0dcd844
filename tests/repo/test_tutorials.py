"""Each tutorial of a framework changes few lines of its program, and prints which. Reads text; runs no program."""

import difflib
import re

import pytest

from tests.support.repository import ROOT

MAX_CHANGED = 5


def _changes(text: str) -> dict[str, list[str]]:
    """The lines that a diff removes ("-") and adds ("+"), in order, without indentation and empty ones."""
    return {sign: [line[1:].strip() for line in text.splitlines() if line.startswith(sign) and line[1:].strip()] for sign in "-+"}


def _differences(before: str, after: str) -> dict[str, list[str]]:
    old, new = ([line.strip() for line in program.splitlines() if line.strip()] for program in (before, after))
    return _changes("\n".join(line for line in difflib.ndiff(old, new) if not line.startswith("?")))


@pytest.mark.parametrize("framework", ["torch", "jax", "keras"])
def test_a_program_changes_in_at_most_five_lines_which_the_page_shows_as_a_diff(framework: str) -> None:
    page = (ROOT / "docs" / "tutorials" / f"{framework}.md").read_text(encoding="utf-8")
    before, after = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)[:2]
    shown = _changes(re.findall(r"^```diff\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)[0])
    assert _differences(before, after) == shown
    assert max(map(len, shown.values())) <= MAX_CHANGED, shown
