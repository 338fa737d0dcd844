"""How grpcio is loaded: a thread that waits for a message takes it from the socket itself. Knows grpcio's switches; nothing of calls."""

import importlib.machinery
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # its import takes 30 ms, and a finder needs no base
    from importlib.abc import Loader

# Set it to 0 to leave gRPC as it is.
SWITCH = "LOCKSTEP_OWN_POLLING"
_EXPERIMENTS, _STRATEGY, _BACKUP = "GRPC_EXPERIMENTS", "GRPC_POLL_STRATEGY", "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"
_VERBOSITY = "GRPC_VERBOSITY"
_LIBRARY = "grpc._cython.cygrpc"
# All of them, or the engine is used all the same.
_OFF = ("event_engine_client", "event_engine_listener", "event_engine_callback_cq", "event_engine_for_all_other_endpoints")
# Each thread looks at its own sockets: 0.24 us for each of them. With "epoll1", which is the default, one looks at those of all threads,
# and wakes another one for what is that one's.
_EACH_ITS_OWN = "poll"
# Each has a connection or two.
_FEW_WORKERS = 32
# While no thread waits for a message, one must still check whether a server can be reached again. gRPC's default is 5 s.
_BACKUP_MS = 100


def prepare_import() -> bool:
    """Has grpcio poll in the threads that wait, once it is imported; False if it has been imported already. Idempotent."""
    if _LIBRARY in sys.modules:
        return False
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return True


def expect_many_connections() -> None:
    """Chooses what takes the same time for any number of connections; for a server that may have more than some 64. Before the import."""
    _Finder.has_many_connections = True


def expect_workers(number: int | None) -> None:
    """Chooses for a server of so many workers; None: unknown, and mostly they are few. Before the import."""
    if (number or 0) > _FEW_WORKERS:
        expect_many_connections()


def settings(environment: Mapping[str, str], *, has_many_connections: bool = False) -> dict[str, str]:
    """Returns what the environment is to say while the library is loaded; nothing if it is set already."""
    said = environment.get(_EXPERIMENTS, "")
    if environment.get(SWITCH) == "0" or "event_engine" in said:
        return {}
    wanted = {_EXPERIMENTS: ",".join([*filter(None, [said]), *(f"-{name}" for name in _OFF)])}
    # Without the engine, gRPC notes on stderr each server that ends; the caller's own message is better.
    also = {_BACKUP: str(_BACKUP_MS), _VERBOSITY: "ERROR"} | ({} if has_many_connections else {_STRATEGY: _EACH_ITS_OWN})
    return wanted | {name: value for name, value in also.items() if name not in environment}


def knows_switches(library: Path) -> bool:
    """Whether a library of grpcio has all that is switched off here: what it does not know it complains of."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(name.encode()) >= 0 for name in _OFF)


class _Finder:
    """Finds gRPC's library, and nothing else."""

    has_many_connections = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the library's spec with a loader that says how it is to work."""
        if name != _LIBRARY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or spec.origin is None:
            return spec
        changes = settings(os.environ, has_many_connections=self.has_many_connections)
        if changes and knows_switches(Path(spec.origin)):
            spec.loader = cast("Loader", _Loader(spec.loader, changes))
        return spec


class _Loader:
    """Loads as another one does, in a changed environment."""

    def __init__(self, loader: "Loader", changes: Mapping[str, str]) -> None:
        self._loader, self._changes = loader, changes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Makes the module."""
        with _environment(self._changes):
            return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs what the module does when it is imported."""
        with _environment(self._changes):
            self._loader.exec_module(module)


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The environment with these changes, for the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
