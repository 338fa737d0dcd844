"""`DNNClassifier` and `DNNRegressor`: networks with scikit-learn's interface, trained on parameter servers. Knows no transport.

from worker_client.estimator import DNNClassifier   # pip install 'lockstep-ps[estimator]'

DNNClassifier((64,), random_state=0).fit(X, y).score(X_test, y_test)         # a cluster inside this process
DNNClassifier((64,), target="host:5000").fit(X, y)                           # as one worker of a running cluster
"""

import hashlib
import logging
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec, ModelMismatch, PermissionDenied, ShuttingDown, Unauthenticated, Unavailable
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ClusterState
from worker_client.model import optimizers
from worker_client.model.declarations import Buffer
from worker_client.neural_network import ACTIVATIONS, Network
from worker_client.opening import LOCAL_CHIEF, TIMEOUT_S, connect, local, observe
from worker_client.session.session import Session
from worker_client.sync_replicas.graph import Graph, get_or_create_global_step, get_variable
from worker_client.sync_replicas.hooks import SessionRunHook
from worker_client.sync_replicas.optimizers import Optimizer, as_optimizer
from worker_client.sync_replicas.session import MonitoredSession, MonitoredTrainingSession

log = logging.getLogger("lockstep.worker")

# The training loop behind an estimator: batches of its examples, one contribution each.


Batch = tuple[Array, Array]


def batches(features: Array, targets: Array, size: int, *, seed: int, worker: int, passes: range) -> Iterator[Batch]:
    """Yields the features and targets of each batch of so many examples, in a new order in each pass; the last of a pass may be smaller.

    The same seed, worker and pass always give the same batches; two workers with the same examples use different orders.
    """
    for index in passes:
        order = np.random.default_rng((seed, worker, index)).permutation(len(targets))
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield features[chosen], targets[chosen]


class _Loss:
    """A loss function for a training op: returns the loss of a batch and its gradients, in memory that is reused."""

    def __init__(self, network: Network, first: Mapping[str, Array]) -> None:
        self._network = network
        self._gradients = {name: np.empty_like(value) for name, value in first.items()}

    def __call__(self, variables: Mapping[str, Array], batch: Batch) -> tuple[float, dict[str, Array]]:
        features, targets = batch
        return self._network.loss_and_gradients(variables, features, targets, into=self._gradients), self._gradients


def pass_losses(losses: Sequence[float], *, num_batches: int) -> list[float]:
    """Returns the mean over each pass of the losses of its batches; the last pass may be incomplete."""
    return [float(np.mean(losses[start : start + num_batches])) for start in range(0, len(losses), num_batches)]


