"""`lockstep demo`: trains a cluster on handwritten digits and shows it. Connects the parts of the demo; decides when training is over."""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lockstep.demo.digits import DEFAULT, NAMES, ExamplesMissing, load_digits, optimizer_of, split
from lockstep.demo.display import DemoFiles, Display, open_display
from lockstep.demo.observer import DemoObserver, DemoStatus, Trained
from lockstep.launcher.cluster import LocalCluster, kept_directories
from lockstep.launcher.failures import ClusterWatch, TooFewWorkers
from lockstep.launcher.spec import ClusterSpec, spec_of
from lockstep.launcher.supervisor import Interrupted, LaunchFailed, Supervisor, describe_end
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.logs import warnings_to_stderr
from ps_protocol.process.options import DEMO, LEASE, MAX_STEPS, Given, add_options, options_of
from ps_protocol.process.output import BoundedOutput, write_last
from worker_client.model.wire_format import wire_format

WANTED_ACCURACY = 0.95
_POLL_S = 0.1
_LEASE_S = 5.0
# The last reading of the variables and the end of the last worker come in either order, at most this far apart.
_LAST_LOOK_S = 2.0
# Seven processes share the machine's processors, so NumPy's threads for matrix products would only wait for each other.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `demo`."""
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps to train (default 400; 800 if the policy makes a step of every contribution)"
    )
    add_options(parser, options_of(DEMO), has_variables=False)
    parser.add_argument("--optimizer", choices=NAMES, default=DEFAULT, help=f"which optimizer to train with (default {DEFAULT})")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="learning rate (default: one that suits the optimizer)")
    parser.add_argument("--wire", metavar="FORMAT", help="train over gRPC with this encoding, for example bfloat16, int8 or top_k:0.05")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("lockstep-demo"),
        metavar="DIR",
        help="directory for the files that it writes (default lockstep-demo)",
    )
    parser.add_argument("--plain", action="store_true", help="print plain lines, even on a terminal")
    parser.add_argument(
        "--pace",
        type=float,
        default=0.025,
        metavar="S",
        help="least seconds that a worker takes for a batch, so that you can watch (default 0.025)",
    )


def run_demo(arguments: argparse.Namespace) -> int:
    """Runs the demo to its end and returns the exit code."""
    try:
        setting = _setting(arguments)
        files = DemoFiles(arguments.output)
        with BoundedOutput(sys.stdout) as output, warnings_to_stderr():
            status = _show_demo(setting, files=files, output=output, is_plain=arguments.plain)
        if failure := _failure(status, num_steps=setting.num_steps):
            write_last(sys.stderr, f"{failure}\n")
            return 1
        return 0
    except Interrupted as interrupted:
        write_last(sys.stderr, f"\n{interrupted}: all processes have been ended\n", is_hurried=True)
        return interrupted.exit_code
    except ExamplesMissing as error:
        write_last(sys.stderr, f"lockstep demo: {error}\n")
        return 1
    except LaunchFailed as error:
        write_last(sys.stderr, f"lockstep demo: {error}\n")
        return ExitCode.USAGE if error.exit_code == ExitCode.USAGE else ExitCode.FAILED


def _show_demo(setting: "_Setting", *, files: DemoFiles, output: BoundedOutput, is_plain: bool) -> DemoStatus:
    try:
        with open_display(output, num_steps=setting.num_steps, is_plain=is_plain) as display:
            trained, summary = _run_demo(setting, files=files, display=display)
    except Interrupted:
        output.hurry()
        raise
    paths = "".join(f"  {path.relative_to(files.directory)}\n" for path in files.written())
    output.write(f"{summary}\nfiles in {files.directory}:\n{paths}")
    return trained.status


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """The cluster and the workers' arguments, from the command's arguments."""

    spec: ClusterSpec
    num_steps: int
    optimizer: str
    learning_rate: float | None
    pace_s: float
    wire: str | None = None

    @property
    def worker_flags(self) -> list[str]:
        rate = [] if self.learning_rate is None else ["--learning-rate", str(self.learning_rate)]
        wire = [] if self.wire is None else ["--wire", self.wire]
        return ["--pace", str(self.pace_s), "--optimizer", self.optimizer, *rate, *wire]

    @property
    def summary(self) -> dict[str, object]:
        rate = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        wire = {} if self.wire is None else {"wire": self.wire}
        return {"steps_asked_for": self.num_steps, "policy": self.spec.policy.text, "optimizer": self.optimizer, **rate, **wire}


def _setting(arguments: argparse.Namespace) -> _Setting:
    spec = spec_of(Given(vars(arguments), {}), num_ps=2, num_workers=3)
    steps = arguments.steps if arguments.steps is not None else 400 if spec.is_sync else 800
    if steps < 1:
        raise LaunchFailed(f"--steps: got {steps}, want 1 or more", exit_code=ExitCode.USAGE)
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
    return _Setting(
        spec=replace(spec, passed_on={**spec.passed_on, MAX_STEPS: steps, LEASE: _LEASE_S}),
        num_steps=steps,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        pace_s=arguments.pace,
        wire=arguments.wire,
    )


