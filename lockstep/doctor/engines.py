"""Checks of an engine before a start: what it needs of this machine, then the hosts of its job, or its API server. Starts no cluster."""

import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from lockstep.doctor.findings import Finding, fail, ok, warn
from lockstep.doctor.hosts import host_findings
from lockstep.doctor.kubernetes import kubernetes_findings
from lockstep.launcher.engines.engine import ELSEWHERE, ENGINES, EngineKind, module_of
from ps_protocol.model.misspelling import known_names
from ps_protocol.process import options
from ps_protocol.process.options import Given


def engine_findings(given: Given) -> Iterator[Finding]:
    """Yields findings about the --engine, and what it starts a cluster on. Waits for answers of hosts and of Kubernetes."""
    name = given[options.ENGINE]
    if name not in (known := (*ENGINES, *ELSEWHERE)):
        yield fail("engine", f"there is no {name!r}", f"choose one: {known_names(name, known)}")
        return
    kind: EngineKind = module_of(name).KIND if name in ENGINES else EngineKind(program=ELSEWHERE[name][1])
    if kind.program and shutil.which(kind.program) is None:
        yield fail(kind.program, "is not in PATH", f"install it, or have PATH name its directory: {name} is used by it")
    elif name == "kubernetes":
        yield from kubernetes_findings()
    elif name == "systemd":
        yield ok(name, "systemctl is in PATH")
    else:
        yield from _launcher_findings(name, kind, given)


def _launcher_findings(name: str, kind: EngineKind, given: Given) -> Iterator[Finding]:
    modules = {kind.module: kind.module, "cryptography": "certs"}  # each with its extra; the last makes certificates for several hosts
    missing = [module for module in modules if module and find_spec(module) is None]
    for module in missing:
        is_needed = module == kind.module or not kind.starts_workers
        what = "no such module" if is_needed else "no such module, without which a cluster is on one machine alone"
        report = fail if is_needed else warn
        yield report(module, f"{sys.executable} has {what}", f"pip install 'lockstep-ps[{modules[module]}]'")
    if wrong := kind.check():
        yield fail(kind.program, *wrong)
    elif kind.starts_workers and kind.module not in missing:
        yield ok(name, "is there; it starts your program, whose lockstep.connect() starts the cluster with the flags in LOCKSTEP_UP")
    elif not missing:
        yield from host_findings(given)
