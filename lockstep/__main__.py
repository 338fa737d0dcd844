"""The `lockstep` command: finds the command, prints its answer, and says how a failure, Ctrl-C or a closed pipe ends it.

Which commands there are: `lockstep/cli/commands.py`. Only the requested one is imported, since a health check runs every two seconds.
"""

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from lockstep import __version__
from lockstep.cli.commands import COMMANDS, actions_of, actions_text, find, overview
from ps_protocol.process.exit_codes import ExitCode, of_signal
from ps_protocol.process.options import Parser

ROLES = ("server", "chief")
# Most objects that a command makes belong to modules and are never freed. With Python's default of 700, the collector would scan them some
# thirty times.
_NUM_OBJECTS_TO_COLLECT = 20_000
_HELP = ("-h", "--help", "--help-all")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # gRPC logs each connection that a server closes. It reads this variable on import, which happens later. Child processes inherit it.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return _run(words)
    except KeyboardInterrupt:
        return of_signal(signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the broken pipe again at exit
        return of_signal(signal.SIGPIPE)
    except Exception as error:
        exit_code = _exit_code_of(error)
        lacking = _lacking(error)
        if exit_code is None and not lacking:
            raise
        name = f"lockstep {words[0]}" if words and words[0] in COMMANDS else "lockstep"
        print(f"{name}: {lacking or getattr(error, 'message', error)}", file=sys.stderr)
        return exit_code or ExitCode.FAILED


def program() -> NoReturn:
    """Runs a command as a program of its own."""
    gc.set_threshold(_NUM_OBJECTS_TO_COLLECT)
    code = main()
    if code > of_signal(0):
        # After Ctrl-C the user waits for the prompt, and Python's own shutdown takes a second on a busy machine.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
        os._exit(code)
    gc.freeze()  # else Python collects garbage in all modules at exit, which takes 0.1 s of CPU
    sys.exit(code)


def _run(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = _asked_for(words[1:])
    if not words or words[0] in _HELP:
        print(overview())
        # A script whose variable is empty gives no command, and must not go on as if it had.
        return ExitCode.DONE if words else ExitCode.USAGE
    if words[0] in ("version", "--version"):
        print(f"lockstep-ps {__version__}")
        return ExitCode.DONE
    name, rest = find(words)
    if name in ROLES:
        _run_role(name, rest)
    if actions_of(name):
        print(actions_text(name))
        return ExitCode.DONE if rest[:1] and rest[0] in _HELP else ExitCode.USAGE
    command, functions = COMMANDS[name], _functions(name)
    arguments = parser_of(name).parse_args(rest)
    answer = getattr(functions, f"run_{_key(name)}")(arguments)
    if not command.has_answer:
        return int(answer)
    print(json.dumps(answer.fields, indent=2) if arguments.json else answer.words)
    return int(answer.exit_code)


def _asked_for(words: list[str]) -> list[str]:
    """Returns the words that show the help of a command, whatever follows its name; of `help` itself: of all commands."""
    if not words or words[0] == "help":
        return ["--help"]
    return words if words[0] in ("version", "--version") else [*find(words)[0].split(), "--help"]


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a command's arguments, or of an action's."""
    command = COMMANDS[name]
    words = f"{command.words[0].upper()}{command.words[1:]}."
    parser = Parser(prog=f"lockstep {name}", usage=f"lockstep {name} {command.usage}", description=words, examples=command.examples)
    getattr(_functions(name), f"add_{_key(name)}_arguments")(parser)
    if command.has_answer:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _functions(name: str) -> ModuleType:
    return import_module(f"lockstep.cli.{COMMANDS[name].module}")


def _exit_code_of(error: Exception) -> int | None:
    """Returns 2 for a usage error, 1 for a failed command, and None for a defect, whose traceback is shown."""
    # Imported here: a health check runs every two seconds.
    from lockstep.cli.results import CommandFailed
    from lockstep.launcher.supervisor import LaunchFailed
    from ps_protocol.errors import InvalidSpec, PsError

    if isinstance(error, CommandFailed | LaunchFailed):
        return error.exit_code
    if isinstance(error, OSError):
        return ExitCode.FAILED
    return (ExitCode.USAGE if isinstance(error, InvalidSpec) else ExitCode.FAILED) if isinstance(error, PsError) else None


def _lacking(error: Exception) -> str:
    """Says what the system has refused this process; empty: the error is of another kind."""
    from ps_protocol.process.exhaustion import words_of

    return words_of(error)


def _run_role(name: str, words: list[str]) -> NoReturn:
    """Replaces this process by the role, so that signals and exit code are the role's own."""
    from lockstep.launcher.supervisor import with_checkout

    # -P: a chief.py in the user's directory must not be taken for ours.
    module = "lockstep.combined" if name == "server" and "--with-chief" in words else COMMANDS[name].module
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *words], {**os.environ, **with_checkout(os.environ)})


if __name__ == "__main__":
    program()
