"""The `lockstep` command: which subcommands there are, and how a failure, Ctrl-C or a closed pipe ends one. Does nothing itself."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from lockstep import __version__
from ps_protocol.process.options import Parser

ROLES = {"server": ("ps_server", "run one parameter server"), "chief": ("chief", "run the chief")}


# Most objects that a command makes belong to modules and are never freed. With Python's default of 700, the collector would scan them some
# thirty times.
_NUM_OBJECTS_TO_COLLECT = 20_000
# A shell adds this to the number of the signal that ended a program.
_SIGNALLED = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # gRPC logs each connection that a server closes. It reads this variable on import, which happens later. Child processes inherit it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        if words and words[0] in ROLES:
            _run_role(words[0], words[1:])
        arguments = _parser(words[0] if words else "").parse_args(words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the broken pipe again at exit
        return _SIGNALLED + signal.SIGPIPE
    except Exception as error:
        exit_code = _exit_code_of(error)
        lacking = _lacking(error)
        if exit_code is None and not lacking:
            raise
        name = f"lockstep {words[0]}" if words and words[0] in COMMANDS else "lockstep"
        print(f"{name}: {lacking or getattr(error, 'message', error)}", file=sys.stderr)
        return exit_code or 1


def program() -> NoReturn:
    """Runs a subcommand as a program of its own."""
    gc.set_threshold(_NUM_OBJECTS_TO_COLLECT)
    code = main()
    if code > _SIGNALLED:
        # After Ctrl-C the user waits for the prompt, and Python's own shutdown takes a second on a busy machine.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
        os._exit(code)
    gc.freeze()  # else Python collects garbage in all modules at exit, which takes 0.1 s of CPU
    sys.exit(code)


def _exit_code_of(error: Exception) -> int | None:
    """Returns 2 for a usage error, 1 for a failed command, and None for a defect, whose traceback is shown."""
    # Imported here: a health check runs every two seconds.
    from lockstep.cli.access import CommandFailed
    from lockstep.launcher.supervisor import LaunchFailed
    from ps_protocol.errors import InvalidSpec, PsError

    if isinstance(error, CommandFailed | LaunchFailed):
        return error.exit_code
    return (2 if isinstance(error, InvalidSpec) else 1) if isinstance(error, PsError) else None


def _lacking(error: Exception) -> str:
    """Says what the system has refused this process; empty: the error is of another kind."""
    from ps_protocol.process.exhaustion import words_of

    return words_of(error)


def _parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(prog="lockstep", description="A parameter server for any training loop.")
    parser.add_argument("--version", action="version", version=f"lockstep-ps {__version__}", help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (words, module) in COMMANDS.items():
        subparser = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        if name == command:
            functions = import_module(f"lockstep.cli.{module}")
            getattr(functions, f"add_{name}_arguments")(subparser)
            subparser.set_defaults(run=getattr(functions, f"run_{name}"))
    for name, (_, words) in ROLES.items():
        commands.add_parser(name, help=words, add_help=False)
    return parser


# The help text, and the module of `lockstep.cli` that has the command's two functions, for example `add_why_arguments` and `run_why`. Only
# the module of the requested subcommand is imported: a health check runs every two seconds.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("train on handwritten digits with a cluster on this machine, and watch it", "clusters.demo"),
    "up": ("start a cluster on this machine, with your program as its workers", "clusters.up"),
    "status": ("show a cluster's step, workers and parameter servers, and what it waits for", "watch.status"),
    "why": ("say why a cluster waits: the step, what is missing, who was last seen when, what happens next", "watch.status"),
    "top": ("show a cluster live: its wait, speed, steps, workers and servers", "watch.top"),
    "ls": ("list the clusters that run on this machine", "watch.local"),
    "page": ("print the address of a cluster's page for a browser", "watch.local"),
    "policy": ("show how a cluster coordinates its workers, or change it between two steps", "clusters.change"),
    "set": ("change the learning rate or another number of a running cluster's optimizer", "clusters.change"),
    "plan": ("say how many backup workers pay off, from measured or assumed computing times", "advice.plan"),
    "finish": ("end training: every worker is released, and the processes end", "clusters.change"),
    "checkpoint": ("have a running cluster save a checkpoint; list, verify, export or import those of a directory", "files.checkpoint"),
    "certs": ("make certificates and tokens for the processes of a cluster", "files.certs"),
    "trace": ("record a few seconds of a cluster's steps as a trace for Perfetto or chrome://tracing", "watch.recordings"),
    "doctor": ("check whether this machine, its files and its network are fit for a cluster, and say what to do", "advice.doctor"),
    "tensorboard": ("write event files for TensorBoard while a cluster trains: metrics, steps per second, staleness", "watch.recordings"),
    "health": ("ask a parameter server or chief whether it is alive, or ready", "watch.health"),
    "audit": ("check what a cluster has written with --history, and compute its values again", "files.audit"),
}


def _run_role(name: str, words: list[str]) -> NoReturn:
    """Replaces this process by the role, so that signals and exit code are the role's own."""
    from lockstep.launcher.supervisor import with_checkout

    # -P: a chief.py in the user's directory must not be taken for ours.
    module = "lockstep.combined" if name == "server" and "--with-chief" in words else ROLES[name][0]
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *words], {**os.environ, **with_checkout()})


if __name__ == "__main__":
    program()
