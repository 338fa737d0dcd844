"""torchrun: it starts the workers itself. Rank 0 starts `lockstep up` beside them, whose own workers only stand for those of torchrun.

All ranks learn of the cluster by torchrun's own store, so nothing has to be told to them. torchrun may end all ranks and start them again
after a failure: the cluster stays, and they take their places again.
"""

import atexit
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.launcher.engines.standin import TOLD_VARIABLE, WATCHED_VARIABLE
from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.options import UP_FLAGS, Given
from ps_protocol.security.tokens import write_secret

log = logging.getLogger("lockstep.worker")

_STANDIN = Path(__file__).parent / "standin.py"
# Roles import NumPy, and so does the launcher; a busy machine takes long.
_START_S = 120.0
_END_S = 30.0
_LOOK_S, _SAY_AFTER_S = 0.05, 2.0
# In torchrun's store: the launcher that rank 0 has started, and for each number of ranks what these must know.
_LAUNCHER = "lockstep/launcher"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """A run of torchrun, as rank 0 sees it."""

    hosts: tuple[Host, ...]
    num_workers: int
    is_launcher: bool = True

    def run_again(self) -> str:
        """Does nothing: torchrun has no queue."""
        return "start it again to continue from its newest checkpoint"


def engine(environment: Mapping[str, str]) -> Torchrun:
    """Returns the run that this process is rank 0 of. Raises InvalidSpec if there is none."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        raise InvalidSpec("--engine torchrun: this is no worker of torchrun, whose programs call lockstep.connect() alone")
    size, here = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    # Where all ranks are on one machine, the cluster is one of that machine.
    address = _own_address(environment)
    hosts = (Host(name=address, address=address, reach=("sh", "-c")),) if size > here else ()
    return Torchrun(hosts=hosts, num_workers=size)


def join(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which this rank finds the cluster of its run; rank 0 starts the cluster unless it runs. Blocks until then.

    The flags of `lockstep up` are in LOCKSTEP_UP. Raises InvalidSpec for wrong ones, and Unavailable if there is no cluster in time.
    """
    store = _store(environment)
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if rank == "0":
        store.set(_key(size), json.dumps(_cluster(store, environment)))
    _await(store, _key(size))
    told = json.loads(store.get(_key(size)))
    if "failure" in told:
        raise InvalidSpec(told["failure"])
    # torchrun runs each rank once: whoever had the place before is gone, or about to be.
    found = {**told["variables"], "LOCKSTEP_WORKER_INDEX": rank, "LOCKSTEP_NUM_WORKERS": size, "LOCKSTEP_TAKEOVER": "1"}
    if "ca" in told:
        private = Path(tempfile.mkdtemp(prefix="lockstep-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        write_secret(private / "ca.pem", told["ca"])
        found["LOCKSTEP_TLS_CA"] = str(private / "ca.pem")
    return found


def _key(size: str) -> str:
    return f"lockstep/cluster/{size}"


def _await(store: Any, key: str) -> None:
    """Waits for rank 0, and says so after a while."""
    deadline, has_said = time.monotonic() + _START_S, False
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise Unavailable(f"torchrun's rank 0 has started no cluster within {_START_S:g} s; does it call lockstep.connect()?")
        if not has_said and time.monotonic() > deadline - _START_S + _SAY_AFTER_S:
            log.warning("waiting until rank 0 of torchrun has started the cluster, up to %g s", _START_S)
            has_said = True
        time.sleep(_LOOK_S)


def _store(environment: Mapping[str, str]) -> Any:
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise InvalidSpec("torchrun keeps its store to itself here; unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or set LOCKSTEP_CHIEF")
    from torch.distributed import TCPStore

    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_START_S))


def _cluster(store: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what ranks must know of the cluster that runs, or is started now; or why there is none."""
    size = environment["WORLD_SIZE"]
    if store.check([_LAUNCHER]):
        earlier = json.loads(store.get(_LAUNCHER))
        is_here = earlier["host"] == socket.gethostname() and _runs(earlier["pid"])
        if is_here and earlier["size"] == size:
            told: dict[str, Any] = earlier["told"]
            return told
        # No rank may find a cluster that has ended, also when there are as many of them again later.
        store.delete_key(_key(earlier["size"]))
        if is_here:
            _end(earlier["pid"])
    with tempfile.TemporaryDirectory(prefix="lockstep-") as private:
        pid, told = _start(environment, Path(private) / "told")
    if "failure" not in told:
        store.set(_LAUNCHER, json.dumps({"host": socket.gethostname(), "pid": pid, "size": size, "told": told}))
    return told


def _start(environment: Mapping[str, str], answer: Path) -> tuple[int, dict[str, Any]]:
    """Starts a cluster. Returns the launcher's process and what ranks must know, which a stand-in writes into the file `answer`."""
    words = [sys.executable, "-P", "-m", "lockstep", "up", "--engine", "torchrun", *shlex.split(Given({}, environment)[UP_FLAGS])]
    # Of a session of its own: torchrun ends the group of a rank.
    launcher = subprocess.Popen(
        [*words, "--", sys.executable, "-I", "-S", str(_STANDIN)],
        env={**environment, TOLD_VARIABLE: str(answer), WATCHED_VARIABLE: str(os.getppid())},
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
        time.sleep(_LOOK_S)
    launcher.returncode = 0  # it runs on when this process has ended
    return launcher.pid, json.loads(answer.read_text())


def _end(launcher: int) -> None:
    """Ends a cluster for another number of workers; the next one continues from its last checkpoint, if it saves any."""
    with suppress(ProcessLookupError):
        os.kill(launcher, signal.SIGTERM)
    deadline = time.monotonic() + _END_S
    while _runs(launcher) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _runs(pid: int) -> bool:
    with suppress(ChildProcessError):  # this process may have started it, and has to take note of its end
        os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _own_address(environment: Mapping[str, str]) -> str:
    """Returns where the other nodes reach this one: the address from which it reaches torchrun's store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))
        address: str = probe.getsockname()[0]
    return environment["MASTER_ADDR"] if address.startswith("127.") else address