def _run_demo(setting: _Setting, *, files: DemoFiles, display: Display) -> tuple[Trained, str]:
    start, spec = time.monotonic(), setting.spec
    needs = f"{spec.needs_text} contributions" if spec.is_sync else spec.needs_text
    needs += f", {spec.num_backups} in reserve" if spec.num_backups else ""
    train, test = split(load_digits())
    with (
        kept_directories(spec.recovery),
        Supervisor(log_directory=files.logs, show_line=lambda name, line: None) as supervisor,
    ):
        display.say(f"starting {spec.num_ps} parameter servers, a chief and {spec.num_workers} workers; {needs}")
        if spec.num_workers > spec.num_workers_needed:
            whose = "any process but this one" if spec.recovery.has_checkpoints else "the process of a worker"
            display.say(f"try it: kill -9 {whose}, from another terminal; training continues")
        cluster = LocalCluster(spec, supervisor=supervisor, note=display.say)
        watch = ClusterWatch(cluster, say=display.say)
        observer = DemoObserver(num_workers=spec.num_workers, train=train, test=test)
        try:
            cluster.start_roles(environment=_ONE_THREAD)
            if cluster.page_url:
                display.say(f"its page, in a browser: {cluster.page_address}")
            with cluster.listed("lockstep demo"):
                _start_workers(cluster, setting.worker_flags, observer=observer)
                trained = _watch(supervisor=supervisor, observer=observer, watch=watch, files=files, display=display)
        except (Interrupted, TooFewWorkers) as error:
            if cluster.workers:
                watch.interrupt(supervisor, str(error))
            raise
        finally:
            observer.stop(timeout_s=0.2)
        watch.finish_training(supervisor)
    seconds = time.monotonic() - start
    failed = {worker.name: describe_end(worker.returncode or 0) for worker in watch.failed_workers}
    files.write_model(trained.variables)
    files.write_summary(trained.status, setting=setting.summary, seconds=seconds, ended_on_the_way=failed)
    return trained, _summary(trained.status, spec=spec, seconds=seconds, failed=failed)


def _start_workers(cluster: LocalCluster, worker_flags: list[str], *, observer: DemoObserver) -> None:
    cluster.start_workers([sys.executable, "-P", "-m", "lockstep.demo.worker", *worker_flags], environment=_ONE_THREAD)
    observer.start(cluster.chief_address, cluster=cluster.name, token_file=cluster.token_file)


def _watch(*, supervisor: Supervisor, observer: DemoObserver, watch: ClusterWatch, files: DemoFiles, display: Display) -> Trained:
    """Shows the training until it is finished and all workers have ended."""
    seen: DemoStatus | None = None
    last_look_ends_at: float | None = None
    while True:
        watch.see(supervisor.poll(timeout_s=watch.pause_s(_POLL_S)))
        if observer.status is not seen and observer.status is not None:
            seen = observer.status
            files.add_metrics(seen)
        display.show(seen, supervisor.processes)
        if observer.trained is not None and not watch.has_running_workers:
            return observer.trained
        _check(observer, files=files)
        # Either the final variables or the end of all workers has come, so the other is due. A worker that starts after training finds no
        # chief.
        if observer.trained is not None or not watch.has_running_workers:
            last_look_ends_at = last_look_ends_at or time.monotonic() + _LAST_LOOK_S
            if time.monotonic() > last_look_ends_at:
                if observer.trained is not None:
                    return observer.trained
                raise LaunchFailed(f"all workers have ended, but training is not finished; logs: {files.logs}")


def _check(observer: DemoObserver, *, files: DemoFiles) -> None:
    if observer.error is not None:
        raise LaunchFailed(f"cannot watch the cluster any more: {observer.error.message}; logs: {files.logs}")


def _summary(status: DemoStatus, *, spec: ClusterSpec, seconds: float, failed: Mapping[str, str]) -> str:
    accepted = ", ".join(f"worker {worker.index}: {worker.num_accepted}" for worker in status.workers)
    lines = [
        f"finished: {status.step} steps in {seconds:.1f} s, test accuracy {status.test_accuracy:.3f}, loss {status.loss:.4f}",
        f"contributions accepted: {accepted}; dropped: {status.num_stale} stale, {status.num_late} late",
    ]
    if spec.num_backups and status.num_stale + status.num_late:
        first = f"the first {spec.replicas_to_aggregate} of {spec.num_workers} workers"
        lines.append(f"(that is as it should be: a step takes {first}, and what the others compute for it counts for nothing)")
    if status.max_staleness:
        lines.append(f"a contribution was computed from variables at most {status.max_staleness} steps old")
    if failed:
        ends = ", ".join(f"{name} ({end})" for name, end in failed.items())
        lines.append(f"lost during training: {ends}; the others continued")
    return "\n".join(lines)


def _failure(status: DemoStatus, *, num_steps: int) -> str:
    if status.step < num_steps:
        return f"training ended at step {status.step} of {num_steps}"
    if status.test_accuracy < WANTED_ACCURACY:
        return f"test accuracy {status.test_accuracy:.3f} after {num_steps} steps, want {WANTED_ACCURACY}: train longer (--steps)"
    return ""
