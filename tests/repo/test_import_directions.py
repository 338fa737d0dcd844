"""Allowed imports. The layers are folder names, so the folder list is the architecture; an unknown folder fails the test."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source_tree import PACKAGES, Import, imports, module_name, source_files
from tests.support.repository import ROOT

# Each package's folders and top-level modules, innermost first. A module imports from its own room and from the rooms before it.
LAYERS: dict[str, tuple[str, ...]] = {
    "ps_protocol": (
        *(
            "errors",
            "v1",
            "model",
            "encodings",
            "roles",
            "wire",
            "security",
            "process",
            "http",
            "metrics",
            "sockets",
            "rpc",
            "shared_memory",
        ),
        "checkpoint",
    ),
    "ps_server": (
        "optimizers",
        "numbers",
        "contributions",
        "model",
        "shard",
        "accumulators",
        "serving",
        "threads",
        "config",
        "server",
        "__main__",
    ),
    "chief": ("options", "policies", "core", "shards", "config", "page", "serving", "__main__"),
    "worker_client": (
        "model",
        "neural_network",
        "core",
        "cluster",
        "shards",
        "session",
        "opening",
        "sync_replicas",
        "accumulators",
        "strategy",
        "estimator",
    ),
    "lockstep": (
        "errors",
        "planning",
        "audit",
        "launcher",
        "certs",
        "checkpoint_export",
        "checkpoint_import",
        "in_process",
        "dry_run",
        "tensorboard",
        "timeline",
        "doctor",
        "combined",
        "contributing",
        "jax",
        "keras",
        "torch",
        "demo",
        "cli",
        "__main__",
    ),
}
# What decides and never waits, looks at a clock, talks to anybody or logs: folders, or single modules in one.
PURE = (
    "ps_protocol.errors",
    "ps_protocol.model",
    "ps_protocol.encodings",
    "ps_protocol.roles",
    "ps_protocol.security.options",
    "ps_protocol.process.options",
    "ps_protocol.shared_memory.words",
    "ps_server.optimizers",
    "ps_server.numbers",
    "ps_server.contributions",
    "ps_server.model",
    "ps_server.accumulators.rounds",
    "chief.options",
    "chief.policies",
    "chief.core",
    "chief.page.cost",
    "chief.page.look",
    "worker_client.model",
    "worker_client.core",
    "worker_client.neural_network",
    "worker_client.strategy.values",
    "worker_client.strategy.reduction",
    "worker_client.strategy.group",
    "worker_client.strategy.messages",
    "worker_client.strategy.exchange",
    "lockstep.planning",
    "lockstep.timeline",
    "lockstep.cli.formatting",
    "lockstep.cli.watch.view",
)
# The only layers of one role that another may import, and who may.
ROLES = ("ps_server", "chief", "worker_client")
FORBIDDEN_IN_PURE = {
    *("grpc", "grpc_health", "google", "threading", "time", "logging", "asyncio", "os", "socket", "subprocess", "multiprocessing"),
    *("concurrent", "signal", "sched", "select", "selectors", "warnings", "datetime", "queue", "secrets"),
}
THIRD_PARTY = {
    # fsspec: checkpoints at a URL, which nothing else imports.
    "ps_protocol": {"grpc", "grpc_health", "google", "numpy", "ml_dtypes", "fsspec"},
    # sklearn: the estimator; opentelemetry: spans of steps. Nothing else imports them.
    "worker_client": {"grpc", "google", "numpy", "sklearn", "opentelemetry"},
    "ps_server": {"grpc", "google", "numpy"},
    "chief": {"grpc", "google"},
    # cryptography: `lockstep certs`, which nothing else imports.
    # jax, keras, torch: the adapters of these names, which nothing else imports; safetensors and ml_dtypes: the latter's.
    "lockstep": {
        "grpc",
        "google",
        "numpy",
        "grpc_health",
        "rich",
        "sklearn",
        "cryptography",
        "jax",
        "keras",
        "torch",
        "safetensors",
        "ml_dtypes",
    },
}
# local() runs all roles in one process, so it reaches beyond its package, in the function that does it.
LOCAL = ("worker_client", "lockstep.in_process")


def room(module: str) -> str:
    """The folder or top-level module of its package that a module lies in: "core" of chief.core.waiting."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def floor(module: str) -> int:
    """How far out a module's room lies in its package; raises for a room that LAYERS does not name."""
    package = module.split(".")[0]
    return LAYERS[package].index(room(module))


