"""Rules for every file: nothing that runs what somebody sent, nothing unfinished, a first line that says why."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.repo.source_tree import imports, module_name, source_files, tree
from tests.support.repository import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "os.system"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

FILES = [*source_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
# What is not installed, but is read as an example, or run on what others sent.
OTHER_FILES = [path for name in ("examples", "tests") for path in sorted((ROOT / name).rglob("*.py"))]


@pytest.mark.parametrize("path", [*FILES, *OTHER_FILES], ids=module_name)
def test_nothing_runs_what_somebody_sent(path: Path) -> None:
    # A test may read the arrays that it wrote; pickles it may not read either.
    may = {"np.load"} if path in OTHER_FILES else set()
    wrong = [f"imports {i.module} at line {i.line}" for i in imports(path) if i.top in FORBIDDEN_MODULES]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS - may:
            wrong.append(f"calls {ast.unparse(node.func)} at line {node.lineno}")
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell") and not _is_false(node.value):
            wrong.append(f"passes {node.arg} at line {node.value.lineno}")
    assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_nothing_is_left_unfinished(path: Path) -> None:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    wrong = [f"line {comment.start[0]}: {comment.string}" for comment in comments if UNFINISHED.search(comment.string)]
    names = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Name))
    wrong += [f"line {name.lineno}: {name.id}" for name in names if name.id == "NotImplementedError"]
    assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_first_line_says_what_the_file_owns(path: Path) -> None:
    docstring = ast.get_docstring(tree(path)) or ""
    assert docstring.splitlines()[:1] and len(docstring.splitlines()[0]) >= 20, f"{path.relative_to(ROOT)}: no sentence on its first line"


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__main__.py"], ids=module_name)
def test_import_has_no_effect(path: Path) -> None:
    """Handlers, threads, files and sockets belong to whoever runs a program, not to whoever imports a module."""
    effects = {"logging.basicConfig", "logging.config.dictConfig", "signal.signal", "os.environ.setdefault", "np.seterr", "open", "print"}
    calls = [node.value for node in tree(path).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    wrong = [ast.unparse(call) for call in calls if ast.unparse(call.func) in effects]
    assert not wrong, f"{path.relative_to(ROOT)}: {wrong}"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
