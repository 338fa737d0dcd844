"""What a launched cluster is asked for: policy, checkpoints, restarts; as flags, values and the roles' arguments. Starts nothing."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale

# The flags that choose a coordination policy, both ways: from arguments to a PolicySpec, and on to a chief's arguments. Starts nothing.


POLICIES = tuple(name.name.lower() for name in PolicyName)


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds the numbers of the policies; the policy's own name is the caller's to add."""
    group = parser.add_argument_group("the policy's numbers")
    group.add_argument("--tokens", choices=("strict", "fifo"), help="sync: fifo is exactly SyncReplicasOptimizer's queue (default strict)")
    group.add_argument("--num-tokens", type=int, metavar="N", help="sync with fifo: tokens there are at first (default -1: as many as R)")
    group.add_argument(
        "--staleness", type=int, metavar="S", help="ssp: contributions that a worker may be ahead of the slowest (default 0)"
    )
    group.add_argument("--no-locking", action="store_true", help="async: apply on arrival, without a lock; updates may be lost")
    group.add_argument(
        "--max-staleness", type=int, metavar="N", help="ssp, async: contributions that are more stale … (default: any count)"
    )
    group.add_argument("--too-stale", choices=("drop", "scale"), help="… are dropped, or applied with less weight (default drop)")


def policy_of(arguments: argparse.Namespace, *, replicas_to_aggregate: int | None = None) -> PolicySpec:
    """Returns the policy that the arguments name. Raises InvalidSpec, also for a number that the policy has no use for."""
    name = PolicyName[arguments.policy.upper()]
    _check_use(arguments, name)
    return PolicySpec(
        name=name,
        tokens=TokenMode.FIFO if arguments.tokens == "fifo" else TokenMode.STRICT,
        num_tokens=-1 if arguments.num_tokens is None else arguments.num_tokens,
        replicas_to_aggregate=replicas_to_aggregate,
        staleness=arguments.staleness or 0,
        use_locking=not arguments.no_locking,
        max_staleness=arguments.max_staleness,
        too_stale=TooStale.SCALE if arguments.too_stale == "scale" else TooStale.DROP,
    )


def policy_flags(policy: PolicySpec) -> list[str]:
    """Returns the arguments that make `python -m chief` begin with this policy; R and T have their own."""
    flags = ["--policy", policy.name.name.lower()]
    if policy.tokens is TokenMode.FIFO:
        flags += ["--tokens", "fifo", "--num-tokens", str(policy.num_tokens)]
    if policy.name is PolicyName.SSP:
        flags += ["--staleness", str(policy.staleness)]
    if not policy.use_locking:
        flags += ["--no-locking"]
    if policy.max_staleness is not None:
        flags += ["--max-staleness", str(policy.max_staleness), "--too-stale", policy.too_stale.name.lower()]
    return flags


def _check_use(arguments: argparse.Namespace, name: PolicyName) -> None:
    """A flag that would do nothing is a mistake of whoever gives it."""
    users = {
        "tokens": {PolicyName.SYNC},
        "num_tokens": {PolicyName.SYNC},
        "staleness": {PolicyName.SSP},
        "no_locking": {PolicyName.ASYNC},
        "max_staleness": {PolicyName.SSP, PolicyName.ASYNC},
        "too_stale": {PolicyName.SSP, PolicyName.ASYNC},
    }
    for flag, names in users.items():
        if getattr(arguments, flag) not in (None, False) and name not in names:
            words = " and ".join(sorted(user.name.lower() for user in names))
            raise InvalidSpec(f"--{flag.replace('_', '-')}: it is for the policy {words}, not {name.name.lower()}")
    if arguments.num_tokens is not None and arguments.tokens != "fifo":
        raise InvalidSpec("--num-tokens: only --tokens fifo has it")
    if arguments.too_stale is not None and arguments.max_staleness is None:
        raise InvalidSpec("--too-stale: give --max-staleness, beyond which a contribution is too stale")


# The flags that say what a cluster keeps and what is started again, and how roles are told. Starts nothing; reads no checkpoint.


