"""Writes what documents say of code from the code: `python -m tests.repo.made_docs [--write]`.

In docs/reference/cli.md and docs/contributing/design.md what stands between two marks, in docs/contributing/faults.md the last column; all
else is written by hand. Also deploy/kubernetes/lockstep.yaml, which is what `lockstep k8s render` writes for the digits.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.__main__ import ROLES, parser_of
from lockstep.cli.clusters.kubernetes import manifests_of, spec_of
from lockstep.cli.commands import COMMANDS, actions_of, overview
from ps_protocol.process.exit_codes import MEANINGS
from ps_protocol.process.options import TABLE, Option, Program, default_text
from tests.repo.changes import touched
from tests.support.repository import ROOT

CLI, FAULTS = ROOT / "docs" / "reference" / "cli.md", ROOT / "docs" / "contributing" / "faults.md"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "lockstep.yaml"
# The cluster of MANIFESTS.
DIGITS = """
    --name digits --namespace lockstep --image lockstep-ps:local --ps 2 --workers 3 --min-replicas 1 --max-steps 600
    --checkpoint-dir /checkpoints --checkpoint-claim digits-checkpoints --checkpoint-size 10Gi --env OMP_NUM_THREADS=1
    -- python -m lockstep.demo.worker
"""
DESIGN = ROOT / "docs" / "contributing" / "design.md"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# What the programs of the table are called on the page.
_PROGRAMS = {program: program.value for program in Program} | {Program.CALLER: "callers"}
# Where more is said of an option, by its name.
_SEE = {
    "policy": "[policies](../explanation/policies.md)",
    "reject-nonfinite": "[gradients](api.md#gradients-that-are-not-finite)",
    "checkpoint-dir": "[checkpoints](../how-to/resume.md)",
    "durability": "[what a loss costs](../explanation/reliability.md)",
    "history": "[audit](../explanation/reliability.md#check-a-run-afterwards)",
    "standbys": "[standbys](../explanation/reliability.md#standbys)",
    "chief-in-ps": "[running](../how-to/running.md#the-chief-inside-a-parameter-server)",
    "tensorboard": "[monitor](../how-to/monitor.md#tensorboard)",
    "metrics": "[monitor](../how-to/monitor.md#prometheus)",
    "page": "[the page](../how-to/watch.md)",
    "log-format": "[JSON logs](#json-logs)",
    "data-port": "[transports](api.md#transport-and-wire-format)",
    "token-file": "[TLS and tokens](../how-to/tls.md)",
    "transport": "[transports](api.md#transport-and-wire-format)",
    "wire": "[compression](../how-to/compression.md)",
    "otel": "[monitor](../how-to/monitor.md#opentelemetry)",
}


def made_cli(page: str) -> str:
    """Returns the page of commands with its tables as they should be."""
    tables = {
        "overview": f"```text\n{overview()}\n```",
        "options": _table(("flag", "variable", "programs", "default", "meaning"), map(_option, TABLE)),
        "arguments": _table(("command", "argument", "meaning"), _arguments()),
        "codes": _table(("code", "meaning"), MEANINGS.items()),
    }
    return _BLOCK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


def made_design(page: str) -> str:
    """Returns the page of the design with what made-up changes touch."""
    table = _table(("change", "files by hand", "then"), touched())
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table}\n\n{found[3]}", page)


def made_faults(page: str) -> str:
    """Returns the page of faults with the files of the tests that show each: those with the mark `shows`."""
    shown: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        marks = re.findall(r"@pytest\.mark\.shows\(([^)]*)\)", path.read_text(encoding="utf-8"))
        for fault in dict.fromkeys(re.findall(r"F\d+", "".join(marks))):
            shown.setdefault(fault, []).append(f"`{path.relative_to(ROOT / 'tests')}`")
    return re.sub(
        r"^\| (F\d+) \| (.*) \| .*\|$", lambda row: f"| {row[1]} | {row[2]} | {', '.join(shown.get(row[1], []))} |", page, flags=re.M
    )


def made_manifests(_: str) -> str:
    """Returns the manifests of the digits."""
    return manifests_of(spec_of(parser_of("k8s render").parse_args(DIGITS.split())), str(MANIFESTS.relative_to(ROOT)))


def _option(option: Option[Any]) -> tuple[str, ...]:
    flag = f"`{option.flag}{' ' * bool(option.metavar)}{_code(option.metavar)}`" if option.has_flag else ""
    variable = f"`{option.variable}{'=1' * option.is_switch}`" if option.variable else ""
    see = f"; see {_SEE[option.flag[2:]]}" if option.flag[2:] in _SEE else ""
    programs = ", ".join(_PROGRAMS[program] for program in option.programs)
    return flag, variable, programs, _cell(default_text(option)), _cell(option.words) + see


def _arguments() -> Iterator[tuple[str, str, str]]:
    """Yields what commands take that is not in the table of options."""
    of_table = {option.help_text(has_variable=has) for option in TABLE for has in (False, True)}
    commands: dict[tuple[str, str], list[str]] = {}  # one that several commands take has one row
    for name in COMMANDS:
        if name in ROLES or actions_of(name):
            continue
        for one in parser_of(name)._actions:
            if one.help not in (None, argparse.SUPPRESS, *of_table) and one.dest not in ("help", "json"):
                shown = ", ".join(one.option_strings) + f" {_metavar(one)}" * (one.nargs != 0)
                commands.setdefault((f"`{_code(shown.strip())}`", _cell(str(one.help))), []).append(name)
    last: list[str] = []
    for (argument, meaning), names in commands.items():
        # Actions of one command are named once: `lockstep checkpoint ls`, `verify`.
        first, *others = names
        others = [name.removeprefix(f"{first.split()[0]} ") for name in others]
        yield (", ".join([f"`lockstep {first}`", *(f"`{name}`" for name in others)]) if names != last else "", argument, meaning)
        last = names


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or "|".join(map(str, action.choices or (action.dest.upper(),))))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(row)} |") for row in rows)])


def _code(text: str) -> str:
    return text.replace("|", "\\|")


def _cell(text: str) -> str:
    return _code(text).replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_") if "`" not in text else _code(text)


def main(words: list[str]) -> int:
    """Writes the pages, or says how they differ and returns 1."""
    wrong = 0
    for path, made in ((CLI, made_cli), (DESIGN, made_design), (FAULTS, made_faults), (MANIFESTS, made_manifests)):
        page, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        wanted = made(page)
        if page == wanted:
            continue
        if words == ["--write"]:
            path.write_text(wanted, encoding="utf-8")
            continue
        print("".join(difflib.unified_diff(page.splitlines(True), wanted.splitlines(True), name, "from the code")), end="")
        print(f"{name} is not what the code says: run 'make fix-docs'", file=sys.stderr)
        wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
