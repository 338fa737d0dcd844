"""`lockstep ls`: lists the clusters that launchers run on this machine, with their pages. Calls no chief."""

import argparse
import dataclasses
import time
from pathlib import Path

from lockstep.cli.formatting import duration_text, plain, printable, table
from lockstep.cli.results import CommandResult
from ps_protocol.process.local_clusters import LocalEntry, local_clusters
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.tokens import token_of

NOBODY = "no cluster of yours that `lockstep up` or `lockstep demo` started is running on this machine"


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ls`."""
    parser.add_argument("--token", action="store_true", help="print addresses of pages with the token of a reader, who can only look")


def run_ls(arguments: argparse.Namespace) -> CommandResult:
    """Returns the clusters."""
    clusters = local_clusters()
    if arguments.token:
        clusters = [dataclasses.replace(one, page=_with_token(one)) for one in clusters]
    return CommandResult(words=listing(clusters) if clusters else NOBODY, fields=plain(clusters))


def _with_token(one: LocalEntry) -> str:
    """Returns the address of a page, with the token of an observer where one is needed."""
    return f"{one.page}#token={token_of(Path(one.token_file), CallerRole.OBSERVER)}" if one.page and one.token_file else one.page


def listing(clusters: list[LocalEntry]) -> str:
    """Returns a table of clusters."""
    rows: list[tuple[str, ...]] = [("pid", "since", "cluster", "chief", "page", "command")]
    now = time.time()
    for one in clusters:
        # Shortens each path to its last part, by which its user knows the program.
        words = " ".join(word.rpartition("/")[2] for word in one.command.split())
        command = words if len(words) <= 60 else f"{words[:59]}…"
        age = f"{duration_text(max(0.0, now - one.started_at))} ago"
        rows.append((str(one.pid), age, *map(printable, (one.name, one.chief, one.page or "none", command))))
    return table(rows, left=(2, 3, 4, 5))
