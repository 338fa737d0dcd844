"""Each `lockstep …` line in a block of the documentation is one that its command takes. Parses it; runs nothing."""

import argparse
import re
import shlex
from importlib import import_module

import pytest

from lockstep.__main__ import COMMANDS
from tests.support.repository import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]
_BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"(?:[A-Z_]+=\S+ )*lockstep ([a-z]+)\b(.*)")
# What ends the words of one command in a shell.
_ENDS = {"|", ">", "&", "&&", ";"}


def commands() -> list[tuple[str, str, str]]:
    """Returns the page, the command and its words, of each line."""
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                match = _LINE.match(line.strip())
                if match and match[1] in COMMANDS:
                    found.append((str(page.relative_to(ROOT)), match[1], match[2]))
    return found


@pytest.mark.parametrize(("page", "command", "text"), commands())
def test_a_command_of_the_documentation_is_understood(page: str, command: str, text: str) -> None:
    words = shlex.split(text, comments=True)
    end = next((number for number, word in enumerate(words) if word in _ENDS), len(words))
    parser = argparse.ArgumentParser(prog=f"lockstep {command}", exit_on_error=False)
    getattr(import_module(f"lockstep.cli.{COMMANDS[command][1]}"), f"add_{command}_arguments")(parser)
    try:
        parser.parse_args(words[:end])
    except SystemExit:
        pytest.fail(f"{page}: lockstep {command}{text}")


def test_the_documentation_has_command_lines_to_check() -> None:
    assert len(commands()) > 30
