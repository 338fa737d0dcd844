"""Rules for every file that no tool knows: imports change nothing, private names stay private, log lines have fields."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT

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
LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}

PACKAGES = ("ps_protocol", "ps_server", "chief", "worker_client", "lockstep")
# What a program imports names from: packages, the APIs of tf.compat.v1.train and tf.distribute, and the adapters of frameworks.
FACES = (*PACKAGES, "worker_client/sync_replicas", "worker_client/strategy", "lockstep/jax", "lockstep/keras", "lockstep/torch")
# Says how grpc is loaded, before one of its modules imports it.
LOADS_GRPC = "ps_protocol/rpc"


def files(*tops: str) -> list[Path]:
    """Hand-written Python files below the folders, without the generated stubs."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py") if path.parent.name != "v1")


FILES = files(*PACKAGES, "benchmarks")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a chain of names, "" for any other expression."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_import_has_no_effect() -> None:
    """Handlers, threads, files and sockets belong to a program that runs, and importing a module must not make any."""
    effects = {"logging.basicConfig", "logging.config.dictConfig", "signal.signal", "os.environ.setdefault", "np.seterr", "open", "print"}
    wrong = [
        f"{_at(path, node.lineno)} {ast.unparse(node)}"
        for path in FILES
        if path.name != "__main__.py"
        for node in ast.iter_child_nodes(nodes(path)[0])
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted(node.value.func) in effects
    ]
    assert not wrong, "\n".join(wrong)


def _loaded_by(script: str) -> set[str]:
    words = [sys.executable, "-c", f"import sys; before = set(sys.modules); {script}; print(*set(sys.modules) - before)"]
    return set(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True).stdout.split())


def test_import_worker_client_loads_only_grpcio_protobuf_and_numpy() -> None:
    loaded = _loaded_by("import worker_client")
    third_party = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"worker_client", "ps_protocol"}
    # What grpcio itself brings along; and compiled modules that register themselves under a private name.
    of_grpcio = {"cython_runtime", "typing_extensions", "grpc_health"}
    assert {name for name in third_party if not name.startswith("_")} <= {"grpc", "google", "numpy"} | of_grpcio
    assert "grpc_health.v1" not in loaded, "grpcio imports the empty package; the health service is for servers"


def test_import_starts_no_thread() -> None:
    _loaded_by("import threading, ps_protocol.rpc.shard, ps_protocol.rpc.chief, worker_client; assert threading.active_count() == 1")


def test_an_init_of_a_folder_imports_nothing() -> None:
    """A name is imported from the module that defines it, so an `__init__.py` of a folder holds its description and nothing else."""
    inits = [
        path
        for path in files(*PACKAGES)
        if path.name == "__init__.py" and path.parent.relative_to(ROOT).as_posix() not in (*FACES, LOADS_GRPC)
    ]
    assert not [_at(path, 1) for path in inits if any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes(path))]


def test_grpc_is_imported_where_it_is_loaded_only() -> None:
    """Else a thread that waits for a message would not take it from the socket itself, depending on who imports what first."""
    elsewhere = [path for path in files(*PACKAGES) if not path.is_relative_to(ROOT / LOADS_GRPC)]
    assert not [_at(path, node.lineno) for path in elsewhere for node in ast.parse(path.read_text("utf-8")).body if _imports(node, "grpc")]


def _imports(node: ast.stmt, package: str) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
    return isinstance(node, ast.Import | ast.ImportFrom) and any(name.partition(".")[0] == package for name in names)


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


def test_a_log_line_is_a_fact_and_then_its_fields_which_the_documents_name() -> None:
    """What `--log-format json` makes keys of: at the end of the text of each call."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8").partition("\n## JSON logs\n")[2].partition("\n## ")[0]
    wrong, names = [], set()
    for path in files(*PACKAGES):
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
