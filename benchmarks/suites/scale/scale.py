"""What many workers, many variables or many servers cost. Knows the three by name, and how to print."""

import argparse
import json
from collections.abc import Sequence

from benchmarks.suites.scale import servers, variables, workers

_WHAT = {
    "workers": (workers, "workers that block on one chief: how long until the last of them has its token"),
    "variables": (variables, "the same bytes in many variables and in few: what a variable costs"),
    "servers": (servers, "many parameter servers: start, step, status, end"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one of them and prints the figures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks run scale", description="Measures with real processes on this machine.")
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, (module, words) in _WHAT.items():
        kind = kinds.add_parser(name, help=words, description=words)
        module.add_arguments(kind)
        kind.add_argument("--json", action="store_true", help="print all figures as JSON")
    options = parser.parse_args(arguments)
    module = _WHAT[options.what][0]
    report = module.measure(options)
    print(json.dumps(report) if options.json else module.in_words(report))
    return 0
