"""Synchronous training with several workers is training in one process on the union of their batches, and the same to the bit each time.

Two linear softmax classifiers of scikit-learn's handwritten digits, one in float32 and one in float64, are trained side by side, so that
one run of a cluster shows both element types. Each optimizer is written out plainly.
"""

import threading
from collections.abc import Callable, Mapping

import numpy as np
import pytest

import worker_client
from ps_protocol.model.variables import Array
from tests.support.cluster.shape import Cluster, Shape, Start

NUM_WORKERS = 3
NUM_STEPS = 50
ROWS_A_WORKER = 32
MAX_DELAY_S = 0.004
# Rates and the like are float32 numbers to the servers, as in the original, also for variables of float64.
RATE, MOMENTUM = float(np.float32(0.05)), float(np.float32(0.9))
DTYPES = {"32": np.float32, "64": np.float64}

Values = dict[str, Array]
Update = Callable[[Values, Values, Values], Values]


def initial_values() -> Values:
    """Returns the classifiers' first values: small, not zero, so that relative errors mean something."""
    rng = np.random.default_rng(3)
    weights, bias = 0.01 * rng.normal(size=(64, 10)), 0.01 * rng.normal(size=10)
    return {f"{name}{size}": value.astype(dtype) for size, dtype in DTYPES.items() for name, value in (("w", weights), ("b", bias))}


def rows_of(worker: int, step: int, num_rows: int) -> Array:
    """Returns the numbers of the rows that a worker uses in a step."""
    start = (step * NUM_WORKERS + worker) * ROWS_A_WORKER
    return np.arange(start, start + ROWS_A_WORKER) % num_rows


def union_of(step: int, num_rows: int) -> Array:
    """Returns the numbers of the rows that all workers together use in a step."""
    return np.concatenate([rows_of(worker, step, num_rows) for worker in range(NUM_WORKERS)])


def gradients(values: Mapping[str, Array], images: Array, labels: Array, rows: Array) -> Values:
    """Returns the gradients of the mean cross-entropy over some rows, each in its variable's element type."""
    found: Values = {}
    for size, dtype in DTYPES.items():
        inputs = images[rows].astype(dtype)
        scores = inputs @ values[f"w{size}"] + values[f"b{size}"]
        scores -= scores.max(axis=1, keepdims=True)
        errors = np.exp(scores)
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(rows.size), labels[rows]] -= 1
        errors /= dtype(rows.size)
        found[f"w{size}"], found[f"b{size}"] = inputs.T @ errors, errors.sum(axis=0)
    return found


def _sgd(values: Values, slots: Values, gradient: Values) -> Values:
    return {name: value - RATE * gradient[name] for name, value in values.items()}


def _momentum(values: Values, slots: Values, gradient: Values) -> Values:
    for name in values:
        slots[name] = MOMENTUM * slots.get(name, np.zeros_like(values[name])) + gradient[name]
    return {name: value - RATE * slots[name] for name, value in values.items()}


def _nesterov(values: Values, slots: Values, gradient: Values) -> Values:
    for name in values:
        slots[name] = MOMENTUM * slots.get(name, np.zeros_like(values[name])) + gradient[name]
    return {name: value - (RATE * gradient[name] + RATE * MOMENTUM * slots[name]) for name, value in values.items()}


def _adagrad(values: Values, slots: Values, gradient: Values) -> Values:
    for name in values:
        slots[name] = slots.get(name, np.full_like(values[name], 0.1)) + gradient[name] ** 2
    return {name: value - RATE * gradient[name] / np.sqrt(slots[name]) for name, value in values.items()}


