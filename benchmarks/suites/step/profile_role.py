"""The processes of the profile: a parameter server and a worker with timed seams. Summarizes nothing."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.seams import SERVER_SEAMS, SERVER_STREAMS, WORKER_REQUESTS, WORKER_SEAMS, Recorder
from benchmarks.harness.worker import Station
from benchmarks.harness.workload import NUM_WARMUP_STEPS, OPTIMIZERS, Workload, transports_of
from worker_client import Session, connect

DIRECTORY_VARIABLE = "BENCHMARK_PROFILE"


def serve() -> int:
    """Runs `python -m ps_server` with this process's arguments, and keeps its intervals when it ends."""
    from ps_server.__main__ import main as run_server

    recorder = Recorder()
    for seam, part in SERVER_SEAMS:
        recorder.wrap(seam, part)
    for seam, part in SERVER_STREAMS:
        recorder.wrap_stream(seam, part)
    recorder.wrap_receiving("receive")
    try:
        return run_server()
    finally:
        recorder.write(Path(os.environ[DIRECTORY_VARIABLE]) / f"ps-{os.getpid()}.json")


def work(orders: dict[str, Any], station: Station) -> None:
    """Trains as the benchmarks' worker does, times the parts of its steps, and writes the intervals."""
    workload, recorder = Workload(**orders["workload"]), Recorder()
    for seam, part in WORKER_SEAMS:
        recorder.wrap(seam, part)
    recorder.wrap_requests(*WORKER_REQUESTS)
    with connect() as session:
        session.create_or_join(workload.initial_values(), optimizer=OPTIMIZERS[workload.optimizer]())
        station.await_go()
        for _ in range(NUM_WARMUP_STEPS):
            _step(session, recorder)
        recorder.intervals.clear()
        station.say("warm")
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(workload.num_steps):
            recorder.note("step", lambda: _step(session, recorder))
        after = resource.getrusage(resource.RUSAGE_SELF)
        recorder.write(Path(os.environ[DIRECTORY_VARIABLE]) / f"worker-{session.worker_index}.json")
        cpu = {"user_s": after.ru_utime - before.ru_utime, "system_s": after.ru_stime - before.ru_stime}
        station.say("done", transports=transports_of(session), **cpu)
        station.await_release()


def _step(session: Session, recorder: Recorder) -> None:
    variables = recorder.note("session.views()", session.views)
    gradients = recorder.note("session.gradient_buffers()", session.gradient_buffers)

    def compute() -> None:
        for name, value in variables.items():
            np.multiply(value, 0.001, out=gradients[name])

    recorder.note("compute", compute)
    recorder.note("session.step()", lambda: session.step(gradients))


if __name__ == "__main__":
    sys.exit(serve())
