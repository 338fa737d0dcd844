"""The project's own source files and what each imports, read as syntax trees. Runs none of them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT

PACKAGES = ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement's module; `function` is the dotted name of the function that it stands in, "" for the top of the file."""

    module: str
    line: int
    function: str

    @property
    def top(self) -> str:
        """First part of the module's name."""
        return self.module.partition(".")[0]


def source_files(*packages: str) -> list[Path]:
    """Hand-written Python files of the packages (default: all), without the generated stubs."""
    found = (path for package in packages or PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if "_pb2" not in path.name and path.parent.name != "v1")


def module_name(path: Path) -> str:
    """Dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree, each before what it is made of."""
    found: list[ast.AST] = [tree(path)]
    for node in found:  # which grows meanwhile
        found += children(node)
    return found


def children(node: ast.AST) -> list[ast.AST]:
    """What a node is made of: `ast.iter_child_nodes` in a third of the time, since the rules look at half a million nodes."""
    found: list[ast.AST] = []
    for value in vars(node).values():
        if isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


@cache
def imports(path: Path) -> list[Import]:
    """Everything that a file imports, at its top or inside functions. `from a import b` counts as a.b where that is a module of ours."""
    return list(_imports(tree(path), ""))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _imports(node: ast.AST, function: str) -> Iterator[Import]:
    for child in children(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(module=alias.name, line=child.lineno, function=function) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield Import(module=whole if _is_module(whole) else child.module or "", line=child.lineno, function=function)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _imports(child, f"{function}.{child.name}".lstrip("."))
        else:
            yield from _imports(child, function)


@cache
def _is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").is_file() or base.is_dir()
