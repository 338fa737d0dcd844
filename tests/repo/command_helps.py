"""Prints, as JSON, what each command says of itself to `--help`. In one process, since most of the time is that of imports."""

import contextlib
import io
import json
import runpy
import sys

from benchmarks.__main__ import SUITES
from lockstep.__main__ import COMMANDS as SUBCOMMANDS

COMMANDS = {
    "lockstep": ["lockstep"],
    "server": ["ps_server"],
    "chief": ["chief"],
    **{name: ["lockstep", name] for name in SUBCOMMANDS if name != "checkpoint"},
    **{f"checkpoint {name}": ["lockstep", "checkpoint", *name.split()] for name in ("", "ls", "verify", "export", "import")},
    **{f"run {name}": ["benchmarks", "run", name] for name in SUITES},
}


def help_of(module: str, *words: str) -> str:
    """What `python -m MODULE WORDS --help` prints."""
    sys.argv = [module, *words, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert printed.getvalue().startswith("usage: "), f"{module}: {printed.getvalue()}"
    return printed.getvalue()


if __name__ == "__main__":
    json.dump({name: help_of(*words) for name, words in COMMANDS.items()}, sys.stdout)
