"""Checks of what a cluster is started on: what its engine needs of this machine; whether each host, by ssh or as an engine has it, can run
processes of a cluster, and shares its checkpoints. Starts no cluster.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

from lockstep.doctor.findings import Finding, fail, ok, warn
from lockstep.doctor.kubernetes import kubernetes_findings
from lockstep.launcher.engines.engine import ELSEWHERE, ENGINES, EngineKind, engine_of, module_of
from lockstep.launcher.hosts import Hosts, parse_hosts
from lockstep.launcher.looks import looking_at
from lockstep.launcher.spec import directory_of
from lockstep.launcher.supervisor import Supervisor
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.misspelling import known_names
from ps_protocol.process import options
from ps_protocol.process.options import Given

_SAY_AFTER_S, _ANSWER_S = 2.0, 60.0


def host_findings(given: Given) -> Iterator[Finding]:
    """Yields findings about the --engine, if there is one, and a finding for each of its hosts, or of --hosts.

    Starts Lockstep's agent on each host, and waits for its answer, or that of Kubernetes.
    """
    if not (name := given[options.ENGINE]):
        yield from _look_findings(given)
        return
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
        yield from _look_findings(given)


def _look_findings(given: Given) -> Iterator[Finding]:
    try:
        found = engine_of(name, os.environ).hosts if (name := given[options.ENGINE]) else parse_hosts(given[options.HOSTS])
    except (InvalidSpec, Unavailable) as error:
        yield fail("hosts", error.message, "`lockstep up` with the same flags would end with these words")
        return
    hosts = Hosts(found, python=given[options.HOST_PYTHON], cwd=given[options.HOST_DIR])
    place = directory_of(given[options.CHECKPOINT_DIR])
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(log_directory=None, show_line=lambda name, line: None))
        try:
            looks = stack.enter_context(looking_at(hosts, () if place is None else (place,), supervisor=supervisor))
        except OSError as error:
            yield fail("checkpoint-dir", f"cannot write to {place}: {error.strerror}", "make it, on storage that all hosts share")
            return
        supervisor.await_end(lambda: not any(one.is_running for one in looks), grace_s=_SAY_AFTER_S)
        for look in looks:
            if look.is_running:
                yield warn(look.name, f"has not answered yet, and may within {_ANSWER_S:g} s", "if it always takes long, so does a start")
        supervisor.await_end(lambda: not any(one.is_running for one in looks), grace_s=_ANSWER_S)
        for look in looks:
            if look.is_running:
                yield fail(look.name, f"has not answered within {_ANSWER_S:g} s", "try to reach it by hand")
            elif look.returncode:
                yield fail(look.name, look.last_words.removeprefix(f"{look.name}: "), "mend that there")
            else:
                shares = "" if place is None else f", and shares and writes {place}"
                yield ok(look.name, f"runs this version of Lockstep, has the working directory{shares}")