DEFAULT_MAX_RESTARTS = 5
# The words of ps_protocol.roles.checkpoint.Durability: NumPy takes its time to import, and a broken one is the roles' to tell of.
DURABILITIES = ("none", "interval", "step")
_USAGE = 2
_WORDS = ("latest", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What is kept, and what comes back. None: as the roles do by themselves. `checkpoint_dir` is a path or a URL; empty: no checkpoints.

    `max_restarts`: how often in a row a role is started again that ended soon after its start. `restart_workers`: how often each worker is.
    """

    checkpoint_dir: str = ""
    durability: str | None = None
    interval_s: float | None = None
    interval_steps: int | None = None
    num_kept: int | None = None
    restore: str | None = None
    min_replicas: int | None = None
    history: Path | None = None
    max_restarts: int = DEFAULT_MAX_RESTARTS
    restart_workers: int = 0

    def __post_init__(self) -> None:
        counts = {"--checkpoint-steps": self.interval_steps, "--keep-checkpoints": self.num_kept, "--min-replicas": self.min_replicas}
        for flag, value in counts.items():
            if value is not None and value < 1:
                raise LaunchFailed(f"{flag}: got {value}, want 1 or more", exit_code=_USAGE)
        for flag, value in {"--max-restarts": self.max_restarts, "--restart-workers": self.restart_workers}.items():
            if value < 0:
                raise LaunchFailed(f"{flag}: got {value}, want 0 or more", exit_code=_USAGE)
        if self.interval_s is not None and not self.interval_s > 0:
            raise LaunchFailed(f"--checkpoint-interval: got {self.interval_s:g}, want more than 0 seconds", exit_code=_USAGE)
        if not self.checkpoint_dir:
            self._check_nothing_needs_a_directory()
        if self.restore is not None and self.restore not in _WORDS:
            _check_tag(self.restore)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a parameter server that was lost can get its part of the model back."""
        return bool(self.checkpoint_dir)

    @property
    def is_local(self) -> bool:
        """Whether the checkpoints lie in a directory of this machine."""
        return self.has_checkpoints and "://" not in self.checkpoint_dir

    @property
    def directory(self) -> Path | None:
        """The directory of this machine that the checkpoints lie in, as the roles understand its name; None: there is none."""
        if self.is_local:
            return Path(self.checkpoint_dir).expanduser()
        parts = urlsplit(self.checkpoint_dir)
        # What is wrong with another host's name, the roles tell.
        is_here = parts.scheme == "file" and parts.netloc in ("", "localhost") and bool(parts.path)
        return Path(unquote(parts.path)).expanduser() if is_here else None

    @property
    def ps_flags(self) -> list[str]:
        """What each parameter server is told."""
        return _given({"--checkpoint-dir": self.checkpoint_dir if self.is_local else None, "--history": self.history})

    @property
    def environment(self) -> dict[str, str]:
        """What is told by a variable: there may be a password in a URL, and everybody on the machine sees command lines."""
        return {"LOCKSTEP_CHECKPOINT_DIR": self.checkpoint_dir} if self.has_checkpoints and not self.is_local else {}

    @property
    def chief_flags(self) -> list[str]:
        """What the chief is told."""
        return [
            *self.ps_flags,
            *_given({"--durability": self.durability, "--checkpoint-interval": self.interval_s, "--checkpoint-steps": self.interval_steps}),
            *_given({"--keep-checkpoints": self.num_kept, "--restore": self.restore, "--min-replicas": self.min_replicas}),
        ]

    def _check_nothing_needs_a_directory(self) -> None:
        given = {
            "--durability": self.durability not in (None, "none"),
            "--checkpoint-interval": self.interval_s is not None,
            "--checkpoint-steps": self.interval_steps is not None,
            "--keep-checkpoints": self.num_kept is not None,
            "--restore": self.restore not in (None, "none"),
        }
        for flag, is_given in given.items():
            if is_given:
                raise LaunchFailed(f"{flag}: where do checkpoints lie? give --checkpoint-dir too", exit_code=_USAGE)


NO_RECOVERY = Recovery()


def add_recovery_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("what is kept, and what comes back")
    group.add_argument(
        "--checkpoint-dir", default="", metavar="DIR", help="where checkpoints lie, a directory or a URL (default: there are none)"
    )
    group.add_argument(
        "--durability",
        choices=DURABILITIES,
        help="what the loss of a parameter server may cost: all steps, those since the last checkpoint (default), or none",
    )
    group.add_argument("--checkpoint-interval", type=float, metavar="S", help="seconds between checkpoints (default 60)")
    group.add_argument("--checkpoint-steps", type=int, metavar="N", help="steps between checkpoints, instead of seconds")
    group.add_argument("--keep-checkpoints", type=int, metavar="K", help="how many are kept")
    group.add_argument("--restore", metavar="WHAT", help="begin from the latest checkpoint (default), none, or the one of this name")
    group.add_argument(
        "--min-replicas", type=int, metavar="M", help="sync: when workers are gone, a step needs as many as are left, M at least"
    )
    group.add_argument(
        "--restart-workers", type=int, default=0, metavar="N", help="how often each worker that fails is started again (default 0)"
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=DEFAULT_MAX_RESTARTS,
        metavar="N",
        help="start a chief that was killed again, and with checkpoints a parameter server, N times in quick succession (default 5)",
    )
    group.add_argument("--history", type=Path, metavar="DIR", help="write down all that `lockstep verify DIR` needs to check the training")


def recovery_of(arguments: argparse.Namespace) -> Recovery:
    """Returns what the arguments say. Raises LaunchFailed for what makes no sense."""
    return Recovery(
        checkpoint_dir=arguments.checkpoint_dir,
        durability=arguments.durability,
        interval_s=arguments.checkpoint_interval,
        interval_steps=arguments.checkpoint_steps,
        num_kept=arguments.keep_checkpoints,
        restore=arguments.restore,
        min_replicas=arguments.min_replicas,
        history=arguments.history,
        max_restarts=arguments.max_restarts,
        restart_workers=arguments.restart_workers,
    )


def _check_tag(tag: str) -> None:
    from ps_protocol.errors import InvalidSpec
    from ps_protocol.roles.checkpoint import check_tag  # as above

    try:
        check_tag(tag)
    except InvalidSpec as error:
        raise LaunchFailed(f"--restore: {error.message}", exit_code=_USAGE) from error


def _given(flags: dict[str, object]) -> list[str]:
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
