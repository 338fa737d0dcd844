"""`lockstep audit DIR`: checks a history's records, and that its values follow from its contributions. Needs no cluster."""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial

from lockstep.audit.books import Books, check_books
from lockstep.audit.facts import Facts, facts_of
from lockstep.audit.values import Recomputed, recompute
from lockstep.cli.access import CommandFailed
from lockstep.cli.progress import Progress, shown
from ps_protocol.errors import PsError
from ps_protocol.process.history import Chronicle, read_history

_MAX_SHOWN = 20
_EXIT_PROBLEMS, _EXIT_USAGE = 1, 2


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("directory", metavar="DIR", help="directory that was given to --history")
    parser.add_argument(
        "--books-only", action="store_true", help="check the records only; recomputing the values takes as long as training did"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _fields(facts: Facts, books: Books, values: Recomputed, problems: list[str]) -> dict[str, object]:
    return {
        "is_clean": not problems,
        "problems": problems,
        "not_computed_again": [*values.skipped],
        "unfinished": facts.torn,
        "num_processes": len(facts.processes),
        "num_epochs": len(books.epochs),
        "num_steps": sum(len(epoch.steps) for epoch in books.epochs.values()),
        "contributions": dict(books.counts),
        "num_steps_computed_again": values.num_steps,
    }


def _read(directory: str) -> Facts:
    """Reads the history, and shows the progress without a total, because the number of records is not known before."""

    def counted(progress: Progress) -> Iterator[Chronicle]:
        for chronicle in read_history(directory):
            progress.advance(len(chronicle.records), total=0)
            yield chronicle

    with shown("reading the history, in records") as progress:
        return facts_of(counted(progress))


def _recompute(facts: Facts) -> Recomputed:
    total = sum(len(life.applied) for life in facts.lives.values() if not life.arrived)
    with shown("computing steps again") as progress:
        return recompute(facts, on_step=partial(progress.advance, 1, total=total))


def run_audit(arguments: argparse.Namespace) -> int:
    """Prints the result of the audit. Returns 0 if all promises were kept, 1 if not, 2 if no history can be read."""
    started = time.monotonic()
    try:
        facts = _read(arguments.directory)
        books = check_books(facts)
        values = Recomputed() if arguments.books_only else _recompute(facts)
    except PsError as error:
        raise CommandFailed(error.message, exit_code=_EXIT_USAGE) from error
    problems = [*books.problems, *values.problems]
    if arguments.json:
        print(json.dumps(_fields(facts, books, values, problems), indent=2))
        return _EXIT_PROBLEMS if problems else 0
    for problem in problems[:_MAX_SHOWN]:
        print(f"WRONG  {problem}")
    if len(problems) > _MAX_SHOWN:
        print(f"… and {len(problems) - _MAX_SHOWN} more")
    for words in values.skipped:
        print(f"not computed again: {words}")
    for name in facts.torn:
        print(f"unfinished: {name} ends within a record (a full disk, or a killed process); what it did afterwards is missing")
    num_steps = sum(epoch.num_steps for epoch in books.epochs.values())
    counts = ", ".join(f"{count} {result}" for result, count in sorted(books.counts.items()))
    print(f"{len(facts.processes)} processes, {len(books.epochs)} epochs, {num_steps} steps")
    print(f"{len(facts.parts)} contributions: {counts or 'none'}")
    if not arguments.books_only:
        print(f"{values.num_steps} steps of servers computed again")
    print(f"{'clean' if not problems else f'{len(problems)} problems'} ({time.monotonic() - started:.1f} s)")
    return _EXIT_PROBLEMS if problems else 0
