"""The `lockstep` command: which subcommands there are, and what an end by Ctrl-C or a closed pipe looks like. Does nothing itself."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

ROLES = {"ps": ("ps_server", "run one parameter server"), "chief": ("chief", "run the chief")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # gRPC notes each connection that a server closes, and reads this when it is imported, which no line above does. Children have it too.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        if words and words[0] in ROLES:
            _run_role(words[0], words[1:])
        arguments = _parser(words[0] if words else "").parse_args(words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it ends
        return 128 + signal.SIGPIPE


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep", description="A parameter server for any training loop.")
    parser.add_argument("--version", action="version", version=_version() if command == "--version" else "", help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (words, prepare) in _COMMANDS.items():
        subparser = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        if name == command:
            prepare(subparser)
    for name, (_, words) in ROLES.items():
        commands.add_parser(name, help=words, add_help=False)
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return f"lockstep-ps {metadata.version('lockstep-ps')}"
    except metadata.PackageNotFoundError:
        return "lockstep-ps, a source tree that is not installed"


def _prepare_demo(parser: argparse.ArgumentParser) -> None:
    from lockstep.demo import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(run=run)


def _prepare_up(parser: argparse.ArgumentParser) -> None:
    from lockstep.up import add_arguments, run

    add_arguments(parser)
    parser.set_defaults(run=run)


def _prepare_status(parser: argparse.ArgumentParser) -> None:
    from lockstep.status import add_status_arguments, run_status

    add_status_arguments(parser)
    parser.set_defaults(run=run_status)


def _prepare_finish(parser: argparse.ArgumentParser) -> None:
    from lockstep.status import add_finish_arguments, run_finish

    add_finish_arguments(parser)
    parser.set_defaults(run=run_finish)


def _prepare_policy(parser: argparse.ArgumentParser) -> None:
    from lockstep.policy import add_policy_arguments, run_policy

    add_policy_arguments(parser)
    parser.set_defaults(run=run_policy)


def _prepare_set(parser: argparse.ArgumentParser) -> None:
    from lockstep.policy import add_set_arguments, run_set

    add_set_arguments(parser)
    parser.set_defaults(run=run_set)


def _prepare_plan(parser: argparse.ArgumentParser) -> None:
    from lockstep.plan import add_plan_arguments, run_plan

    add_plan_arguments(parser)
    parser.set_defaults(run=run_plan)


def _prepare_health(parser: argparse.ArgumentParser) -> None:
    from lockstep.health import add_health_arguments, run_health

    add_health_arguments(parser)
    parser.set_defaults(run=run_health)


# Only the module of the subcommand that is wanted is imported: a health check runs every two seconds.
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": ("train on handwritten digits with a cluster on this machine, and watch it", _prepare_demo),
    "up": ("start a cluster on this machine, with your program as its workers", _prepare_up),
    "status": ("show a cluster's step, workers and parameter servers, and what it waits for", _prepare_status),
    "policy": ("show how a cluster coordinates its workers, or change it between two steps", _prepare_policy),
    "set": ("change the learning rate or another number of a running cluster's optimizer", _prepare_set),
    "plan": ("say how many backup workers pay, from measured or assumed computing times", _prepare_plan),
    "finish": ("end training: every worker is released, and the processes end", _prepare_finish),
    "health": ("ask a parameter server or chief whether it is alive, or ready", _prepare_health),
}


def _run_role(name: str, words: list[str]) -> NoReturn:
    """Turns this process into the role, so that signals and exit code are the role's own."""
    from lockstep.cluster import with_checkout

    # -P: a chief.py in the user's directory must not be taken for ours.
    module = "lockstep.combined" if name == "ps" and "--with-chief" in words else ROLES[name][0]
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *words], {**os.environ, **with_checkout()})


if __name__ == "__main__":
    sys.exit(main())
