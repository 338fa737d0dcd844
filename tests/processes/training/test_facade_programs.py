"""Programs in the style of tf.compat.v1.train as processes: the example trains, and a worker that was stopped for long continues."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.commands import run_up
from tests.support.processes.processes import end
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

# Counts its accepted contributions in `w`; ends ten runs after its session has come back as another incarnation, or with an error.
COUNTING = """
import sys
import numpy as np
from worker_client import PushOutcome
from worker_client.sync_replicas import *

class AfterRecovery(SessionRunHook):
    num_sessions = num_runs = 0
    def after_create_session(self, session, coord):
        self.num_sessions += 1
    def after_run(self, run_context, run_values):
        self.num_runs += run_context.session.session.membership.participant.incarnation > 1
        if self.num_runs == 10:
            run_context.request_stop()

get_variable("w", np.zeros(3))
op = GradientDescentOptimizer(1.0, use_locking=True).minimize(lambda _: (0.0, {"w": -np.ones(3)}))
outcomes = []
with MonitoredTrainingSession(sys.argv[1], hooks=[AfterRecovery()], worker_index=0, max_wait_secs=30) as session:
    while not session.should_stop():
        outcomes.append(session.run(op).outcome)
    accepted, unknown = (sum(outcome is kind for outcome in outcomes) for kind in (PushOutcome.ACCEPTED, PushOutcome.ROLLED_BACK))
    print(accepted, unknown, len(outcomes), *session.read()["w"])
"""


def test_example_trains_with_two_workers(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "sync_replicas.py").read_text(encoding="utf-8")
    status, out = run_up("--ps", "1", "--workers", "2", worker=example, run_dir=tmp_path / "run")
    assert status == 0, out
    for worker in range(2):
        assert f"[worker {worker}] worker {worker}: weights [ 1.99" in out, out
    assert "training is finished at step 200: the chief worker (0) has ended its session" in out


def test_worker_that_slept_beyond_its_lease_continues_and_nothing_counts_twice(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(lease_s=1.0), stack, directory=socket_dir)
        address = cluster.chief_address
        stack.enter_context(worker_client.connect(address, worker_index=1))  # so that the cluster does not end for want of workers
        command = [sys.executable, "-c", COUNTING, address]
        worker = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        stack.callback(end, worker)
        observer = cluster.observer()
        wait_until(lambda: observer.status().global_step >= 5, timeout_s=20, what="the worker trains")
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: any(p.index == 0 and p.state == "lapsed" for p in observer.status().participants), what="the lease lapses")
        worker.send_signal(signal.SIGCONT)
        out, _ = worker.communicate(timeout=30)
        assert worker.returncode == 0
    accepted, unknown, num_runs, *values = (int(float(word)) for word in out.decode().split())
    assert (accepted + unknown == num_runs, unknown <= 1) == (True, True)
    assert set(values) <= {accepted, accepted + unknown}
