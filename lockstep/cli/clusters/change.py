"""`lockstep policy`, `set` and `finish`: change a running cluster between two steps, or end it. Knows the terminal; decides nothing."""

import argparse
import math
import os
import socket
from collections.abc import Sequence
from typing import Any

from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.formatting import plain
from lockstep.cli.results import CommandResult
from lockstep.cli.watch.view import policy_text
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName
from ps_protocol.process.options import BACKUP_WORKERS, CHANGE, Given, add_options, contributions_of, options_of, policy_of
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import Chief, FinishTrainingRequest, HyperparameterChange, SettingsReply
from worker_client.session.changes import await_change

_POLICIES = tuple(name.name.lower() for name in PolicyName)
_TRUTH = {"true": 1.0, "false": 0.0}


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `policy`."""
    add_arguments(parser)
    parser.add_argument("policy", nargs="?", choices=_POLICIES, help="the new policy (default: show the present one)")
    add_options(parser, options_of(CHANGE), has_variables=False, are_folded=False)
    _add_timeout(parser)


def add_set_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `set`."""
    add_arguments(parser)
    parser.add_argument("changes", nargs="+", metavar="NAME=VALUE", help="learning_rate or another number of the optimizer")
    parser.add_argument("--variable", default="", metavar="NAME", help="change this variable's own optimizer (default: the model's)")
    _add_timeout(parser)


def add_finish_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `finish`."""
    add_arguments(parser)
    parser.add_argument("--reason", default="requested by a user", help="reason to show in status and logs")


def run_policy(arguments: argparse.Namespace) -> CommandResult:
    """Returns the policy, or the new one."""
    given = Given(vars(arguments), {})
    _check_timeout(arguments)
    with chief_of(arguments) as chief:
        if arguments.policy is None:
            _check_nothing_given(given)
            status = chief.status()
            counts = {"replicas_to_aggregate": status.replicas_to_aggregate, "total_num_replicas": status.total_num_replicas}
            return CommandResult(words=policy_text(status), fields={"policy": plain(status.policy), "step": status.global_step, **counts})
        name = PolicyName[arguments.policy.upper()]
        num_workers = chief.status().total_num_replicas or None if BACKUP_WORKERS in given else None
        policy = policy_of(given, name=name, contributions=contributions_of(given, name, num_workers=num_workers))
        reply = _changed(chief, arguments, policy=policy)
        fields = {"policy": plain(policy), "step": reply.step, "version": reply.version}
        return CommandResult(words=f"policy {policy.text} from step {reply.step} on", fields=fields)


def run_set(arguments: argparse.Namespace) -> CommandResult:
    """Changes numbers of an optimizer and returns from which step on they count."""
    _check_timeout(arguments)
    with chief_of(arguments) as chief:
        numbers = change_of(arguments.changes, variable=arguments.variable)
        reply = _changed(chief, arguments, hyperparameters=numbers)
        words = f"{', '.join(arguments.changes)} from step {reply.step} on, version {reply.version}"
        return CommandResult(words=words, fields={"changes": arguments.changes, "step": reply.step, "version": reply.version})


def run_finish(arguments: argparse.Namespace) -> CommandResult:
    """Ends training and returns at which step."""
    with chief_of(arguments) as chief:
        cluster = chief.status().cluster
        # The chief's log shows the reason, so that it names the process that asked.
        step = chief.call(
            FinishTrainingRequest(reason=f"{arguments.reason} (`lockstep finish` on {socket.gethostname()} pid {os.getpid()})")
        )
    words = f"cluster {cluster!r} at {chief.address}: training is finished at step {step}; the processes end as their workers leave"
    return CommandResult(words=words, fields={"step": step, "reason": arguments.reason, "cluster": cluster, "chief": chief.address})


def _changed(chief: Chief, arguments: argparse.Namespace, **change: Any) -> SettingsReply:
    return await_change(lambda asked, timeout_s: chief.call(asked), Wait("the change", timeout_s=arguments.timeout), **change)


def change_of(words: Sequence[str], *, variable: str = "") -> HyperparameterChange:
    """Returns the change for arguments such as "learning_rate=0.01". Raises InvalidSpec."""
    numbers: dict[str, float] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise InvalidSpec(f"{word!r}: want NAME=VALUE, for example learning_rate=0.01")
        if name in numbers:
            raise InvalidSpec(f"{name} is given twice")
        numbers[name] = _number(name, text)
    rate = numbers.pop("learning_rate", None)
    return HyperparameterChange(variable=variable, learning_rate=None if rate is None else constant(rate), hyperparameters=numbers)


def _number(name: str, text: str) -> float:
    try:
        value = _TRUTH[text] if text in _TRUTH else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidSpec(f"{name}: got {text[:40]!r}, want a finite number, true or false")
    return value


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for the step under way (default 30)")


def _check_nothing_given(given: Given) -> None:
    for option in options_of(CHANGE):
        if option in given:
            raise InvalidSpec(f"{option.flag}: of which policy? name it: lockstep policy {' | '.join(_POLICIES)}")


def _check_timeout(arguments: argparse.Namespace) -> None:
    if not arguments.timeout > 0:
        raise InvalidSpec(f"--timeout: got {arguments.timeout}, want more than 0 seconds")
