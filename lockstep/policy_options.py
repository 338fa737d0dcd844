"""The flags that choose a coordination policy, both ways: from arguments to a PolicySpec, and on to a chief's arguments. Starts nothing."""

import argparse

from ps_protocol.errors import InvalidSpec
from ps_protocol.policy_spec import PolicyName, PolicySpec, TokenMode, TooStale

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
