"""Open MPI: its ranks meet in a directory that all nodes share, below the one that they run in. Makes no call of MPI."""

import atexit
import hashlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.launcher.engines import ranks
from lockstep.launcher.engines.engine import Engine, EngineKind
from lockstep.launcher.engines.ranks import Ranks
from ps_protocol.errors import InvalidSpec
from ps_protocol.security.tokens import write_secret

_VERSION_S = 10


def _check() -> tuple[str, str] | None:
    what = f"does not say its version within {_VERSION_S} s"
    with suppress(subprocess.TimeoutExpired):
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_S).stdout
        if "Open MPI" in said:
            return None
        what = f"is of another MPI: {said.strip()[:60]}"
    return what, "use that of Open MPI, which tells its ranks their number"


KIND = EngineKind(program="mpirun", starts_workers=True, check=_check)


def engine(environment: Mapping[str, str]) -> Engine:
    """Returns the run that this process is a rank of. Raises InvalidSpec if there is none."""
    return _ranks(environment).as_engine()


def _ranks(environment: Mapping[str, str]) -> Ranks:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        raise InvalidSpec("--engine mpi: this is no rank of Open MPI, whose programs call lockstep.connect() alone")
    # Where mpirun listens for its nodes.
    place = re.search(r"tcp://([\d.]+)[^:;]*:(\d+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return Ranks(
        engine="mpi",
        rank=int(environment["OMPI_COMM_WORLD_RANK"]),
        num_workers=int(environment["OMPI_COMM_WORLD_SIZE"]),
        num_here=int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        near=(place[1], int(place[2])) if place else (socket.gethostname(), 1),
        owner=os.getpid(),  # mpirun waits for all that may write to its output
    )


def join(environment: Mapping[str, str]) -> dict[str, str]:
    """Does what `ranks.join` says."""
    # The number of a job may be that of an earlier one; the address of its mpirun is not, too.
    run = environment.get("PMIX_NAMESPACE", "") + environment.get("OMPI_MCA_orte_hnp_uri", "")
    directory = Path("lockstep-runs") / f"mpi-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
    found = _ranks(environment)
    if found.rank == 0:
        atexit.register(shutil.rmtree, directory, ignore_errors=True)  # a token lies there
    return ranks.join(found, FileStore(directory), environment)


class FileStore:
    """Texts in files of a directory, which their owner alone may read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""
        return all((self._directory / key).exists() for key in keys)

    def get(self, key: str, /) -> str:
        """Returns one that is there."""
        return (self._directory / key).read_text()

    def set(self, key: str, text: str, /) -> None:
        """Puts one there, in place of an earlier one."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_secret(self._directory / key, text)

    def delete_key(self, key: str, /) -> None:
        """Removes one, if it is there."""
        (self._directory / key).unlink(missing_ok=True)
