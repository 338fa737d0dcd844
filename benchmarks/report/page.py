"""Puts measured figures into benchmarks/figures.md. Knows the page's markers and the reports; measures nothing.

The text between `<!-- figures: NAME -->` and `<!-- end of figures -->` is replaced; NAME is "peers", "table", "profile", or
"targets" for how many targets were met, and which were not.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.harness.arguments import WrongArguments
from benchmarks.peers.comparison import COLUMNS, missed_targets, rows_of
from benchmarks.report.figures import as_row, table_lines
from benchmarks.report.profile_figures import process_rows
from benchmarks.suites.step import table

PAGE = Path(benchmarks.__file__).parent / "figures.md"
_BLOCK = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


DESCRIPTION = "Puts measured figures into benchmarks/figures.md."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("reports", nargs="*", type=Path, help="what `run table --json` and `run peers --json` wrote")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="what `run profile --json` printed")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write the figures to (default: benchmarks/figures.md)")


def run(options: argparse.Namespace) -> int:
    """Fills the page from reports in JSON; returns the exit code."""
    try:
        blocks = _blocks([_read(path) for path in options.reports])
        blocks |= {"profile": profile_block(_read(options.profile))} if options.profile else {}
        text = options.page.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        raise WrongArguments(str(error)) from None
    options.page.write_text(fill(text, blocks), encoding="utf-8")
    absent = [name for name in blocks if f"<!-- figures: {name} -->" not in text]
    print(f"filled {', '.join(sorted(set(blocks) - set(absent))) or 'nothing'}" + (f"; no place for {', '.join(absent)}" if absent else ""))
    return 0


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Returns the page with the named blocks replaced; others stay as they are."""
    return _BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}" if match[2] in blocks else match[0], text)


def _blocks(reports: Sequence[dict[str, Any]]) -> dict[str, str]:
    blocks: dict[str, str] = {}
    for report in reports:
        if report["kind"] == "peers":
            blocks |= {"peers": peers_block(report), "targets": targets_block(report)}
        elif report["kind"] == "table":
            blocks["table"] = table_block(report)
        else:
            raise ValueError(f"a report of kind {report['kind']!r}: give what `run table` or `run peers` wrote")
    return blocks


# The heading of a table and the block of targets say the first three; the report has the others.
_NOT_ON_THE_PAGE = {"ps", "policy", "targets", "each run", "… each", "peak MiB: each"}


def peers_block(report: Mapping[str, Any]) -> str:
    """Returns the tables of the comparison, one for each policy and number of servers."""
    lines = [_circumstances(report)]
    for policy, num_ps in dict.fromkeys((record["policy"], record["num_ps"]) for record in report["rows"]):
        records = [record for record in report["rows"] if (record["policy"], record["num_ps"]) == (policy, num_ps)]
        heading = f"**{policy}, {num_ps} server{'s' if num_ps > 1 else ''}**"
        kept = [index for index, column in enumerate(COLUMNS) if column not in _NOT_ON_THE_PAGE]
        rows = [[row[index] for index in kept] for record in records for row in rows_of(record)]
        lines += ["", heading, "", *table_lines([COLUMNS[index] for index in kept], rows)]
    return "\n".join(lines)


def targets_block(report: Mapping[str, Any]) -> str:
    """Returns how many targets are met, and each that is missed with its ratio."""
    num_judged, missed = missed_targets(report["rows"])
    return "\n".join([f"{num_judged - len(missed)} of {num_judged} met.", *([""] if missed else []), *(f"- {text}" for text in missed)])


def table_block(report: Mapping[str, Any]) -> str:
    """Returns the table of Lockstep alone."""
    return "\n".join([_circumstances(report), "", *table_lines(table.COLUMNS, [table.cells(row) for row in report["rows"]])])


def profile_block(report: Mapping[str, Any]) -> str:
    """Returns the tables of a profile, path by path."""
    lines: list[str] = []
    for path in report["paths"]:
        lines += [f"**{report['size'].replace('/', ' / ')}, {path['title']}**: a step took {path['step_ms']:.1f} ms.", ""]
        lines += [as_row(row) if row[0] else "" for row in process_rows(path)] + [""]
    return "\n".join(lines).rstrip("\n")


def _circumstances(report: Mapping[str, Any]) -> str:
    return f"{report['date']}, {report['cpus']} CPUs, load average {report['load']} before the first run, {report['repeat']} runs a row."


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))
