"""`lockstep status` and `why`: ask the chief, print its answer. Knows the terminal; decides nothing."""

import argparse
import json
import sys
import threading

from lockstep.cli.access import ChiefAbsent, add_arguments, chief_of
from lockstep.cli.watch.text import as_json, as_text, why_text
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.spec import Placement
from ps_protocol.roles.chief import ClusterStatus

_WATCH_PERIOD_S = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (with --watch: one object after the other)")
    parser.add_argument("--ledger", type=int, default=0, metavar="N", help="also show what the last N steps were made of")
    parser.add_argument("--placement", action="store_true", help="also show on which parameter server each variable lies")
    parser.add_argument("--watch", action="store_true", help="show the status again every second, until Ctrl-C or the chief's end")


def run_status(arguments: argparse.Namespace) -> int:
    """Prints the status, once or again and again, and returns the exit code."""
    if arguments.ledger < 0:
        raise InvalidSpec(f"--ledger: got {arguments.ledger}, want 0 or more")
    has_shown, placement = False, None
    try:
        with chief_of(arguments) as chief:
            while True:
                # The placement never changes once there is a model.
                placement = placement or (chief.get_model(max_wait_s=0.0).placement if arguments.placement else None)
                _show(chief.status(max_ledger_entries=arguments.ledger), placement, arguments)
                has_shown = True
                if not arguments.watch:
                    return 0
                threading.Event().wait(_WATCH_PERIOD_S)
    except ChiefAbsent as absent:
        if not has_shown:
            raise
        print("the chief has ended", file=sys.stderr)
        return absent.exit_code


def _show(status: ClusterStatus, placement: Placement | None, arguments: argparse.Namespace) -> None:
    if arguments.watch and not arguments.json and sys.stdout.isatty():
        sys.stdout.write(_CLEAR)
    print(as_json(status, placement=placement) if arguments.json else as_text(status, placement=placement), flush=True)


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `why`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print step, state, wait and reason as JSON")


def run_why(arguments: argparse.Namespace) -> int:
    """Prints why the cluster waits and returns the exit code: 0 if the chief answered."""
    with chief_of(arguments) as chief:
        status = chief.status()
    if arguments.json:
        found = {"state": status.state.name.lower(), "step": status.global_step, "epoch": status.epoch, "step_age_s": status.step_age_s}
        print(json.dumps({**found, "waiting_for": status.waiting_for, "reason": status.reason}, indent=2))
    else:
        print(why_text(status))
    return 0
