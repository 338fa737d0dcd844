"""`lockstep systemd`: writes units for the roles of a cluster on bare hosts. Knows flags, the terminal and files."""

import argparse
import re
from pathlib import Path

from chief.config import parse_config
from lockstep.systemd import SystemdSpec, commands_of, files_of, units_of
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import CHIEF, Given, add_options, options_of

# What a unit says itself.
_OWN = (options.ADVERTISE, options.TAKEOVER, options.ANNOUNCE, options.STANDBY_ADDRESSES)
_FLAGS = [option for option in options_of(CHIEF) if option not in _OWN and option.group != options.SECURITY_GROUP]


def add_systemd_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `systemd`: those of the chief, whose addresses are those at which hosts reach each other, and a few more."""
    add_options(parser, _FLAGS, has_variables=False)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="directory for the units (default: this one)")
    parser.add_argument("--user", default="lockstep", help="user that runs all (default lockstep)")
    parser.add_argument("--certs-dir", default="", metavar="DIR", help="where each host has its files of `lockstep certs create`")
    parser.add_argument("--worker-dir", default="", metavar="DIR", help="where workers run the command")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each worker runs")


def run_systemd(arguments: argparse.Namespace) -> int:
    """Writes the units, and prints the commands that install them. Raises InvalidSpec for flags that make no cluster."""
    spec = _spec_of(arguments)
    units = units_of(spec)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, text in units.items():
            (arguments.out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidSpec(f"--out {arguments.out}: {error.strerror}; choose another directory") from error
    print(f"wrote {', '.join(units)}; now:\n\n{commands_of(spec, str(arguments.out))}")
    return ExitCode.DONE


def _spec_of(arguments: argparse.Namespace) -> SystemdSpec:
    given = Given(options.split_range(vars(arguments)), {})
    told = {option.variable: text for option in _FLAGS if option.variable and (text := given.flag_of(option)) is not None}
    if not arguments.certs_dir and not given[options.ALLOW_INSECURE_NETWORK]:
        raise InvalidSpec("--certs-dir: give where each host has its files of `lockstep certs create`, or --allow-insecure-network")
    secrets = {name: f"{arguments.certs_dir}/{file}" for name, file in files_of("chief").items()} if arguments.certs_dir else {}
    flags = [option.flag if option.is_switch else f"{option.flag}={text}" for option in _FLAGS if (text := given.flag_of(option))]
    parse_config(flags, environment=secrets)  # as the chief will: a wrong flag is named now
    if not re.fullmatch(r"[a-z_][a-z0-9_-]*", arguments.user):
        raise InvalidSpec(f"--user: got {arguments.user!r}, want the name of a user on each host")
    for flag, place in (("--certs-dir", arguments.certs_dir), ("--worker-dir", arguments.worker_dir)):
        if place and not place.startswith("/"):
            raise InvalidSpec(f"{flag}: got {place!r}, want a path from the root, the same on each host")
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if command and not command[0].startswith("/"):
        raise InvalidSpec(f"-- {command[0]}: systemd wants the program's path from the root, such as {Path('/usr/bin') / command[0]}")
    return SystemdSpec(told=told, user=arguments.user, certs_dir=arguments.certs_dir, directory=arguments.worker_dir, command=command)
