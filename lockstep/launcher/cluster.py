"""A launched cluster: its processes here or on several hosts, their arguments and environments, and when they are ready. Knows no step."""

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.launcher.gpus import VISIBLE, Gpus, gpus_here
from lockstep.launcher.hosts import Hosts
from lockstep.launcher.looks import looking_at
from lockstep.launcher.remote import EXIT_HOST_LOST
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import (
    LaunchFailed,
    Process,
    ProcessSpec,
    Supervisor,
    describe_end,
    make_directory,
    shell_code,
)
from lockstep.systemd import files_of
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.listening import end_beside, page_beside
from ps_protocol.process.local_clusters import entry, listed
from ps_protocol.process.waiting import LAUNCHER_SAYS
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import OPEN, Security
from ps_protocol.security.tokens import BESIDE_SOCKET, new_token_lines, token_of, write_secret

# A role imports grpc and NumPy: half a second on an idle machine, much longer on a busy one.
START_TIMEOUT_S = 60.0
_SAY_AFTER_S = 2.0
# The shell's variables may describe another cluster; the roles of this one must not inherit them.
_FOREIGN = {**dict.fromkeys(options.cluster_variables()), "TF_CONFIG": None}


class LaunchedCluster:
    """The processes of one cluster. Unix sockets in the supervisor's private directory, or ports that the system chooses.

    `security`: variables for tokens and TLS, in place of tokens of the cluster's own and, on several hosts, of an authority of its own.
    """

    def __init__(
        self, spec: ClusterSpec, *, supervisor: Supervisor, note: Callable[[str], None], security: Mapping[str, str] | None = None
    ) -> None:
        self._given_security = security
        self.spec = spec
        self._hosts = Hosts(spec.hosts, python=spec.host_python, cwd=spec.host_dir, places=spec.places) if spec.hosts else None
        # The next run continues from this one's checkpoints. A cluster only takes its own, so both need the same name.
        self.name = "up-local" if spec.has_checkpoints else f"up-{supervisor.token[:6]}"
        self.chief_address = self.page_url = ""
        # For commands that call the cluster; set once started.
        self.security = OPEN
        self.roles: list[Process] = []  # the parameter servers by index, then the chief unless it runs in ps 0
        self.workers: list[Process] = []
        self._supervisor = supervisor
        self._note = note
        self._addresses: dict[str, str] = {}  # where roles serve, also after a restart
        self._replaced: set[int] = set()  # workers whose host was lost
        self._gpus = Gpus(spec.worker_gpus, here=gpus_here(os.environ) if self._hosts is None else None)
        for index in range(spec.num_workers):
            self._gpus_of(index)  # raises an error before anything starts
        self._moving: set[str] = set()  # roles that begin on another host, and whose address there is not known yet
        self._held: set[str] = set()  # processes that begin once the addresses of those that they call are known
        self._leaving: Process | None = None  # a chief that was asked to end for its successor
        self._environment: Mapping[str, str | None] = {}
        self._worker_command: Sequence[str] = ()
        self._worker_environment: Mapping[str, str | None] = {}
        self._list_chief: Callable[[str], None] = lambda address: None
        self._said_at = time.monotonic()  # when the user has heard last what is waited for

    @property
    def chief(self) -> Process:
        """The process of the chief, once started."""
        return self.roles[0 if self.spec.chief_in_ps else -1]

    @property
    def page_address(self) -> str:
        """The page's address for a browser, with a token that may read and change nothing. Empty: there is no page.

        The token follows a #, and browsers do not send that part to any server.
        """
        if not self.page_url or self.security.token_file is None:
            return self.page_url
        return f"{self.page_url}#token={token_of(self.security.token_file, CallerRole.OBSERVER)}"

    @property
    def tunnel(self) -> str:
        """The command that leads this machine's port of the page to the chief's host; empty: the page is here."""
        if self._hosts is None or not self.page_url:
            return ""
        port = urlsplit(self.page_url).port
        return f"ssh -N -L {port}:127.0.0.1:{port} {self._hosts.of('chief').name}"

    @contextmanager
    def listed(self, command: str) -> Iterator[None]:
        """Lists the cluster for other commands of this user within the block; `command`: the workers' command."""
        known = entry(name=self.name, chief=self.chief_address, page=self.page_url, security=self.security, command=command)
        with listed(known) as self._list_chief:
            yield

    def start_roles(self, *, environment: Mapping[str, str | None] | None = None, command: Sequence[str] = ()) -> None:
        """Starts parameter servers and chief, and returns once they serve. Raises LaunchFailed with the last lines of a role that fails.

        `command`: that of the workers, which their hosts are asked for before anything starts.
        """
        self._environment = {**_FOREIGN, **(environment or {}), **self.spec.told}
        with self._looking_at_hosts(command):
            self._make_secrets()
        # The chief's process starts last: its flags name the addresses of the others.
        for index in range(1 if self.spec.chief_in_ps else 0, self.spec.num_ps):
            self.roles.append(self._supervisor.start(self._role_spec(f"ps {index}")))
        for index in range(self.spec.num_ps if self.spec.has_standbys else 0):
            self.roles.append(self._supervisor.start(self._role_spec(f"standby {index}")))
        for process in self.roles:
            self._addresses[process.name] = self._await_address(process, process.name)
        if self.spec.chief_in_ps:
            self.roles.insert(0, self._supervisor.start(self._role_spec("ps 0")))
            self._addresses["ps 0"] = self._await_address(self.chief, "ps 0")
        else:
            self.roles.append(self._supervisor.start(self._role_spec("chief")))
        self.chief_address = self._addresses["chief"] = self._await_address(self.chief, "chief")
        # The chief wrote the page's address before its own, if it serves a page.
        with suppress(FileNotFoundError):
            self.page_url = page_beside(self._announce("chief")).read_text().strip()
        if self.spec.tensorboard is not None:
            self._start_recorder(self.spec.tensorboard)

    def _make_secrets(self) -> None:
        if self._given_security is not None:
            return
        private = self._supervisor.directory
        if self._hosts is None:
            write_secret(private / BESIDE_SOCKET, new_token_lines())
            self.security = Security(token_file=private / BESIDE_SOCKET)
            return
        from lockstep.certs import create  # imports cryptography

        try:
            create(private, cluster=self.name, hosts=[host.address for host in self._hosts])
        except InvalidSpec as error:
            raise LaunchFailed(error.message, exit_code=ExitCode.USAGE) from error
        self.security = Security(token_file=private / BESIDE_SOCKET, tls_ca=private / "ca.pem")

    def _secrets_of(self, kind: str) -> dict[str, str]:
        """Returns the files that prove who a role or a worker is, by variable, as names in the private directory."""
        if self._given_security is not None:
            return {}
        if self._hosts is None:
            return {"LOCKSTEP_TOKEN_FILE": BESIDE_SOCKET}
        return files_of(kind)

    def _placed(self, spec: ProcessSpec, *, kind: str, returns: Sequence[Path] = ()) -> ProcessSpec:
        """Returns a process for its host, with the secrets of its kind. The shell's variables may be for another cluster."""
        secrets, private = self._secrets_of(kind), self._supervisor.directory
        given = self._given_security or {variable: str(private / name) for variable, name in secrets.items()}
        spec = replace(spec, environment={**spec.environment, **dict.fromkeys(options.SECURITY_VARIABLES), **given})
        if self._hosts is not None:
            names = [path.name for path in returns]
            host = self._hosts.of(spec.name)
            spec = self._hosts.carried(spec, host=host, private=private, files=[*secrets.values()], returns=names)
        return spec

    @contextmanager
    def _looking_at_hosts(self, command: Sequence[str]) -> Iterator[None]:
        """Asks all hosts, which have the block's time for it, whether they can run the cluster's processes, and share what these share.

        Raises LaunchFailed after the block where one cannot, in the words of the first of these.
        """
        if self._hosts is None:
            yield
            return
        directories = [path for path in (self.spec.directory, self.spec.history) if path is not None]
        with looking_at(
            self._hosts,
            directories,
            supervisor=self._supervisor,
            num_workers=self.spec.num_workers,
            command=command,
            environment=self._passed_on(),
        ) as looks:
            yield
            self._await(
                lambda: any(one.returncode for one in looks) or not any(one.is_running for one in looks),
                what=lambda: f"there is an answer of {', '.join(one.name for one in looks if one.is_running)}",
                process=looks[0],
            )
            if any(one.returncode for one in looks):
                # Others may lack the same, and say so.
                self._supervisor.await_end(lambda: not any(one.is_running for one in looks), grace_s=_SAY_AFTER_S)
                raise LaunchFailed(next(one.last_words for one in looks if one.returncode), exit_code=ExitCode.USAGE)

    def _passed_on(self) -> dict[str, str | None]:
        """Returns the variables that workers on other hosts get as they are here; --worker-gpus chooses GPUs anew there."""
        names = {*self.spec.host_env} - ({VISIBLE} if self.spec.worker_gpus else set())
        return {name: os.environ.get(name) for name in names}

    def start_workers(self, command: Sequence[str], *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts the workers; each finds the cluster by its environment."""
        self._worker_command = command
        history = {one.variable: self.spec.told.get(one.variable) for one in (options.HISTORY, options.HISTORY_MAX_BYTES)}
        self._worker_environment = {**history, LAUNCHER_SAYS: "1", **(environment or {})}
        for index in range(self.spec.num_workers):
            self.workers.append(self._supervisor.start(self._worker_spec(index)))

    def may_restart(self, role: Process) -> bool:
        """Whether training can continue with a new process in place of this one, which has ended.

        A parameter server's part of the model is lost with it, and only a checkpoint or its standby restores it. The servers also keep the
        chief's state. A chief that ended with an error has logged the reason, and would end for it again; one that ended with 0
        and left the servers running was asked to by somebody.
        """
        has_chief = role is self.chief
        if role.returncode is None:
            return False
        has_failed = role.returncode > 0 and role.returncode != EXIT_HOST_LOST
        if has_chief and (has_failed or self.trained_until() is not None):
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
        """Starts a role that has ended again after a pause, at its old address unless its host is lost; does not wait for it."""
        self._announce(role.name).unlink(missing_ok=True)
        if self._hosts is not None and self._hosts.see_end(role):
            self._moving.add(role.name)
        process = self._start(self._role_spec(role.name, is_again=True, pause_s=pause_s))
        self.roles[self.roles.index(role)] = process
        return process

    def awaited_by(self, name: str) -> list[str]:
        """Returns the roles that a process calls, and whose new address is not known yet: until it is, the process does not begin."""
        if self._hosts is None or name.startswith(("ps ", "standby ")):
            return []
        called = [role.name for role in self.roles if role.name != name]
        return [one for one in called if one in self._moving or self._hosts.has_lost(one)]

    def follow_moves(self) -> str:
        """Reads where roles serve that were restarted on another host, and lets begin what waits for them.

        Asks a chief to end that has to know of them, and returns words for that.
        """
        moved = [role for role in self.roles if role.name in self._moving and self._announce(role.name).exists()]
        for role in moved:
            self._addresses[role.name] = self._address_of(role.name)
            self._moving.discard(role.name)
        self.chief_address = self._addresses.get("chief", self.chief_address)
        if self.chief in moved:
            self._list_chief(self.chief_address)
        has_old = self.chief.is_running and self.chief.name not in self._held
        for process in [one for one in (*self.roles, *self.workers) if one.name in self._held and not self.awaited_by(one.name)]:
            self._held.discard(process.name)
            if process is self.chief:
                self._role_spec(process.name, is_again=True)
            else:
                self._worker_spec(self.workers.index(process))
        servers = [f"{role.name} at {self._addresses[role.name]}" for role in moved if role is not self.chief]
        if not servers or not has_old:
            return ""
        self._leaving = self.chief
        self.chief.signal_group(signal.SIGTERM)  # its servers are arguments of a chief; its successor goes on at the same step
        return f"restarting the chief, which has to know {', '.join(servers)}"

    def makes_way(self, process: Process) -> bool:
        """Whether a process was asked to end for its own successor."""
        return process is self._leaving

    def restart_worker(self, worker: Process, *, pause_s: float) -> Process:
        """Starts a worker that has ended again after a pause, in its old place; does not wait for it."""
        index = self.workers.index(worker)
        if self._hosts is not None and self._hosts.see_end(worker):
            self._replaced.add(index)
        self.workers[index] = self._start(self._worker_spec(index, pause_s=pause_s))
        return self.workers[index]

    def has_begun(self, process: Process) -> bool:
        """Whether a process that was started runs on its host, and does not wait for room there, or for an address."""
        is_told = self._hosts is None or not Hosts.task_of(process.name, private=self._supervisor.directory).exists()
        return is_told and process.name not in self._held

    def _start(self, spec: ProcessSpec) -> Process:
        """Starts a process again; one that has to wait for others begins when it finds its task."""
        self._held.discard(spec.name)
        if self.awaited_by(spec.name):
            self._held.add(spec.name)
            Hosts.task_of(spec.name, private=self._supervisor.directory).unlink()
        return self._supervisor.start(spec)

    def _worker_spec(self, index: int, *, pause_s: float = 0.0) -> ProcessSpec:
        place = {
            "LOCKSTEP_CHIEF": self.chief_address,
            "LOCKSTEP_CLUSTER": self.name,
            "LOCKSTEP_WORKER_INDEX": str(index),
            "LOCKSTEP_NUM_WORKERS": str(self.spec.num_workers),
            # The worker of a lost host may run on there for a while.
            options.TAKE_PLACE.variable: "1" if index in self._replaced else None,
        }
        full = {**self._passed_on(), **self._worker_environment, **place, **self._gpus_of(index)}
        spec = ProcessSpec(name=f"worker {index}", command=self._worker_command, environment=full, pause_s=pause_s)
        return self._placed(spec, kind="worker")

    def _gpus_of(self, index: int) -> dict[str, str]:
        return self._gpus.of(index, host="" if self._hosts is None else self._hosts.of(f"worker {index}").name)

    def _start_recorder(self, directory: Path) -> None:
        """Starts the process that writes event files. Training does not depend on it, and it ends by itself after training."""
        words = ["tensorboard", str(directory.absolute()), "--chief", self.chief_address, "--cluster", self.name]
        command = [sys.executable, "-P", "-m", "lockstep", *words]
        files = {"LOCKSTEP_TOKEN_FILE": self.security.token_file, "LOCKSTEP_TLS_CA": self.security.tls_ca}
        security = (
            {variable: str(path) for variable, path in files.items() if path} if self._given_security is None else self._given_security
        )
        environment = {**_FOREIGN, **dict.fromkeys(options.SECURITY_VARIABLES), **security}
        self._supervisor.start(ProcessSpec(name="tensorboard", command=command, environment=environment))

    def _role_spec(self, name: str, *, is_again: bool = False, pause_s: float = 0.0) -> ProcessSpec:
        if name == "chief":
            module, flags = "chief", self._chief_flags(is_again=is_again)
        else:
            module, flags = "ps_server", self._ps_flags(name)
            if name == "ps 0" and self.spec.chief_in_ps:
                module, flags = "lockstep.combined", [*flags, "--with-chief", *self._chief_flags(is_again=is_again)]
        # -P: a chief.py in the user's directory must not shadow Lockstep's.
        command = [sys.executable, "-P", "-m", self._program_of(module), *flags]
        spec = ProcessSpec(name=name, command=command, environment=self._environment, pause_s=pause_s)
        place = self._announce(name)
        kind = module.removesuffix("_server")
        return self._placed(spec, kind=kind, returns=[place, page_beside(place), end_beside(place)])

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
        flags = ["--cluster", self.name, "--announce", str(self._announce(name)), "--address"]
        address = None if name in self._moving else self._addresses.get(name)
        if self._hosts is not None:
            # Not the host's name: many a host's own name leads to a loopback address there.
            port, host = address.rpartition(":")[2] if address else "0", self._hosts.of(name).address
            return [*flags, f"0.0.0.0:{port}", *(["--advertise", f"{host}:{port}"] if name == "chief" else [])]
        socket_path = self._supervisor.directory / f"{name.replace(' ', '')}.sock"
        return [*flags, address or ("127.0.0.1:0" if self.spec.is_tcp else f"unix:{socket_path}")]

    def _announce(self, name: str) -> Path:
        return self._supervisor.directory / f"{name.replace(' ', '')}.address"

    def _await_address(self, process: Process, name: str) -> str:
        self._await(self._announce(name).exists, what=lambda: f"{process.name} (pid {process.pid}) begins to serve", process=process)
        return self._address_of(name)

    def _address_of(self, name: str) -> str:
        """Returns where others reach a role that has begun to serve."""
        address = self._announce(name).read_text().strip()
        return address if self._hosts is None else f"{self._hosts.of(name).address}:{address.rpartition(':')[2]}"

    def _await(self, is_there: Callable[[], bool], *, what: Callable[[], str], process: Process) -> None:
        """Waits for it, and says so once, where the start has gone on for a while without a word.

        Raises LaunchFailed after a minute, and where a role has ended.
        """
        start, has_said = time.monotonic(), False
        while not is_there():
            now = time.monotonic()
            if now > start + START_TIMEOUT_S:
                raise LaunchFailed(f"waited {START_TIMEOUT_S:g} s in vain until {what()}. {process.tail}")
            if now > self._said_at + _SAY_AFTER_S and not has_said:
                self._note(f"waiting until {what()}, up to {START_TIMEOUT_S:g} s …")
                self._said_at, has_said = now, True
            self._supervisor.poll(timeout_s=0.05)
            self._check_roles()

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
