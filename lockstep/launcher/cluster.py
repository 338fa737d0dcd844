"""A cluster on this machine: which processes it has, their arguments and environments, and when they are ready. Knows no step."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.environments import FOREIGN, with_checkout
from lockstep.launcher.spec import NO_RECOVERY, Recovery, policy_flags
from lockstep.launcher.supervisor import LaunchFailed, Process, ProcessSpec, Supervisor, describe_end, shell_code
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode
from ps_protocol.security.options import SECURITY_VARIABLES
from ps_protocol.security.tokens import BESIDE_SOCKET, new_token_lines, write_secret

# A role imports grpc and NumPy: half a second on an idle machine. A busy one may take far longer, but not for ever.
START_TIMEOUT_S = 60.0
_SAY_AFTER_S = 2.0
DEFAULT_POLICY = PolicySpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What to start. A step needs `num_workers - num_backups` contributions; the slowest `num_backups` are not waited for.

    `num_required` says instead how many contributions a step needs, which may be more than there are workers. Both are about sync only.
    `chief_in_ps`: the chief runs in the process of ps 0. `has_standbys`: each parameter server has a second one that takes its place.
    `reject_nonfinite`: gradients that are not finite are refused.
    """

    num_ps: int
    num_workers: int
    num_backups: int = 0
    num_required: int | None = None
    max_steps: int | None = None
    lease_s: float | None = None
    is_tcp: bool = False
    chief_in_ps: bool = False
    has_standbys: bool = False
    policy: PolicySpec = DEFAULT_POLICY
    reject_nonfinite: bool = False
    recovery: Recovery = NO_RECOVERY

    def __post_init__(self) -> None:
        counts = {"--ps": self.num_ps, "--workers": self.num_workers, "--max-steps": self.max_steps}
        for flag, value in {**counts, "--replicas-to-aggregate": self.num_required}.items():
            if value is not None and value < 1:
                raise LaunchFailed(f"{flag}: got {value}, want 1 or more", exit_code=2)
        if not 0 <= self.num_backups < self.num_workers:
            want = f"0 to {self.num_workers - 1}, since {self.num_workers} workers are to be started and a step needs one at least"
            raise LaunchFailed(f"--backup-workers: got {self.num_backups}, want {want}", exit_code=2)
        if self.num_backups and self.num_required is not None:
            raise LaunchFailed("--backup-workers and --replicas-to-aggregate say the same in two ways; give one of them", exit_code=2)
        if not self.is_sync and (self.num_backups or self.num_required is not None):
            flag = "--backup-workers" if self.num_backups else "--replicas-to-aggregate"
            raise LaunchFailed(f"{flag}: only the policy sync has steps of several contributions, not {self.policy.text}", exit_code=2)
        if (least := self.recovery.min_replicas) is not None and not (self.is_sync and least <= self.replicas_to_aggregate):
            want = f"1 to {self.replicas_to_aggregate}, which a step needs when nobody is gone" if self.is_sync else "the policy sync"
            raise LaunchFailed(f"--min-replicas: got {least}, want {want}", exit_code=2)
        if self.has_standbys and self.recovery.history is not None:
            raise LaunchFailed("--history: `lockstep verify` knows one server a shard; leave out --history, or --standbys", exit_code=2)
        if self.has_standbys and self.chief_in_ps:
            raise LaunchFailed("--standbys: the chief has none, so it needs a process of its own; leave out --chief-in-ps", exit_code=2)
        if self.lease_s is not None and not self.lease_s > 0:
            raise LaunchFailed(f"--lease: got {self.lease_s}, want more than 0 seconds", exit_code=2)

    @property
    def is_sync(self) -> bool:
        """Whether a step is the mean of several contributions; with the other policies every contribution is a step."""
        return self.policy.name is PolicyName.SYNC

    @property
    def replicas_to_aggregate(self) -> int:
        """Contributions that a step needs while the policy is sync."""
        return self.num_workers - self.num_backups if self.num_required is None else self.num_required

    @property
    def num_workers_needed(self) -> int:
        """Workers without whom training cannot go on."""
        if not self.is_sync or self.policy.tokens is TokenMode.FIFO:
            return 1
        if self.recovery.min_replicas is not None:
            return self.recovery.min_replicas
        return min(self.replicas_to_aggregate, self.num_workers)

    @property
    def needs_text(self) -> str:
        """What a step needs, in words."""
        if not self.is_sync:
            return f"policy {self.policy.text}: every contribution is a step"
        needs = self.replicas_to_aggregate
        return f"a step needs {needs}" if self.policy == DEFAULT_POLICY else f"policy {self.policy.text}: a step needs {needs}"


