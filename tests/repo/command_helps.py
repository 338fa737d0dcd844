"""Prints, as JSON, what each command says of itself to `--help-all`. In one process, since most of the time is that of imports."""

import contextlib
import io
import json
import runpy
import sys

from benchmarks.__main__ import SUITES
from lockstep.__main__ import ROLES
from lockstep.cli.commands import COMMANDS as SUBCOMMANDS

COMMANDS = {
    "lockstep": ["lockstep", "--help"],
    **{name: [command.module, "--help-all"] for name, command in SUBCOMMANDS.items() if name in ROLES},
    **{name: ["lockstep", *name.split(), "--help-all"] for name in SUBCOMMANDS if name not in ROLES},
    **{f"run {name}": ["benchmarks", "run", name, "--help"] for name in SUITES},
}


def help_of(module: str, *words: str) -> str:
    """What `python -m MODULE WORDS` prints."""
    sys.argv = [module, *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert printed.getvalue().startswith("usage: "), f"{module}: {printed.getvalue()}"
    return printed.getvalue()


if __name__ == "__main__":
    json.dump({name: help_of(*words) for name, words in COMMANDS.items()}, sys.stdout)
