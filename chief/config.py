"""The chief's configuration from flags, LOCKSTEP_* variables and TF_CONFIG, in this order. Knows no socket and starts nothing."""

import argparse
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from chief.options import DEFAULT_CHECKPOINT_INTERVAL_S, DEFAULT_CHECKPOINTS_KEPT, DEFAULT_LEASE_S, RESTORE_LATEST, CheckpointConfig
from chief.options import CoordinationConfig as CoordinationConfig
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.process.listening import check_bind_address
from ps_protocol.process.tf_config import TfConfig, parse_tf_config
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.identity import parse_address
from ps_protocol.security.options import OPEN, Security, add_security_flags, security_of

# Options of a command as flags or LOCKSTEP_* have them, read and checked one by one. Knows texts; no option.


Choice = TypeVar("Choice", bound=enum.Enum)


def option_text(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name and the text of an option: the flag's, else the variable's."""
    return (flag, given) if given is not None else (variable, environment.get(variable, "").strip())


def integer(flag: str, given: str | None, variable: str, environment: Mapping[str, str], *, least: int = 1) -> int | None:
    """Returns a whole number; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = int(text) if len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or value < least:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a whole number >= {least}")
    return value


def choice(kind: type[Choice], flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> Choice | None:
    """Returns the member of this word; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    by_word = {member.name.lower(): member for member in kind}
    if text.strip().lower() not in by_word:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want {' or '.join(by_word)}")
    return by_word[text.strip().lower()]


def number(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> float | None:
    """Returns a number > 0; None if the option was not given. Raises InvalidSpec."""
    name, text = option_text(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a number of seconds > 0")
    return value


def truth(variable: str, environment: Mapping[str, str]) -> bool:
    """Returns whether a variable says yes. Raises InvalidSpec."""
    text = environment.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise InvalidSpec(f"{variable}: got {text!r}, want 1 or 0")


# The chief's flags and LOCKSTEP_* for checkpoints and recovery. Knows arguments; opens no place.


def add_recovery_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="where checkpoints lie, a directory or a URL, the same for all roles [LOCKSTEP_CHECKPOINT_DIR] (none: no checkpoints)",
    )
    parser.add_argument(
        "--durability",
        metavar="none|interval|step",
        help="what the loss of a parameter server may cost: everything, the steps since the last checkpoint, or nothing"
        " [LOCKSTEP_DURABILITY] (interval)",
    )
    parser.add_argument(
        "--checkpoint-interval",
        metavar="SECONDS",
        help=f"time between checkpoints [LOCKSTEP_CHECKPOINT_INTERVAL] ({DEFAULT_CHECKPOINT_INTERVAL_S:g})",
    )
    parser.add_argument("--checkpoint-steps", metavar="N", help="steps between checkpoints [LOCKSTEP_CHECKPOINT_STEPS] (by time alone)")
    parser.add_argument(
        "--keep-checkpoints", metavar="K", help=f"how many are kept [LOCKSTEP_KEEP_CHECKPOINTS] ({DEFAULT_CHECKPOINTS_KEPT})"
    )
    parser.add_argument(
        "--restore", metavar="latest|none|TAG", help="which checkpoint to begin with, if there is one [LOCKSTEP_RESTORE] (latest)"
    )
    parser.add_argument(
        "--min-replicas",
        metavar="M",
        help="sync: when workers are gone, a step needs as many as are left, M at least [LOCKSTEP_MIN_REPLICAS] (as many as ever)",
    )
    parser.add_argument(
        "--takeover", action="store_true", help="take the parameter servers from their present chief, even if it seems to be alive"
    )
    parser.add_argument(
        "--history", metavar="DIR", type=Path, help="directory for a record that `lockstep verify` checks [LOCKSTEP_HISTORY] (none)"
    )
    parser.add_argument("--enable-failpoints", action="store_true", help="for tests: do what LOCKSTEP_FAILPOINTS says")


def place_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Returns where checkpoints lie; empty: nowhere."""
    given: str | None = flags.checkpoint_dir
    return (given if given is not None else environment.get("LOCKSTEP_CHECKPOINT_DIR", "")).strip()


def checkpoints_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> CheckpointConfig | None:
    """Returns when checkpoints are made; None if there is no place for them. Raises InvalidSpec if a flag asks for what cannot be."""
    durability = choice(Durability, "--durability", flags.durability, "LOCKSTEP_DURABILITY", environment)
    interval_s = number("--checkpoint-interval", flags.checkpoint_interval, "LOCKSTEP_CHECKPOINT_INTERVAL", environment)
    every_steps = integer("--checkpoint-steps", flags.checkpoint_steps, "LOCKSTEP_CHECKPOINT_STEPS", environment)
    keep = integer("--keep-checkpoints", flags.keep_checkpoints, "LOCKSTEP_KEEP_CHECKPOINTS", environment)
    if not place_of(flags, environment):
        asked = {"--durability": flags.durability, "--checkpoint-interval": flags.checkpoint_interval, "--restore": flags.restore}
        asked |= {"--checkpoint-steps": flags.checkpoint_steps, "--keep-checkpoints": flags.keep_checkpoints}
        for flag, given in asked.items():
            if given is not None and given != "none":
                raise InvalidSpec(f"{flag}: where do checkpoints lie? give --checkpoint-dir too, to all roles")
        return None
    return CheckpointConfig(
        durability=durability or Durability.INTERVAL,
        interval_s=DEFAULT_CHECKPOINT_INTERVAL_S if interval_s is None else interval_s,
        every_steps=every_steps,
        keep=keep or DEFAULT_CHECKPOINTS_KEPT,
        restore=flags.restore if flags.restore is not None else environment.get("LOCKSTEP_RESTORE", "").strip() or RESTORE_LATEST,
    )


# How the chief is to run, from flags, LOCKSTEP_* and TF_CONFIG. Knows arguments; no grpc.


DEFAULT_ADDRESS = "127.0.0.1:0"
DEFAULT_CLUSTER = "lockstep"
MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChiefConfig:
    """One chief. `ps` are the addresses of the parameter servers, by index; `announce` is a file for its own once it serves.

    `standbys` are those of their standbys, by index; an empty one, or none at all: there is none. `advertise`: where participants that have
    lost it find this chief (port 0: the one where it listens); empty: at `address`.

    `checkpoint_dir`: a path or a URL, the same for all roles; empty: there are no checkpoints, and `coordination` has none either.
    `is_takeover`: it takes the servers from their present chief, whatever that one does. `history`: a directory for a record of all steps.
    """

    ps: tuple[str, ...]
    standbys: tuple[str, ...] = ()
    coordination: CoordinationConfig = field(default_factory=CoordinationConfig)
    address: str = DEFAULT_ADDRESS
    advertise: str = ""
    announce: Path | None = None
    allow_insecure_network: bool = False
    security: Security = OPEN
    checkpoint_dir: str = ""
    is_takeover: bool = False
    history: Path | None = None
    enable_failpoints: bool = False

    def __post_init__(self) -> None:
        if not self.ps:
            raise InvalidSpec("which parameter servers? give --ps ADDRESS,ADDRESS (by index), or set LOCKSTEP_PS or TF_CONFIG")
        if len(self.ps) > MAX_SHARDS:
            raise InvalidSpec(f"--ps: {len(self.ps)} parameter servers, {MAX_SHARDS} at most")
        self._check_standbys()
        for index, address in enumerate(self.ps):
            parse_address(address)
            if address in self.ps[:index]:
                raise InvalidSpec(
                    f"--ps: {address} occurs twice, as ps {self.ps.index(address)} and ps {index}; each needs its own address"
                )
        parse_address(self.address, is_bind=True)
        if self.advertise:
            parse_address(self.advertise, is_bind=True)
        check_bind_address(self.address, is_insecure_network_allowed=self.allow_insecure_network, is_closed=self.security.is_closed)

    def _check_standbys(self) -> None:
        if len(self.standbys) > len(self.ps):
            raise InvalidSpec(f"--standbys: {len(self.standbys)} for {len(self.ps)} parameter servers; want one for each at most, by index")
        if any(self.standbys) and self.history is not None:
            raise InvalidSpec("--history: `lockstep verify` knows one server a shard; leave out --history, or --standbys")
        given = [*self.ps, *filter(None, self.standbys)]
        for index, address in enumerate(self.standbys):
            if address:
                parse_address(address)
                if given.count(address) > 1:
                    raise InvalidSpec(f"--standbys: {address} (of ps {index}) occurs twice; each process needs its own address")


def parse_config(arguments: Sequence[str], *, environment: Mapping[str, str]) -> ChiefConfig:
    """Returns the configuration: each part from its flag, else LOCKSTEP_*, else TF_CONFIG, else its default. Raises InvalidSpec."""
    flags = _parser().parse_args(arguments)
    tf_config = parse_tf_config(environment.get("TF_CONFIG", ""))
    task = tf_config if tf_config is not None and tf_config.task_type == "chief" else None
    ps = flags.ps if flags.ps is not None else environment.get("LOCKSTEP_PS", "")
    return ChiefConfig(
        ps=tuple(part.strip() for part in ps.split(",") if part.strip()) or (task.ps if task else ()),
        standbys=_standbys(flags.standbys if flags.standbys is not None else environment.get("LOCKSTEP_STANDBYS", "")),
        coordination=_coordination(flags, environment, task),
        address=flags.address or environment.get("LOCKSTEP_ADDRESS") or (task.bind_address if task else None) or DEFAULT_ADDRESS,
        advertise=flags.advertise if flags.advertise is not None else environment.get("LOCKSTEP_ADVERTISE", ""),
        announce=flags.announce,
        allow_insecure_network=flags.allow_insecure_network or truth("LOCKSTEP_ALLOW_INSECURE_NETWORK", environment),
        security=security_of(flags, environment, is_server=True),
        checkpoint_dir=place_of(flags, environment),
        is_takeover=flags.takeover,
        history=flags.history or (Path(history) if (history := environment.get("LOCKSTEP_HISTORY", "").strip()) else None),
        enable_failpoints=flags.enable_failpoints,
    )


def _standbys(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def _coordination(flags: argparse.Namespace, environment: Mapping[str, str], task: TfConfig | None) -> CoordinationConfig:
    total = integer("--total-num-replicas", flags.total_num_replicas, "LOCKSTEP_TOTAL_NUM_REPLICAS", environment)
    required = integer("--replicas-to-aggregate", flags.replicas_to_aggregate, "LOCKSTEP_REPLICAS_TO_AGGREGATE", environment)
    lease_s = number("--lease", flags.lease, "LOCKSTEP_LEASE_S", environment)
    return CoordinationConfig(
        cluster=flags.cluster if flags.cluster is not None else environment.get("LOCKSTEP_CLUSTER") or DEFAULT_CLUSTER,
        replicas_to_aggregate=required,
        # A cluster that lists its workers has so many.
        total_num_replicas=total if total is not None or task is None else len(task.workers) or None,
        max_steps=integer("--max-steps", flags.max_steps, "LOCKSTEP_MAX_STEPS", environment),
        lease_s=DEFAULT_LEASE_S if lease_s is None else lease_s,
        policy=_policy(flags, environment),
        min_replicas=integer("--min-replicas", flags.min_replicas, "LOCKSTEP_MIN_REPLICAS", environment),
        checkpoints=checkpoints_of(flags, environment),
        reject_nonfinite=flags.reject_nonfinite or truth("LOCKSTEP_REJECT_NONFINITE", environment),
    )


def _policy(flags: argparse.Namespace, environment: Mapping[str, str]) -> PolicySpec:
    name = choice(PolicyName, "--policy", flags.policy, "LOCKSTEP_POLICY", environment) or PolicyName.SYNC
    tokens = choice(TokenMode, "--tokens", flags.tokens, "LOCKSTEP_TOKENS", environment) or TokenMode.STRICT
    num_tokens = integer("--num-tokens", flags.num_tokens, "LOCKSTEP_NUM_TOKENS", environment, least=-1)
    staleness = integer("--staleness", flags.staleness, "LOCKSTEP_STALENESS", environment, least=0)
    max_staleness = integer("--max-staleness", flags.max_staleness, "LOCKSTEP_MAX_STALENESS", environment, least=0)
    too_stale = choice(TooStale, "--too-stale", flags.too_stale, "LOCKSTEP_TOO_STALE", environment)
    # What would do nothing is a mistake of whoever gives it; what cannot be, the policy itself refuses.
    if staleness is not None and name is not PolicyName.SSP:
        raise InvalidSpec(f"{_given('--staleness', flags.staleness)}: it is for the policy ssp, not {name.name.lower()}")
    if num_tokens is not None and tokens is not TokenMode.FIFO:
        raise InvalidSpec(f"{_given('--num-tokens', flags.num_tokens)}: only --tokens fifo has it")
    if too_stale is not None and max_staleness is None:
        words = "give --max-staleness, beyond which a contribution is too stale"
        raise InvalidSpec(f"{_given('--too-stale', flags.too_stale)}: {words}")
    return PolicySpec(
        name=name,
        tokens=tokens,
        num_tokens=-1 if num_tokens is None else num_tokens,
        staleness=staleness or 0,
        use_locking=not (flags.no_locking or truth("LOCKSTEP_NO_LOCKING", environment)),
        max_staleness=max_staleness,
        too_stale=too_stale or TooStale.DROP,
    )


def _given(flag: str, text: str | None) -> str:
    """Where an option comes from: the flag, or its variable."""
    return flag if text is not None else f"LOCKSTEP_{flag.removeprefix('--').replace('-', '_').upper()}"


class _Parser(argparse.ArgumentParser):
    """Leaves the words of an error to the caller, which says them in one line."""

    def error(self, message: str) -> NoReturn:
        raise InvalidSpec(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m chief", description="Runs the chief of a cluster until training is finished.", allow_abbrev=False)
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="where to listen, host:port or unix:/path; port 0: any free one [LOCKSTEP_ADDRESS] (127.0.0.1:0)",
    )
    parser.add_argument(
        "--advertise",
        metavar="ADDRESS",
        help="where workers that have lost their chief find this one; port 0: as in --address [LOCKSTEP_ADVERTISE] (where it listens;"
        " if that is everywhere, the address that this machine has towards the parameter servers)",
    )
    parser.add_argument("--ps", metavar="ADDRESSES", help="the parameter servers, by index, with commas between [LOCKSTEP_PS]")
    parser.add_argument(
        "--standbys",
        metavar="ADDRESSES",
        help="a second server for each parameter server, by index, with commas between; an empty part: none [LOCKSTEP_STANDBYS] (none)",
    )
    parser.add_argument("--cluster", metavar="NAME", help="name of the cluster; others are refused [LOCKSTEP_CLUSTER] (lockstep)")
    parser.add_argument(
        "--replicas-to-aggregate",
        metavar="R",
        help="contributions that a step needs [LOCKSTEP_REPLICAS_TO_AGGREGATE] (T, or 1 if T is not given)",
    )
    parser.add_argument(
        "--total-num-replicas",
        metavar="T",
        help="workers expected; more than R: backups, fewer: several contributions each [LOCKSTEP_TOTAL_NUM_REPLICAS] (any number)",
    )
    parser.add_argument("--max-steps", metavar="N", help="step at which training is finished [LOCKSTEP_MAX_STEPS] (none)")
    parser.add_argument(
        "--lease",
        metavar="SECONDS",
        help=f"a worker silent for so long counts as gone [LOCKSTEP_LEASE_S] ({DEFAULT_LEASE_S:g})",
    )
    parser.add_argument(
        "--reject-nonfinite",
        action="store_true",
        help="refuse a gradient that has infinities or NaN when it is pushed [LOCKSTEP_REJECT_NONFINITE=1] (they count as any other)",
    )
    _add_policy(parser)
    add_recovery_flags(parser)
    parser.add_argument("--announce", metavar="FILE", type=Path, help="file to write the address to, once it serves")
    parser.add_argument(
        "--allow-insecure-network",
        action="store_true",
        help="listen where others than this machine can reach it, without encryption [LOCKSTEP_ALLOW_INSECURE_NETWORK=1]",
    )
    add_security_flags(parser, is_server=True)
    return parser


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", metavar="sync|ssp|async", help="how workers are coordinated; may be changed while training [LOCKSTEP_POLICY] (sync)"
    )
    parser.add_argument(
        "--tokens",
        metavar="strict|fifo",
        help="sync: tokens always of the open step, or the queue of SyncReplicasOptimizer [LOCKSTEP_TOKENS] (strict)",
    )
    parser.add_argument("--num-tokens", metavar="N", help="fifo: tokens at the start; -1: as many as R [LOCKSTEP_NUM_TOKENS] (-1)")
    parser.add_argument(
        "--staleness", metavar="S", help="ssp: contributions that a worker may be ahead of the slowest [LOCKSTEP_STALENESS] (0)"
    )
    parser.add_argument(
        "--no-locking",
        action="store_true",
        help="async: servers apply on arrival without a lock; concurrent updates may be lost [LOCKSTEP_NO_LOCKING=1]",
    )
    parser.add_argument(
        "--max-staleness", metavar="N", help="ssp and async: steps beyond which a contribution is too stale [LOCKSTEP_MAX_STALENESS] (none)"
    )
    parser.add_argument(
        "--too-stale",
        metavar="drop|scale",
        help="what becomes of it: dropped, or applied with the weight 1 / (1 + excess) [LOCKSTEP_TOO_STALE] (drop)",
    )