def is_pure(module: str) -> bool:
    """Whether a module lies in one of the PURE places; what only names such a folder counts, too."""
    return any(module == place or module.startswith(f"{place}.") for place in PURE)


def _where(path: Path, imported: Import) -> str:
    return f"{path.relative_to(ROOT)}:{imported.line} imports {imported.module}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_and_module_has_its_layer(package: str) -> None:
    found = {room(module_name(path)) for path in source_files(package)} - {"__init__"}
    assert found - {"v1"} == set(LAYERS[package]) - {"v1"}, "name a new folder in LAYERS, or take a gone one out"


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_import_only_inwards(package: str) -> None:
    wrong = [
        _where(path, imported)
        for path in source_files(package)
        if room(module_name(path)) != "__init__"
        for imported in imports(path)
        if imported.top == package and room(imported.module) != "__init__" and floor(imported.module) > floor(module_name(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_that_outlive_an_epoch_do_not_import_the_epoch() -> None:
    inner = ("chief.core.epoch", "chief.core.recovery", "chief.core.coordinator", "chief.core.report")
    wrong = [
        _where(path, imported)
        for path in source_files("chief")
        if module_name(path).startswith("chief.core.cluster")
        for imported in imports(path)
        if imported.module.startswith(inner)
    ]
    assert not wrong, "\n".join(wrong)


def test_roles_meet_only_in_ps_protocol() -> None:
    others = {role: {*PACKAGES, "benchmarks", "tests"} - {role, "ps_protocol"} for role in ("ps_protocol", *ROLES)}
    wrong = [
        _where(path, imported)
        for role, forbidden in others.items()
        for path in source_files(role)
        for imported in imports(path)
        if imported.top in forbidden and not (role == LOCAL[0] and imported.module == LOCAL[1] and imported.function)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_place_listed_as_pure_exists() -> None:
    missing = [place for place in PURE if not any((ROOT / place.replace(".", "/")).with_suffix(end).exists() for end in ("", ".py"))]
    assert not missing, missing


def test_pure_code_knows_no_wire_thread_clock_or_log() -> None:
    wrong = []
    for path in source_files():
        if not is_pure(module_name(path)):
            continue
        for imported in imports(path):
            known = imported.top in sys.stdlib_module_names or imported.top in ("numpy", "ml_dtypes")
            allowed = is_pure(imported.module) if imported.top in PACKAGES else known and imported.top not in FORBIDDEN_IN_PURE
            if not allowed:
                wrong.append(_where(path, imported))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_third_party_packages_are_those_declared(package: str) -> None:
    wrong = [
        _where(path, imported)
        for path in source_files(package)
        for imported in imports(path)
        if imported.top not in sys.stdlib_module_names and imported.top not in (*PACKAGES, *THIRD_PARTY[package])
    ]
    assert not wrong, "\n".join(wrong)


# What a program imports names from: packages, the APIs of tf.compat.v1.train and tf.distribute, and the adapters of frameworks.
FACES = (
    *(ROOT / "worker_client" / name for name in ("sync_replicas", "strategy")),
    *(ROOT / "lockstep" / name for name in ("jax", "keras", "torch")),
)


def test_an_init_of_a_folder_imports_nothing() -> None:
    """A name is imported from the module that defines it, so an `__init__.py` of a folder holds its description and nothing else."""
    folders = [path for path in source_files() if path.name == "__init__.py" and path.parent.parent != ROOT and path.parent not in FACES]
    wrong = [str(path.relative_to(ROOT)) for path in folders if imports(path)]
    assert not wrong, wrong


_LOADED_BY = """
import sys
before = set(sys.modules)
import {package}
print(*sorted(set(sys.modules) - before))
"""


def test_import_worker_client_loads_only_grpcio_protobuf_and_numpy() -> None:
    script = _LOADED_BY.format(package="worker_client")
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    loaded = set(result.stdout.split())
    third_party = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"worker_client", "ps_protocol"}
    # What grpcio itself brings along; and compiled modules that register themselves under a private name.
    of_grpcio = {"cython_runtime", "typing_extensions", "grpc_health"}
    assert {name for name in third_party if not name.startswith("_")} <= {"grpc", "google", "numpy"} | of_grpcio
    assert "grpc_health.v1" not in loaded, "grpcio imports the empty package; the health service is for servers"


def test_import_has_no_effect_on_threads() -> None:
    script = "import threading, ps_protocol.rpc.shard, ps_protocol.rpc.chief, worker_client; print(threading.active_count())"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "1"
