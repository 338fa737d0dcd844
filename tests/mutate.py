"""`make mutate MODULE=…`: breaks a module in many small ways, and reports which tests notice.

    python -m tests.mutate chief/core/cluster/data.py tests/unit/chief tests/simulation --most 40

Each path of tests is a layer; without any, the unit tests of the module's package are the only one. A mutant is a comparison or a condition
that is turned, a line that is removed, or a number that is one more. For each mutant and layer a fork of this process imports all with
the mutant in the module's place: so only tests that run in their own process can notice. A layer pays if it notices what the layers below
it do not; a mutant that nobody notices is a claim without a test, or code without a purpose. Writes no file.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import grpc as grpc  # what takes long to import, and is never mutated
import hypothesis as hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    one: other
    for pair in [(ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
    for one, other in (pair, pair[::-1])
}
# A mutant may take so many times as long as the module itself: then it hangs, which is noticed, too.
_PATIENCE = 5


@dataclass(frozen=True)
class Mutant:
    """One change to a syntax tree; `make` does it, for good."""

    line: int
    words: str
    make: Callable[[], None]


def mutants(tree: ast.Module) -> list[Mutant]:
    """All mutants of a module, from its first line to its last."""
    return sorted(_below(tree), key=lambda mutant: mutant.line)


def _below(node: ast.AST) -> Iterator[Mutant]:
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.stmt) and isinstance(value, list) and _can_go(child):
                yield Mutant(child.lineno, f"without: {_shown(child)}", _removed(value, place))
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
                yield from (*_of(child), *_below(child))


def _of(node: ast.AST) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        turned = _TURNED[type(node.ops[0])]
        yield Mutant(node.lineno, f"{turned.__name__} in: {_shown(node)}", lambda: node.ops.__setitem__(0, turned()))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield Mutant(node.lineno, f"{other.__name__} in: {_shown(node)}", lambda: setattr(node, "op", other()))
    elif isinstance(node, ast.Constant) and isinstance(number := node.value, int | float) and not isinstance(number, bool):
        yield Mutant(node.lineno, f"{number + 1} in place of {number}", lambda: setattr(node, "value", number + 1))
    elif isinstance(node, ast.Return) and node.value is not None and _shown(node.value) not in ("None", "False", "0"):
        yield Mutant(node.lineno, f"None in place of: {_shown(node)}", lambda: setattr(node, "value", None))
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield Mutant(node.test.lineno, f"not in: {_shown(node.test)}", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test)))


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0][:80]


def _can_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant) and not ast.unparse(statement).startswith("log")
    if isinstance(statement, ast.Assign):
        return not any(isinstance(target, ast.Name) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)


def _removed(body: list[ast.stmt], place: int) -> Callable[[], None]:
    return lambda: body.__setitem__(place, ast.copy_location(ast.Pass(), body[place]))


class _FromTree(importlib.machinery.SourceFileLoader):
    """Imports one module from a syntax tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        super().__init__(name, str(path))
        self._tree = ast.fix_missing_locations(tree)

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """As of a finder in `sys.meta_path`."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        """The code of the tree."""
        return self.source_to_code(self._tree, self.path)


@dataclass
class _Run:
    """A fork at work."""

    layer: str
    mutant: Mutant | None
    began_s: float


class Trial:
    """Runs layers of tests over mutants of a module, as many at once as there are processors."""

    def __init__(self, path: Path, layers: Sequence[str]) -> None:
        self._path, self._layers = path, layers
        self._name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._limit_s = dict.fromkeys(layers, 600.0)
        self._running: dict[int, _Run] = {}

    def measure(self) -> None:
        """Runs each layer over the module as it is, which must pass; its time is the measure of a mutant's."""
        for layer in self._layers:
            began_s = time.monotonic()
            if self.noticed([(layer, None)]):
                raise SystemExit(f"mutate: {layer} fails without a mutant; want tests that pass")
            self._limit_s[layer] = _PATIENCE * (time.monotonic() - began_s) + 10

    def noticed(self, todo: Sequence[tuple[str, Mutant | None]]) -> list[tuple[str, Mutant | None]]:
        """Returns those of the pairs of a layer and a mutant in which a test failed, or hung."""
        found, waiting = [], list(reversed(todo))
        while waiting or self._running:
            while waiting and len(self._running) < (os.cpu_count() or 1):
                self._start(*waiting.pop())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                for one, run in self._running.items():
                    if time.monotonic() - run.began_s > self._limit_s[run.layer]:
                        os.killpg(one, signal.SIGKILL)
                time.sleep(0.05)
            elif (ended := self._running.pop(pid, None)) and status:
                found.append((ended.layer, ended.mutant))
        return found

    def _start(self, layer: str, mutant: Mutant | None) -> None:
        pid = os.fork()
        if not pid:
            os.setsid()
            with open(os.devnull, "r+b") as nothing:
                for stream in (0, 1, 2):
                    os.dup2(nothing.fileno(), stream)
            if mutant is not None:
                mutant.make()
            sys.meta_path.insert(0, _FromTree(self._name, self._path, self.tree))
            with tempfile.TemporaryDirectory() as scratch:
                os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = scratch
                code = pytest.main(
                    [
                        layer,
                        "-x",
                        "-q",
                        "--assert=plain",
                        "-p",
                        "no:cacheprovider",
                        f"--basetemp={scratch}/tests",
                    ]
                )
            os._exit(int(code))
        self._running[pid] = _Run(layer, mutant, time.monotonic())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the mutants that nobody notices, and what each layer notices, alone or not; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", type=Path, help="a file of a package")
    parser.add_argument("layers", nargs="*", help="tests of each layer, as a path; by default the unit tests of the package")
    parser.add_argument("--most", type=int, default=40, help="mutants that are tried, spread over the module (default 40)")
    options = parser.parse_args(arguments)
    path = (ROOT / options.module).resolve()
    layers = options.layers or [f"tests/unit/{path.relative_to(ROOT).parts[0]}"]
    trial = Trial(path, layers)
    every = mutants(trial.tree)
    chosen = [every[int(place)] for place in np.linspace(0, len(every) - 1, min(options.most, len(every)))]
    trial.measure()
    noticed = trial.noticed([(layer, mutant) for mutant in chosen for layer in layers])
    by_mutant = {id(mutant): {layer for layer, one in noticed if one is mutant} for mutant in chosen}
    for mutant in chosen:
        if not by_mutant[id(mutant)]:
            print(f"{options.module}:{mutant.line}: nobody notices {mutant.words}")
    print(f"{len(chosen)} of {len(every)} mutants of {options.module}")
    for layer in layers:
        alone = sum(found == {layer} for found in by_mutant.values())
        print(f"  {layer:40} notices {sum(layer in found for found in by_mutant.values())}, {alone} alone")
    print(f"  {'nobody':40} notices {sum(not found for found in by_mutant.values())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
