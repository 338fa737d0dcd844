"""How grpcio is loaded: a thread that waits for a message takes it from the socket itself. Knows grpcio's switches; nothing of calls."""

import importlib.machinery
import importlib.util
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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


# Of this process. It is chosen before grpcio is loaded.
_has_many_connections = False


def load_grpc() -> None:
    """Loads grpcio so that it polls in the threads that wait; as it is, if it has been loaded already."""
    library = _library()
    if library is None or _LIBRARY in sys.modules:
        return
    changes = settings(os.environ, has_many_connections=_has_many_connections)
    with _environment(changes if changes and knows_switches(library) else {}):
        importlib.import_module(_LIBRARY)


def expect_many_connections() -> None:
    """Chooses what takes the same time for any number of connections; for a server that may have more than some 64. Before the import."""
    global _has_many_connections
    _has_many_connections = True


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


def _library() -> Path | None:
    """Returns where grpcio's library is, and does not load it."""
    package = importlib.util.find_spec("grpc")
    places = [str(Path(place, "_cython")) for place in (package.submodule_search_locations or ())] if package is not None else []
    found = importlib.machinery.PathFinder.find_spec(_LIBRARY, places)
    return Path(found.origin) if found is not None and found.origin is not None else None


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
