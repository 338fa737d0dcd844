"""`lockstep status` and `why`: ask the chief, and return its answer. Knows no terminal; decides nothing."""

import argparse

from chief.page.recorder import NUM_STEPS, Recorder
from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.formatting import plain
from lockstep.cli.results import CommandResult
from lockstep.cli.watch.view import fields_of, status_lines, why_lines
from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import GetModelRequest


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_arguments(parser)
    parser.add_argument(
        "--ledger", type=int, default=0, metavar="N", help=f"also show what the last N steps were made of, {NUM_STEPS} at most"
    )
    parser.add_argument("--placement", action="store_true", help="also show on which parameter server each variable lies")


def run_status(arguments: argparse.Namespace) -> CommandResult:
    """Returns all that is known of the cluster."""
    if not 0 <= arguments.ledger <= NUM_STEPS:
        raise InvalidSpec(f"--ledger: got {arguments.ledger}, want 0 to {NUM_STEPS}")
    with chief_of(arguments) as chief:
        look = Recorder(chief, read_metrics=lambda status: ()).look()
        placement = chief.call(GetModelRequest(max_wait_s=0.0)).placement if arguments.placement else None
    words = "\n".join(status_lines(look, placement=placement, num_ledger=arguments.ledger))
    return CommandResult(words=words, fields=fields_of(look.status, placement=placement, num_ledger=arguments.ledger))


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
