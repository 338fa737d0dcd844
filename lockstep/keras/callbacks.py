"""Callbacks of `fit()`: one ends it with the cluster's training, and one trains beside a compiled step. Knows sessions."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

import worker_client
from lockstep.contributing import check_connected, until_counted
from lockstep.errors import InvalidSpec
from lockstep.keras.variables import are_equal, check_floats, names_of, value_of
from ps_protocol.model.variables import Array
from worker_client.session.session import Session


class StopWhenFinished(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends `fit()` when the cluster's training is finished: by `--max-steps`, or by a request.

    It also joins the model before the first batch; without it, the TensorFlow backend would join during that batch and lose its gradients.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def on_train_begin(self, logs: Any = None) -> None:
        """Builds the optimizer, if the model is built and the optimizer is not."""
        if self.model.built and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops `fit()` if training is finished; makes no call."""
        if self._session.is_finished:
            self.model.stop_training = True


class AverageUpdates(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains on a cluster beside a compiled step, with any backend and any optimizer, which each worker runs by itself.

    After each batch it contributes the change of the trainable variables; the servers add the mean of all workers' changes, and the model
    continues with the result. For plain SGD and momentum, this equals training in one process with the mean gradient. Other optimizers keep
    moments of the worker's own gradients, which are not in checkpoints. Other float variables, such as the statistics of batch
    normalization, become the mean over the workers. `options` are those of `Session.create_or_join`. Ends `fit()` when the cluster's
    training is finished.

    For several `fit()`, of which some freeze layers, use one callback, and give it as `variables` all that any of them trains.
    """

    def __init__(self, session: Session, *, variables: Sequence[Any] | None = None, **options: Any) -> None:
        super().__init__()
        check_connected(session, "AverageUpdates")
        self._session, self._options = session, options
        self._of_all_phases = variables
        self._trained: dict[str, Any] = {}
        self._averaged: dict[str, Any] = {}
        self._before: Mapping[str, Array] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Creates or joins the model, and writes the cluster's values to the variables."""
        if not self._trained:
            self._join()
        self._write(self._session.read())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Contributes the batch's changes, and waits for the other workers."""
        # Between batches, the JAX backend keeps the values outside the variables.
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        if not self._session.is_finished:
            changes = {name: self._before[name] - value_of(variable) for name, variable in self._trained.items()}
            updates = {name: value_of(variable) for name, variable in self._averaged.items()}
            until_counted(
                self._session, lambda: self._session.step(changes, updates=updates or None), has_same_values=self._has_same_values
            )
        self._write(self._session.read())
        if self._session.is_finished:
            self.model.stop_training = True

    def _join(self) -> None:
        trained = list(self.model.trainable_variables if self._of_all_phases is None else self._of_all_phases)
        if not trained:
            raise InvalidSpec("AverageUpdates: the model has no trainable variables yet; call model.build() before fit()")
        known = {id(variable) for variable in trained}
        floats = [one for one in self.model.non_trainable_variables if keras.backend.is_float_dtype(one.dtype)]
        others = [one for one in floats if id(one) not in known]
        names = names_of([*trained, *others])
        check_floats(names[: len(trained)], trained)
        given: dict[str, Any] = {name: value_of(variable) for name, variable in zip(names, trained, strict=False)}
        for name, variable in zip(names[len(trained) :], others, strict=True):
            given[name] = worker_client.Buffer(value_of(variable), "mean")
        self._session.create_or_join(given, optimizer=worker_client.sgd(1.0), **self._options)
        self._trained = dict(zip(names, trained, strict=False))
        self._averaged = dict(zip(names[len(trained) :], others, strict=True))

    def _has_same_values(self) -> bool:
        return are_equal(self._session.read(), self._before)

    def _write(self, values: dict[str, Array]) -> None:
        self._before = values
        for name, variable in {**self._trained, **self._averaged}.items():
            # A copy, because some backends use a given array in place.
            variable.assign(values[name].copy())
