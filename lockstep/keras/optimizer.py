"""A Keras optimizer whose updates parameter servers compute from the mean gradient of all workers. Knows sessions; no formulas."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

import worker_client
from lockstep.contributing import OVERWRITTEN, AddedGradients, check_connected, join, left_out, trains_no_more, until_counted
from lockstep.errors import InvalidSpec
from lockstep.keras import formulas
from lockstep.keras.rows import TableRows
from lockstep.keras.variables import are_equal, check_floats, gradient_of, names_of, numbers_of, value_of
from ps_protocol.model.variables import Array
from worker_client.session.session import Session

log = logging.getLogger(__name__)

# The group of variables without weight decay.
NO_DECAY = "no decay"


class _Training:
    """The session's side of the optimizer: the cluster's variables for those of the model, their optimizers, and contributions."""

    def __init__(
        self, session: Session, optimizer: Any, variables: Sequence[Any] | None, tables: Sequence[TableRows], options: Mapping[str, Any]
    ) -> None:
        self.session, self.optimizer = session, optimizer
        self._of_all_phases = variables
        # By the variable that has the rows of a batch, which is none of the cluster's.
        self._tables = {id(layer.rows): layer for layer in tables}
        self._phase, self._left_out = 0, dict[str, None]()
        self._options = {**formulas.limits_of(optimizer), **options}
        self.variables: list[Any] = []
        self._names: dict[int, str] = {}
        self._values: Mapping[str, Array] = {}
        # The learning rate that the servers have, and whether some variables have no weight decay.
        self._rate, self._has_groups = 0.0, False
        self._added, self._warned = AddedGradients(), set[str]()
        # Compared before each step, to find out whether the program has written into the variables.
        self._smallest: Any = None

    def join(self, variables: Sequence[Any], *, learning_rate: float) -> bool:
        """Creates the model with these variables' values, or writes the cluster's values to them.

        Returns whether the values are unchanged.
        """
        own = [variable for variable in variables if id(variable) not in self._tables]
        present = [one for one in (variables if self._of_all_phases is None else self._of_all_phases) if id(one) not in self._tables]
        names = names_of(present)
        check_floats(names, present)
        known = {id(variable): name for variable, name in zip(present, names, strict=True)}
        for variable in own:
            if id(variable) not in known:
                raise InvalidSpec(f"variables: {variable.path!r} is trained and is not among them; give all that any phase trains")
        values = {name: value_of(variable) for name, variable in zip(names, present, strict=True)}
        given: dict[str, Any] = {}
        # Keras has no public function that tells which variables have weight decay.
        decays = getattr(self.optimizer, "_use_weight_decay", lambda variable: True)
        specs = {is_decayed: self._spec(learning_rate, is_decayed) for is_decayed in (True, False)}
        for name, variable in zip(names, present, strict=True):
            if variable.constraint is not None:
                raise InvalidSpec(f"variable {name!r}: its constraint would not be kept; leave it out, or train with AverageUpdates")
            is_decayed = bool(decays(variable))
            given[name] = values[name] if is_decayed else worker_client.Variable(values[name], optimizer=specs[False].in_group(NO_DECAY))
        self._rate, self._has_groups = learning_rate, any(isinstance(one, worker_client.Variable) for one in given.values())
        given |= {layer.name: layer.table for layer in self._tables.values()}
        named = type(self.optimizer).__name__
        join(self.session, given, optimizer=specs[True], options=self._options, call="Optimizer(session, …", named=named)
        self._phase = self.session.phase
        self.variables, self._names = present, known
        self.refresh()  # those that are frozen in this phase, too
        self.variables, self._names = list(variables), {id(variable): known[id(variable)] for variable in own}
        self._left_out = left_out(self.session, self._names.values())
        for layer in self._tables.values():
            layer.session = self.session
        self._smallest = min(own, key=lambda variable: values[known[id(variable)]].size, default=None)
        return are_equal(values, self._values)

    def refresh(self) -> None:
        """Writes the values of this worker's step to the variables."""
        self._write(self.session.read())

    def step(self, gradients: Sequence[Any], variables: Sequence[Any] | None, *, scale: float | None, learning_rate: float) -> None:
        """Contributes gradients, waits for the step, and writes the new values to the variables."""
        if (error := trains_no_more(self.session, self._phase)) is not None:
            raise error
        if self._added.are_in(next((one for one in gradients if one is not None), None)):
            self._warn_once(AddedGradients.FORGOTTEN.format("model.zero_grad()"))
        smallest = self._smallest
        if smallest is not None and not np.array_equal(value_of(smallest), self._values[self._names[id(smallest)]], equal_nan=True):
            self._warn_once(OVERWRITTEN.format("variables, as set_weights() and restore_best_weights do"))
        named: dict[str, Array | worker_client.IndexedSlices | None] = {**self._left_out, **dict.fromkeys(self._names.values())}
        for variable, gradient in zip(self.variables if variables is None else variables, gradients, strict=True):
            if (layer := self._tables.get(id(variable))) is not None:
                named[layer.name] = layer.take_gradient(gradient, scale=scale)
                continue
            name = self._names.get(id(variable))
            if name is None:
                raise InvalidSpec(f"variable {variable.path!r} is not one that the model had when it was built; make a new optimizer")
            if gradient is not None:
                array = gradient_of(name, gradient, dtype=self._values[name].dtype)
                named[name] = array if scale is None else array / array.dtype.type(scale)
        if not self.session.is_finished:
            numbers = self._numbers(learning_rate) if learning_rate != self._rate else None
            until_counted(self.session, lambda: self.session.step(named, hyperparameters=numbers), has_same_values=self._has_same_values)
        self.refresh()

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning(words)

    def _spec(self, learning_rate: float, is_decayed: bool) -> Any:
        return formulas.optimizer_of(self.optimizer, learning_rate=learning_rate, decays=is_decayed)

    def _numbers(self, learning_rate: float) -> dict[str, Any]:
        """Returns the hyper-parameters for a contribution: the learning rate, if a schedule or a callback has changed it."""
        rate: dict[str, Any] = {"learning_rate": learning_rate}
        return {**rate, NO_DECAY: rate} if self._has_groups else rate

    def _has_same_values(self) -> bool:
        return are_equal(self.session.read(), self._values)

    def _write(self, values: Mapping[str, Array]) -> None:
        self._values = values
        for variable in self.variables:
            if (name := self._names.get(id(variable))) is not None:
                # A copy: some backends use an array that they are given in place.
                variable.assign(values[name].copy())


