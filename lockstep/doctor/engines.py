"""Checks of an engine before a start: what it needs of this machine, then the hosts of its job, or its API server. Starts no cluster."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from lockstep.doctor.findings import Finding, fail, ok, warn
from lockstep.doctor.hosts import host_findings
from lockstep.doctor.kubernetes import kubernetes_findings
from lockstep.launcher.engines.engine import ELSEWHERE, ENGINES
from ps_protocol.model.misspelling import known_names
from ps_protocol.process import options
from ps_protocol.process.options import Given

# A program that must be in PATH, and a module that this Python must have.
_PROGRAMS = {"slurm": "srun", "skypilot": "ssh", "torchrun": "torchrun", "mpi": "mpirun", "kubernetes": "kubectl", "systemd": "systemctl"}
_MODULES = {"torchrun": "torch", "ray": "ray", "ray_train": "ray"}
# What a module is installed with.
_INSTALLED = {"cryptography": "lockstep-ps[certs]", "ray": "lockstep-ps[ray]", "torch": "lockstep-ps[torch]"}
_ANSWER_S = 10
# These start the workers, whose program starts the rest.
_HAVE_RANKS = ("torchrun", "mpi", "ray_train")


def engine_findings(given: Given) -> Iterator[Finding]:
    """Yields findings about the --engine, and what it starts a cluster on. Waits for answers of hosts and of Kubernetes."""
    name = given[options.ENGINE]
    if name not in (known := (*ENGINES, *ELSEWHERE)):
        yield fail("engine", f"there is no {name!r}", f"choose one: {known_names(name, known)}")
        return
    if (program := _PROGRAMS.get(name, "")) and shutil.which(program) is None:
        yield fail(program, "is not in PATH", f"install it, or have PATH name its directory: {name} is used by it")
        return
    own = [_MODULES[name]] if name in _MODULES else []
    modules = [*own, *(["cryptography"] if name in ENGINES else [])]  # which makes certificates for several hosts
    missing = [module for module in modules if find_spec(module) is None]
    for module in missing:
        is_needed = name not in _HAVE_RANKS or module in own
        what = "no such module" if is_needed else "no such module, without which a cluster is on one machine alone"
        yield (fail if is_needed else warn)(module, f"{sys.executable} has {what}", f"pip install '{_INSTALLED[module]}'")
    mpi = _first_words(program) if name == "mpi" else ""
    if name == "mpi" and "Open MPI" not in mpi:
        what = f"is of another MPI: {mpi.strip()[:60]}" if mpi else f"does not say its version within {_ANSWER_S} s"
        yield fail(program, what, "use that of Open MPI, which tells its ranks their number")
    elif name in _HAVE_RANKS and not {*own} & {*missing}:
        yield ok(name, "is there; it starts your program, whose lockstep.connect() starts the cluster with the flags in LOCKSTEP_UP")
    elif name == "kubernetes":
        yield from kubernetes_findings()
    elif name == "systemd":
        yield ok(name, "systemctl is in PATH")
    elif not missing:
        yield from host_findings(given)


def _first_words(program: str) -> str:
    """Returns what a program says of its version; empty: nothing within 10 s."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=_ANSWER_S).stdout
    return ""
