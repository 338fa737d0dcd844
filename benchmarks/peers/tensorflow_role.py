"""A server or worker process of TensorFlow's parameter servers, with plain SGD. Runs in TensorFlow's environment.

With the argument "async", each worker's gradients are applied on arrival; without it, SyncReplicasOptimizer is used.
"""

import sys
from pathlib import Path

import tensorflow as tf

from benchmarks.harness.worker import await_file
from benchmarks.peers.role import RoleWork, measure, read_work


def main() -> None:
    """Serves, or trains, until the process is ended."""
    work = read_work()
    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    tf1.logging.set_verbosity(tf1.logging.ERROR)
    addresses = [f"127.0.0.1:{port}" for port in work.ports]
    cluster = tf1.train.ClusterSpec({"ps": addresses[: work.num_servers], "worker": addresses[work.num_servers :]})
    server = tf1.train.Server(cluster, job_name=work.kind, task_index=work.index)
    if work.kind == "ps":
        server.join()
    else:
        _train(work, cluster, server.target)


def _train(work: RoleWork, cluster: object, target: object) -> None:
    tf1 = tf.compat.v1
    is_async = "async" in sys.argv[2:]
    is_chief, chief_is_up = work.index == 0, Path(work.directory) / "chief-is-up"
    with tf1.device(tf1.train.replica_device_setter(worker_device=f"/job:worker/task:{work.index}", cluster=cluster)):
        global_step = tf1.train.get_or_create_global_step()
        initial = tf1.random_normal_initializer(seed=1)
        variables = [tf1.get_variable(f"v{i:04d}", shape=[work.num_elements], initializer=initial) for i in range(work.num_variables)]
        gradients = [0.001 * variable.read_value() for variable in variables]  # every byte is read and every byte is pushed
        optimizer = tf1.train.GradientDescentOptimizer(0.1)
        if not is_async:
            optimizer = tf1.train.SyncReplicasOptimizer(optimizer, work.num_workers, work.num_workers)
        train = optimizer.apply_gradients(list(zip(gradients, variables, strict=True)), global_step=global_step)
        # No initial tokens: with them, a fast worker could make both workers' first contributions.
        hooks = [] if is_async else [optimizer.make_session_run_hook(is_chief, num_tokens=0)]
    # A worker that finds the model uninitialised retries only after 30 s. Its server must run nevertheless, because the chief waits for it.
    if not is_chief:
        await_file(chief_is_up)
    nothing = {"save_checkpoint_secs": None, "save_summaries_steps": None, "log_step_count_steps": None}
    with tf1.train.MonitoredTrainingSession(master=target, is_chief=is_chief, hooks=hooks, **nothing) as session:
        chief_is_up.touch()
        measure(work, lambda: session.run(train))


if __name__ == "__main__":
    main()
