"""What a worker's command lacks where it is to run: a program, its file, a module that it begins by importing. Starts nothing."""

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path


def what_lacks(command: Sequence[str], *, environment: Mapping[str, str]) -> str:
    """Returns words for what keeps a command from beginning in this directory; empty: nothing that is seen without starting it.

    Modules are looked for only if the command runs on this process's own Python.
    """
    program, argument = command[0], command[1] if len(command) > 1 else ""
    if shutil.which(program, path=environment.get("PATH")) is None:
        if os.path.isfile(program):
            return f"{program!r} cannot be run as a program; a Python file is run by: … -- python {program}"
        return f"there is no program {program!r} (looked in PATH)"
    if program != sys.executable or (argument.startswith("-") and argument != "-m"):
        return ""
    if argument == "-m":
        first = command[2].partition(".")[0] if len(command) > 2 else ""
        return f"{sys.executable} has no module {first}" if first and not _finds(first, Path.cwd(), environment) else ""
    if argument and not os.path.exists(argument):
        return f"there is no file {argument} in {Path.cwd()}"
    place = Path(argument).resolve().parent  # as Python finds it, also through a link
    for name in _first_imports(Path(argument)):
        if not (origin := _finds(name, place, environment)):
            return f"{argument} imports {name}, and {sys.executable} has no such module"
        if place in Path(origin).parents:
            break  # one of the user's own may say where others are
    return ""


def _first_imports(path: Path) -> Iterator[str]:
    """Yields the modules that a program imports before it does anything else."""
    with suppress(OSError, SyntaxError, ValueError):  # Python itself says it better
        for statement in ast.parse(path.read_bytes()).body:
            if isinstance(statement, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                yield statement.module.partition(".")[0]
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                return


def _finds(name: str, directory: Path, environment: Mapping[str, str]) -> str:
    """Returns where a program in a directory would find a module, without importing it; empty: nowhere."""
    if name in sys.modules:
        return name
    here, sys.path = sys.path, [str(directory), *environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    try:
        found = find_spec(name)
        return "" if found is None else found.origin or name  # a package may be a directory without a file
    finally:
        sys.path = here