@keras.saving.register_keras_serializable(package="lockstep")
class Optimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer for `compile()`: the parameter servers run one of Keras' own optimizers on the mean gradient.

    `optimizer`: one of `keras.optimizers` (SGD, Adam, AdamW, Nadam, Adamax, Lamb, Lion, RMSprop, Adagrad, Adadelta), with its limits on the
    gradient and its weight decay, or its name. Its learning rate may be a schedule, and callbacks may set it: each contribution carries it,
    and if workers differ, a step uses that of the lowest worker index. `options` are those of `Session.create_or_join`. When the model is
    built, its variables get the cluster's values. Each batch is one contribution, and waits for the other workers.

    A second optimizer on a session begins another phase of training, with the values as they are and new moments. `variables`: all that
    any phase trains, such as `model.trainable_variables` before layers are frozen; None: those that the model trains now. `tables`: the
    model's layers of type `TableRows`.

    The training step must run eagerly: `compile(run_eagerly=True)` with TensorFlow and JAX; torch does so by itself. When the cluster's
    training is finished, the variables keep the final values: `StopWhenFinished` ends `fit()` then. Raises InvalidSpec for options that
    servers cannot run, and the errors of `Session.step`. A saved model contains Keras' optimizer instead, without its state, which is on
    the servers; without this package, load the model with compile=False.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        *,
        variables: Sequence[Any] | None = None,
        tables: Sequence[TableRows] = (),
        **options: Any,
    ) -> None:
        check_connected(session, "Optimizer")
        inner = keras.optimizers.get(optimizer)
        config = inner.get_config()
        formulas.optimizer_of(inner, learning_rate=0.0, decays=True)  # raises errors here, not only when the model is built
        super().__init__(learning_rate=_rate(config["learning_rate"]), loss_scale_factor=config.get("loss_scale_factor"))
        self._training = _Training(session, inner, variables, tables, options)

    def build(self, variables: Sequence[Any]) -> None:
        """Presents the model to the cluster, and gives the variables its values. Blocks while another worker creates the model."""
        if not self.built:
            super().build(variables)
            self._has_own_values = self._training.join(variables, learning_rate=self._rate_now())
            self.iterations.assign(self._training.session.local_step)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Makes one contribution, waits until its step is applied, and writes the new values to the variables."""
        if not self.built:
            if trainable_variables is None:
                raise InvalidSpec("apply() was given gradients and no variables before the optimizer was built; give both")
            self.build(list(trainable_variables))
            if not self._has_own_values:
                log.warning("the first gradients are for other values than the cluster's and are left out: build the model before training")
                return
        rate = self._rate_now()
        self._training.step(list(grads), trainable_variables, scale=self.loss_scale_factor, learning_rate=rate)
        self.iterations.assign(self._training.session.local_step)

    def refresh(self) -> None:
        """Writes the values of this worker's step to the variables: in a loop over `session.batches()`, after its end."""
        self._training.refresh()

    def save_own_variables(self, store: Any) -> None:
        """Saves what Keras' own optimizer begins with: its state is on the servers."""
        fresh = self.from_config(self.get_config())
        fresh.build(self._training.variables)
        fresh.save_own_variables(store)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration for a saved model: that of Keras' own optimizer."""
        return {"optimizer": keras.optimizers.serialize(self._training.optimizer)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Returns the optimizer of Keras that the model was saved with; a session cannot be saved."""
        return keras.optimizers.deserialize(config["optimizer"], custom_objects=custom_objects)

    def _rate_now(self) -> float:
        return float(numbers_of("learning_rate", self.learning_rate))


def _rate(config: Any) -> Any:
    """The learning rate of a configuration: a number or a schedule."""
    if isinstance(config, Mapping):
        return keras.optimizers.schedules.deserialize(dict(config))
    return float(config)
