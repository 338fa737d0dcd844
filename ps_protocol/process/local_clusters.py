"""The clusters that this user's launchers run on this machine: one file each, in a private directory. Knows files and processes; no chief.

A file is valid while the process that wrote it runs. The start time of the process tells it from a later process with the same number.
Launchers remove invalid files. Readers change nothing: a reader in a container may share the directory, and sees no process outside of the
container.
"""

import dataclasses
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.security.options import Security
from ps_protocol.security.tokens import write_secret

_MAX_FILE_BYTES, _MAX_FILES = 1 << 16, 1_000


@light_dataclass(frozen=True, slots=True, kw_only=True)
class LocalEntry:
    """One cluster of a launcher: how to reach its chief and its page, and which command its workers run. Holds no token."""

    name: str
    chief: str
    page: str
    token_file: str
    tls_ca: str
    command: str
    directory: str
    pid: int
    process_start: int
    started_at: float


def entry(*, name: str, chief: str, page: str, security: Security, command: str) -> LocalEntry:
    """Returns the entry of a cluster that this process runs."""
    return LocalEntry(
        name=name,
        chief=chief,
        page=page,
        token_file=str(security.token_file or ""),
        tls_ca=str(security.tls_ca or ""),
        command=command,
        directory=str(Path.cwd()),
        pid=os.getpid(),
        process_start=_start_of(os.getpid()) or 0,
        started_at=time.time(),
    )


@contextmanager
def listed(cluster: LocalEntry) -> Iterator[Callable[[str], None]]:
    """Lets other commands of this user find the cluster during the block. If the file cannot be written, they need its address.

    What it yields lists the cluster anew, with its chief at another address.
    """
    path: Path | None = None
    with suppress(OSError):
        directory = _directory()
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if _is_private(directory):
            for other in _files(directory):
                if (found := _read(other)) is None or not _runs(found):
                    with suppress(OSError):
                        other.unlink()
            path = directory / f"{cluster.pid}.json"
            write_secret(path, json.dumps(dataclasses.asdict(cluster)))

    def move(chief: str) -> None:
        with suppress(OSError):
            if path is not None:
                write_secret(path, json.dumps({**dataclasses.asdict(cluster), "chief": chief}))

    try:
        yield move
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()


def local_clusters() -> list[LocalEntry]:
    """Returns the clusters that run now, the oldest first."""
    found: list[LocalEntry] = []
    with suppress(OSError):
        directory = _directory()
        if _is_private(directory):
            found = [cluster for path in _files(directory) if (cluster := _read(path)) is not None and _runs(cluster)]
    return sorted(found, key=lambda cluster: cluster.started_at)


def with_local_secrets(security: Security, *, chief: str) -> Security:
    """Returns the security options with token file and authority of this user's cluster whose chief has this address.

    Unchanged if there is no such cluster, the caller has a token, or it calls no chief. A caller of a Unix socket finds the tokens beside
    it.
    """
    if security.token or security.token_file is not None or not chief or chief.startswith("unix:"):
        return security
    found = next((one for one in local_clusters() if one.chief == chief and one.token_file), None)
    if found is None:
        return security
    tls_ca = Path(found.tls_ca) if found.tls_ca else security.tls_ca
    return dataclasses.replace(security, token_file=Path(found.token_file), tls_ca=tls_ca)


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    has_own = os.path.isabs(runtime) and os.path.isdir(runtime)
    return Path(runtime, "lockstep") if has_own else Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")


def _is_private(directory: Path) -> bool:
    """Whether the file is this user's, and no other user can write to it. Raises OSError."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"))[:_MAX_FILES]


def _read(path: Path) -> LocalEntry | None:
    """Returns the entry of a file; None if the file is not one of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            given = json.loads(file.read(_MAX_FILE_BYTES))
        cluster = LocalEntry(**given)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    kinds = {"pid": int, "process_start": int, "started_at": float}
    return cluster if all(type(value) is kinds.get(name, str) for name, value in dataclasses.asdict(cluster).items()) else None


def _runs(cluster: LocalEntry) -> bool:
    return cluster.pid > 0 and _start_of(cluster.pid) == cluster.process_start


def _start_of(pid: int) -> int | None:
    """Returns when a process started, in ticks since the machine did (0: unknown on this system); None if the process does not exist."""
    try:
        # The name of the program is in parentheses, and may have some of its own.
        return int(Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except FileNotFoundError:
        if os.path.isdir("/proc/self"):
            return None
    except (OSError, IndexError, ValueError):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return None
    return 0
