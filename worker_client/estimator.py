"""`DNNClassifier`: a neural network with scikit-learn's interface, trained on parameter servers. Needs scikit-learn; knows no transport.

from worker_client.estimator import DNNClassifier   # pip install 'lockstep-ps[estimator]'

DNNClassifier((64,), random_state=0).fit(X, y).score(X_test, y_test)         # a cluster inside this process
DNNClassifier((64,), target="host:5000").fit(X, y)                           # as one worker of a running cluster
"""

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec
from ps_protocol.model.variables import Array
from worker_client.model import optimizers
from worker_client.neural_network import ACTIVATIONS, Network
from worker_client.opening import local
from worker_client.session.session import Session
from worker_client.sync_replicas.graph import Graph, get_or_create_global_step, get_variable
from worker_client.sync_replicas.hooks import SessionRunHook
from worker_client.sync_replicas.optimizers import Optimizer, as_optimizer
from worker_client.sync_replicas.replicas_optimizer import SyncReplicasOptimizer
from worker_client.sync_replicas.session import MonitoredTrainingSession

# The training loop behind an estimator: batches of its examples, one contribution each.


Batch = tuple[Array, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Features as (examples, features), the number of each one's class, and how many of them make a batch."""

    features: Array
    labels: Array
    batch_size: int

    @property
    def num_batches(self) -> int:
        """Batches of one pass; the last one may be smaller."""
        return -(-len(self.labels) // self.batch_size)

    def batches(self, *, seed: int, worker: int, num_passes: int) -> Iterator[Batch]:
        """Yields features and labels of one batch after the other, in an order that is new in each pass.

        The same seed and worker always give the same batches; two workers with the same examples go through them in different orders.
        """
        for index in range(num_passes):
            order = np.random.default_rng((seed, worker, index)).permutation(len(self.labels))
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                yield self.features[chosen], self.labels[chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The final variables by name, the mean loss of each pass that was begun, and the last step of the training."""

    variables: dict[str, Array]
    losses: list[float]
    global_step: int


def train(
    network: Network, examples: Examples, *, optimizer: Any, hooks: Sequence[SessionRunHook], master: Any, seed: int, num_passes: int
) -> Trained:
    """Joins the model, creating it if this is the first worker, and contributes one batch after the other, `num_passes` times over.

    `optimizer` and `master` are those of a monitored session. Ends before if a hook asks for it, or if the cluster's training is finished.
    The first worker to finish ends training for the whole cluster, so that all workers get the same final variables. Blocks; raises
    what the session and the hooks raise.
    """
    with Graph().as_default():
        for name, value in network.initial_values(np.random.default_rng(seed)).items():
            get_variable(name, value)
        train_op = optimizer.minimize(_Loss(network), global_step=get_or_create_global_step())
        # A chief worker creates the model; without a hook that names it, the first worker to come does.
        is_chief = all(getattr(hook, "is_chief", True) for hook in hooks)
        losses: list[float] = []
        with MonitoredTrainingSession(master, is_chief=is_chief, hooks=hooks, log_step_count_steps=None) as session:
            for batch in examples.batches(seed=seed, worker=session.session.worker_index, num_passes=num_passes):
                if session.should_stop():
                    break
                # None if the session was lost and a new one took its place: what became of that contribution is not known.
                if (loss := session.run(train_op, feed_dict=batch).loss) is not None:
                    losses.append(loss)
            session.finish(f"the estimator of worker {session.session.worker_index} is done with its examples")
            variables, global_step = session.read(), session.session.global_step
    return Trained(variables=variables, losses=pass_losses(losses, num_batches=examples.num_batches), global_step=global_step)


class _Loss:
    """The loss of a batch and its gradients, as a training op asks for them; the gradients' memory is used again and again."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._gradients: dict[str, Array] = {}

    def __call__(self, variables: Mapping[str, Array], batch: Batch) -> tuple[float, dict[str, Array]]:
        if not self._gradients:
            self._gradients = {name: np.empty_like(value) for name, value in variables.items()}
        features, labels = batch
        return self._network.loss_and_gradients(variables, features, labels, into=self._gradients), self._gradients


def pass_losses(losses: Sequence[float], *, num_batches: int) -> list[float]:
    """Returns the mean over each pass of the losses of its batches; the last pass may be incomplete."""
    return [float(np.mean(losses[start : start + num_batches])) for start in range(0, len(losses), num_batches)]


# `DNNClassifier`: a neural network with scikit-learn's interface, trained on parameter servers. Needs scikit-learn; knows no transport.
#
# from worker_client.estimator import DNNClassifier   # pip install 'lockstep-ps[estimator]'
#
# DNNClassifier((64,), random_state=0).fit(X, y).score(X_test, y_test)         # a cluster inside this process
# DNNClassifier((64,), target="host:5000").fit(X, y)                           # as one worker of a running cluster


try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("DNNClassifier needs scikit-learn 1.6 or newer: pip install 'lockstep-ps[estimator]'") from error


class DNNClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A feed-forward network that ends in a softmax over the classes, trained by the cross-entropy of batches.

    `hidden_units`: units of each hidden layer (none at all: logistic regression). `activation`: "relu", "tanh", "logistic" or "identity".
    `optimizer`: a name ("adam", "sgd", …), which trains with `learning_rate`, or what an optimizer function of worker_client returns, which
    has its own; both leave the cluster's policy as it is. Or a `SyncReplicasOptimizer` or another optimizer of that kind, which says how
    workers are coordinated as well. `batch_size` in examples; `max_iter` passes over the examples. `random_state`: first weights and order.

    `target` is the chief's address of a running cluster, None a cluster of one worker inside this process; the latter gives, for the same
    data and an int as `random_state`, the same weights every time. In a cluster each worker calls `fit` with its own examples and with
    the same parameters; the first worker to go through its examples ends the training, and every worker has the same final network.

    After `fit`: `classes_`, `n_features_in_` (and `feature_names_in_`), `variables_` (weights and biases by name), `loss_curve_` (mean loss
    of each of this worker's passes), `n_iter_` (passes that were begun), `global_step_` (steps of the cluster).
    """

    def __init__(
        self,
        hidden_units: Sequence[int] = (64,),
        *,
        activation: str = "relu",
        optimizer: str | OptimizerSpec | Optimizer | SyncReplicasOptimizer = "adam",
        learning_rate: float = 0.001,
        batch_size: int = 32,
        max_iter: int = 100,
        random_state: Any = None,
        target: str | None = None,
    ) -> None:
        self.hidden_units = hidden_units
        self.activation = activation
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.random_state = random_state
        self.target = target

    def fit(
        self, X: npt.ArrayLike, y: npt.ArrayLike, *, hooks: Iterable[SessionRunHook] = (), classes: npt.ArrayLike | None = None
    ) -> Self:
        """Trains on `X`, (examples, features) of finite numbers, and `y`, a label for each; returns this estimator.

        `hooks`: those of the `MonitoredTrainingSession` that this trains through; one that asks for a stop ends the training, and the hook
        of a `SyncReplicasOptimizer` must be among them if that is the optimizer. `classes`: all labels there are, where this worker's
        examples may lack some; all workers must give the same. Blocks until the training is finished. float32 features train in
        float32, others in float64. Raises ValueError for data or parameters that cannot be trained with, what hooks raise, and in a
        cluster what its session raises, a PsError.
        """
        features, given = validate_data(self, X, y, dtype=(np.float64, np.float32))
        check_classification_targets(given)
        self.classes_, labels = _encode(column_or_1d(given, warn=True), classes)
        optimizer = self._check_parameters()
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        sizes = (features.shape[1], *(int(units) for units in self.hidden_units), len(self.classes_))
        self._network = Network(sizes=sizes, activation=self.activation, dtype=features.dtype)
        examples = Examples(features=features, labels=labels, batch_size=self.batch_size)
        trained = train(
            self._network,
            examples,
            optimizer=optimizer,
            hooks=tuple(hooks),
            master=self.target if self.target is not None else _private_cluster,
            seed=seed,
            num_passes=self.max_iter,
        )
        self.variables_, self.loss_curve_, self.global_step_ = trained.variables, trained.losses, trained.global_step
        # A worker that came when all was over has begun none, and has the final network all the same.
        self.n_iter_ = len(trained.losses)
        return self

    def predict(self, X: npt.ArrayLike) -> Array:
        """Returns the most probable class of each example. Asks no cluster. Raises NotFittedError before `fit`."""
        check_is_fitted(self, "variables_")
        predicted: Array = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return predicted

    def predict_proba(self, X: npt.ArrayLike) -> Array:
        """Returns the probability of each class, in the order of `classes_`, for each example, as (examples, classes). Asks no cluster."""
        check_is_fitted(self, "variables_")
        features = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        return self._network.probabilities(self.variables_, features)

    def predict_log_proba(self, X: npt.ArrayLike) -> Array:
        """Returns the logarithms of `predict_proba`; -inf where a probability is 0."""
        with np.errstate(divide="ignore"):
            logarithms: Array = np.log(self.predict_proba(X))
        return logarithms

    def _check_parameters(self) -> Optimizer | SyncReplicasOptimizer:
        """Returns the optimizer. The parameters are checked here, since scikit-learn wants constructors that check nothing."""
        for name in ("batch_size", "max_iter"):
            _check_count(name, getattr(self, name))
        if not isinstance(self.hidden_units, (Sequence, np.ndarray)) or isinstance(self.hidden_units, str):
            raise ValueError(f"hidden_units: got {self.hidden_units!r}, want a sequence of numbers such as (64,)")
        for units in self.hidden_units:
            _check_count("hidden_units", units)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {self.activation!r}, want one of {', '.join(ACTIVATIONS)}")
        if isinstance(self.optimizer, (Optimizer, SyncReplicasOptimizer)):
            return self.optimizer
        if isinstance(self.optimizer, OptimizerSpec):
            return as_optimizer(self.optimizer, keeps_policy=True)
        if self.optimizer not in GRADIENT_OPTIMIZERS:
            words = f"want one of {', '.join(GRADIENT_OPTIMIZERS)}, or what worker_client.adam(0.001) or another optimizer function returns"
            raise ValueError(f"optimizer: got {self.optimizer!r}, {words}")
        try:
            factory: Callable[[float], OptimizerSpec] = getattr(optimizers, self.optimizer)
            return as_optimizer(factory(self.learning_rate), keeps_policy=True)
        except InvalidSpec as error:
            raise ValueError(error.message) from error


def _private_cluster(worker_index: int | None) -> Session:
    """A session in a new cluster inside this process."""
    return local(worker_index=worker_index)


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
