"""Each `lockstep …` line in a block of the documentation is one that its command takes. Parses it; runs nothing."""

import re
import shlex

import pytest

from chief.config import parse_config as parse_chief_config
from lockstep.__main__ import parser_of
from lockstep.cli.commands import COMMANDS, actions_of, find
from ps_server.config import parse_config as parse_server_config
from tests.support.repository import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "SECURITY.md"]
_BLOCK = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"(?:[A-Z_]+=\S+ )*lockstep ([a-z]+\b.*)")
# What ends the words of one command in a shell.
_ENDS = {"|", ">", "&", "&&", ";"}


def commands() -> list[tuple[str, str]]:
    """Returns the page and the words after `lockstep`, of each line."""
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if match := _LINE.match(line.strip()):
                    found.append((str(page.relative_to(ROOT)), match[1]))
    return found


@pytest.mark.parametrize(("page", "text"), commands())
def test_a_command_of_the_documentation_is_understood(page: str, text: str) -> None:
    check(text)


@pytest.mark.parametrize("example", [example for command in COMMANDS.values() for example in command.examples])
def test_an_example_of_a_help_text_is_understood(example: str) -> None:
    check(example.removeprefix("lockstep "))


def check(text: str) -> None:
    """Parses a command's words up to where a shell ends it. Raises InvalidSpec."""
    words = shlex.split(text, comments=True)
    end = next((number for number, word in enumerate(words) if word in _ENDS), len(words))
    name, rest = find(words[:end])
    if name == "chief":
        parse_chief_config(rest, environment={})
    elif name == "server":
        parse_server_config(rest[: rest.index("--with-chief")] if "--with-chief" in rest else rest, environment={})
    else:
        assert not actions_of(name), f"lockstep {text}: which action?"
        parser_of(name).parse_args(rest)


def test_the_documentation_has_command_lines_to_check() -> None:
    assert len(commands()) > 30
