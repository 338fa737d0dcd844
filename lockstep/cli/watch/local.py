"""`lockstep ls` and `page`: list the clusters that launchers run on this machine, and the addresses of their pages. Call no chief."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from lockstep.cli.access import CommandFailed
from lockstep.cli.formatting import duration_text, printable, table
from ps_protocol.process.local_clusters import LocalEntry, local_clusters
from ps_protocol.security.permissions import CallerRole
from ps_protocol.security.tokens import token_of

NOBODY = "no cluster of yours that `lockstep up` or `lockstep demo` started is running on this machine"


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ls`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `page`."""
    parser.add_argument("--pid", type=int, metavar="PID", help="process id of its `lockstep up`, if there are several (see `lockstep ls`)")
    parser.add_argument("--admin", action="store_true", help="with a token that may change the training")


def run_ls(arguments: argparse.Namespace) -> int:
    """Prints the clusters and returns the exit code."""
    clusters = local_clusters()
    if arguments.json:
        print(json.dumps([dataclasses.asdict(one) for one in clusters], indent=2))
    else:
        print(listing(clusters) if clusters else NOBODY)
    return 0


def run_page(arguments: argparse.Namespace) -> int:
    """Prints the address of a page and returns the exit code."""
    clusters = [one for one in local_clusters() if arguments.pid in (None, one.pid)]
    if not clusters:
        raise CommandFailed(NOBODY if arguments.pid is None else f"{NOBODY} as process {arguments.pid}; see `lockstep ls`")
    if len(clusters) > 1:
        raise CommandFailed(f"which one? give --pid\n{listing(clusters)}", exit_code=2)
    (cluster,) = clusters
    if not cluster.page:
        raise CommandFailed("this cluster has no page: it was started with --page none")
    role = CallerRole.ADMIN if arguments.admin else CallerRole.OBSERVER
    print(f"{cluster.page}#token={token_of(Path(cluster.token_file), role)}" if cluster.token_file else cluster.page)
    return 0


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
