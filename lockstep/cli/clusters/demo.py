"""`lockstep demo`: `lockstep up` with a program of Lockstep's own as its workers, which learn handwritten digits."""

import argparse
import sys
from typing import Any

from lockstep.cli.clusters.up import add_run_dir, run_cluster
from lockstep.demo.digits import DEFAULT, NAMES, ExamplesMissing, load_digits, optimizer_of
from lockstep.launcher.spec import ClusterSpec, flags_of, given_of
from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import KINDS
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import NUM_PS, NUM_WORKERS, UP, Option, add_options, options_of
from ps_protocol.process.output import write_last
from worker_client.model.wire_format import wire_format

WANTED_ACCURACY = 0.95
_NUM_PS, _NUM_WORKERS = 2, 3
# A policy that makes a step of every contribution has smaller steps.
_STEPS, _SMALL_STEPS = 400, 800
_LEASE_S = 5.0
# Seven processes share the machine's processors, so NumPy's threads for matrix products would only wait for each other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `demo`."""
    parser.epilog = (
        "It takes the flags of `lockstep up`, with defaults of its own."
        f" Exit code: 0 if the model recognises {WANTED_ACCURACY:.0%} of the test examples at the end, else 1."
    )
    parser.add_argument("--optimizer", choices=NAMES, default=DEFAULT, help=f"which optimizer to train with (default {DEFAULT})")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="learning rate (default: one that suits the optimizer)")
    parser.add_argument("--wire", metavar="FORMAT", help="train over gRPC with this encoding, for example bfloat16, int4 or top_k:0.05")
    parser.add_argument(
        "--pace",
        type=float,
        default=0.025,
        metavar="S",
        help="least seconds that a worker takes for a batch, so that you can watch (default 0.025)",
    )
    defaults: dict[Option[Any], str] = {
        NUM_PS: str(_NUM_PS),
        NUM_WORKERS: str(_NUM_WORKERS),
        options.BACKUP_WORKERS: "1 where a step has several contributions, else 0",
        options.MAX_STEPS: f"{_STEPS}; {_SMALL_STEPS} where every contribution is a step",
        options.LEASE: f"{_LEASE_S:g}",
    }
    add_options(parser, options_of(UP), has_variables=False, defaults=defaults)
    add_run_dir(parser)


def run_demo(arguments: argparse.Namespace) -> int:
    """Runs the demo to its end and returns the exit code."""
    try:
        flags = _worker_flags(arguments)
        spec = spec_of(flags_of(arguments))
        load_digits()
        command = [sys.executable, "-P", "-m", "lockstep.demo.worker", *flags]
        return run_cluster(spec, command, title="lockstep demo", run_dir=arguments.run_dir, environment=_ONE_THREAD)
    except (ExamplesMissing, LaunchFailed) as error:
        write_last(sys.stderr, f"lockstep demo: {error}\n")
        return error.exit_code if isinstance(error, LaunchFailed) else ExitCode.FAILED


def spec_of(flags: dict[str, object]) -> ClusterSpec:
    """Returns the cluster that the flags make, with the demo's defaults. Raises LaunchFailed."""
    flags = {"ps": _NUM_PS, "workers": _NUM_WORKERS, "lease": _LEASE_S, **flags}
    given = given_of(flags)
    has_common_steps = KINDS[given[options.POLICY]].has_common_steps
    defaults = {"max_steps": _STEPS if has_common_steps else _SMALL_STEPS}
    if has_common_steps and (given[NUM_WORKERS] or 1) > 1 and options.CONTRIBUTIONS not in given:
        defaults["backup_workers"] = 1
    return ClusterSpec(**{**defaults, **flags})


def _worker_flags(arguments: argparse.Namespace) -> list[str]:
    if not 0 <= arguments.pace <= 60:
        raise LaunchFailed(f"--pace: got {arguments.pace}, want 0 to 60 seconds", exit_code=ExitCode.USAGE)
    try:
        optimizer_of(arguments.optimizer, learning_rate=arguments.learning_rate)
    except InvalidSpec as error:
        raise LaunchFailed(f"--learning-rate: {error.message}", exit_code=ExitCode.USAGE) from error
    try:
        wire_format(arguments.wire)
    except InvalidSpec as error:
        raise LaunchFailed(f"--wire: {error.message.removeprefix('wire: ')}", exit_code=ExitCode.USAGE) from error
    flags = {"--pace": arguments.pace, "--optimizer": arguments.optimizer, "--least-accuracy": WANTED_ACCURACY}
    given = {"--learning-rate": arguments.learning_rate, "--wire": arguments.wire}
    return [word for flag, value in {**flags, **given}.items() if value is not None for word in (flag, str(value))]
