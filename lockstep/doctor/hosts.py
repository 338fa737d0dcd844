"""Checks of other hosts, by ssh or as an engine has them: whether each can run processes of a cluster."""

import os
from collections.abc import Iterator

from lockstep.doctor.findings import Finding, fail, ok
from lockstep.launcher.engines.engine import engine_of
from lockstep.launcher.hosts import Hosts, parse_hosts
from lockstep.launcher.supervisor import Supervisor
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.process import options
from ps_protocol.process.options import Given

_ANSWER_S = 60.0


def host_findings(given: Given) -> Iterator[Finding]:
    """Yields a finding for each of --hosts, or of the --engine. Starts Lockstep's agent on each of them, and waits for its answer."""
    try:
        found = engine_of(name, os.environ).hosts if (name := given[options.ENGINE]) else parse_hosts(given[options.HOSTS])
    except (InvalidSpec, Unavailable) as error:
        yield fail("hosts", error.message, "`lockstep up` with the same flags would end with these words")
        return
    hosts = Hosts(found, python=given[options.HOST_PYTHON], cwd=given[options.HOST_DIR])
    with Supervisor(log_directory=None, show_line=lambda name, line: None) as supervisor:
        looks = [supervisor.start(look) for look in hosts.looks(private=supervisor.directory)]
        supervisor.await_end(lambda: not any(one.is_running for one in looks), grace_s=_ANSWER_S)
        for look in looks:
            if look.is_running:
                yield fail(look.name, f"has not answered within {_ANSWER_S:g} s", "try to reach it by hand")
            elif look.returncode:
                yield fail(look.name, look.last_words, "mend that; the words before the colon say where")
            else:
                yield ok(look.name, "runs this version of Lockstep, and has the working directory")
