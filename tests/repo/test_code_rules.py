"""Rules for every file: received data is never run as code, nothing is unfinished, the first line states the purpose. One test a rule."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.repo.source_tree import dotted, imports, nodes, source_files, tree
from tests.support.repository import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "os.system"}
# A text without any of these breaks no rule about them, and is not parsed.
SUSPICIOUS = re.compile(r"pickle|dill|marshal|shelve|joblib|(?<![\w.])(eval|exec|compile|__import__)\(|\.(unsafe_)?load\(|os\.system|shell")
# Underscores of other libraries that are read, because they offer the same nowhere in public.
FOREIGN_UNDERSCORES = {
    ("", "_replace"): "what named tuples have in public, by their documentation",
    ("", "_exit"): "what `os` has in public, by its documentation",
    ("ps_protocol/rpc/client_stream.py", "_channel"): "the channel that grpcio hides behind its own, for streams without a thread each",
    ("lockstep/torch/embedding.py", "_disable_dynamo"): "what keeps the compiler out, as in PyTorch's own optimizers, without loading it",
    ("lockstep/torch/optimizer.py", "_opt_called"): "what PyTorch's schedulers look at before they warn",
    ("lockstep/torch/tensors.py", "_foreach_copy_"): "a list of tensors copied in one call, as PyTorch's own optimizers do",
    ("lockstep/torch/tensors.py", "_foreach_mul_"): "… and multiplied",
    ("ps_protocol/process/options.py", "_option_string_actions"): "the flags of a parser, which argparse lists nowhere else",
    ("ps_protocol/rpc/server_stream.py", "_rpc_event"): "the call that grpcio hides behind its context, for streams without a thread each",
}
# A name in backquotes: of a file, or of something in it, perhaps dotted, perhaps called.
NAMED_FILE = re.compile(r"`([\w/]+\.py)`")
NAMED_THING = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
COMMENT_THAT_NAMES = re.compile(r"#.*`")
# Names of others, and ends of names.
FOREIGN_NAMES = {"_locked", "feature_names_in_", "hostname", "n_features_in_"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}

FILES = [*source_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]
# What is not installed, but is read as an example, or run on what others sent.
OTHER_FILES = [path for name in ("examples", "tests") for path in sorted((ROOT / name).rglob("*.py"))]


def _at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_received_data_is_run_as_code() -> None:
    wrong = []
    for path in [*FILES, *OTHER_FILES]:
        if not SUSPICIOUS.search(path.read_text(encoding="utf-8")):
            continue
        # A test may read the arrays that it wrote; pickles it may not read either.
        may = {"np.load"} if path in OTHER_FILES else set()
        wrong += [f"{_at(path, i.line)} imports {i.module}" for i in imports(path) if i.top in FORBIDDEN_MODULES]
        for node in nodes(path):
            if isinstance(node, ast.Call) and (called := dotted(node.func)) in FORBIDDEN_CALLS - may:
                wrong.append(f"{_at(path, node.lineno)} calls {called}")
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell") and not _is_false(node.value):
                wrong.append(f"{_at(path, node.value.lineno)} passes {node.arg}")
    assert not wrong, "\n".join(wrong)


def test_no_unfinished_code_is_left() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if UNFINISHED.search(text):
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            comments = (token for token in tokens if token.type == tokenize.COMMENT)
            wrong += [f"{_at(path, comment.start[0])} {comment.string}" for comment in comments if UNFINISHED.search(comment.string)]
        wrong += [_at(path, number) for number, line in enumerate(text.splitlines(), 1) if "NotImplementedError" in line]
    assert not wrong, "\n".join(wrong)


def test_first_line_says_what_the_file_owns() -> None:
    docstrings = {path: ast.get_docstring(tree(path)) or "" for path in FILES}
    wrong = [_at(path, 1) for path, docstring in docstrings.items() if len(docstring.partition("\n")[0]) < 20]
    assert not wrong, "no sentence on the first line of " + ", ".join(wrong)


def test_import_has_no_effect() -> None:
    """Handlers, threads, files and sockets belong to a program that runs, and importing a module must not make any."""
    effects = {"logging.basicConfig", "logging.config.dictConfig", "signal.signal", "os.environ.setdefault", "np.seterr", "open", "print"}
    wrong = [
        f"{_at(path, node.lineno)} {ast.unparse(node)}"
        for path in FILES
        if path.name != "__main__.py"
        for node in tree(path).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in effects
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_reads_anothers_underscore() -> None:
    """`other._name` stands only in the module that gives that name to its own classes."""
    wrong = []
    for path in FILES:
        own, place = _own_names(path), path.relative_to(ROOT).as_posix()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                wrong += [f"{_at(path, node.lineno)} imports {alias.name}" for alias in node.names if _is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                may = node.attr in own or {("", node.attr), (place, node.attr)} & FOREIGN_UNDERSCORES.keys()
                wrong += [] if may else [f"{_at(path, node.lineno)} reads {ast.unparse(node)}"]
    assert not wrong, "\n".join(wrong)


def test_names_in_comments_and_docstrings_exist() -> None:
    files = {path.name for path in [*FILES, *OTHER_FILES]}
    known = FOREIGN_NAMES.union(*(_known_names(path) for path in source_files()))
    wrong = []
    for path in source_files():
        for line, text in _prose(path):
            wrong += [f"{_at(path, line)} names {name}" for name in NAMED_FILE.findall(text) if Path(name).name not in files]
            wrong += [f"{_at(path, line)} names {name}" for name in NAMED_THING.findall(text) if not known.issuperset(name.split("."))]
    assert not wrong, "no longer there: " + "\n".join(wrong)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments and docstrings of a file, each with its first line's number."""
    text = path.read_text(encoding="utf-8")
    if COMMENT_THAT_NAMES.search(text):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from ((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


def _known_names(path: Path) -> set[str]:
    """All that a file may be speaking of: its own name and folders, and every name, argument, attribute and word in quotes in its code."""
    known = {*path.relative_to(ROOT).with_suffix("").parts}
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name):
            known.add(node.id)
        elif isinstance(node, ast.Attribute):
            known.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            known.add(node.arg or "")
        elif isinstance(node, ast.alias):
            known.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            known.update(re.findall(r"\w+", node.value))
    return known


def _own_names(path: Path) -> set[str]:
    """Names of the module's functions, methods, variables, fields and slots, and of what its objects set on themselves."""
    own: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            own.add(node.value)  # in __slots__
    return own


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_a_log_line_is_a_fact_and_then_its_fields_which_the_documents_name() -> None:
    """What `--log-format json` makes keys of: at the end of the text of each call."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("\n## JSON logs\n")[2].partition("\n## ")[0]
    wrong, names = [], set()
    for path in source_files():
        for node in nodes(path):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGGING):
                continue
            for text in [one.value for one in node.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]:
                if re.search(r"\w[=>]%", text) and not re.fullmatch(r".*?[^=\s](?: [a-z_]+=%[-+#.0-9]*[a-z])+", text):
                    wrong.append(f"{_at(path, node.lineno)} logs {text!r}: want a fact, then ' name=%s' for each field")
                names.update(re.findall(r" ([a-z_]+)=%", text))
    wrong += [f"docs/reference/cli.md, JSON logs: no `{name}`" for name in sorted(names) if f"`{name}`" not in page]
    assert not wrong, "\n".join(wrong)
    assert not names & {"time", "level", "logger", "message", "exception"}
