"""How the chief is to run, from flags, LOCKSTEP_* and TF_CONFIG. Knows arguments; no grpc."""

import argparse
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from chief.coordination import DEFAULT_LEASE_S
from chief.coordination import CoordinationConfig as CoordinationConfig
from ps_protocol.addresses import parse_address
from ps_protocol.errors import InvalidSpec
from ps_protocol.listening import check_bind_address
from ps_protocol.policy_spec import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.tf_config import TfConfig, parse_tf_config

DEFAULT_ADDRESS = "127.0.0.1:0"
DEFAULT_CLUSTER = "lockstep"
MAX_SHARDS = 10_000

Choice = TypeVar("Choice", bound=enum.Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChiefConfig:
    """One chief. `ps` are the addresses of the parameter servers, by index; `announce` is a file for its own once it serves."""

    ps: tuple[str, ...]
    coordination: CoordinationConfig = field(default_factory=CoordinationConfig)
    address: str = DEFAULT_ADDRESS
    announce: Path | None = None
    allow_insecure_network: bool = False

    def __post_init__(self) -> None:
        if not self.ps:
            raise InvalidSpec("which parameter servers? give --ps ADDRESS,ADDRESS (by index), or set LOCKSTEP_PS or TF_CONFIG")
        if len(self.ps) > MAX_SHARDS:
            raise InvalidSpec(f"--ps: {len(self.ps)} parameter servers, {MAX_SHARDS} at most")
        for index, address in enumerate(self.ps):
            parse_address(address)
            if address in self.ps[:index]:
                raise InvalidSpec(
                    f"--ps: {address} occurs twice, as ps {self.ps.index(address)} and ps {index}; each needs its own address"
                )
        parse_address(self.address, is_bind=True)
        check_bind_address(self.address, is_insecure_network_allowed=self.allow_insecure_network)


def parse_config(arguments: Sequence[str], *, environment: Mapping[str, str]) -> ChiefConfig:
    """Returns the configuration: each part from its flag, else LOCKSTEP_*, else TF_CONFIG, else its default. Raises InvalidSpec."""
    flags = _parser().parse_args(arguments)
    tf_config = parse_tf_config(environment.get("TF_CONFIG", ""))
    task = tf_config if tf_config is not None and tf_config.task_type == "chief" else None
    ps = flags.ps if flags.ps is not None else environment.get("LOCKSTEP_PS", "")
    return ChiefConfig(
        ps=tuple(part.strip() for part in ps.split(",") if part.strip()) or (task.ps if task else ()),
        coordination=_coordination(flags, environment, task),
        address=flags.address or environment.get("LOCKSTEP_ADDRESS") or (task.bind_address if task else None) or DEFAULT_ADDRESS,
        announce=flags.announce,
        allow_insecure_network=flags.allow_insecure_network or _truth("LOCKSTEP_ALLOW_INSECURE_NETWORK", environment),
    )


def _coordination(flags: argparse.Namespace, environment: Mapping[str, str], task: TfConfig | None) -> CoordinationConfig:
    total = _integer("--total-num-replicas", flags.total_num_replicas, "LOCKSTEP_TOTAL_NUM_REPLICAS", environment)
    required = _integer("--replicas-to-aggregate", flags.replicas_to_aggregate, "LOCKSTEP_REPLICAS_TO_AGGREGATE", environment)
    lease_s = _number("--lease", flags.lease, "LOCKSTEP_LEASE_S", environment)
    return CoordinationConfig(
        cluster=flags.cluster if flags.cluster is not None else environment.get("LOCKSTEP_CLUSTER") or DEFAULT_CLUSTER,
        replicas_to_aggregate=required,
        # A cluster that lists its workers has so many.
        total_num_replicas=total if total is not None or task is None else len(task.workers) or None,
        max_steps=_integer("--max-steps", flags.max_steps, "LOCKSTEP_MAX_STEPS", environment),
        lease_s=DEFAULT_LEASE_S if lease_s is None else lease_s,
        policy=_policy(flags, environment),
    )


def _policy(flags: argparse.Namespace, environment: Mapping[str, str]) -> PolicySpec:
    num_tokens = _integer("--num-tokens", flags.num_tokens, "LOCKSTEP_NUM_TOKENS", environment, least=-1)
    staleness = _integer("--staleness", flags.staleness, "LOCKSTEP_STALENESS", environment, least=0)
    return PolicySpec(
        name=_choice(PolicyName, "--policy", flags.policy, "LOCKSTEP_POLICY", environment) or PolicyName.SYNC,
        tokens=_choice(TokenMode, "--tokens", flags.tokens, "LOCKSTEP_TOKENS", environment) or TokenMode.STRICT,
        num_tokens=-1 if num_tokens is None else num_tokens,
        staleness=staleness or 0,
        use_locking=not (flags.no_locking or _truth("LOCKSTEP_NO_LOCKING", environment)),
        max_staleness=_integer("--max-staleness", flags.max_staleness, "LOCKSTEP_MAX_STALENESS", environment, least=0),
        too_stale=_choice(TooStale, "--too-stale", flags.too_stale, "LOCKSTEP_TOO_STALE", environment) or TooStale.DROP,
    )


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
    parser.add_argument("--ps", metavar="ADDRESSES", help="the parameter servers, by index, with commas between [LOCKSTEP_PS]")
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
    _add_policy(parser)
    parser.add_argument("--announce", metavar="FILE", type=Path, help="file to write the address to, once it serves")
    parser.add_argument(
        "--allow-insecure-network",
        action="store_true",
        help="listen where others than this machine can reach it, without encryption [LOCKSTEP_ALLOW_INSECURE_NETWORK=1]",
    )
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


def _given(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> tuple[str, str]:
    return (flag, given) if given is not None else (variable, environment.get(variable, "").strip())


def _integer(flag: str, given: str | None, variable: str, environment: Mapping[str, str], *, least: int = 1) -> int | None:
    name, text = _given(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = int(text) if len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or value < least:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a whole number >= {least}")
    return value


def _choice(kind: type[Choice], flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> Choice | None:
    name, text = _given(flag, given, variable, environment)
    if not text and name == variable:
        return None
    by_word = {member.name.lower(): member for member in kind}
    if text.strip().lower() not in by_word:
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want {' or '.join(by_word)}")
    return by_word[text.strip().lower()]


def _number(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> float | None:
    name, text = _given(flag, given, variable, environment)
    if not text and name == variable:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a number of seconds > 0")
    return value


def _truth(variable: str, environment: Mapping[str, str]) -> bool:
    text = environment.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise InvalidSpec(f"{variable}: got {text!r}, want 1 or 0")