# The estimators.


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("DNNClassifier needs scikit-learn 1.6 or newer: pip install 'lockstep-ps[estimator]'") from error


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What both have in common: the parameters, which scikit-learn reads from the signature and requires unchecked, and the training."""

    variables_: dict[str, Array]
    loss_curve_: list[float]
    global_step_: int
    _network: Network

    def __init__(
        self,
        hidden_units: Sequence[int] = (64,),
        *,
        activation: str = "relu",
        optimizer: str | OptimizerSpec | Optimizer = "adam",
        learning_rate: float = 0.001,
        batch_size: int = 32,
        max_iter: int = 100,
        random_state: Any = None,
        warm_start: bool = False,
        target: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.hidden_units = hidden_units
        self.activation = activation
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.random_state = random_state
        self.warm_start = warm_start
        self.target = target
        self.timeout_s = timeout_s

    def _train(
        self, features: Array, targets: Array, *, classes: Array | None, hooks: Iterable[SessionRunHook], continues: bool, num_passes: int
    ) -> None:
        """Joins the model, or creates it as the first worker, contributes one batch after the other, and sets what users read of that.

        `classes` None: the outputs are numbers. `continues`: begins with the result of earlier trainings. Ends early if a hook requests it,
        or if the cluster's training is finished. The first worker to finish ends training for the whole cluster, so that all workers get
        the same final variables. Blocks. Raises ValueError for parameters that cannot be trained with, also if the network to continue with
        is another, and the errors of the session and the hooks.
        """
        self._check()
        optimizer, given = _optimizer(self.optimizer, self.learning_rate), tuple(hooks)
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        former: Network | None = self._network if continues else None
        if self.target is None:
            _warn_of_private_cluster()
        dtype = features.dtype if former is None else np.dtype(former.dtype)
        network = Network(
            sizes=(features.shape[1], *map(int, self.hidden_units), targets.shape[1] if classes is None else len(classes)),
            activation=self.activation,
            dtype=dtype,
            head="numbers" if classes is None else "classes",
        )
        if former is not None and network != former:
            raise ValueError(
                f"the network to continue with has layers of {former.sizes} units and {former.activation!r}, wanted are "
                f"{network.sizes} and {network.activation!r}; train a new estimator"
            )
        earlier, begun_step = (self.loss_curve_, self.global_step_) if continues else ([], 0)
        if targets.dtype == features.dtype:
            targets = targets.astype(dtype, copy=False)
        features = features.astype(dtype, copy=False)
        first = network.initial_values(np.random.default_rng(seed)) if former is None else self.variables_
        passes, losses = range(len(earlier), len(earlier) + num_passes), list[float]()
        with Graph().as_default():
            if classes is not None:
                get_variable(_labels_text(classes), Buffer(np.zeros(1)))  # first, so that a mismatch names it first
            for name, value in first.items():
                get_variable(name, value)
            train_op = optimizer.minimize(_Loss(network, first), global_step=get_or_create_global_step())
            with _opened(_opener(self.target, timeout_s=self.timeout_s), given) as session:
                worker = session.session.worker_index
                for batch in batches(features, targets, self.batch_size, seed=seed, worker=worker, passes=passes):
                    if session.should_stop():
                        break
                    # None if the session was lost and a new one took its place: the outcome of that contribution is unknown.
                    if (loss := session.run(train_op, feed_dict=batch).loss) is not None:
                        losses.append(loss)
                session.finish(f"the estimator of worker {worker} is done with its examples")
                values, global_step = session.read(), session.session.global_step
        if self.target is not None:
            _trained_targets.add(self.target)
        self._network, self.variables_ = network, {name: values[name] for name in first}
        self.loss_curve_ = [*earlier, *pass_losses(losses, num_batches=-(-len(targets) // self.batch_size))]
        # A running cluster counts its own steps.
        self.global_step_ = global_step + (begun_step if self.target is None else 0)
        # A worker that joins after the end has begun no pass, and still has the final network.
        self.n_iter_ = len(self.loss_curve_)

    def _check(self) -> None:
        """Raises ValueError for parameters that cannot be trained with."""
        for name in ("batch_size", "max_iter"):
            _check_count(name, getattr(self, name))
        units = self.hidden_units
        if not isinstance(units, (Sequence, np.ndarray)) or isinstance(units, str):
            raise ValueError(f"hidden_units: got {units!r}, want a sequence of numbers such as (64,)")
        for one in units:
            _check_count("hidden_units", one)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {self.activation!r}, want one of {', '.join(ACTIVATIONS)}")

    def _refuse_target(self) -> None:
        if self.target is not None:
            raise ValueError(
                f"partial_fit trains in a cluster inside this process, and target is {self.target!r}: one fit() is one training of a"
                " cluster"
            )


class DNNClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A feed-forward network that ends in a softmax over the classes, trained by the cross-entropy of batches.

    `hidden_units`: units of each hidden layer (none at all: logistic regression). `activation`: "relu", "tanh", "logistic" or "identity".
    `optimizer`: a name ("adam", "sgd", …), which trains with `learning_rate`, or what `lockstep.adam(…)` and the like return,
    which has its own rate; both keep the cluster's policy. Or a `SyncReplicasOptimizer` or another optimizer of that package, which also
    sets the policy. `batch_size` in examples; `max_iter`: passes over the examples. `random_state`: seed of the first weights and the
    order. `warm_start`: `fit` begins with the variables that the last training ended with.

    `target` is the address of a running cluster's chief; None: a cluster of one worker inside this process, which gives the same weights
    every time for the same data and an int as `random_state`. In a cluster, each worker calls `fit` with its own examples and with the same
    parameters and labels; the first worker to finish its passes ends the training, and every worker gets the same final network. One `fit`
    is one training of a cluster. `timeout_s`: how long `fit` waits for a cluster that does not answer.

    After `fit`: `classes_`, `n_features_in_` (and `feature_names_in_`), `variables_` (weights and biases by name), `loss_curve_` (mean loss
    of each of this worker's passes), `n_iter_` (passes that were begun), `global_step_` (steps of the cluster). With `warm_start` and
    `partial_fit`, the last three count all trainings so far.
    """

    def fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, *, hooks: Iterable[SessionRunHook] = (), classes: npt.ArrayLike | None = None
    ) -> Self:
        """Trains on `X`, (examples, features) of finite numbers, and `y`, a label for each; returns this estimator.

        `hooks`: hooks of the `MonitoredTrainingSession` that runs the training; one that requests a stop ends the training, and with a
        `SyncReplicasOptimizer` its hook must be among them. `classes`: all labels, if this worker's examples may lack some; all workers
        must give the same. Blocks until the training is finished. float32 features train in float32, others in float64. Raises ValueError
        for invalid data or parameters, the errors of hooks, and in a cluster the session's errors, each a PsError.
        """
        features, known, labels = self._examples(X, y, classes=classes, is_first=True)
        continues = self.warm_start and hasattr(self, "variables_")
        if continues and not np.array_equal(known, self.classes_):
            raise ValueError(
                f"warm_start: the network has the classes {self.classes_[:10].tolist()}, the examples {known[:10].tolist()}; "
                "give all of them as classes=, or train a new estimator"
            )
        self.classes_: Array = known
        self._train(features, labels, classes=known, hooks=hooks, continues=continues, num_passes=self.max_iter)
        return self

    def partial_fit(self, X: npt.ArrayLike, y: npt.ArrayLike, classes: npt.ArrayLike | None = None) -> Self:
        """Trains for one pass over these examples, beginning with the variables that the last call ended with; returns this estimator.

        `classes`: all labels of all calls; required in the first call. Only for a cluster inside this process: the training of a running
        cluster is one `fit`. The optimizer's slots (momentum, moments) begin anew in each call. Raises ValueError.
        """
        is_first = not hasattr(self, "variables_")
        if is_first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        features, known, labels = self._examples(X, y, classes=classes if is_first else self.classes_, is_first=is_first)
        if not is_first and classes is not None and not np.array_equal(np.unique(np.asarray(classes)), known):
            raise ValueError(f"classes: got {np.unique(np.asarray(classes))[:10].tolist()}, at first they were {known[:10].tolist()}")
        self.classes_ = known
        self._refuse_target()
        self._train(features, labels, classes=known, hooks=(), continues=not is_first, num_passes=1)
        return self

    def predict(self, X: npt.ArrayLike) -> Array:
        """Returns the most probable class of each example. Makes no call. Raises NotFittedError before `fit`."""
        check_is_fitted(self, "variables_")
        predicted: Array = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return predicted

    def predict_proba(self, X: npt.ArrayLike) -> Array:
        """Returns the probability of each class, in the order of `classes_`, for each example, as (examples, classes). Makes no call."""
        check_is_fitted(self, "variables_")
        features = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        return self._network.predictions(self.variables_, features)

    def predict_log_proba(self, X: npt.ArrayLike) -> Array:
        """Returns the logarithms of `predict_proba`; -inf where a probability is 0."""
        with np.errstate(divide="ignore"):
            logarithms: Array = np.log(self.predict_proba(X))
        return logarithms

    def _examples(self, X: npt.ArrayLike, y: npt.ArrayLike, *, classes: npt.ArrayLike | None, is_first: bool) -> tuple[Array, Array, Array]:
        """Returns the features, the classes, and the number of each example's class."""
        features, given = validate_data(self, X, y, dtype=(np.float64, np.float32), reset=is_first)
        check_classification_targets(given)
        return features, *_encode(column_or_1d(given, warn=True), classes)


class DNNRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A feed-forward network that predicts numbers, one for each example or several, trained by the squared error of batches.

    Parameters, a cluster as the `target` and the attributes after `fit` are those of `DNNClassifier`, without classes. Targets are not
    scaled: scale them yourself if they are far from 1.
    """

    def fit(self, X: npt.ArrayLike, y: npt.ArrayLike, *, hooks: Iterable[SessionRunHook] = ()) -> Self:
        """Trains on `X`, (examples, features) of finite numbers, and `y`, a number for each or (examples, outputs); returns this estimator.

        `hooks`, the types and the errors are those of `DNNClassifier.fit`.
        """
        continues = self.warm_start and hasattr(self, "variables_")
        return self._fit(X, y, hooks=hooks, continues=continues, is_first=True, num_passes=self.max_iter)

    def partial_fit(self, X: npt.ArrayLike, y: npt.ArrayLike) -> Self:
        """Trains for one pass over these examples; see `DNNClassifier.partial_fit`."""
        is_first = not hasattr(self, "variables_")
        self._refuse_target()
        return self._fit(X, y, hooks=(), continues=not is_first, is_first=is_first, num_passes=1)

    def predict(self, X: npt.ArrayLike) -> Array:
        """Returns the number of each example, or (examples, outputs). Makes no call. Raises NotFittedError before `fit`."""
        check_is_fitted(self, "variables_")
        features = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        predicted = self._network.predictions(self.variables_, features)
        return predicted[:, 0] if self._is_single else predicted

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, *, hooks: Iterable[SessionRunHook], continues: bool, is_first: bool, num_passes: int
    ) -> Self:
        features, given = validate_data(self, X, y, dtype=(np.float64, np.float32), multi_output=True, y_numeric=True, reset=is_first)
        targets = given.reshape(len(given), -1).astype(features.dtype)
        self._train(features, targets, classes=None, hooks=hooks, continues=continues, num_passes=num_passes)
        self._is_single = given.ndim == 1
        return self


# Addresses where a `fit` of this process has trained a cluster, which ends with its training; another may be there since.
_trained_targets: set[str] = set()
_ENDED_TIMEOUT_S = 1.0  # how long such a cluster has to answer
_has_warned: list[str] = []  # that `fit` trains outside of the cluster that started this process


def _connect_once(target: str, worker_index: int | None, *, timeout_s: float) -> Session:
    """As `connect`. Raises ValueError for a second training of one cluster, at once: it ends with its first one."""
    if target in _trained_targets and _has_ended(target):
        raise ValueError(
            f"fit: this process has trained the cluster at {target!r} already, and one fit() is one training of a cluster. For several "
            "(cross_val_score, GridSearchCV, another fit) leave target out: each then trains in a cluster inside this process"
        )
    _trained_targets.discard(target)
    return connect(target, worker_index=worker_index, timeout_s=timeout_s)


def _has_ended(target: str) -> bool:
    """Whether the cluster that was trained is there no more, or is about to end; else another one has its address."""
    try:
        with observe(target, timeout_s=_ENDED_TIMEOUT_S) as observer:
            return observer.status().state is ClusterState.FINISHED
    except (Unavailable, ShuttingDown):
        return True
    except (Unauthenticated, PermissionDenied):
        return False


def _warn_of_private_cluster() -> None:
    """Warns once where `fit` leaves out the cluster that started this process."""
    chief = os.environ.get("LOCKSTEP_CHIEF")
    if chief and chief != LOCAL_CHIEF and not _has_warned:
        _has_warned.append(chief)
        log.warning(
            "fit: no target is given, so this worker trains for itself, in a cluster inside its process, and not with the others of the "
            "cluster at %s; to train with them: target=os.environ['LOCKSTEP_CHIEF']",
            chief,
        )


def _opener(target: Any, *, timeout_s: float) -> Any:
    """What a monitored session opens its session by: here, at an address, or as the target itself says."""
    if target is None:
        return lambda index: local(worker_index=index)
    return (lambda index: _connect_once(target, index, timeout_s=timeout_s)) if isinstance(target, str) and target else target


def _opened(master: Any, hooks: Sequence[SessionRunHook]) -> MonitoredSession:
    """Returns a session that has the model. Raises ModelMismatch in words of its own where the labels are others."""
    try:
        # The chief worker creates the model; if no hook names a chief worker, the first worker does.
        is_chief = all(getattr(hook, "is_chief", True) for hook in hooks)
        return MonitoredTrainingSession(master, is_chief=is_chief, hooks=hooks, log_step_count_steps=None)
    except ModelMismatch as error:
        if f"{_LABELS}[" not in error.message:
            raise
        raise ModelMismatch(
            "the labels differ between workers, and are part of the model. Give all workers the same: fit(X, y, classes=…)."
            f" {error.message}"
        ) from None


def _optimizer(given: Any, learning_rate: float) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, OptimizerSpec):
        return as_optimizer(given, keeps_policy=True)
    if given not in GRADIENT_OPTIMIZERS:
        words = f"want one of {', '.join(GRADIENT_OPTIMIZERS)}, or what lockstep.adam(0.001) or another optimizer function returns"
        raise ValueError(f"optimizer: got {given!r}, {words}")
    try:
        factory: Callable[[float], OptimizerSpec] = getattr(optimizers, given)
        return as_optimizer(factory(learning_rate), keeps_policy=True)
    except InvalidSpec as error:
        raise ValueError(error.message) from error


# Begins the name of the variable that makes the labels part of the model. A name has at most 256 bytes.
_LABELS = "classes="
_MAX_LABELS_CHARACTERS = 120


def _labels_text(classes: Array) -> str:
    """Returns the classes as text, that of another list for any other list: a long one is shortened, with its number and a digest."""
    text = ascii(classes.tolist())
    if len(text) <= _MAX_LABELS_CHARACTERS:
        return _LABELS + text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_LABELS}{text[:_MAX_LABELS_CHARACTERS]}… ({len(classes)} labels, digest {digest})"


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}: got {value!r}, want a whole number >= 1")


def _encode(y: Array, classes: npt.ArrayLike | None) -> tuple[Array, Array]:
    """Returns the classes, sorted, and the number of each label's class."""
    known, labels = np.unique(y, return_inverse=True)
    if classes is None:
        return known, labels
    given = np.unique(np.asarray(classes))
    unknown = np.setdiff1d(known, given)
    if len(unknown):
        raise ValueError(f"y has labels that are not among the given classes: {unknown[:10].tolist()}; classes: {given[:10].tolist()}")
    return given, np.searchsorted(given, y)
