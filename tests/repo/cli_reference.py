"""Writes the tables of docs/reference/cli.md from what the programs say to `--help`: `python -m tests.repo.cli_reference [--write]`.

What stands between two marks of the page is made here; all around it is written by hand. Knows help texts; no parser.
"""

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.repo.command_helps import COMMANDS
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "reference" / "cli.md"
_BLOCK = re.compile(r"(<!-- made from --help: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# No line is broken before this; argparse has no way to break none.
_WIDTH = "100000"
_CALLER = ("--chief", "--cluster", "--token-file", "--tls-ca", "--tls-cert", "--tls-key", "--tls-server-name")
# Programs and launchers, each of which has a table of its own; commands that take none of `_CALLER`, or few. All others ask a cluster.
_WITH_TABLES = ("up", "demo", "server", "chief")
_ALONE = ("ls", "page", "checkpoint ls", "checkpoint verify", "checkpoint export", "checkpoint import", "plan", "audit", "certs")
# Where more is said of a flag.
_SEE = {
    "--policy": "[policies](../explanation/policies.md)",
    "--reject-nonfinite": "[gradients](api.md#gradients-that-are-not-finite)",
    "--checkpoint-dir": "[checkpoints](checkpoints.md)",
    "--durability": "[what a loss costs](../explanation/reliability.md)",
    "--history": "[audit](../explanation/reliability.md#check-a-run-afterwards)",
    "--standbys": "[standbys](../explanation/standbys.md)",
    "--chief-in-ps": "[running](../how-to/running.md#the-chief-inside-a-parameter-server)",
    "--tensorboard": "[monitor](../how-to/monitor.md#tensorboard)",
    "--metrics": "[monitor](../how-to/monitor.md#prometheus)",
    "--page": "[the page](../how-to/watch.md)",
    "--log-format": "[JSON logs](#json-logs)",
    "--data-port": "[transports](../explanation/transports.md#sockets)",
    "--token-file": "[TLS and tokens](../how-to/tls.md)",
    "--wire": "[compression](../how-to/compression.md)",
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One line of a help text: a flag with its metavar, or a positional argument, and what it says."""

    name: str
    words: str

    @property
    def flag(self) -> str:
        """The flag alone; empty for a positional argument."""
        found = re.search(r"--[a-z][a-z-]*", self.name)
        return found[0] if found else ""


def made(page: str) -> str:
    """Returns the page with its tables as they should be."""
    tables = {
        "commands": _commands(),
        **{name: _flags(name) for name in _WITH_TABLES},
        "caller": _table(("flag", "variable", "meaning"), (_row(one) for one in _arguments("status") if one.flag in _CALLER)),
        "asking": _by_command(_asking()),
        "alone": _by_command(_ALONE),
    }
    return _BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


def _asking() -> tuple[str, ...]:
    others = ("lockstep", *_WITH_TABLES, *_ALONE)
    return tuple(name for name, words in COMMANDS.items() if name not in others and words[0] == "lockstep")


def _commands() -> str:
    commands = [one for one in _entries(_helps()["lockstep"]) if not one.name.startswith("-")]
    return _table(("command", "what it does"), [(f"`lockstep {one.name}`", _cell(one.words)) for one in commands])


def _flags(command: str) -> str:
    rows = [_row(one) for one in _arguments(command) if one.flag]
    if any(variable for _, variable, _ in rows):
        return _table(("flag", "variable", "meaning"), rows)
    return _table(("flag", "meaning"), ((flag, meaning) for flag, _, meaning in rows))


def _by_command(commands: Sequence[str]) -> str:
    rows: list[tuple[str, str, str]] = []
    for command in commands:
        name = f"`lockstep {command.strip()}`"
        own = [one for one in _arguments(command) if one.flag not in _CALLER]
        rows += [(name if one is own[0] else "", f"`{_code(one.name)}`", _cell(one.words)) for one in own]
    return _table(("command", "argument", "meaning"), rows)


def _row(argument: Argument) -> tuple[str, str, str]:
    variable = re.search(r" \[(LOCKSTEP_\w+(?:=1)?)\]", argument.words)
    words = argument.words.replace(variable[0], "") if variable else argument.words
    see = f"; see {_SEE[argument.flag]}" if argument.flag in _SEE else ""
    return f"`{_code(argument.name)}`", f"`{variable[1]}`" if variable else "", _cell(words) + see


def _arguments(command: str) -> list[Argument]:
    return [one for one in _entries(_helps()[command]) if not one.name.startswith(("-h", "-- ")) and one.name != "ACTION"]


def _entries(text: str) -> Iterator[Argument]:
    """Yields what has words of its own, by the indents of argparse: two spaces or four before a name, many before words below it."""
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        found = re.fullmatch(r" {2,4}(\S.*?)(?: {2,}(\S.*))?", line)
        below = re.fullmatch(r" {10,}(\S.*)", after)
        if found and (found[2] or below):
            # From Python 3.13 on, a metavar is said once for a short and a long flag.
            name = re.sub(r"^(-\w) (\S+), (--\S+ \2)$", r"\1, \3", found[1])
            yield Argument(name, found[2] or (below[1] if below else ""))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)])


def _code(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return _code(text).replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") if "`" not in text else _code(text)


_known: dict[str, str] = {}


def _helps() -> dict[str, str]:
    if not _known:
        words, environment = [sys.executable, "-m", "tests.repo.command_helps"], {**os.environ, "COLUMNS": _WIDTH}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True)
        _known.update(json.loads(done.stdout))
    return _known


def main(words: list[str]) -> int:
    """Writes the page, or says how it differs and returns 1."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = made(page)
    if words == ["--write"]:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    print("".join(difflib.unified_diff(page.splitlines(True), wanted.splitlines(True), "docs/reference/cli.md", "from --help")), end="")
    if page != wanted:
        print("docs/reference/cli.md is not what the programs say: run 'make fix-docs'", file=sys.stderr)
    return int(page != wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
