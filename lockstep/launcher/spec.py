"""The specification of a launched cluster, and the arguments of its roles. Knows options; starts nothing, reads no checkpoint."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import Given, Option, Program

DEFAULT_POLICY = PolicySpec()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The places of checkpoints and history, and the limits of restarts. `checkpoint_dir` is a path or a URL; empty: no checkpoints.

    `max_restarts`: how many times in quick succession a failed role is started again. `restart_workers`: how many times each worker is.
    """

    checkpoint_dir: str = ""
    min_replicas: int | None = None
    history: Path | None = None
    max_restarts: int = options.MAX_RESTARTS.default
    restart_workers: int = 0

    @property
    def has_checkpoints(self) -> bool:
        """Whether a lost parameter server can get its part of the model back."""
        return bool(self.checkpoint_dir)

    @property
    def is_local(self) -> bool:
        """Whether the checkpoints are in a directory of this machine."""
        return self.has_checkpoints and "://" not in self.checkpoint_dir

    @property
    def directory(self) -> Path | None:
        """The local directory of the checkpoints, as the roles interpret its name; None: they are not in a local directory."""
        if self.is_local:
            return Path(self.checkpoint_dir).expanduser()
        parts = urlsplit(self.checkpoint_dir)
        # The roles refuse a URL that names another host.
        is_here = parts.scheme == "file" and parts.netloc in ("", "localhost") and bool(parts.path)
        return Path(unquote(parts.path)).expanduser() if is_here else None

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the roles. A URL is passed here because it may contain a password, and every user can read command lines."""
        return {options.CHECKPOINT_DIR.variable: self.checkpoint_dir} if self.has_checkpoints and not self.is_local else {}

    def words(self, role: Program) -> list[str]:
        """Returns a role's arguments."""
        values: dict[Option[Any], object] = {options.HISTORY: self.history, options.MIN_REPLICAS: self.min_replicas}
        values[options.CHECKPOINT_DIR] = self.checkpoint_dir if self.is_local else None
        return options.words_of(values, role)


NO_RECOVERY = Recovery()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The processes to start. A step needs `num_workers - num_backups` contributions, and does not wait for the slowest `num_backups`.

    `num_required` sets the number of contributions directly; it may exceed the number of workers. Both apply to sync only. `chief_in_ps`:
    the chief runs in the process of ps 0. `has_standbys`: each parameter server has a second one that takes its place. `tensorboard`: a
    directory for event files, written by a process of its own; None: none. `page`: where the chief serves its page; empty: nowhere.
    `passed_on`: options that the launcher passes to the roles without interpreting them, with their values.
    """

    num_ps: int
    num_workers: int
    num_backups: int = 0
    num_required: int | None = None
    is_tcp: bool = False
    chief_in_ps: bool = False
    has_standbys: bool = False
    policy: PolicySpec = DEFAULT_POLICY
    recovery: Recovery = NO_RECOVERY
    tensorboard: Path | None = None
    page: str = ""
    passed_on: Mapping[Option[Any], object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise LaunchFailed(f"--workers: got {self.num_workers}, want 1 or more", exit_code=ExitCode.USAGE)
        if not 0 <= self.num_backups < self.num_workers:
            want = f"0 to {self.num_workers - 1}, since {self.num_workers} workers are to be started and a step needs one at least"
            raise LaunchFailed(f"--backup-workers: got {self.num_backups}, want {want}", exit_code=ExitCode.USAGE)
        if self.num_backups and self.num_required is not None:
            raise LaunchFailed(
                "--backup-workers and --replicas-to-aggregate say the same in two ways; give one of them", exit_code=ExitCode.USAGE
            )
        if not self.is_sync and (self.num_backups or self.num_required is not None):
            flag = "--backup-workers" if self.num_backups else "--replicas-to-aggregate"
            raise LaunchFailed(
                f"{flag}: only the policy sync has steps of several contributions, not {self.policy.text}", exit_code=ExitCode.USAGE
            )
        if (least := self.recovery.min_replicas) is not None and not (self.is_sync and least <= self.replicas_to_aggregate):
            want = f"1 to {self.replicas_to_aggregate}, which a step needs when no worker is lost" if self.is_sync else "the policy sync"
            raise LaunchFailed(f"--min-replicas: got {least}, want {want}", exit_code=ExitCode.USAGE)
        if self.has_standbys and self.chief_in_ps:
            raise LaunchFailed(
                "--standbys: the chief has none, so it needs a process of its own; leave out --chief-in-ps", exit_code=ExitCode.USAGE
            )

    @property
    def is_sync(self) -> bool:
        """Whether a step is the mean of several contributions; with the other policies every contribution is a step."""
        return self.policy.has_common_steps

    @property
    def replicas_to_aggregate(self) -> int:
        """Contributions that a step needs while the policy is sync."""
        return self.num_workers - self.num_backups if self.num_required is None else self.num_required

    @property
    def num_workers_needed(self) -> int:
        """The number of workers without which training cannot continue."""
        if not self.policy.needs_many_workers:
            return 1
        if self.recovery.min_replicas is not None:
            return self.recovery.min_replicas
        return min(self.replicas_to_aggregate, self.num_workers)

    @property
    def needs_text(self) -> str:
        """A description of the contributions that a step needs."""
        if not self.is_sync:
            return f"policy {self.policy.text}: every contribution is a step"
        needs = self.replicas_to_aggregate
        return f"a step needs {needs}" if self.policy == DEFAULT_POLICY else f"policy {self.policy.text}: a step needs {needs}"

    def words(self, role: Program) -> list[str]:
        """Returns a role's arguments, without those for its addresses."""
        values: dict[Option[Any], object] = {options.EXPECTED_WORKERS: self.num_workers, **self.passed_on}
        if self.num_required is not None:
            values[options.CONTRIBUTIONS] = self.num_required
        elif self.num_backups:
            values[options.BACKUP_WORKERS] = self.num_backups
        policy = options.policy_words(self.policy) if role is options.CHIEF else []
        return [*options.words_of(values, role), *policy, *self.recovery.words(role)]


