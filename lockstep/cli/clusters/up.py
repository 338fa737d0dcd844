"""`lockstep up`: runs a whole cluster on this machine, with any command as its workers. Knows processes; no step and no tensor."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launcher.cluster import LaunchedCluster, kept_directories
from lockstep.launcher.engines.engine import what_is_left_out
from lockstep.launcher.failures import ClusterWatch, TooFewWorkers
from lockstep.launcher.program import what_lacks
from lockstep.launcher.spec import ClusterSpec, flags_of
from lockstep.launcher.supervisor import (
    Interrupted,
    LaunchFailed,
    PrefixedOutput,
    Process,
    Supervisor,
    make_directory,
    with_checkout,
)
from ps_protocol.errors import InvalidSpec
from ps_protocol.process.exit_codes import ExitCode, of_signal
from ps_protocol.process.logs import warnings_to_stderr
from ps_protocol.process.options import MAX_STEPS, UP, add_options, options_of
from ps_protocol.process.output import BoundedOutput, write_last

_DRY_STEPS = 5
_POLL_S = 0.5
_MAX_PIDS = 20


def add_up_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `up`."""
    parser.epilog = (
        "Each worker finds the cluster by LOCKSTEP_CHIEF, LOCKSTEP_CLUSTER, LOCKSTEP_WORKER_INDEX and LOCKSTEP_NUM_WORKERS, which"
        " lockstep.connect() reads. `python` is the Python that lockstep itself runs on."
        " Exit code: 0 if training finished, else that of the first worker that failed; 1 if workers left too early for it to continue,"
        " or if there is no checkpoint although there was to be one."
    )
    add_options(parser, options_of(UP), has_variables=False)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"start nothing: run the program once against a cluster in its own process, for --max-steps steps (default {_DRY_STEPS})",
    )
    add_run_dir(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each worker runs")


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the place of logs."""
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="directory for logs (default: a new one in lockstep-runs/)")


def run_up(arguments: argparse.Namespace) -> int:
    """Runs the cluster to its end and returns the exit code."""
    try:
        command = _command(arguments.command)
        spec = ClusterSpec(**flags_of(arguments))
        if arguments.dry_run:
            max_steps = spec.told.get(MAX_STEPS.variable) or str(_DRY_STEPS)
            return _dry_run(command, num_workers=spec.num_workers, max_steps=max_steps)
        return run_cluster(spec, command, title=shlex.join(command), run_dir=arguments.run_dir)
    except LaunchFailed as error:
        write_last(sys.stderr, f"lockstep up: {error}\n")
        return error.exit_code


def run_cluster(
    spec: ClusterSpec, command: list[str], *, title: str, run_dir: Path | None, environment: Mapping[str, str] | None = None
) -> int:
    """Runs a cluster with this command as its workers to its end, and returns the exit code.

    `title`: what `lockstep ls` calls it. `environment`: added to that of all processes. Raises LaunchFailed for what a user mistook.
    """
    if spec.engine is not None and not spec.engine.is_launcher:
        return ExitCode.DONE
    if not spec.hosts:  # each of these is asked for itself
        _check_program(command)
    run_dir = run_dir or Path("lockstep-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    logs = run_dir / "logs"
    for path in (run_dir, logs):
        make_directory(path, flag="--run-dir")
    with BoundedOutput(sys.stdout, prefix="[lockstep] ") as stream, warnings_to_stderr():
        output, watch = PrefixedOutput(stream), None
        try:
            with kept_directories(spec):
                try:
                    with Supervisor(log_directory=logs, show_line=output.line) as supervisor:
                        cluster = LaunchedCluster(spec, supervisor=supervisor, note=output.note)
                        output.note(f"logs: {logs}")
                        if spec.engine is None and not spec.hosts and (words := what_is_left_out(os.environ)):
                            output.note(words)
                        cluster.start_roles(environment=environment or {}, command=command)
                        output.note(_ready(cluster))
                        with cluster.listed(title):
                            cluster.start_workers(command, environment=environment or {})
                            watch = ClusterWatch(cluster, say=output.failure)
                            _train(cluster, watch, supervisor=supervisor, output=output, log_directory=logs)
                finally:
                    if watch is not None:
                        _report_saved(cluster, watch, output)  # now that no process is left that could save another
            return 0
        except Interrupted as interrupted:
            stream.hurry()
            with suppress(OSError):  # the end of the reader may be the cause
                output.failure(f"{interrupted}: all processes have been ended")
                _run_again(spec, interrupted, output)
            return interrupted.exit_code
        except LaunchFailed as error:
            if error.exit_code == ExitCode.USAGE:
                raise
            output.failure(str(error))
            return error.exit_code


def _run_again(spec: ClusterSpec, interrupted: Interrupted, output: PrefixedOutput) -> None:
    """Has the engine run the job again if its time was up and a checkpoint lets it continue."""
    if spec.engine is None or interrupted.exit_code != of_signal(signal.SIGUSR1) or not spec.has_checkpoints:
        return
    try:
        output.note(spec.engine.again_words)  # before: the engine may end this process at once
        spec.engine.run_again()
    except InvalidSpec as error:
        output.failure(f"the job does not run again: {error.message}")


def _ready(cluster: LaunchedCluster) -> str:
    spec = cluster.spec
    return (
        f"{spec.num_ps} parameter server{'s' * (spec.num_ps > 1)} and the chief are ready; starting {spec.num_workers}"
        f" worker{'s' * (spec.num_workers > 1)}, {spec.needs_text} unless they say otherwise\n"
        f"to watch it: lockstep top, or lockstep status --chief {cluster.chief_address}"
        + (f"\nits page, in a browser: {cluster.page_address}" if cluster.page_url else "")
        + (f"\nand for that, in another terminal: {cluster.tunnel}" if cluster.tunnel else "")
    )


def _check_program(command: Sequence[str]) -> None:
    if lacks := what_lacks(command, environment=os.environ):
        raise LaunchFailed(f"cannot start the workers: {lacks}", exit_code=ExitCode.USAGE)


def _dry_run(command: list[str], *, num_workers: int, max_steps: str) -> int:
    _check_program(command)
    is_module, is_program = command[1:2] == ["-m"] and len(command) > 2, len(command) > 1 and not command[1].startswith("-")
    if not os.path.basename(command[0]).startswith("python") or not (is_module or is_program):
        raise LaunchFailed(
            "--dry-run: want a Python program, … -- python train.py or … -- python -m package.train", exit_code=ExitCode.USAGE
        )
    here = {"LOCKSTEP_CHIEF": "local", "LOCKSTEP_WORKER_INDEX": "0", "LOCKSTEP_NUM_WORKERS": str(num_workers)}
    environment = {**os.environ, **with_checkout(os.environ), **here, MAX_STEPS.variable: max_steps}
    return subprocess.run([command[0], "-m", "lockstep.dry_run", *command[1:]], env=environment, check=False).returncode


def _command(words: list[str]) -> list[str]:
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise LaunchFailed("what should the workers run? lockstep up --ps 2 --workers 3 -- python train.py", exit_code=ExitCode.USAGE)
    if command[0].startswith("-"):
        raise LaunchFailed(
            f"unknown option {command[0]}; see lockstep up --help; the workers' command comes after --", exit_code=ExitCode.USAGE
        )
    if command[0] in ("python", "python3"):
        # This Python has worker_client; PATH may lead to another one if this command's environment is not activated.
        command[0] = sys.executable
    return command


def _train(cluster: LaunchedCluster, watch: ClusterWatch, *, supervisor: Supervisor, output: PrefixedOutput, log_directory: Path) -> None:
    output.note(f"process ids: {_pids([*cluster.roles, *cluster.workers])}")
    from lockstep.launcher.watch import (  # NumPy is slow to import, and if it is broken, the roles report it
        LastWorkers,
        WaitWords,
        what_is_not_saved,
    )

    poller, waits = watch.ask_chief(), WaitWords(output.note, runs_all=lambda: all(worker.is_running for worker in cluster.workers))
    last = LastWorkers(cluster, poller=poller, say=output.failure)
    try:
        try:
            while watch.has_running_workers and not last.is_time_up:
                watch.see(supervisor.poll(timeout_s=watch.pause_s(_POLL_S)))
                last.see()
                waits.see(poller.status, now=time.monotonic())
        except Interrupted as error:
            watch.interrupt(supervisor, str(error))
            raise
        has_trained = watch.finish_training(supervisor)  # Ctrl-C there ends all without the last checkpoint
    except TooFewWorkers as error:
        watch.interrupt(supervisor, str(error))
        raise
    if last.failure:
        raise LaunchFailed(f"{last.failure}; logs: {log_directory}")
    if has_trained and (lost := what_is_not_saved(cluster, watch.ask_chief().status)):
        raise LaunchFailed(f"training finished, but {lost}, except for what the workers have kept")
    failed = ", ".join(f"{worker.name} ({worker.end_text})" for worker in watch.failed_workers)
    end = "training finished" if has_trained else "all workers ended without any having joined a training"
    where = ", within the backups" if cluster.spec.num_backups else ""
    output.note(end + (f"; failed on the way{where}: {failed}" if failed else ""))


def _pids(processes: Sequence[Process]) -> str:
    words = [f"{process.name} {process.pid}" for process in processes[:_MAX_PIDS]]
    rest = len(processes) - len(words)
    return ", ".join(words) + (f" and {rest} more, which `lockstep status` names" if rest else "")


def _report_saved(cluster: LaunchedCluster, watch: ClusterWatch, output: PrefixedOutput) -> None:
    """Reports the newest checkpoint in a directory of this machine, and what is lost. Lists no other storage, which may take long."""
    if cluster.spec.directory is None:
        return
    from lockstep.launcher.watch import newest_checkpoint, steps_lost

    newest = newest_checkpoint(cluster)
    with suppress(OSError):  # the reader of the output may be gone
        if newest is not None:
            again = "to continue from there, run the same command again (--max-steps counts from the first step)"
            output.note(f"saved: {newest.tag} in {cluster.spec.directory}; {again}")
        if lost := steps_lost(watch.ask_chief(), newest):
            output.failure(f"lost: {lost}")