def _adam(values: Values, slots: Values, gradient: Values) -> Values:
    updated = {}
    for name, value in values.items():
        kind, betas = value.dtype.type, np.array([0.9, 0.999], np.float32)
        beta1, beta2, epsilon = kind(betas[0]), kind(betas[1]), kind(np.float32(1e-8))
        powers = slots.get(f"{name}@powers", betas)
        m, v = (slots.get(f"{name}@{slot}", np.zeros_like(value)) for slot in "mv")
        m, v = m + (gradient[name] - m) * (1 - beta1), v + (gradient[name] ** 2 - v) * (1 - beta2)
        rate = kind(RATE) * np.sqrt(1 - kind(powers[1])) / (1 - kind(powers[0]))
        updated[name] = value - rate * m / (np.sqrt(v) + epsilon)
        slots[f"{name}@m"], slots[f"{name}@v"], slots[f"{name}@powers"] = m, v, powers * betas
    return updated


UPDATES: dict[str, Update] = {"sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "adagrad": _adagrad, "adam": _adam}


def train_alone(optimizer: str, images: Array, labels: Array) -> Values:
    """Returns the values after training in one process, on the union of all workers' rows in each step."""
    values = initial_values()
    slots: Values = {}
    for step in range(NUM_STEPS):
        gradient = gradients(values, images, labels, union_of(step, labels.size))
        values = UPDATES[optimizer](values, slots, gradient)
    return values


OPTIMIZERS = {
    "sgd": worker_client.sgd(RATE),
    "momentum": worker_client.momentum(RATE, momentum=0.9),
    "nesterov": worker_client.momentum(RATE, momentum=0.9, use_nesterov=True),
    "adagrad": worker_client.adagrad(RATE),
    "adam": worker_client.adam(RATE),
}


def train(cluster: Cluster, optimizer: str, digits: tuple[Array, Array], *, delay_seed: int) -> list[Values]:
    """Trains with a thread for each worker, which pauses at random before each contribution; returns what each worker reads in the end."""
    images, labels = digits
    finals: dict[int, Values] = {}

    def work(worker: int) -> None:
        delays = np.random.default_rng([delay_seed, worker])
        with cluster.session(worker) as session:
            # Small variables, split all the same, so that every shard has a part of the arithmetic.
            session.create_or_join(initial_values(), optimizer=OPTIMIZERS[optimizer], split_bytes=1000, timeout_s=30)
            staging = session.gradient_buffers()
            while not session.is_finished:
                found = gradients(session.read(), images, labels, rows_of(worker, session.local_step, labels.size))
                threading.Event().wait(MAX_DELAY_S * delays.random() ** 3)
                for name, gradient in found.items():
                    staging[name][...] = gradient
                assert session.step(staging, timeout_s=30).is_accepted
            finals[worker] = {name: value.copy() for name, value in session.read().items()}

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return [finals[worker] for worker in range(NUM_WORKERS)]


# Of the variable's largest value: an element that happens to end near zero has no digits of its own.
TOLERANCES = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}


@pytest.fixture(scope="module")
def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits  # its import takes a second in each process that only collects the tests

    images, labels = load_digits(return_X_y=True)
    return images / 16, labels


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


def assert_equal_and_repeated(start: Start, optimizer: str, digits: tuple[Array, Array]) -> None:
    shape = Shape(num_ps=2, num_workers=NUM_WORKERS, max_steps=NUM_STEPS)
    first, again = (train(start(shape), optimizer, digits, delay_seed=seed) for seed in (1, 2))
    # The workers' timing leaves no trace.
    assert_same_bits([*first, *again])
    assert_near(first[0], train_alone(optimizer, *digits))


@pytest.mark.parametrize("start", ["in process"], indirect=True)
@pytest.mark.parametrize("optimizer", UPDATES)
def test_workers_equal_one_process_and_repeat_to_the_bit(start: Start, optimizer: str, digits: tuple[Array, Array]) -> None:
    assert_equal_and_repeated(start, optimizer, digits)


@pytest.mark.parametrize("start", ["grpc"], indirect=True)
def test_so_do_workers_over_grpc(start: Start, digits: tuple[Array, Array]) -> None:
    assert_equal_and_repeated(start, "adam", digits)
