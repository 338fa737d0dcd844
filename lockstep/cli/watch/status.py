"""`lockstep status` and `why`: ask the chief, and return its answer. Knows no terminal; decides nothing."""

import argparse
import contextlib

from chief.page.recorder import NUM_STEPS, Recorder
from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.formatting import plain
from lockstep.cli.results import CommandResult
from lockstep.cli.watch.view import fields_of, row_lines, status_lines, why_lines
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.model.keys import KeySpec
from ps_protocol.model.shown import shown
from ps_protocol.model.spec import Placement
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.roles.chief import ClusterStatus, GetModelRequest
from ps_protocol.roles.shard import CountRowsRequest
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.shard import GrpcShard

# A server that is there counts its rows in far less.
_ANSWER_S = 5.0


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_arguments(parser)
    parser.add_argument(
        "--ledger", type=int, default=0, metavar="N", help=f"also show what the last N steps were made of, {NUM_STEPS} at most"
    )
    words = "also show how long ago the rows of this table with keys were used; fails if a server does not answer"
    parser.add_argument("--table", default="", metavar="NAME", help=words)
    parser.add_argument("--placement", action="store_true", help="also show on which parameter server each variable lies")


def run_status(arguments: argparse.Namespace) -> CommandResult:
    """Returns all that is known of the cluster."""
    if not 0 <= arguments.ledger <= NUM_STEPS:
        raise InvalidSpec(f"--ledger: got {arguments.ledger}, want 0 to {NUM_STEPS}")
    with chief_of(arguments) as chief:
        look = Recorder(chief, read_metrics=lambda status: ()).look()
        placement = chief.call(GetModelRequest(max_wait_s=0.0)).placement if arguments.placement or arguments.table else None
        access = chief.access
    shown_placement = placement if arguments.placement else None
    lines = status_lines(look, placement=shown_placement, num_ledger=arguments.ledger)
    fields, exit_code = fields_of(look.status, placement=shown_placement, num_ledger=arguments.ledger), ExitCode.DONE
    if arguments.table:
        # Not in the block above: a server that does not answer is no absent chief.
        keys, counts, silent = _count_rows(arguments.table, look.status, placement or (), access)
        lines += [
            "",
            *row_lines(arguments.table, keys, counts),
            *(f"rows of ps {index} are not counted: {why}" for index, why in silent.items()),
        ]
        fields |= {"rows_by_last_use": counts, "rows_not_counted": silent}
        exit_code = ExitCode.FAILED if silent else ExitCode.DONE
    return CommandResult(words="\n".join(lines), fields=fields, exit_code=exit_code)


def _count_rows(name: str, status: ClusterStatus, placement: Placement, access: Access) -> tuple[KeySpec, list[int], dict[int, str]]:
    """Counts the rows of a table with keys at all servers that have some, and returns why some did not answer. Raises InvalidSpec."""
    placed = [one for one in placement if one.slice.variable.name == name]
    keys = placed[0].slice.variable.keys if placed else None
    if keys is None:
        known = sorted({one.slice.variable.name for one in placement if one.slice.variable.keys is not None})
        what = f"the model has {', '.join(known) or 'none'}" if placement else "there is no model yet"
        raise InvalidSpec(f"--table {shown(name)}: no such table with keys; {what}")
    counts, silent = list[tuple[int, ...]](), dict[int, str]()
    for index in sorted({one.shard for one in placed}):
        with contextlib.closing(GrpcShard(status.shards[index].address, index=index, access=access)) as shard:
            try:
                counts.append(shard.call(CountRowsRequest(epoch=status.epoch, name=name), timeout_s=_ANSWER_S))
            except PsError as error:
                silent[index] = error.message
    return keys, [sum(of_age) for of_age in zip(*counts, strict=True)], silent


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `why`."""
    add_arguments(parser)


def run_why(arguments: argparse.Namespace) -> CommandResult:
    """Returns what the cluster waits for, and what to do."""
    with chief_of(arguments) as chief:
        status = chief.status()
    fields = {"state": status.state, "step": status.global_step, "epoch": status.epoch, "step_age_s": status.step_age_s}
    fields |= {"conditions": status.conditions, "waiting_for": status.waiting_for, "reason": status.reason}
    return CommandResult(words="\n".join(why_lines(status)), fields=plain(fields))
