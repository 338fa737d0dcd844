"""Ranks: workers that an engine itself starts, such as torchrun or mpirun, as copies of one program that calls `lockstep.connect()`.

Rank 0 starts `lockstep up` beside them, whose own workers only stand for the ranks. All learn of the cluster by a store that the engine
has, or a shared directory, so nothing has to be told to them. Where the engine starts its ranks again, the cluster stays.
"""

import atexit
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lockstep.launcher.engines.engine import Engine
from lockstep.launcher.engines.standin import TOLD_VARIABLE, WATCHED_VARIABLE
from lockstep.launcher.hosts import Host
from ps_protocol.errors import ClusterNotStarted, InvalidSpec, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.options import UP_FLAGS, Given
from ps_protocol.security.tokens import write_secret

log = logging.getLogger("lockstep.worker")

_STANDIN = Path(__file__).parent / "standin.py"
# Roles import NumPy, and so does the launcher; a busy machine takes long.
_START_S = 120.0
_END_S = 30.0
_LOOK_S, _SAY_AFTER_S = 0.05, 2.0
# In the store: the launcher that rank 0 has started, and for each number of ranks what these must know.
_LAUNCHER = "launcher"


class Store(Protocol):
    """Texts by name that all ranks of a run share."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def get(self, key: str, /) -> str | bytes:
        """Returns one that is there."""

    def set(self, key: str, text: str, /) -> object:
        """Puts one there, in place of an earlier one."""

    def delete_key(self, key: str, /) -> object:
        """Removes one, if it is there."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a run, as one of them sees them. `engine`: its name; `near`: an address and port that each node can reach.

    `owner`: the process with which the cluster of rank 0 ends.
    """

    engine: str
    rank: int
    num_workers: int
    num_here: int
    near: tuple[str, int]
    owner: int

    def as_engine(self) -> Engine:
        """Where all ranks are on one machine, the cluster is one of that machine; else rank 0's node has all of it but the ranks."""
        hosts: tuple[Host, ...] = ()
        if self.num_workers > self.num_here:
            address = self._own_address()
            hosts = (Host(name=address, address=address, reach=("sh", "-c")),)
        return Engine(hosts=hosts, num_workers=self.num_workers, starts_workers=True)

    def _own_address(self) -> str:
        """Returns where the other nodes reach this one: the address from which it reaches what all can reach."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(self.near)
            address: str = probe.getsockname()[0]
        return self.near[0] if address.startswith("127.") else address


def join(ranks: Ranks, store: Store, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which this rank finds the cluster of its run; rank 0 starts the cluster unless it runs. Blocks until then.

    The flags of `lockstep up` are in LOCKSTEP_UP. Raises ClusterNotStarted where that has failed, or there is no cluster in time.
    """
    key = _key(ranks.num_workers)
    if ranks.rank == 0:
        store.set(key, json.dumps(_cluster(ranks, store, environment)))
    try:
        told = _await(store, key)
    except ClusterNotStarted as error:
        _say_alone(error)
        raise
    # The engine runs each rank once, so an earlier process with this index has ended, or will soon.
    place = {"LOCKSTEP_WORKER_INDEX": str(ranks.rank), "LOCKSTEP_NUM_WORKERS": str(ranks.num_workers), "LOCKSTEP_TAKEOVER": "1"}
    found: dict[str, str] = {**told["variables"], **place}
    if "ca" in told:
        private = Path(tempfile.mkdtemp(prefix="lockstep-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        found["LOCKSTEP_TLS_CA"] = str(_authority(told, private))
    return found


def _say_alone(error: ClusterNotStarted) -> None:
    """Has Python say no more than its text if no program catches it: a traceback of each rank would hide what rank 0 has printed."""
    otherwise = sys.excepthook
    sys.excepthook = lambda kind, one, trace: print(one, file=sys.stderr) if one is error else otherwise(kind, one, trace)


def _key(num_workers: int) -> str:
    return f"cluster-{num_workers}"


def _await(store: Store, key: str) -> dict[str, Any]:
    """Returns what rank 0 tells of a cluster whose training is not over: an earlier one's is. Says after a while that it waits."""
    deadline, has_said, why = time.monotonic() + _START_S, False, "does it call lockstep.connect()?"
    while True:
        if store.check([key]):
            told: dict[str, Any] = json.loads(store.get(key))
            if "failure" in told:
                raise ClusterNotStarted(told["failure"])
            if not (why := _why_not(told)):
                return told
        if time.monotonic() > deadline:
            raise ClusterNotStarted(f"rank 0 has started no cluster within {_START_S:g} s; {why}")
        if not has_said and time.monotonic() > deadline - _START_S + _SAY_AFTER_S:
            log.warning("waiting until rank 0 has started the cluster, up to %g s", _START_S)
            has_said = True
        time.sleep(_LOOK_S)  # polls: a store may be a directory, and no call waits for a file


def _cluster(ranks: Ranks, store: Store, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what ranks must know of the cluster that runs, or is started now; or why there is none."""
    if store.check([_LAUNCHER]):
        earlier = json.loads(store.get(_LAUNCHER))
        told: dict[str, Any] = earlier["told"]
        is_here = earlier["host"] == socket.gethostname() and _runs(earlier["pid"])
        if is_here and earlier["size"] == ranks.num_workers and _goes_on(earlier["pid"], told):
            return told
        # No rank may find a cluster that has ended, also when there are as many of them again later.
        store.delete_key(_key(earlier["size"]))
        if is_here:
            _end(earlier["pid"])
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        pid, told = _start(ranks, environment, Path(private) / "told")
    if "failure" not in told:
        store.set(_LAUNCHER, json.dumps({"host": socket.gethostname(), "pid": pid, "size": ranks.num_workers, "told": told}))
    return told


def _start(ranks: Ranks, environment: Mapping[str, str], answer: Path) -> tuple[int, dict[str, Any]]:
    """Starts a cluster. Returns the launcher's process and what ranks must know, which a stand-in writes into the file `answer`."""
    try:
        flags = Given({}, environment)[UP_FLAGS]
    except InvalidSpec as error:
        return 0, {"failure": error.message}
    words = [sys.executable, "-P", "-m", "lockstep", "up", "--engine", ranks.engine, *flags]
    # Of a session of its own: the engine ends the group of a rank.
    launcher = subprocess.Popen(
        [*words, "--", sys.executable, "-I", "-S", str(_STANDIN)],
        env={**environment, TOLD_VARIABLE: str(answer), WATCHED_VARIABLE: str(ranks.owner)},
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )
    deadline = time.monotonic() + _START_S
    while not answer.exists():
        if launcher.poll() is not None:
            failure = f"lockstep up, which rank 0 has started, ended with exit code {launcher.returncode}; its words are above"
            return launcher.pid, {"failure": failure}
        if time.monotonic() > deadline:
            launcher.terminate()
            failure = f"the cluster has not begun to serve within {_START_S:g} s; what rank 0 has printed says what it waits for"
            return launcher.pid, {"failure": failure}
        time.sleep(_LOOK_S)  # polls: for a file and for the end of the launcher at once
    launcher.returncode = 0  # it runs on when this process has ended
    return launcher.pid, json.loads(answer.read_text())


def _goes_on(launcher: int, told: dict[str, Any]) -> bool:
    """Whether the training of a cluster is not over. Waits for a chief that does not answer: the launcher starts it again, or ends too."""
    deadline = time.monotonic() + _END_S
    while _runs(launcher) and time.monotonic() < deadline:
        if not _why_not(told):
            return True
        time.sleep(_LOOK_S)  # polls: for the chief and for the end of the launcher at once
    return False


def _why_not(told: dict[str, Any]) -> str:
    """Returns why a rank is not to join a cluster: its chief does not answer, or its training is over. Empty: it is."""
    # Only here: the launcher imports this module too, and none of these.
    from ps_protocol.roles.chief import ClusterState
    from ps_protocol.rpc.channel import Access
    from ps_protocol.rpc.chief import GrpcChief
    from ps_protocol.security.options import Security

    variables = told["variables"]
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        security = Security(token=variables["LOCKSTEP_TOKEN"], tls_ca=_authority(told, Path(private)))
        chief = GrpcChief(variables["LOCKSTEP_CHIEF"], cluster=variables["LOCKSTEP_CLUSTER"], access=Access(security))
        try:
            is_over = chief.status().state in (ClusterState.FINISHED, ClusterState.FAILED)
            return "the training of an earlier one is over" if is_over else ""
        except PsError as error:
            return error.message
        finally:
            chief.close()


def _authority(told: dict[str, Any], directory: Path) -> Path | None:
    """Returns a new file with the certificate of the cluster's authority; None: it has none."""
    if "ca" not in told:
        return None
    write_secret(directory / "ca.pem", told["ca"])
    return directory / "ca.pem"


def _end(launcher: int) -> None:
    """Ends a cluster for another one; the next one continues from its last checkpoint, if it saves any."""
    with suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while _runs(launcher) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # polls: the launcher need not be a child of this process


def _runs(pid: int) -> bool:
    with suppress(ChildProcessError):  # this process may have started it, and has to take note of its end
        os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
