"""`lockstep why`: asks the chief why the cluster waits, prints its answer. Knows the terminal; decides nothing."""

import argparse
import json
import sys

from lockstep.chief_access import ChiefAbsent, add_arguments, chief_of
from lockstep.why_text import why_text
from ps_protocol.errors import PsError

_WITHOUT_CHIEF = (
    "if it was killed, nothing is lost: the parameter servers keep the model, and the workers wait. Start the"
    " chief again, best at the same address (`lockstep up`, compose and Kubernetes do so by themselves); it goes on at the same step"
)


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `why`."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print step, state, wait and reason as JSON")


def run_why(arguments: argparse.Namespace) -> int:
    """Prints why the cluster waits and returns the exit code: 0 if the chief answered."""
    try:
        with chief_of(arguments) as chief:
            status = chief.status()
    except ChiefAbsent as absent:
        print(f"lockstep why: {absent}", file=sys.stderr)
        if absent.exit_code == 1:
            print(_WITHOUT_CHIEF, file=sys.stderr)
        return absent.exit_code
    except PsError as error:
        print(f"lockstep why: {error.message}", file=sys.stderr)
        return 1
    if arguments.json:
        found = {"state": status.state.name.lower(), "step": status.global_step, "epoch": status.epoch, "step_age_s": status.step_age_s}
        print(json.dumps({**found, "waiting_for": status.waiting_for, "reason": status.reason}, indent=2))
    else:
        print(why_text(status))
    return 0
