"""A cluster on this machine: its processes, their arguments and environments, and when they are ready. Knows no step."""

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import (
    LaunchFailed,
    Process,
    ProcessSpec,
    Supervisor,
    describe_end,
    make_directory,
    shell_code,
    with_checkout,
)
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.listening import end_beside, page_beside
from ps_protocol.process.local_clusters import entry, listed
from ps_protocol.process.waiting import LAUNCHER_SAYS
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.tokens import BESIDE_SOCKET, new_token_lines, token_of, write_secret

# A role imports grpc and NumPy: half a second on an idle machine, much longer on a busy one.
START_TIMEOUT_S = 60.0
_SAY_AFTER_S = 2.0
# The shell's variables may describe another cluster; the roles of this one must not inherit them.
_FOREIGN = {**dict.fromkeys(options.cluster_variables()), "TF_CONFIG": None}


class LocalCluster:
    """The processes of one cluster. Unix sockets in the supervisor's private directory, or ports that the system chooses.

    `security`: variables for tokens and TLS, in place of tokens of the cluster's own.
    """

    def __init__(
        self, spec: ClusterSpec, *, supervisor: Supervisor, note: Callable[[str], None], security: Mapping[str, str] | None = None
    ) -> None:
        self._given_security = security
        self.spec = spec
        # The next run continues from this one's checkpoints. A cluster only takes its own, so both need the same name.
        self.name = "up-local" if spec.has_checkpoints else f"up-{supervisor.token[:6]}"
        self.chief_address = self.page_url = ""
        self.token_file: Path | None = None  # for commands that call the cluster; set once started
        self.roles: list[Process] = []  # the parameter servers by index, then the chief unless it runs in ps 0
        self.workers: list[Process] = []
        self._supervisor = supervisor
        self._note = note
        self._addresses: dict[str, str] = {}  # where roles serve, also after a restart
        self._role_environment: Mapping[str, str | None] = {}
        self._worker_command: Sequence[str] = ()
        self._worker_environment: Mapping[str, str | None] = {}

    @property
    def chief(self) -> Process:
        """The process of the chief, once started."""
        return self.roles[0 if self.spec.chief_in_ps else -1]

    @property
    def page_address(self) -> str:
        """The page's address for a browser, with a token that may read and change nothing. Empty: there is no page.

        The token follows a #, and browsers do not send that part to any server.
        """
        if not self.page_url or self.token_file is None:
            return self.page_url
        return f"{self.page_url}#token={token_of(self.token_file, CallerRole.OBSERVER)}"

    def listed(self, command: str) -> AbstractContextManager[None]:
        """Lists the cluster for other commands of this user within the block; `command`: the workers' command."""
        return listed(entry(name=self.name, chief=self.chief_address, page=self.page_url, token_file=self.token_file, command=command))

    def start_roles(self, *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts parameter servers and chief, and returns once they serve. Raises LaunchFailed with the last lines of a role that fails."""
        if self._given_security is None:
            self.token_file = self._supervisor.directory / BESIDE_SOCKET
            write_secret(self.token_file, new_token_lines())
        self._role_environment = {
            **_FOREIGN,
            **with_checkout(),
            **(environment or {}),
            **self.spec.told,
            **self._own_security,
        }
        # The chief's process starts last: its flags name the addresses of the others.
        for index in range(1 if self.spec.chief_in_ps else 0, self.spec.num_ps):
            self.roles.append(self._start_role(f"ps {index}"))
        for index in range(self.spec.num_ps if self.spec.has_standbys else 0):
            self.roles.append(self._start_role(f"standby {index}"))
        for process in self.roles:
            self._addresses[process.name] = self._await_address(process, process.name)
        if self.spec.chief_in_ps:
            self.roles.insert(0, self._start_role("ps 0"))
            self._addresses["ps 0"] = self._await_address(self.chief, "ps 0")
        else:
            self.roles.append(self._start_role("chief"))
        self.chief_address = self._addresses["chief"] = self._await_address(self.chief, "chief")
        # The chief wrote the page's address before its own, if it serves a page.
        with suppress(FileNotFoundError):
            self.page_url = page_beside(self._announce("chief")).read_text().strip()
        if self.spec.tensorboard is not None:
            self._start_recorder(self.spec.tensorboard)

    @property
    def _own_security(self) -> dict[str, str | None]:
        """Security variables for the children: those given, or the cluster's own tokens. The shell's may be for another cluster."""
        given = {"LOCKSTEP_TOKEN_FILE": str(self.token_file)} if self._given_security is None else self._given_security
        return {**dict.fromkeys(options.SECURITY_VARIABLES), **given}

    def start_workers(self, command: Sequence[str], *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts the workers; each finds the cluster by its environment."""
        self._worker_command = command
        history = {one.variable: self.spec.told.get(one.variable) for one in (options.HISTORY, options.HISTORY_MAX_BYTES)}
        self._worker_environment = {**history, LAUNCHER_SAYS: "1", **(environment or {})}
        for index in range(self.spec.num_workers):
            self.workers.append(self._start_worker(index))

    def may_restart(self, role: Process) -> bool:
        """Whether training can continue with a new process in place of this one, which has ended.

        A parameter server's part of the model is lost with it, and only a checkpoint or its standby restores it. The servers also keep the
        chief's state. A chief that ended with an error has logged the reason, and would end for it again; one that ended with 0
        and left the servers running was asked to by somebody.
        """
        has_chief = role is self.chief
        if role.returncode is None or (has_chief and (role.returncode > 0 or self.trained_until() is not None)):
            return False
        if (other := self.replica_of(role)) is not None and other.is_running:
            return True
        return self.spec.has_checkpoints or (has_chief and not self.spec.chief_in_ps)

    def replica_of(self, role: Process) -> Process | None:
        """The other parameter server that holds the same shard; None: there are no standbys."""
        others = [other for other in self.roles if other is not role and other.name != "chief"]
        return next((other for other in others if other.name.partition(" ")[2] == role.name.partition(" ")[2]), None)

    def trained_until(self) -> tuple[int, int] | None:
        """Epoch and step at which a training ended, once its chief has ended by itself; None: it has not, or there was no training."""
        with suppress(OSError, ValueError):
            epoch, step = end_beside(self._announce("chief")).read_text().split()
            return int(epoch), int(step)
        return None

    def restart_role(self, role: Process, *, pause_s: float) -> Process:
        """Starts a role that has ended again after a pause, at its old address; does not wait for it."""
        self._announce(role.name).unlink(missing_ok=True)
        process = self._start_role(role.name, is_again=True, pause_s=pause_s)
        self.roles[self.roles.index(role)] = process
        return process

    def restart_worker(self, worker: Process, *, pause_s: float) -> Process:
        """Starts a worker that has ended again after a pause, in its old place; does not wait for it."""
        index = self.workers.index(worker)
        self.workers[index] = self._start_worker(index, pause_s=pause_s)
        return self.workers[index]

    def _start_worker(self, index: int, *, pause_s: float = 0.0) -> Process:
        place = {
            "LOCKSTEP_CHIEF": self.chief_address,
            "LOCKSTEP_CLUSTER": self.name,
            "LOCKSTEP_WORKER_INDEX": str(index),
            "LOCKSTEP_NUM_WORKERS": str(self.spec.num_workers),
        }
        full = {**with_checkout(), **self._worker_environment, **place, **self._own_security}
        spec = ProcessSpec(name=f"worker {index}", command=self._worker_command, environment=full, pause_s=pause_s)
        return self._supervisor.start(spec)

    def _start_recorder(self, directory: Path) -> None:
        """Starts the process that writes event files. Training does not depend on it, and it ends by itself after training."""
        words = ["tensorboard", str(directory.absolute()), "--chief", self.chief_address, "--cluster", self.name]
        command = [sys.executable, "-P", "-m", "lockstep", *words]
        environment = {**_FOREIGN, **with_checkout(), **self._own_security}
        self._supervisor.start(ProcessSpec(name="tensorboard", command=command, environment=environment))

    def _start_role(self, name: str, *, is_again: bool = False, pause_s: float = 0.0) -> Process:
        if name == "chief":
            module, flags = "chief", self._chief_flags(is_again=is_again)
        else:
            module, flags = "ps_server", self._ps_flags(name)
            if name == "ps 0" and self.spec.chief_in_ps:
                module, flags = "lockstep.combined", [*flags, "--with-chief", *self._chief_flags(is_again=is_again)]
        # -P: a chief.py in the user's directory must not shadow Lockstep's.
        command = [sys.executable, "-P", "-m", self._program_of(module), *flags]
        return self._supervisor.start(ProcessSpec(name=name, command=command, environment=self._role_environment, pause_s=pause_s))

    def _program_of(self, module: str) -> str:
        """The module that is run for a role."""
        return module

    def _ps_flags(self, name: str) -> list[str]:
        return [*self._common_flags(name), "--index", name.partition(" ")[2]]

    def _chief_flags(self, *, is_again: bool) -> list[str]:
        spec = self.spec
        servers = [self._addresses.get(f"ps {index}", "") for index in range(spec.num_ps)]
        if spec.chief_in_ps:
            servers[0] = "self"
        flags = [*self._common_flags("chief"), "--ps", ",".join(servers)]
        if spec.has_standbys:
            flags += ["--standbys", ",".join(self._addresses[f"standby {index}"] for index in range(spec.num_ps))]
        if spec.page:
            # After a restart at the same address, so that an open browser finds it again.
            flags += [options.PAGE.flag, urlsplit(self.page_url).netloc or spec.page]
        # The launcher knows that the former chief has ended, so the new one may take over at once.
        return [*flags, *([options.TAKEOVER.flag] if is_again else [])]

    def _common_flags(self, name: str) -> list[str]:
        socket_path = self._supervisor.directory / f"{name.replace(' ', '')}.sock"
        address = self._addresses.get(name) or ("127.0.0.1:0" if self.spec.is_tcp else f"unix:{socket_path}")
        return ["--address", address, "--cluster", self.name, "--announce", str(self._announce(name))]

    def _announce(self, name: str) -> Path:
        return self._supervisor.directory / f"{name.replace(' ', '')}.address"

    def _await_address(self, process: Process, name: str) -> str:
        path, start = self._announce(name), time.monotonic()
        has_said = False
        while not path.exists():
            self._supervisor.poll(timeout_s=0.05)
            self._check_roles()
            waited_s = time.monotonic() - start
            if waited_s > START_TIMEOUT_S:
                words = f"{process.name} (pid {process.pid}) did not begin to serve within {START_TIMEOUT_S:g} s"
                raise LaunchFailed(f"{words}. {process.tail}")
            if waited_s > _SAY_AFTER_S and not has_said:
                self._note(f"waiting for {process.name} (pid {process.pid}) to begin to serve, up to {START_TIMEOUT_S:g} s …")
                has_said = True
        return path.read_text().strip()

    def _check_roles(self) -> None:
        for process in self.roles:
            if process.returncode is not None:
                raise LaunchFailed(
                    f"{process.name} ended while starting: {describe_end(process.returncode)}. {process.tail}",
                    exit_code=shell_code(process.returncode) or 1,
                )


@contextmanager
def kept_directories(spec: ClusterSpec) -> Iterator[None]:
    """Makes the directories of checkpoints and history if they are on this machine, and locks that of the checkpoints within the block.

    Clusters that a launcher starts share one name, so that the next run continues from the last one's checkpoints. Without the lock, two
    clusters at a time would take each other's checkpoints for their own, and remove them. Raises LaunchFailed if a directory cannot be
    written to, or is locked.
    """
    if spec.history is not None:
        make_directory(spec.history, flag="--history")
    place = spec.directory
    if place is None:
        yield
        return
    make_directory(place, flag="--checkpoint-dir")
    # Locks the directory itself: this needs no file, and the system releases it when the process ends.
    try:
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise LaunchFailed(f"cannot read {place}: {error.strerror}; choose another --checkpoint-dir", exit_code=ExitCode.USAGE) from error
    try:
        _lock(held, place)
        yield
    finally:
        os.close(held)


def _lock(held: int, place: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        words = f"--checkpoint-dir: another cluster on this machine is using {place}; end it first, or choose another directory"
        raise LaunchFailed(words, exit_code=ExitCode.USAGE) from None
    except OSError:
        pass  # the file system has no locks, so it cannot keep another cluster out
