"""Checks of other hosts, by ssh or as an engine has them: whether each can run processes of a cluster, and shares its checkpoints."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

from lockstep.doctor.findings import Finding, fail, ok, warn
from lockstep.launcher.engines.engine import engine_of
from lockstep.launcher.hosts import Hosts, parse_hosts
from lockstep.launcher.looks import looking_at
from lockstep.launcher.spec import directory_of
from lockstep.launcher.supervisor import Supervisor
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.process import options
from ps_protocol.process.options import Given

_SAY_AFTER_S, _ANSWER_S = 2.0, 60.0


def host_findings(given: Given) -> Iterator[Finding]:
    """Yields a finding for each of --hosts, or of the --engine. Starts Lockstep's agent on each of them, and waits for its answer."""
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
                yield fail(look.name, look.last_words, "mend that; the words before the colon say where")
            else:
                shares = "" if place is None else f", and shares and writes {place}"
                yield ok(look.name, f"runs this version of Lockstep, has the working directory{shares}")
