"""`lockstep up` under other policies: which workers a step waits for, which may end early, and the workers' environment."""

from pathlib import Path

from tests.support.processes.commands import run_up

# A process less to start. The launcher asks the chief the same, wherever that runs.
IN_PS = "--chief-in-ps"

# All wait for all to come; then worker 0 ends of its own accord after a few contributions, and the others continue to the end.
EARLY = """
import os
import threading
from ps_protocol.process.memory import importing_for_good
with importing_for_good():
    import numpy as np
    import worker_client
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
    while len(session.status().participants) < int(os.environ["LOCKSTEP_NUM_WORKERS"]):
        threading.Event().wait(0.01)
    count = 0
    while not session.is_finished and not (session.worker_index == 0 and count == 3):
        result = session.step({"w": np.ones(4)})
        count += result.is_accepted
    print("contributed", count, "policy", session.policy.text, flush=True)
"""


def failing(policy: str) -> str:
    """Worker 0 sets the policy before it makes the model; worker 2 fails after five contributions."""
    create = f"if session.worker_index == 0: session.set_policy(worker_client.{policy})\n    session.create_or_join("
    fails = "if session.worker_index == 2 and count == 5: raise RuntimeError('boom')\n        count += "
    worker = EARLY.replace("count == 3", "count == -1").replace("session.create_or_join(", create).replace("count += ", fails)
    return worker.replace("sgd(0.5))", "sgd(0.5), create=session.worker_index == 0)")


def test_under_async_a_worker_that_ends_early_is_not_missed(tmp_path: Path) -> None:
    code, out = run_up("--workers", "3", "--policy", "async", "--max-steps", "200", worker=EARLY, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "starting 3 workers, policy async: every contribution is a step" in out
    assert "contributed 3 policy async" in out and "too few workers" not in out
    counts = [int(line.split("contributed ")[1].split()[0]) for line in out.splitlines() if "contributed " in line]
    assert sum(counts) == 200


def test_a_worker_that_fails_is_judged_by_the_policy_that_the_program_has_set(tmp_path: Path) -> None:
    worker = failing("sync_policy(replicas_to_aggregate=2)")
    code, out = run_up("--workers", "3", IN_PS, "--max-steps", "300", worker=worker, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "RuntimeError: boom" in out
    # Within the second in which others may fail as well, training may have ended.
    assert "training continues: 2 workers are left" in out or "failed on the way: worker 2" in out
    assert "training finished; failed on the way" in out


def test_fewer_workers_than_contributions_give_several_each(tmp_path: Path) -> None:
    arguments = [IN_PS, "--workers", "2", "--replicas-to-aggregate", "5", "--max-steps", "4"]
    code, out = run_up(*arguments, worker=EARLY.replace("count == 3", "count == -1"), run_dir=tmp_path / "run")
    assert code == 0, out
    assert "starting 2 workers, a step needs 5" in out
    counts = [int(line.split("contributed ")[1].split()[0]) for line in out.splitlines() if "contributed " in line]
    assert sum(counts) == 20


SPOILT = """
from ps_protocol.process.memory import importing_for_good
with importing_for_good():
    import numpy as np
    import worker_client
with worker_client.connect() as session:
    session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
    session.set_policy(worker_client.async_policy())
    for gradient in (np.array([1, np.nan, np.inf, 1]), np.ones(4)):
        try:
            session.step({"w": gradient})
        except worker_client.PsError as error:
            print("refused", error.reason, error.message, flush=True)
    print("values", session.read()["w"].tolist(), flush=True)
"""


def test_gradients_that_are_not_finite_are_refused_whatever_the_policy_becomes(tmp_path: Path) -> None:
    code, out = run_up("--reject-nonfinite", IN_PS, worker=SPOILT, run_dir=tmp_path / "run")
    assert code == 0, out
    assert "refused NON_FINITE_GRADIENT 'w' has 2 non-finite values (worker 0, step 0); nothing was changed" in out
    assert "values [-0.5, -0.5, -0.5, -0.5]" in out
