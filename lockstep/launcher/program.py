"""What a worker's command lacks where it is to run: a program, its file, a module that it begins by importing. Starts nothing.

What could still be there once the program runs is not lacking: better that the worker says it than that a program that runs is refused.
"""

import ast
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Importing one of these leads to no other modules; importing any other may change where Python looks for what comes next.
_LEADS_NOWHERE = {*sys.stdlib_module_names, "lockstep", "numpy", "worker_client"}
# A program in text; what is larger is an archive, or takes long to read.
_MAX_BYTES = 1 << 18


def what_lacks(command: Sequence[str], *, environment: Mapping[str, str]) -> str:
    """Returns words for what keeps a command from beginning in this directory; empty: nothing that is seen without starting it.

    Modules are looked for only if the command runs on this process's own Python, with the same variables for it.
    """
    program, argument = command[0], command[1] if len(command) > 1 else ""
    if shutil.which(program, path=environment.get("PATH")) is None:
        if os.path.isfile(program):
            return f"{program!r} cannot be run as a program; a Python file is run by: … -- python {program}"
        return f"there is no program {program!r} (looked in PATH)"
    if program != sys.executable or (argument.startswith("-") and argument != "-m"):
        return ""
    if argument not in ("", "-m") and not os.path.exists(argument):
        return f"there is no file {argument} in {Path.cwd()}"
    if sys.flags.ignore_environment or _of_python(environment) != _of_python(os.environ):
        return ""  # it may look elsewhere
    if argument == "-m":
        first = command[2].partition(".")[0] if len(command) > 2 else ""
        return f"{sys.executable} has no module {first}" if first and _place_of(first, Path.cwd()) is None else ""
    directory = Path(argument).resolve().parent  # as Python finds it, also through a link
    for name in _first_imports(Path(argument)):
        if (place := _place_of(name, directory)) is None:
            return f"{argument} imports {name}, and {sys.executable} has no such module"
        if name not in _LEADS_NOWHERE or directory in Path(place).parents:
            break
    return ""


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith("PYTHON")}


def _first_imports(path: Path) -> Iterator[str]:
    """Yields the modules that a program imports before it does anything else."""
    for statement in _statements(path):
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.partition(".")[0]
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            return


def _statements(path: Path) -> list[ast.stmt]:
    """Returns those of a program; none where it is no text of Python, which Python itself says better, or no file: a pipe is read once."""
    with suppress(OSError, SyntaxError, ValueError, MemoryError, RecursionError), warnings.catch_warnings(action="ignore"):
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return ast.parse(path.read_bytes()).body
    return []


def _place_of(name: str, directory: Path) -> str | None:
    """Returns where a program in a directory would find a module, without importing it; None: nowhere."""
    here, sys.path = sys.path, [str(directory), *sys.path]
    try:
        # Not find_spec() of importlib, which answers of a module that this process has imported, not of one of that name in the directory.
        found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, None)) is not None), None)
    except Exception:  # whatever a finder of an installed package raises, which may build what it finds
        return ""
    finally:
        sys.path = here
    if found is None:
        return "" if name in sys.modules else None  # __main__ has no place
    return found.origin or ""  # a package may be a directory without a file
