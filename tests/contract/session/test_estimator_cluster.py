"""`DNNClassifier` as a worker of a running cluster: every worker ends with the same network, whichever finishes first."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client as sdk
from lockstep import errors
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import momentum
from worker_client.sync_replicas import SessionRunHook, StopAtStepHook, SyncReplicasOptimizer

RANDOM = np.random.default_rng(2)
X = np.concatenate([RANDOM.normal(center, 1.0, (40, 3)) for center in (-2.0, 0.0, 2.0)])
Y = np.repeat(["low", "middle", "high"], 40)
CLASSES = ["high", "low", "middle"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def fit_all(classifiers: list[Any], hooks: Callable[[int], list[SessionRunHook]] = lambda index: []) -> None:
    """Each in a thread of its own, with every so-manieth example."""
    count = len(classifiers)

    def fit(index: int) -> None:
        classifiers[index].fit(X[index::count], Y[index::count], classes=CLASSES, hooks=hooks(index))

    threads = [threading.Thread(target=fit, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads)


def test_workers_of_a_cluster_end_with_the_same_network(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(num_ps=2, num_workers=2), stack, directory=socket_dir)
    one, other = (sdk.DNNClassifier((8,), learning_rate=0.02, max_iter=15, random_state=3, target=cluster.chief_address) for _ in range(2))
    fit_all([one, other])
    assert one.global_step_ == other.global_step_ == 15 * 2, "two batches of 60 examples a pass, and both workers' are one step"
    for name, value in one.variables_.items():
        np.testing.assert_array_equal(value, other.variables_[name])
    assert one.score(X, Y) == other.score(X, Y) > 0.8


def test_the_first_worker_to_finish_ends_the_training_of_all(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(num_workers=2), stack, directory=socket_dir)
    short, long = (sdk.DNNClassifier((4,), max_iter=passes, random_state=3, target=cluster.chief_address) for passes in (2, 500))
    fit_all([short, long])
    assert short.n_iter_ == 2 and long.n_iter_ <= 3
    np.testing.assert_array_equal(short.variables_["logits/weights"], long.variables_["logits/weights"])


def test_a_cluster_that_finishes_by_itself_ends_the_fit(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(max_steps=5), stack, directory=socket_dir)
    classifier = sdk.DNNClassifier((4,), random_state=3, target=cluster.chief_address).fit(X, Y)
    assert classifier.global_step_ == 5 and classifier.n_iter_ == 2


def test_the_hook_of_a_sync_replicas_optimizer_trains_the_workers_in_step(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(num_ps=2), stack, directory=socket_dir)
    optimizers = [SyncReplicasOptimizer(momentum(0.05), replicas_to_aggregate=2, total_num_replicas=2) for _ in range(2)]
    classifiers = [
        sdk.DNNClassifier((8,), optimizer=optimizer, max_iter=15, random_state=3, target=cluster.chief_address) for optimizer in optimizers
    ]
    fit_all(classifiers, lambda index: [optimizers[index].make_session_run_hook(is_chief=index == 0)])
    one, other = classifiers
    assert one.global_step_ == other.global_step_ <= 30, "a step is the mean of two contributions"
    np.testing.assert_array_equal(one.variables_["logits/weights"], other.variables_["logits/weights"])
    assert one.score(X, Y) > 0.8


def test_a_hook_that_asks_for_a_stop_ends_the_fit(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    classifier = sdk.DNNClassifier((4,), random_state=3, target=cluster.chief_address).fit(X, Y, hooks=[StopAtStepHook(last_step=6)])
    assert classifier.global_step_ == 6 and classifier.n_iter_ == 2


@pytest.mark.parametrize(
    ("mine", "others"), [([0, 1, 3], [0, 1, 2]), (["ant", "bee", "cow"], ["cat", "dog", "eel"]), ([0, 1, 2, 3], [0, 1, 2])]
)
def test_other_labels_are_another_model(mine: list[Any], others: list[Any], stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    one, other = (sdk.DNNClassifier((4,), max_iter=1, random_state=3, target=cluster.chief_address) for _ in range(2))
    asked, answered = threading.Event(), threading.Event()

    class WhileItTrains(SessionRunHook):
        def after_create_session(self, session: Any, coord: Any) -> None:
            asked.set()
            assert answered.wait(50)

    thread = threading.Thread(target=one.fit, args=(X, np.resize(others, 120)), kwargs={"hooks": [WhileItTrains()]}, daemon=True)
    thread.start()
    assert asked.wait(50)
    with pytest.raises(errors.ModelMismatch) as refused:
        other.fit(X, np.resize(mine, 120))
    answered.set()
    thread.join(50)
    assert all(words in refused.value.message for words in (str(mine), str(others), "classes=…"))


def test_a_long_list_of_labels_is_told_apart_by_its_end(stack: ExitStack, socket_dir: Path) -> None:
    from worker_client.estimator import _labels_text

    one, other = np.arange(1000), np.array([*range(999), 1000])
    assert _labels_text(one) != _labels_text(other) and len(_labels_text(one).encode()) < 256


def test_one_fit_is_one_training_of_a_cluster(stack: ExitStack, socket_dir: Path) -> None:
    from sklearn.model_selection import cross_val_score

    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    classifier = sdk.DNNClassifier((4,), max_iter=1, random_state=3, target=cluster.chief_address, timeout_s=1.0).fit(X, Y)
    with pytest.raises(ValueError, match=r"one fit\(\) is one training of a cluster.*leave target out"):
        classifier.fit(X, Y)
    with pytest.raises(ValueError, match=r"one fit\(\) is one training of a cluster"):
        cross_val_score(classifier, X, Y, cv=2, error_score="raise")


@pytest.mark.timeout(40)  # less than what a cluster has to answer at first
def test_a_second_fit_where_the_cluster_has_ended_is_refused_at_once(socket_dir: Path) -> None:
    with ExitStack() as until_it_ends:
        cluster = ServedCluster(Shape(), until_it_ends, directory=socket_dir)
        classifier = sdk.DNNClassifier((4,), max_iter=1, random_state=3, target=cluster.chief_address).fit(X, Y)
    with pytest.raises(ValueError, match=r"one fit\(\) is one training of a cluster"):
        classifier.fit(X, Y)


def test_a_cluster_that_was_started_again_at_its_address_is_trained_again(socket_dir: Path) -> None:
    for seed in (3, 4):
        with ExitStack() as one_cluster:
            cluster = ServedCluster(Shape(), one_cluster, directory=socket_dir)
            classifier = sdk.DNNClassifier((4,), max_iter=2, random_state=seed, target=cluster.chief_address).fit(X, Y)
            assert classifier.n_iter_ == 2


def test_a_target_without_a_cluster_is_given_up_in_time(socket_dir: Path) -> None:
    assert sdk.DNNClassifier().timeout_s == sdk.DNNRegressor().timeout_s == 60.0, "that of connect()"
    with pytest.raises(errors.Unavailable, match="nobody"):
        sdk.DNNClassifier(target=f"unix:{socket_dir}/nobody", timeout_s=0.2).fit(X, Y)


def test_a_worker_that_trains_for_itself_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CHIEF", "host:5000")
    monkeypatch.setattr("worker_client.estimator._has_warned", [])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sdk.DNNClassifier((4,), max_iter=1).fit(X, Y)
    said = [record.getMessage() for record in caplog.records if "target" in record.getMessage()]
    assert len(said) == 1 and "host:5000" in said[0] and "target=os.environ['LOCKSTEP_CHIEF']" in said[0]
