"""The training loop behind an estimator: batches of its examples, one contribution each. Knows monitored sessions, not scikit-learn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.tensors import Array
from worker_client.estimator_network import Network
from worker_client.graph import Graph, get_or_create_global_step, get_variable
from worker_client.hooks import SessionRunHook
from worker_client.monitored_session import MonitoredTrainingSession

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
    Whoever is done first finishes the training of the whole cluster, so that all its workers get the same final variables. Blocks; raises
    what the session and the hooks raise.
    """
    with Graph().as_default():
        for name, value in network.initial_values(np.random.default_rng(seed)).items():
            get_variable(name, value)
        train_op = optimizer.minimize(_Loss(network), global_step=get_or_create_global_step())
        # A chief worker creates the model; without a hook that says who that is, whoever comes first does.
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