class LocalCluster:
    """The processes of one cluster. Unix sockets in the supervisor's private directory, or ports that the system chooses.

    `security`: what the environments say of it, in place of tokens of the cluster's own.
    """

    def __init__(
        self, spec: ClusterSpec, *, supervisor: Supervisor, note: Callable[[str], None], security: Mapping[str, str] | None = None
    ) -> None:
        self._given_security = security
        self.spec = spec
        # The next run goes on from the checkpoints of this one, and only a cluster's own are taken: it must have the same name.
        self.name = "up-local" if spec.recovery.has_checkpoints else f"up-{supervisor.token[:6]}"
        self.chief_address = ""
        self.token_file: Path | None = None  # for whoever may talk to the cluster; once started
        self.roles: list[Process] = []  # the parameter servers by index, then the chief, unless that is in ps 0
        self.workers: list[Process] = []
        self._supervisor = supervisor
        self._note = note
        self._addresses: dict[str, str] = {}  # where roles serve, and shall serve again
        self._role_environment: Mapping[str, str | None] = {}
        self._worker_command: Sequence[str] = ()
        self._worker_environment: Mapping[str, str | None] = {}

    @property
    def chief(self) -> Process:
        """The process of the chief, once started."""
        return self.roles[0 if self.spec.chief_in_ps else -1]

    @property
    def token_words(self) -> str:
        """What a command outside needs besides the chief's address: beside a Unix socket it finds the tokens by itself."""
        return f" --token-file {self.token_file}" if self.spec.is_tcp else ""

    def start_roles(self, *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts parameter servers and chief and returns once they serve; LaunchFailed with a role's last words if one doesn't come up."""
        if self._given_security is None:
            self.token_file = self._supervisor.directory / BESIDE_SOCKET
            write_secret(self.token_file, new_token_lines())
        told = self.spec.recovery.environment
        self._role_environment = {**FOREIGN, **with_checkout(), **(environment or {}), **told, **self._own_security}
        # The process with the chief must be told where the others are.
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

    @property
    def _own_security(self) -> dict[str, str | None]:
        """Tokens that nobody needs to know of; whatever the shell says about another cluster's must not reach the children."""
        given = {"LOCKSTEP_TOKEN_FILE": str(self.token_file)} if self._given_security is None else self._given_security
        return {**dict.fromkeys(SECURITY_VARIABLES), **given}

    def start_workers(self, command: Sequence[str], *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts the workers; each finds the cluster by its environment."""
        history = self.spec.recovery.history
        self._worker_command = command
        self._worker_environment = {"LOCKSTEP_HISTORY": None if history is None else str(history), **(environment or {})}
        for index in range(self.spec.num_workers):
            self.workers.append(self._start_worker(index))

    def may_restart(self, role: Process) -> bool:
        """Whether training can go on with a new process in the place of this one, which has ended.

        What a parameter server held is lost with it, and only a checkpoint brings it back; the chief's knowledge is with the servers too.
        A chief that ended by itself has said why, and another one would say the same.
        """
        has_chief = role is self.chief
        if role.returncode is None or (has_chief and role.returncode >= 0):
            return False
        if (other := self.replica_of(role)) is not None and other.is_running:
            return True
        return self.spec.recovery.has_checkpoints or (has_chief and not self.spec.chief_in_ps)

    def replica_of(self, role: Process) -> Process | None:
        """The other parameter server that holds the same, if standbys were asked for."""
        others = [other for other in self.roles if other is not role and other.name != "chief"]
        return next((other for other in others if other.name.partition(" ")[2] == role.name.partition(" ")[2]), None)

    def restart_role(self, role: Process) -> Process:
        """Starts a role that has ended again, at its old address; does not wait until it serves."""
        self._announce(role.name).unlink(missing_ok=True)
        process = self._start_role(role.name, is_again=True)
        self.roles[self.roles.index(role)] = process
        return process

    def restart_worker(self, worker: Process) -> Process:
        """Starts a worker that has ended again, in its old place."""
        index = self.workers.index(worker)
        self.workers[index] = self._start_worker(index)
        return self.workers[index]

    def _start_worker(self, index: int) -> Process:
        place = {
            "LOCKSTEP_CHIEF": self.chief_address,
            "LOCKSTEP_CLUSTER": self.name,
            "LOCKSTEP_WORKER_INDEX": str(index),
            "LOCKSTEP_NUM_WORKERS": str(self.spec.num_workers),
        }
        full = {**with_checkout(), **self._worker_environment, **place, **self._own_security}
        return self._supervisor.start(ProcessSpec(name=f"worker {index}", command=self._worker_command, environment=full))

    def _start_role(self, name: str, *, is_again: bool = False) -> Process:
        if name == "chief":
            module, flags = "chief", self._chief_flags(is_again=is_again)
        else:
            module, flags = "ps_server", self._ps_flags(name)
            if name == "ps 0" and self.spec.chief_in_ps:
                module, flags = "lockstep.combined", [*flags, "--with-chief", *self._chief_flags(is_again=is_again)]
        # -P: a chief.py in the user's directory must not be taken for ours.
        command = [sys.executable, "-P", "-m", self._program_of(module), *flags]
        return self._supervisor.start(ProcessSpec(name=name, command=command, environment=self._role_environment))

    def _program_of(self, module: str) -> str:
        """The module that is run for a role."""
        return module

    def _ps_flags(self, name: str) -> list[str]:
        return [*self._common_flags(name), "--index", name.partition(" ")[2], *self.spec.recovery.ps_flags]

    def _chief_flags(self, *, is_again: bool) -> list[str]:
        spec = self.spec
        servers = [self._addresses.get(f"ps {index}", "") for index in range(spec.num_ps)]
        if spec.chief_in_ps:
            servers[0] = "self"
        flags = [*self._common_flags("chief"), "--ps", ",".join(servers)]
        if spec.has_standbys:
            flags += ["--standbys", ",".join(self._addresses[f"standby {index}"] for index in range(spec.num_ps))]
        flags += ["--replicas-to-aggregate", str(spec.replicas_to_aggregate), "--total-num-replicas", str(spec.num_workers)]
        if spec.policy != DEFAULT_POLICY:
            flags += policy_flags(spec.policy)
        if spec.max_steps is not None:
            flags += ["--max-steps", str(spec.max_steps)]
        if spec.lease_s is not None:
            flags += ["--lease", str(spec.lease_s)]
        if spec.reject_nonfinite:
            flags.append("--reject-nonfinite")
        # The launcher knows that the former chief is dead; nobody else may take it for granted.
        return [*flags, *spec.recovery.chief_flags, *(["--takeover"] if is_again else [])]

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
                raise LaunchFailed(f"{words}; its last lines:\n{process.tail()}" if process.last_lines else f"{words} and said nothing")
            if waited_s > _SAY_AFTER_S and not has_said:
                self._note(f"waiting for {process.name} (pid {process.pid}) to begin to serve, up to {START_TIMEOUT_S:g} s …")
                has_said = True
        return path.read_text().strip()

    def _check_roles(self) -> None:
        for process in self.roles:
            if process.returncode is not None:
                raise LaunchFailed(
                    f"{process.name} ended while starting: {describe_end(process.returncode)}. {last_lines(process)}",
                    exit_code=shell_code(process.returncode) or 1,
                )


def last_lines(process: Process) -> str:
    """Returns a sentence with the last lines of a process."""
    return f"Its last lines:\n{process.tail()}" if process.last_lines else "It said nothing."
