"""Who may import whom: `__main__ → server → service → store or runner → core → pure half of ps_protocol`, and roles never each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGES, Import, imports, module_name, source_files
from tests.support.repository import ROOT

ROLES = ("ps_server", "chief", "worker_client")

# The half of ps_protocol that knows no wire; whatever is not named here belongs to the other half, and no core may import it.
PURE = {
    *("errors", "error_base", "checkpoint_errors", "tensors", "layout", "segments", "optimizer_spec", "model", "placement"),
    *("shard", "chief", "backoff", "version", "addresses", "handshake", "tf_config"),
    *("averages", "clipping", "policy_spec", "variable_options", "accumulators", "partitioners"),
    *("encodings", "encodings_halves", "encodings_int8", "encodings_top_k", "encodings_frames", "encodings_gradients"),
    "finite",
    *("shared_memory", "worker_slots", "one_line"),
    *(
        "shard_values",
        "shard_save_values",
        "chief_values",
        "chief_status_values",
        "checkpoint",
        "checkpoint_format",
        "data_ranges",
        "authorization",
    ),
}
# The shells of the servers, innermost first; whatever is not named here is core. A module imports only from its own row or earlier ones.
SHELLS: dict[str, list[set[str]]] = {
    "ps_server": [
        {"config", "idle_streams", "index_stream", "apply_threads", "background", "checkpoint_reading", "shard_history"},
        {"sharing", "transactions", "readings", "creations", "turns", "listeners"},
        {"copy_memories", "save_pace", "shard_saves", "shard_restores"},
        {"adoptable_store", "store", "named_accumulator", "accumulator_registry"},
        {"arena_stream"},
        {"push_streams", "variables_streams"},
        {"in_process_shard", "service", "accumulator_service", "stream_service", "memory_service", "command_service", "recovery_service"},
        {"server"},
        {"__main__"},
    ],
    "chief": [
        {"config", "own_address", "shard_stream", "shard_caller"},
        {"shard_links", "checkpoint_store", "found_record"},
        {"shard_calls", "shard_lanes", "at_shards", "replica", "replica_calls", "replicated_link", "replica_return"},
        {"shard_tasks", "recovery_tasks"},
        {"shard_side"},
        {"runner"},
        {"in_process_chief", "worker_calls"},
        {"conversation", "single_call"},
        {"service"},
        {"server"},
        {"__main__"},
    ],
}
# A core decides; it does not wait, look at a clock, speak to anybody, or say anything.
FORBIDDEN_IN_PURE = {
    *("grpc", "grpc_health", "google", "threading", "time", "logging", "asyncio", "os", "socket", "subprocess", "multiprocessing"),
    *("concurrent", "signal", "sched", "select", "selectors", "warnings", "datetime", "queue", "secrets"),
}
THIRD_PARTY = {
    "ps_protocol": {"grpc", "google", "numpy", "ml_dtypes", "fsspec"},  # fsspec: checkpoints at a URL, which nothing else imports
    "worker_client": {"grpc", "google", "numpy", "sklearn"},  # sklearn: the estimator, which nothing else imports
    "ps_server": {"grpc", "google", "numpy", "grpc_health"},
    "chief": {"grpc", "google", "grpc_health"},
    # cryptography: `lockstep certs`, which nothing else imports.
    "lockstep": {"grpc", "google", "numpy", "grpc_health", "rich", "sklearn", "cryptography"},
}
# What simulates a cluster is as pure as the cores, though it lives beside the command; it may import the chief's core.
SIMULATION = (
    *("latencies", "planning", "shared_link", "simulation", "simulation_result", "trace", "trace_recorder"),
    *("status_text", "recovery_text", "why_text"),
)
# The one exception: local() composes all roles in one process.
EXCEPTION = ("worker_client", "local", "lockstep.in_process")


def _stem(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def _is_pure(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "ps_protocol" and (len(parts) == 1 or parts[1] in PURE)


def _layer(package: str, module_stem: str) -> int:
    """0 for the core."""
    return next((index + 1 for index, row in enumerate(SHELLS.get(package, [])) if module_stem in row), 0)


def _is_core(path: Path) -> bool:
    package = path.relative_to(ROOT).parts[0]
    # That of ps_protocol prepares the import of grpc, whoever comes to it.
    if _stem(path) == "__init__":
        return False
    if package == "ps_protocol":
        return _is_pure(module_name(path))
    return package in SHELLS and _layer(package, _stem(path)) == 0


def _where(path: Path, imported: Import) -> str:
    return f"{path.relative_to(ROOT)}:{imported.line} imports {imported.module}"


def _is_exception(path: Path, imported: Import) -> bool:
    return (path.relative_to(ROOT).parts[0], imported.function, imported.module) == EXCEPTION


def test_roles_meet_only_in_ps_protocol() -> None:
    others = {role: {*PACKAGES, "benchmarks", "tests"} - {role, "ps_protocol"} for role in ("ps_protocol", *ROLES)}
    wrong = [
        _where(path, imported)
        for role, forbidden in others.items()
        for path in source_files(role)
        for imported in imports(path)
        if imported.top in forbidden and not _is_exception(path, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_local_is_the_only_exception_and_imports_inside_the_function() -> None:
    found = [(path.name, i.function) for role in ROLES for path in source_files(role) for i in imports(path) if i.top == "lockstep"]
    assert found == [(found[0][0], "local")] if found else True


@pytest.mark.parametrize("path", [path for path in source_files() if _is_core(path)], ids=module_name)
def test_core_knows_no_wire_thread_clock_or_log(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = []
    for imported in imports(path):
        if imported.top in PACKAGES:
            parts = imported.module.split(".")
            is_own_core = imported.top == package and _layer(package, parts[1] if len(parts) > 1 else "") == 0 and package != "ps_protocol"
            allowed = is_own_core or _is_pure(imported.module)
        else:
            allowed = imported.top not in FORBIDDEN_IN_PURE and (
                imported.top in sys.stdlib_module_names or imported.top in ("numpy", "ml_dtypes")
            )
        if not allowed:
            wrong.append(_where(path, imported))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stem", SIMULATION)
def test_simulation_knows_no_wire_thread_clock_or_log(stem: str) -> None:
    wrong = []
    for imported in imports(path := ROOT / "lockstep" / f"{stem}.py"):
        own = imported.module.split(".")[1] if "." in imported.module else ""
        pure = {"lockstep": own in SIMULATION, "chief": _layer("chief", own) == 0, "ps_protocol": _is_pure(imported.module)}
        if imported.top in FORBIDDEN_IN_PURE or not pure.get(imported.top, imported.top not in PACKAGES):
            wrong.append(_where(path, imported))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(SHELLS))
def test_layers_import_only_inwards(package: str) -> None:
    wrong = []
    for path in source_files(package):
        for imported in imports(path):
            parts = imported.module.split(".")
            if imported.top == package and len(parts) > 1 and _layer(package, parts[1]) > _layer(package, _stem(path)):
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
    script = "import threading, ps_protocol.shard_client, ps_protocol.chief_client, worker_client; print(threading.active_count())"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "1"
