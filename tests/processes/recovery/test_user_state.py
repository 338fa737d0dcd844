"""State of workers' programs over killed processes: it matches the step at every step, and a cluster resumes with it."""

from contextlib import ExitStack
from pathlib import Path

from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage
from tests.processes.recovery.cluster import EVERYBODY, Cluster

NUM_STEPS = 400


def go_on(cluster: Cluster, num_steps: int) -> None:
    begin = cluster.reach(lambda status: True, "the chief").global_step
    cluster.reach(lambda status: status.global_step >= begin + num_steps, f"{num_steps} more steps")


def test_the_state_is_that_of_the_step_whatever_is_killed_and_after_a_resume(socket_dir: Path) -> None:
    flags = ("--workers", 2, "--checkpoint-steps", 25, "--max-steps", NUM_STEPS)
    with ExitStack() as stack:
        cluster = Cluster(socket_dir, stack, program=(Path(__file__).with_name("state_worker.py"), NUM_STEPS), chief=flags)
        go_on(cluster, 30)
        cluster.restart("worker 0")
        go_on(cluster, 40)
        cluster.restart("ps")
        cluster.reach(lambda status: status.epoch == 2, "the new epoch")
        go_on(cluster, 30)
        cluster.restart("chief")
        go_on(cluster, 30)
        cluster.restart("chief", "worker 1")
        go_on(cluster, 30)
        cluster.restart(*EVERYBODY)
        assert cluster.await_workers() == [0, 0]
    whole, _ = list_checkpoints(open_storage(str(socket_dir / "checkpoints")), cluster="lockstep")
    last = whole[-1].checkpoint
    assert last.step == NUM_STEPS
    assert [f'"n":{NUM_STEPS},' in one.json for one in last.attached.user_states] == [True, True]
