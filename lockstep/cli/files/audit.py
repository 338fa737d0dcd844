"""`lockstep audit DIR`: checks a history's records, and that its values follow from its contributions. Needs no cluster."""

import argparse
import time
from collections.abc import Iterator
from functools import partial

from lockstep.audit.books import Books, check_books
from lockstep.audit.facts import Facts, facts_of
from lockstep.audit.values import Recomputed, recompute
from lockstep.cli.progress import Progress, shown
from lockstep.cli.results import CommandFailed, CommandResult
from ps_protocol.errors import PsError
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.history import Chronicle, read_history

_MAX_SHOWN = 20


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("directory", metavar="DIR", help="directory that was given to --history")
    parser.add_argument(
        "--books-only", action="store_true", help="check the records only; recomputing the values takes as long as training did"
    )


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
        "all_computed_again_since": None if values.since is None else {"epoch": values.since[0], "step": values.since[1]},
        "without_oldest_records": facts.cut,
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


def run_audit(arguments: argparse.Namespace) -> CommandResult:
    """Returns the result of the audit. Its exit code is 0 if all promises were kept, 1 if not, 2 if no history can be read."""
    started = time.monotonic()
    try:
        facts = _read(arguments.directory)
        books = check_books(facts)
        values = Recomputed() if arguments.books_only else _recompute(facts)
    except PsError as error:
        raise CommandFailed(error.message, exit_code=ExitCode.USAGE) from error
    problems = [*books.problems, *values.problems]
    said = [f"WRONG  {problem}" for problem in problems[:_MAX_SHOWN]]
    if len(problems) > _MAX_SHOWN:
        said.append(f"… and {len(problems) - _MAX_SHOWN} more")
    said += [f"not computed again: {words}" for words in values.skipped]
    said += [
        f"unfinished: {name} ends within a record (a full disk, or a killed process); what it did afterwards is missing"
        for name in facts.torn
    ]
    num_steps = sum(epoch.num_steps for epoch in books.epochs.values())
    counts = ", ".join(f"{count} {result}" for result, count in sorted(books.counts.items()))
    said.append(", ".join([_count(len(facts.processes), "process", "es"), _count(len(books.epochs), "epoch"), _count(num_steps, "step")]))
    said.append(f"{len(facts.parts)} contributions: {counts or 'none'}")
    if facts.cut:
        said.append(f"{len(facts.cut)} of the processes no longer have their oldest records (--history-max-bytes)")
    if not arguments.books_only:
        since = "" if values.since is None else f", all from step {values.since[1]} of epoch {values.since[0]} on"
        said.append(f"{values.num_steps} steps of servers computed again{since}")
    said.append(f"{'clean' if not problems else f'{len(problems)} problems'} ({time.monotonic() - started:.1f} s)")
    fields = _fields(facts, books, values, problems)
    return CommandResult(words="\n".join(said), fields=fields, exit_code=ExitCode.FAILED if problems else ExitCode.DONE)


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"
