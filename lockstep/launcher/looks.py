"""What a host must have to run processes of a cluster: how a launcher asks for it, and what the agent there answers.

A look is a process on each host that ends with 0 if others can run there, and otherwise with words that say why not.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

import lockstep
from lockstep.launcher.hosts import Hosts
from lockstep.launcher.program import what_lacks
from lockstep.launcher.supervisor import Process, ProcessSpec, Supervisor


class Refused(Exception):
    """A process cannot run on this host; the text says why and what to do."""


@contextmanager
def looking_at(
    hosts: Hosts,
    directories: Iterable[Path],
    *,
    supervisor: Supervisor,
    num_workers: int = 0,
    command: Sequence[str] = (),
    environment: Mapping[str, str | None] = MappingProxyType({}),
) -> Iterator[list[Process]]:
    """Starts a look at each host, all of which must share the directories; they have the block's time. Raises OSError.

    `command` and `environment`: those of the workers, which their hosts are asked for.
    """
    with ExitStack() as stack:
        # A host that does not see such a file has another directory of that name.
        marks = [directory / f".lockstep-{supervisor.token}" for directory in directories]
        for mark in marks:
            stack.callback(mark.unlink, missing_ok=True)
            mark.touch()
        working = {hosts.of(f"worker {index}").name for index in range(num_workers)}
        looks = []
        for host in hosts:
            wanted = command if host.name in working else ()
            look = ProcessSpec(name=f"host {host.name}", command=wanted, environment=environment)
            looks.append(hosts.carried(look, host=host, private=supervisor.directory, look_for=marks))
        yield [supervisor.start(look) for look in looks]


def enter_host(*, version: str, cwd: str) -> None:
    """Makes the directory that processes run in that of this one. Raises Refused, also if the host has another version."""
    if version != lockstep.__version__:
        raise Refused(f"it has Lockstep {lockstep.__version__}, the launcher {version}; install the same")
    try:
        os.chdir(cwd)
    except OSError as error:
        raise Refused(f"no {cwd}: {error.strerror}; copy the program there, or name its place with --host-dir") from error


def answer_look(marks: Sequence[str], wanted: ProcessSpec, *, host: str) -> None:
    """Raises Refused where the launcher's files are not here, nothing can be written beside them, or a package or a program is missing."""
    for mark in marks:
        if not os.path.exists(mark):
            raise Refused(f"it does not see {mark}, which the launcher has written; all hosts must share that directory, or give a URL")
        try:
            os.close(os.open(own := f"{mark}-{host}", os.O_CREAT | os.O_EXCL))
            os.unlink(own)
        except OSError as error:
            raise Refused(f"it cannot write to {os.path.dirname(mark)}: {error.strerror}; servers and chief write there") from error
    if missing := [name for name in ("grpc", "numpy") if importlib.util.find_spec(name) is None]:
        raise Refused(f"its Python, {sys.executable}, has no {' and no '.join(missing)}; install lockstep-ps there by pip")
    environment = {name: text for name, text in {**os.environ, **wanted.environment}.items() if text is not None}
    if wanted.command and (lacks := what_lacks(wanted.command, environment=environment)):
        raise Refused(f"cannot start a worker: {lacks}")
