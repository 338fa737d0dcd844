"""What a launcher was told of a cluster, and what it tells the roles. Knows options; starts nothing, reads no checkpoint."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lockstep.launcher.engines.engine import Engine, engine_of
from lockstep.launcher.hosts import Host, parse_hosts
from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import CHIEF, SERVER, UP, Given, Option, options_of, split_range, text_of

_FLAGS: dict[str, Option[Any]] = {option.key: option for option in options_of(UP)}


class ClusterSpec:
    """The flags of a launcher, checked: `ClusterSpec(ps=2, workers=3, max_steps=100)`. A flag that is None or False was not given.

    Raises LaunchFailed, with the exit code for a wrong use, for flags that make no cluster. The launcher interprets what it needs itself,
    and tells the roles all texts as they were given, in `told`: variables and not flags, because every user can read command lines, and
    the URL of a checkpoint may contain a password.
    """

    def __init__(self, **flags: object) -> None:
        given = given_of(flags)
        try:
            options.check_place(given)
            _check_restore(given)
            self.policy = options.policy_of(given)
            if given[options.HOSTS] and given[options.ENGINE]:
                raise InvalidSpec("--hosts: the --engine says which machines there are; leave out one of the two")
            # The engine in whose job the cluster runs; None: there is none.
            self.engine: Engine | None = engine_of(given[options.ENGINE], os.environ) if given[options.ENGINE] else None
            # Other machines that the processes run on; none: all run here.
            self.hosts = parse_hosts(given[options.HOSTS]) if self.engine is None else self.engine.hosts
            self.num_workers = given[options.NUM_WORKERS] or (self.engine.num_workers if self.engine is not None else 0) or 1
            # The workers only stand for programs that the engine itself has started.
            self.has_standins = self.engine is not None and self.engine.starts_workers
            if self.engine is not None and self.has_standins and self.num_workers != self.engine.num_workers:
                raise InvalidSpec(f"--workers: got {self.num_workers}, and {given[options.ENGINE]} has started {self.engine.num_workers}")
            # The host of each worker, if the engine has placed them.
            self.places: tuple[Host, ...] = ()
            if self.engine is not None and self.engine.place is not None:
                self.places = self.engine.place(self.num_workers)
                self.hosts = tuple(dict.fromkeys(self.places))
            required = options.contributions_of(given, self.policy.name, num_workers=self.num_workers)
            # Contributions that a step needs while the policy is sync.
            self.num_required = required or self.num_workers
            options.check_least(given, self.policy, num_required=self.num_required)
        except InvalidSpec as error:
            raise LaunchFailed(error.message, exit_code=ExitCode.USAGE) from error
        self.num_ps = given[options.NUM_PS] or 1
        self.num_backups = given[options.BACKUP_WORKERS] or 0
        self.min_replicas = given[options.MIN_REPLICAS]
        self.worker_gpus = given[options.WORKER_GPUS] or (self.engine.worker_gpus if self.engine is not None else 0)
        self.is_tcp = given[options.TCP]
        self.host_python, self.host_dir, self.host_env = given[options.HOST_PYTHON], given[options.HOST_DIR], given[options.HOST_ENV]
        # The chief runs in the process of ps 0.
        self.chief_in_ps = given[options.CHIEF_IN_PS]
        # Each parameter server has a second one that takes its place.
        self.has_standbys = given[options.STANDBYS]
        # A path or a URL; empty: no checkpoints.
        self.checkpoint_dir = given[options.CHECKPOINT_DIR]
        self.history = given[options.HISTORY]
        # How many times in quick succession a failed role is started again; how many times each worker is.
        self.max_restarts, self.restart_workers = given[options.MAX_RESTARTS], given[options.RESTART_WORKERS]
        # A directory for event files, written by a process of its own; None: none.
        self.tensorboard = given[options.TENSORBOARD]
        # Where the chief serves its page; empty: nowhere.
        self.page = options.DEFAULT_ADDRESS if (page := given[options.PAGE]) is None else page
        self.told = {
            option.variable: text
            for option in _FLAGS.values()
            if {SERVER, CHIEF} & {*option.programs} and (text := given.flag_of(option)) is not None
        } | {options.EXPECTED_WORKERS.variable: str(self.num_workers)}
        if self.hosts and self.chief_in_ps:
            raise LaunchFailed("--chief-in-ps: on several hosts the chief has a process of its own", exit_code=ExitCode.USAGE)
        if self.has_standbys and self.chief_in_ps:
            raise LaunchFailed(
                "--standbys: the chief has none, so it needs a process of its own; leave out --chief-in-ps", exit_code=ExitCode.USAGE
            )

    @property
    def has_checkpoints(self) -> bool:
        """Whether a lost parameter server can get its part of the model back."""
        return bool(self.checkpoint_dir)

    @property
    def directory(self) -> Path | None:
        """The local directory of the checkpoints, as the roles interpret its name; None: they are not in a local directory."""
        return directory_of(self.checkpoint_dir)

    @property
    def num_workers_needed(self) -> int:
        """The number of workers without which training cannot continue."""
        return (self.min_replicas or min(self.num_required, self.num_workers)) if self.policy.needs_many_workers else 1

    @property
    def needs_text(self) -> str:
        """A description of the contributions that a step needs."""
        needs = f"a step needs {self.num_required}" if self.policy.has_common_steps else "every contribution is a step"
        return needs if self.policy.text == "sync" else f"policy {self.policy.text}: {needs}"


def directory_of(place: str) -> Path | None:
    """Returns the local directory of checkpoints, as roles interpret its name; None: they are in none."""
    if place and "://" not in place:
        return Path(place).expanduser()
    parts = urlsplit(place)
    # The roles refuse a URL that names another host.
    is_here = parts.scheme == "file" and parts.netloc in ("", "localhost") and bool(parts.path)
    return Path(unquote(parts.path)).expanduser() if is_here else None


def flags_of(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the flags of a cluster among the arguments of a launcher, those that were given."""
    return {key: value for key, value in vars(arguments).items() if key in _FLAGS and value is not None}


def given_of(flags: Mapping[str, object]) -> Given:
    """Returns the options of these flags. Raises LaunchFailed for a wrong one, before anything starts."""
    if unknown := flags.keys() - _FLAGS.keys():
        raise TypeError(f"a cluster has no flags {', '.join(sorted(unknown))}")
    texts = {key: text_of(value) for key, value in flags.items() if value is not None and value is not False}
    try:
        given = Given(split_range(texts), {})
        for option in _FLAGS.values():
            given[option]
    except InvalidSpec as error:
        raise LaunchFailed(error.message, exit_code=ExitCode.USAGE) from error
    return given


def _check_restore(given: Given) -> None:
    if (tag := given[options.RESTORE]) not in ("latest", "none"):
        from ps_protocol.roles.checkpoint import check_tag  # NumPy is slow to import, and if it is broken, the roles report it

        try:
            check_tag(tag)
        except InvalidSpec as error:
            raise InvalidSpec(f"{options.RESTORE.flag}: {error.message}") from error