def spec_of(given: Given, *, num_ps: int = 1, num_workers: int = 1, num_backups: int | None = None) -> ClusterSpec:
    """Returns the specification for a launcher's flags; the arguments are defaults for flags that were not given. Raises LaunchFailed.

    `num_backups` None: with sync and several workers 1, else 0.
    """
    try:
        options.check_place(given)
        policy = options.policy_of(given)
        _check_restore(given)
        num_workers = given[options.NUM_WORKERS] or num_workers
        if num_backups is None:
            num_backups = int(policy.has_common_steps and num_workers > 1)
        backups = given[options.BACKUP_WORKERS]
        return ClusterSpec(
            num_ps=given[options.NUM_PS] or num_ps,
            num_workers=num_workers,
            num_backups=num_backups if backups is None else backups,
            num_required=given[options.CONTRIBUTIONS],
            is_tcp=given[options.TCP],
            chief_in_ps=given[options.CHIEF_IN_PS],
            has_standbys=given[options.STANDBYS],
            policy=policy,
            recovery=Recovery(
                checkpoint_dir=given[options.CHECKPOINT_DIR],
                min_replicas=given[options.MIN_REPLICAS],
                history=given[options.HISTORY],
                max_restarts=given[options.MAX_RESTARTS],
                restart_workers=given[options.RESTART_WORKERS],
            ),
            tensorboard=given[options.TENSORBOARD],
            page=options.DEFAULT_ADDRESS if (page := given[options.PAGE]) is None else page,
            passed_on={option: given[option] for option in options.TABLE if _is_passed_on(option) and option in given},
        )
    except InvalidSpec as error:
        raise LaunchFailed(error.message, exit_code=ExitCode.USAGE) from error


# Options that the launcher interprets itself and passes on in its own way.
_UNDERSTOOD = (options.BACKUP_WORKERS, options.CONTRIBUTIONS, options.CHECKPOINT_DIR, options.MIN_REPLICAS, options.HISTORY, options.PAGE)


def _is_passed_on(option: Option[Any]) -> bool:
    is_shared = options.UP in option.programs and bool({options.SERVER, options.CHIEF} & {*option.programs})
    return is_shared and option not in _UNDERSTOOD and option.group != options.POLICY_GROUP


def _check_restore(given: Given) -> None:
    if (tag := given[options.RESTORE]) not in ("latest", "none"):
        from ps_protocol.roles.checkpoint import check_tag  # NumPy is slow to import, and if it is broken, the roles report it

        try:
            check_tag(tag)
        except InvalidSpec as error:
            raise InvalidSpec(f"{options.RESTORE.flag}: {error.message}") from error
