"""`DNNClassifier` in one process: scikit-learn's own checks, the same weights for the same seed, and errors for wrong parameters."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client as sdk
from lockstep.demo.digits import load_digits, split
from tests.support.repository import ROOT
from worker_client import sync_replicas

RANDOM = np.random.default_rng(2)
X = np.concatenate([RANDOM.normal(center, 1.0, (30, 3)) for center in (-2.0, 0.0, 2.0)])
Y = np.repeat(["low", "middle", "high"], 30)


@pytest.mark.filterwarnings("ignore")  # scikit-learn's checks provoke warnings, and say so if one is missing
@pytest.mark.parametrize(
    "estimator",
    [
        lambda: sdk.DNNClassifier((16,), learning_rate=0.02, max_iter=4),
        lambda: sdk.DNNRegressor((16,), learning_rate=0.03, max_iter=8),
    ],
    ids=["classifier", "regressor"],
)
def test_the_classifier_passes_every_check_of_scikit_learn(estimator: Callable[[], Any]) -> None:
    pytest.importorskip("dask_ml", reason="`make test-frameworks` has what runs these many checks, and runs them")
    from sklearn.utils.estimator_checks import check_estimator

    checked = check_estimator(estimator(), on_fail=None)
    assert [(one["check_name"], str(one["exception"])) for one in checked if one["status"] == "failed"] == []
    assert sum(one["status"] == "passed" for one in checked) > 45


@pytest.mark.timeout(120)
def test_the_classifier_learns_the_digits() -> None:
    train, test = split(load_digits())
    classifier = sdk.DNNClassifier((32,), learning_rate=0.003, max_iter=15, random_state=1).fit(train.images, train.labels)
    assert classifier.score(test.images, test.labels) > 0.95
    assert classifier.n_iter_ == 15 and classifier.global_step_ == 15 * 45
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0] / 5
    assert classifier.variables_["hidden_0/weights"].dtype == np.float32


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    one, again, other = (sdk.DNNClassifier((4, 3), max_iter=3, random_state=seed).fit(X, Y).variables_ for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["logits/weights"], other["logits/weights"])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", sdk.adam(0.05)])
def test_the_classifier_trains_with_any_optimizer(optimizer: Any) -> None:
    from sklearn.base import clone

    classifier = sdk.DNNClassifier((8,), optimizer=optimizer, learning_rate=0.1, max_iter=20, random_state=0)
    assert clone(classifier).fit(X, Y).score(X, Y) > 0.8


def test_without_hidden_units_the_classifier_is_logistic_regression() -> None:
    classifier = sdk.DNNClassifier((), learning_rate=0.05, random_state=0).fit(X, Y)
    assert sorted(classifier.variables_) == ["logits/biases", "logits/weights"] and classifier.score(X, Y) > 0.8


def test_the_classifier_works_in_a_pipeline_and_a_cross_validation() -> None:
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), sdk.DNNClassifier((8,), learning_rate=0.02, max_iter=20, random_state=0))
    assert cross_val_score(pipeline, X, Y, cv=3).min() > 0.7


def test_a_grid_search_over_a_pipeline_finds_what_its_clone_learns_as_well() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), sdk.DNNClassifier((8,), max_iter=20, random_state=0))
    search = GridSearchCV(pipeline, {"dnnclassifier__learning_rate": [1e-6, 0.02]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"dnnclassifier__learning_rate": 0.02} and search.best_score_ > 0.7
    best = search.best_estimator_
    np.testing.assert_array_equal(clone(best).fit(X, Y).predict_proba(X), best.predict_proba(X))


def test_classes_that_the_examples_lack_can_be_named() -> None:
    classifier = sdk.DNNClassifier((4,), max_iter=2, random_state=0).fit(X[:60], Y[:60], classes=["low", "middle", "high"])
    assert list(classifier.classes_) == ["high", "low", "middle"]
    assert classifier.predict_proba(X).shape == (90, 3)
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(X)), classifier.predict_proba(X))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"hidden_units": 8}, r"hidden_units: got 8, want a sequence of numbers such as \(64,\)"),
        ({"hidden_units": (4, 0)}, "hidden_units: got 0, want a whole number >= 1"),
        ({"batch_size": 2.5}, "batch_size: got 2.5, want a whole number >= 1"),
        ({"max_iter": 0}, "max_iter: got 0, want a whole number >= 1"),
        ({"activation": "swish"}, "activation: got 'swish', want one of relu, tanh, logistic, identity"),
        ({"optimizer": "adamax"}, "optimizer: got 'adamax', want one of sgd, momentum"),
        ({"optimizer": "add"}, "optimizer: got 'add', want one of sgd, momentum"),
        ({"learning_rate": -1.0}, "learning_rate = -1.0, want >= 0"),
    ],
)
def test_parameters_that_cannot_be_trained_with_are_refused_with_a_reason(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sdk.DNNClassifier(**parameters).fit(X, Y)


def test_labels_outside_the_named_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="not among the given classes: \\['high'\\]"):
        sdk.DNNClassifier().fit(X, Y, classes=["low", "middle"])


def test_hooks_hear_of_every_batch() -> None:
    heard: list[str] = []

    class Listener(sync_replicas.SessionRunHook):
        def begin(self) -> None:
            heard.append("begin")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            heard.append("run")

        def end(self, session: Any) -> None:
            heard.append("end")

    sdk.DNNClassifier((4,), max_iter=2, random_state=0).fit(X, Y, hooks=[Listener()])
    assert heard == ["begin", *["run"] * 6, "end"]


def test_a_sync_replicas_optimizer_trains_with_its_hook_also_without_a_cluster() -> None:
    optimizer = sync_replicas.SyncReplicasOptimizer(sdk.sgd(0.1), replicas_to_aggregate=1)
    classifier = sdk.DNNClassifier((4,), optimizer=optimizer, max_iter=2, random_state=0)
    classifier.fit(X, Y, hooks=[optimizer.make_session_run_hook(is_chief=True, num_tokens=0)])
    assert classifier.global_step_ == 6


def test_without_scikit_learn_only_the_estimator_is_missing_and_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("raise ImportError('hidden by a test')\n")
    script = "import worker_client as w, worker_client.sync_replicas as s; s.SyncReplicasOptimizer; w.DNNClassifier"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert result.stderr.splitlines()[-1].endswith("DNNClassifier needs scikit-learn 1.6 or newer: pip install 'lockstep-ps[estimator]'")


# More of the same data, and numbers in place of classes.


def test_the_regressor_learns_one_number_or_several() -> None:
    y = X @ np.array([[1.0, 0.5], [-0.5, 0.25], [0.25, 1.0]])
    one = sdk.DNNRegressor((16,), learning_rate=0.02, max_iter=60, random_state=0).fit(X, y[:, 0])
    assert one.predict(X).shape == (90,) and one.score(X, y[:, 0]) > 0.95
    both = sdk.DNNRegressor((16,), learning_rate=0.02, max_iter=60, random_state=0).fit(X.astype(np.float32), y)
    assert both.predict(X).shape == (90, 2) and both.score(X, y) > 0.95
    assert both.variables_["outputs/weights"].dtype == np.float32
    assert both.loss_curve_[-1] < both.loss_curve_[0] / 5


def test_partial_fit_continues_where_the_last_call_ended() -> None:
    classifier = sdk.DNNClassifier((8,), learning_rate=0.02, random_state=0)
    for _ in range(15):
        for part in (slice(0, None, 2), slice(1, None, 2)):
            classifier.partial_fit(X[part], Y[part], classes=["low", "middle", "high"])
    assert classifier.score(X, Y) > 0.8
    assert classifier.n_iter_ == len(classifier.loss_curve_) == 30 and classifier.global_step_ == 60
    regressor = sdk.DNNRegressor((8,), learning_rate=0.02, random_state=0)
    for _ in range(40):
        regressor.partial_fit(X, X[:, 0])
    assert regressor.score(X, X[:, 0]) > 0.9


def test_a_pass_of_partial_fit_is_a_pass_of_fit() -> None:
    whole = sdk.DNNClassifier((8,), optimizer="sgd", learning_rate=0.1, max_iter=2, random_state=3).fit(X, Y)
    parts = sdk.DNNClassifier((8,), optimizer="sgd", learning_rate=0.1, random_state=3)
    parts.partial_fit(X, Y, classes=np.unique(Y)).partial_fit(X, Y)
    assert all(np.array_equal(whole.variables_[name], parts.variables_[name]) for name in whole.variables_)
    assert whole.loss_curve_ == parts.loss_curve_ and whole.global_step_ == parts.global_step_


@pytest.mark.parametrize("kind", ["DNNClassifier", "DNNRegressor"])
def test_a_warm_start_continues_where_fit_ended(kind: str) -> None:
    estimator, y = getattr(sdk, kind), Y if kind == "DNNClassifier" else X[:, 0]
    whole = estimator((8,), optimizer="sgd", learning_rate=0.05, max_iter=4, random_state=3).fit(X, y)
    twice = estimator((8,), optimizer="sgd", learning_rate=0.05, max_iter=2, random_state=3, warm_start=True).fit(X, y).fit(X, y)
    assert all(np.array_equal(whole.variables_[name], twice.variables_[name]) for name in whole.variables_)
    assert twice.n_iter_ == 4 and twice.global_step_ == whole.global_step_
    cold = estimator((8,), optimizer="sgd", learning_rate=0.05, max_iter=2, random_state=3).fit(X, y).fit(X, y)
    assert cold.n_iter_ == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sdk.DNNClassifier().partial_fit(X, Y), "classes must be passed on the first call to partial_fit"),
        (lambda: _begun().partial_fit(X, Y, classes=["low", "high"]), "classes: got .'high', 'low'., at first they were"),
        (lambda: _begun().partial_fit(X, np.repeat("other", 90)), "y has labels that are not among the given classes: .'other'."),
        (lambda: _begun().partial_fit(X[:, :2], Y), "X has 2 features, but DNNClassifier is expecting 3 features"),
        (lambda: _begun().set_params(hidden_units=(5,)).partial_fit(X, Y), r"layers of \(3, 4, 3\) units .* wanted are \(3, 5, 3\)"),
        (lambda: _begun().set_params(warm_start=True).fit(X[:60], Y[:60]), "warm_start: the network has the classes"),
        (
            lambda: sdk.DNNClassifier(target="host:5000").partial_fit(X, Y, classes=np.unique(Y)),
            "target is 'host:5000': one fit.. is one",
        ),
        (lambda: sdk.DNNRegressor(target="host:5000").partial_fit(X, X[:, 0]), "target is 'host:5000': one fit.. is one"),
        (lambda: sdk.DNNRegressor((8,)).fit(X, Y), "could not convert|dtype"),
    ],
)
def test_training_that_cannot_be_continued_is_refused_with_a_reason(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def _begun() -> Any:
    return sdk.DNNClassifier((4,), random_state=0).partial_fit(X, Y, classes=np.unique(Y))


@pytest.mark.filterwarnings("ignore")  # dask's own
def test_dask_trains_the_classifier_block_by_block() -> None:
    wrappers = pytest.importorskip("dask_ml.wrappers", reason="dask-ml is not installed: `make test-frameworks` has it")
    from dask import array

    order = np.random.default_rng(1).permutation(90)
    features, labels = array.from_array(X[order], chunks=(30, 3)), array.from_array(Y[order], chunks=30)
    incremental = wrappers.Incremental(sdk.DNNClassifier((8,), learning_rate=0.05, random_state=0), assume_equal_chunks=True)
    for _ in range(10):
        incremental.partial_fit(features, labels, classes=np.unique(Y))
    assert incremental.estimator_.n_iter_ == 30
    assert incremental.score(features, labels) > 0.8
