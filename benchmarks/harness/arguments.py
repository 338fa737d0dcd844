"""Arguments that several suites share. Knows argparse; measures nothing."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIRECTORY = Path("lockstep-runs")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class WrongArguments(ValueError):
    """The arguments are inconsistent; the text says which, and what would be valid."""


def at_least_one(text: str) -> int:
    """Returns a whole number of 1 or more, as a type for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, want 1 or more")
    return value


def parse_bytes(amount: str) -> int:
    """Returns the bytes of an amount such as "64MiB" or "1048576". The type of an option; raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", amount)
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"got {amount!r}, want bytes, such as 64MiB or 1048576")
    return int(match[1]) * _UNITS[match[2]]


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, an object a line, for `python -m benchmarks compare`")


def add_files(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds --json and --plot for a suite that saves each row when it is measured."""
    parser.add_argument(
        "--json", type=Path, default=DIRECTORY / name, metavar="FILE", help="where the figures are kept (default %(default)s)"
    )
    add_plot(parser)


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Adds --plot."""
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the figures to this file; needs the extra `bench`")


def check_files(options: argparse.Namespace) -> None:
    """Raises WrongArguments before the measurement, which takes minutes."""
    # Imported here, because workers import this module too, and their memory is measured.
    from benchmarks.report.plot import check_plot

    if options.plot:
        check_plot(options.plot)
    if isinstance(options.json, Path):
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WrongArguments(f"--json {options.json}: {error.strerror}") from None


def show(report: dict[str, Any], in_words: Callable[[dict[str, Any]], str], options: argparse.Namespace) -> None:
    """Prints a report, as JSON if `--json` is given."""
    print(json.dumps(report) if options.json else in_words(report), flush=True)
