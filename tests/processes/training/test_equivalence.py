"""Synchronous training with several workers is training in one process on the union of their batches, and the same to the bit each time."""

import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.model.variables import Array
from tests.processes.training.equivalence import NUM_STEPS, NUM_WORKERS, UPDATES, Values, train_alone
from tests.processes.training.equivalence_worker import train
from tests.support.processes.processes import start
from tests.support.sessions.clusters import Shape, run_chief, start_ps

# One with state and one with numbers that change with the step: what carries the bytes knows no optimizer.
IN_PROCESSES = ["momentum", "adam"]
# Of the variable's largest value: an element that happens to end near zero has no digits of its own.
TOLERANCES = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits  # its import takes a second in each process that only collects the tests

    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


def train_in_threads(optimizer: str, digits: tuple[Array, Array], *, delay_seed: int) -> list[Values]:
    """Trains in one process, with a thread for each worker; returns what each worker reads in the end."""
    images, labels = digits
    cluster = InProcessCluster(num_ps=2, total_num_replicas=NUM_WORKERS, max_steps=NUM_STEPS)
    finals: dict[int, Values] = {}

    def work(worker: int) -> None:
        session = worker_client.local(cluster, worker_index=worker)
        finals[worker] = train(session, optimizer=optimizer, images=images, labels=labels, delay_seed=delay_seed)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return [finals[worker] for worker in range(NUM_WORKERS)]


def train_in_processes(digits: tuple[Array, Array], *, delay_seed: int, directory: Path) -> dict[str, list[Values]]:
    """Trains with IN_PROCESSES, each in a cluster of its own, with a process for each worker; returns what each reads in the end."""
    np.save(directory / "images.npy", digits[0])
    np.save(directory / "labels.npy", digits[1])
    with ExitStack() as stack:
        chiefs = {optimizer: start_cluster(stack, directory / optimizer) for optimizer in IN_PROCESSES}
        runs = [part for optimizer, address in chiefs.items() for part in ("--run", f"{optimizer}={address}")]
        workers = []
        for worker in range(NUM_WORKERS):
            place = ["--worker", worker, "--delay-seed", delay_seed, "--data", directory, "--out", directory]
            workers.append(start(stack, "-m", "tests.processes.training.equivalence_worker", *place, *runs))
        assert [worker.wait(100) for worker in workers] == [0] * NUM_WORKERS
    return {optimizer: [written(directory / f"{optimizer}-{worker}") for worker in range(NUM_WORKERS)] for optimizer in IN_PROCESSES}


def written(directory: Path) -> Values:
    """Returns the values that a worker process has written."""
    return {path.stem: np.load(path) for path in directory.glob("*.npy")}  # noqa: TID251 (our own)


def start_cluster(stack: ExitStack, directory: Path) -> str:
    """Starts servers and a chief in this process, and returns the chief's address."""
    directory.mkdir()
    addresses = [start_ps(index, stack, directory=directory) for index in range(2)]
    shape = Shape(total_num_replicas=NUM_WORKERS, max_steps=NUM_STEPS)
    return run_chief(shape, stack, ps_addresses=addresses, directory=directory).address


def assert_same_bits(runs: list[Values]) -> None:
    for values in runs[1:]:
        assert values.keys() == runs[0].keys()
        assert all(values[name].tobytes() == runs[0][name].tobytes() for name in values)


def assert_near(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        tolerance = TOLERANCES[value.dtype] * np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("optimizer", UPDATES)
def test_workers_in_threads_equal_one_process_and_repeat_to_the_bit(optimizer: str, digits: tuple[Array, Array]) -> None:
    first = train_in_threads(optimizer, digits, delay_seed=1)
    assert_same_bits([*first, *train_in_threads(optimizer, digits, delay_seed=2)])
    assert_near(first[0], train_alone(optimizer, *digits))


@pytest.mark.timeout(150)
def test_workers_in_processes_equal_one_process_and_repeat_to_the_bit(digits: tuple[Array, Array], socket_dir: Path) -> None:
    runs = []
    for delay_seed in (1, 2):
        directory = socket_dir / str(delay_seed)
        directory.mkdir()
        runs.append(train_in_processes(digits, delay_seed=delay_seed, directory=directory))
    for optimizer in IN_PROCESSES:
        alone = train_alone(optimizer, *digits)
        assert_near(runs[0][optimizer][0], alone)
        # Neither the workers' timing nor what carries the bytes leaves a trace.
        assert_same_bits([*runs[0][optimizer], *runs[1][optimizer], *train_in_threads(optimizer, digits, delay_seed=3)])
