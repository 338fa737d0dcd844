"""Claims about lockstep.keras with the backend that KERAS_BACKEND names, one function each. Writes the failed ones as JSON.

A process has one backend for ever, so `test_backends.py` starts this once for each.
"""

import copy
import functools
import json
import logging
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import keras
import numpy as np

import lockstep
import lockstep.keras
from lockstep.in_process import InProcessCluster

BACKEND = keras.backend.backend()
# The torch backend has nothing to compile.
EAGER = {} if BACKEND == "torch" else {"run_eagerly": True}
X = np.random.default_rng(0).normal(size=(96, 5)).astype(np.float32)
Y = np.sin(X.sum(axis=1, keepdims=True))
optimizers = keras.optimizers
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True, epsilon=1e-3),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adamax": lambda: optimizers.Adamax(0.01),
    "lamb": lambda: optimizers.Lamb(0.01, weight_decay=0.1),
    "lion": lambda: optimizers.Lion(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop, centered": lambda: optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "global norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped values": lambda: optimizers.Adam(0.01, clipvalue=0.01),
    "scaled loss": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
    "a schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.01, 7)),
    "a schedule, some decay": lambda: _without_biases(optimizers.AdamW(_halving(), weight_decay=0.5)),
    "some decay": lambda: _without_biases(optimizers.AdamW(0.01, weight_decay=0.5)),
}


def _halving() -> Any:
    return optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)


def _without_biases(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _model(*more: Any) -> Any:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, activation="tanh", name="first"), *more, keras.layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input((5,)), *layers], name="net")


def _fit(model: Any, optimizer: Any, **options: Any) -> Any:
    callbacks = options.pop("callbacks", [])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model.fit(X, Y, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)


def _agree(one: Any, other: Any, *, atol: float = 1e-6) -> None:
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


@contextmanager
def _refused(words: str, kind: type[Exception] = lockstep.PsError) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), f"{error!s} lacks {words!r}"
    else:
        raise AssertionError(f"nothing was refused; want {words!r}")


def servers_train_as_each_optimizer_does() -> None:
    for name, make in OPTIMIZERS.items():
        alone, ours = _model(), _model()
        _fit(alone, make())
        with lockstep.local() as session:
            optimizer = lockstep.keras.Optimizer(session, make())
            _fit(ours, optimizer, **EAGER)
            assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == session.local_step == 9
            assert "net/first/kernel" in session.read()
        try:
            _agree(ours, alone)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


class _AllRows(keras.layers.Layer):  # type: ignore[misc]
    """What Embedding is, but for TensorFlow: there Keras squares and clips the gradients of a row that occurs twice one by one."""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.rows = self.add_weight(shape=(num_rows, width), initializer="zeros")

    def call(self, numbers: Any) -> Any:
        return keras.ops.matmul(keras.ops.one_hot(numbers, self.rows.shape[0], dtype=self.rows.dtype), self.rows)


# They change only rows with a gradient.
_OF_ROWS: tuple[Callable[[], Any], ...] = (
    lambda: optimizers.SGD(0.1),
    lambda: optimizers.Adagrad(0.1),
    lambda: optimizers.SGD(0.1, clipnorm=0.1),
)


def _clicks(embedding: Any) -> Any:
    keras.utils.set_random_seed(7)
    given = keras.Input((3,), dtype="int32")
    return keras.Model(given, keras.layers.Dense(1)(keras.layers.Flatten()(embedding(given))))


def a_layer_of_rows_with_any_keys_trains_as_a_layer_of_all_rows() -> None:
    random, known = np.random.default_rng(5), np.array([-5, 3, 2**62, -(2**63), 7_000_000_000_123, 0, 11, 12])
    batches = [(random.integers(0, len(known), (6, 3)), random.normal(size=(6, 1)).astype(np.float32)) for _ in range(5)]
    for make in _OF_ROWS:
        embedding = _AllRows(len(known), 4)
        alone, layer = _clicks(embedding), lockstep.keras.TableRows(lockstep.EmbeddingTable(4, keys="int64"), max_keys=8, name="clicks")
        ours = _clicks(layer)
        alone.compile(optimizer=make(), loss="mse")
        with _refused("clicks: no optimizer has been built with it"):
            layer.positions(known)
        with lockstep.local() as session:
            ours.compile(optimizer=lockstep.keras.Optimizer(session, make(), tables=[layer]), loss="mse", **EAGER)
            ours.optimizer.build(ours.trainable_variables)
            with _refused("9 different keys in a batch, max_keys is 8"):
                layer.positions(np.arange(9))
            for numbers, labels in batches:
                alone.train_on_batch(numbers, labels)
                ours.train_on_batch(layer.positions(known[numbers]), labels)
            assert session.local_step == len(batches)
            numbers = batches[0][0]
            found = ours.predict_on_batch(layer.positions(known[numbers]))
            np.testing.assert_allclose(found, alone.predict_on_batch(numbers), rtol=0, atol=1e-6)
            rows = session.read_rows("clicks", known)
            np.testing.assert_allclose(rows, keras.ops.convert_to_numpy(embedding.rows), rtol=0, atol=1e-6)
            assert not session.read_rows("clicks", [99]).any(), "a key that was never seen has its first value"


def callbacks_may_set_the_learning_rate() -> None:
    alone, ours = _model(), _model()
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))]
    _fit(alone, optimizers.SGD(0.1), callbacks=callbacks)
    with lockstep.local() as session:
        _fit(ours, lockstep.keras.Optimizer(session, optimizers.SGD(0.1)), callbacks=callbacks, **EAGER)
    _agree(ours, alone)


def _functional() -> Any:
    """Two branches, of which one is added back, with normalization and dropout; three classes."""
    keras.utils.set_random_seed(7)
    given = keras.Input((5,))
    hidden = keras.layers.Dense(8, activation="tanh")(given)
    normal = keras.layers.Dropout(0.3, seed=1)(keras.layers.BatchNormalization()(hidden))
    joined = keras.layers.Add()([hidden, keras.layers.Dense(8)(normal)])
    return keras.Model(given, keras.layers.Dense(3, activation="softmax")(joined))


def a_functional_model_trains_as_with_keras_alone() -> None:
    labels = (np.abs(Y[:, 0]) * 2.9).astype(np.int32)
    alone, ours = _functional(), _functional()
    with lockstep.local() as session:
        begun = lockstep.keras.Optimizer(session, optimizers.SGD(0.1, momentum=0.5))
        histories = []
        for model, optimizer in ((alone, optimizers.SGD(0.1, momentum=0.5)), (ours, begun)):
            callbacks = [
                keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
                keras.callbacks.TerminateOnNaN(),
            ]
            model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], run_eagerly=True)
            weights = {0: 1.0, 1: 2.0, 2: 0.5}
            fitted = model.fit(X, labels, batch_size=32, epochs=4, shuffle=False, verbose=0, callbacks=callbacks, class_weight=weights)
            histories.append(fitted.history)
        np.testing.assert_allclose(histories[1]["loss"], histories[0]["loss"], rtol=1e-5)
        assert histories[1]["learning_rate"] == histories[0]["learning_rate"] != [histories[0]["learning_rate"][0]] * 4
    _agree(ours, alone, atol=1e-5)  # the statistics of the normalization, too


def an_optimizer_may_be_given_by_name() -> None:
    with lockstep.local() as session:
        _fit(_model(), lockstep.keras.Optimizer(session, "rmsprop"), **EAGER)
        assert session.local_step == 9


def a_worker_begins_with_the_values_of_the_cluster() -> None:
    cluster = InProcessCluster(total_num_replicas=2, replicas_to_aggregate=1)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        one, other = _model(), _model()
        other.set_weights([value + 1 for value in other.get_weights()])
        one_optimizer, other_optimizer = (lockstep.keras.Optimizer(session, "sgd") for session in (first, second))
        one_optimizer.build(one.trainable_variables)
        other_optimizer.build(other.trainable_variables)
        _agree(one, other, atol=0.0)


def gradients_that_are_there_before_the_model_is_joined_are_left_out() -> None:
    if BACKEND == "jax":
        return  # stateless_apply() builds nothing
    cluster = InProcessCluster(total_num_replicas=2, replicas_to_aggregate=1)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        one, other = _model(), _model()
        other.set_weights([value + 1 for value in other.get_weights()])
        lockstep.keras.Optimizer(first, "sgd").build(one.trainable_variables)
        optimizer = lockstep.keras.Optimizer(second, "sgd")
        gradients = [keras.ops.ones(variable.shape) for variable in other.trainable_variables]
        optimizer.apply(gradients, other.trainable_variables)
        _agree(one, other, atol=0.0)
        assert second.global_step == 0
        optimizer.apply(gradients, other.trainable_variables)
        assert second.global_step == 1


def averaged_updates_are_what_sgd_does() -> None:
    alone, ours = _model(), _model()
    _fit(alone, optimizers.SGD(0.1, momentum=0.9))
    with lockstep.local() as session:
        _fit(ours, optimizers.SGD(0.1, momentum=0.9), callbacks=[lockstep.keras.AverageUpdates(session)])
        assert session.local_step == 9
    _agree(ours, alone)


def statistics_are_averaged() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    final: dict[int, Any] = {}
    models = [_model(keras.layers.BatchNormalization(name="norm")) for _ in range(2)]
    for model in models:
        model.compile(optimizer=optimizers.SGD(0.1), loss="mse")

    def work(index: int) -> None:
        with lockstep.local(cluster, worker_index=index) as session:
            callback = lockstep.keras.AverageUpdates(session)
            callback.set_model(models[index])
            callback.on_train_begin()
            for batch in range(3):
                norm = models[index].get_layer("norm")
                norm.moving_mean.assign(np.full(8, float(index + batch)))
                callback.on_train_batch_end(batch)
                final[index] = models[index].get_weights(), keras.ops.convert_to_numpy(norm.moving_mean)

    threads = [Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other in zip(final[0][0], final[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(final[0][1], np.full(8, 2.5, np.float32))


def fit_ends_with_the_training_of_the_cluster() -> None:
    with lockstep.local(max_steps=4) as session:
        model = _model()
        _fit(model, lockstep.keras.Optimizer(session, "sgd"), callbacks=[lockstep.keras.StopWhenFinished(session)], **EAGER)
        assert session.is_finished and session.local_step == 4
        read = session.read()
        names = ["net/first/kernel", "net/first/bias", "net/last/kernel", "net/last/bias"]
        for name, value in zip(names, model.get_weights(), strict=True):
            np.testing.assert_array_equal(read[name], value)
    with lockstep.local(max_steps=4) as session:
        history = _fit(_model(), optimizers.SGD(0.1), callbacks=[lockstep.keras.AverageUpdates(session)])
        assert session.local_step == 4 and len(history.epoch) == 2


def a_saved_model_loads_with_the_optimizer_of_keras() -> None:
    with lockstep.local() as session, tempfile.TemporaryDirectory() as directory:
        model = _model()
        _fit(model, lockstep.keras.Optimizer(session, optimizers.Adam(0.01)), **EAGER)
        model.save(Path(directory) / "model.keras")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Skipping variable loading")
            loaded = keras.saving.load_model(Path(directory) / "model.keras")
        assert isinstance(loaded.optimizer, optimizers.Adam)
        _agree(loaded, model, atol=0.0)
        elsewhere = "import sys; sys.modules['lockstep'] = None; import keras; keras.saving.load_model(sys.argv[1], compile=False)"
        subprocess.run([sys.executable, "-c", elsewhere, str(Path(directory) / "model.keras")], check=True, timeout=300)


def a_step_that_is_compiled_has_a_sentence() -> None:
    if BACKEND == "torch":
        return
    with lockstep.local() as session, _refused("run_eagerly=True", Exception):
        _fit(_model(), lockstep.keras.Optimizer(session, "sgd"), run_eagerly=False)


def what_was_read_is_the_programs_own() -> None:
    with lockstep.local() as session:
        model = _model()
        _fit(model, lockstep.keras.Optimizer(session, "sgd"), **EAGER)
        before = session.read()
        for value in model.get_weights():
            if value.flags.writeable:
                value += 1
        for variable in model.trainable_variables:
            variable.assign(keras.ops.zeros(variable.shape))
        for name, value in session.read().items():
            np.testing.assert_array_equal(value, before[name])


def _fine_tune(model: Any, begin: Callable[[Any], Any], make: Callable[[float], Any], **options: Any) -> None:
    """Trains the last layer, then all, then the first layer alone, with a new optimizer each time."""
    for rate, (first, last) in {0.02: (False, True), 0.01: (True, True), 0.005: (True, False)}.items():
        model.get_layer("first").trainable, model.get_layer("last").trainable = first, last
        _fit(model, begin(make(rate)), **options)


def freezing_and_thawing_is_what_new_optimizers_of_keras_do() -> None:
    for make in (optimizers.Adam, optimizers.Nadam, lambda rate: optimizers.AdamW(rate, weight_decay=0.1)):
        alone, ours = _model(), _model()
        _fine_tune(alone, lambda optimizer: optimizer, make)
        with lockstep.local() as session:
            begin = functools.partial(lockstep.keras.Optimizer, session, variables=ours.trainable_variables)
            _fine_tune(ours, begin, make, **EAGER)
            assert (session.local_step, session.phase) == (27, 2)
        _agree(ours, alone, atol=1e-4)  # on a GPU, which adds in an order of its own each time


def averaged_updates_freeze_and_thaw() -> None:
    alone, ours = _model(), _model()
    _fine_tune(alone, lambda optimizer: optimizer, optimizers.Adam)
    with lockstep.local() as session:
        callback = lockstep.keras.AverageUpdates(session, variables=ours.trainable_variables)
        _fine_tune(ours, lambda optimizer: optimizer, optimizers.Adam, callbacks=[callback])
        assert session.local_step == 27
    _agree(ours, alone)


def a_phase_that_cannot_be_is_refused_with_advice_that_works() -> None:
    with lockstep.local() as session:
        model = _model()
        model.get_layer("first").trainable = False
        _fit(model, lockstep.keras.Optimizer(session, "sgd"), **EAGER)
        model.get_layer("first").trainable = True
        with _refused("give the first optimizer all variables that any phase trains"):
            _fit(model, lockstep.keras.Optimizer(session, "sgd"), **EAGER)
    with lockstep.local() as session:
        model = _model()
        first = lockstep.keras.Optimizer(session, "sgd", variables=model.trainable_variables)
        model.get_layer("first").trainable = False
        _fit(model, first, **EAGER)
        with _refused("another formula (Adam) than the first optimizer (SGD)"):
            _fit(model, lockstep.keras.Optimizer(session, "adam"), **EAGER)
        model.get_layer("first").trainable = True
        _fit(model, lockstep.keras.Optimizer(session, "sgd"), **EAGER)
        with _refused("another optimizer has been made on this session since", RuntimeError):
            first.apply([keras.ops.ones(variable.shape) for variable in model.trainable_variables], model.trainable_variables)
        with _refused("is trained and is not among them"):
            lockstep.keras.Optimizer(session, "sgd", variables=model.trainable_variables[:1]).build(model.trainable_variables)


def frozen_variables_are_those_of_the_cluster() -> None:
    cluster = InProcessCluster(total_num_replicas=2, replicas_to_aggregate=1)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        one, other = _model(), _model()
        other.set_weights([value + 1 for value in other.get_weights()])
        for model, session in ((one, first), (other, second)):
            variables = model.trainable_variables
            model.get_layer("first").trainable = False
            lockstep.keras.Optimizer(session, "sgd", variables=variables).build(model.trainable_variables)
        _agree(one, other, atol=0.0)


def a_changed_model_on_one_worker_is_refused() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        lockstep.keras.Optimizer(first, optimizers.SGD(0.25)).build(_model().trainable_variables)
        with _refused("norm/gamma"):
            lockstep.keras.Optimizer(second, "sgd").build(_model(keras.layers.BatchNormalization(name="norm")).trainable_variables)
        with _refused("worker 0 presented"):
            lockstep.keras.Optimizer(second, "adam").build(_model().trainable_variables)
        words = "optimizer SGD.learning_rate.arguments['value'] is 0.5, the cluster's is 0.25."
        with _refused(f"{words} To keep training with your numbers, say Optimizer("):
            lockstep.keras.Optimizer(second, optimizers.SGD(0.5)).build(_model().trainable_variables)
        lockstep.keras.Optimizer(second, optimizers.SGD(0.5), on_optimizer_change="adopt").build(_model().trainable_variables)


def what_servers_cannot_do_is_refused() -> None:
    own = type("Own", (optimizers.SGD,), {})  # derived by the program: nobody knows its formula
    with lockstep.local() as session:
        for optimizer, words in (
            (own(0.1), "Own is not known, so the parameter servers cannot run it; want one of SGD, Adam"),
            (optimizers.Adafactor(0.1), "Adafactor is not known"),
            (optimizers.SGD(0.1, use_ema=True), "use_ema is not supported"),
            (optimizers.SGD(0.1, gradient_accumulation_steps=2), "gradient_accumulation_steps is not supported"),
            (lockstep.keras.Optimizer(session, "sgd"), "Optimizer is not known"),
        ):
            with _refused(words):
                lockstep.keras.Optimizer(session, optimizer)
        constrained = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, kernel_constraint="non_neg")])
        with _refused("its constraint would not be kept"):
            lockstep.keras.Optimizer(session, "sgd").build(constrained.trainable_variables)
        with _refused("is int32, want floats"):
            lockstep.keras.Optimizer(session, "sgd").build(
                [keras.Variable(np.zeros(3, np.int32), dtype="int32", name="count", trainable=False)]
            )
        with _refused("want a session"):
            lockstep.keras.Optimizer("host:5000", "sgd")  # type: ignore[arg-type]
        with _refused("want a session"):
            lockstep.keras.AverageUpdates(None)  # type: ignore[arg-type]
        lockstep.keras.Optimizer(session, "sgd").build(_model().trainable_variables)  # the session can still be used


def gradients_of_other_variables_are_refused() -> None:
    with lockstep.local() as session:
        model, other = _model(), _model()
        optimizer = lockstep.keras.Optimizer(session, "sgd")
        optimizer.build(model.trainable_variables)
        gradients = [keras.ops.ones(variable.shape) for variable in other.trainable_variables]
        with _refused("is not one that the model had when it was built"):
            optimizer.apply(gradients, other.trainable_variables)
        with _refused("No gradients provided for any variable"):
            optimizer.apply([None] * 4, model.trainable_variables)
        optimizer.apply([None, *gradients[1:]], model.trainable_variables)
        assert session.local_step == 1


@contextmanager
def _said() -> Iterator[list[str]]:
    """What the optimizer logs meanwhile."""
    said: list[str] = []
    logger = logging.getLogger("lockstep.keras.optimizer")
    logger.handle, handle = lambda record: said.append(record.getMessage()), logger.handle  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    try:
        yield said
    finally:
        logger.handle = handle  # type: ignore[method-assign]
        logging.disable(logging.WARNING)


def a_forgotten_zero_grad_is_said_once() -> None:
    if BACKEND != "torch":
        return  # the others add to no gradient
    with _said() as said, lockstep.local() as session:
        model = _model()
        optimizer = lockstep.keras.Optimizer(session, "sgd")
        optimizer.build(model.trainable_variables)
        for is_forgotten in (False, False, True, True):
            if not is_forgotten:
                model.zero_grad()
            keras.ops.mean(keras.ops.square(model(X) - keras.ops.convert_to_tensor(Y))).backward()
            optimizer.apply([variable.value.grad for variable in model.trainable_variables], model.trainable_variables)
            assert bool(said) == is_forgotten
    assert said == ["the gradients of the last step are part of this one's: call model.zero_grad() before backward()"]


def values_set_between_two_fits_are_said_to_be_replaced_once() -> None:
    with _said() as said, lockstep.local() as session:
        model = _model()
        _fit(model, lockstep.keras.Optimizer(session, "sgd"), **EAGER)
        model.fit(X, Y, batch_size=32, verbose=0)
        assert not said
        for _ in range(2):
            model.set_weights([value + 1 for value in model.get_weights()])
            model.fit(X, Y, batch_size=32, verbose=0)
    assert len(said) == 1 and "as set_weights() and restore_best_weights do" in said[0] and "--checkpoint-dir" in said[0]


def all_workers_have_the_values_of_the_last_step_when_the_data_ends() -> None:
    cluster, ended = InProcessCluster(total_num_replicas=2), Barrier(2)
    models = [_model() for _ in range(2)]

    def work(index: int) -> None:
        with lockstep.local(cluster, worker_index=index) as session:
            variables = models[index].trainable_variables
            optimizer = lockstep.keras.Optimizer(session, "sgd")
            optimizer.build(variables)
            # An odd number: one worker makes the last step alone.
            for _ in session.batches("train", num_samples=9, batch_size=1):
                optimizer.apply([keras.ops.ones(variable.shape) for variable in variables], variables)
            optimizer.refresh()
            ended.wait(60)

    threads = [Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    _agree(models[0], models[1], atol=0.0)


def a_model_without_values_is_refused() -> None:
    if BACKEND != "torch":
        return  # only torch has a device for that
    with keras.device("meta"):
        model = _model()
    with lockstep.local() as session, _refused("has no values (device meta)"):
        lockstep.keras.Optimizer(session, "sgd").build(model.trainable_variables)


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        part = slice(32 * index, 32 * (index + 1))
        return X[part], Y[part]


def workers_that_load_data_do_no_harm() -> None:
    with lockstep.local() as session:
        ours, alone = _model(), _model()
        ours.compile(optimizer=lockstep.keras.Optimizer(session, optimizers.SGD(0.1)), loss="mse", **EAGER)
        alone.compile(optimizer=optimizers.SGD(0.1), loss="mse")
        for model in (ours, alone):
            data = _Batches(workers=2, use_multiprocessing=True)
            model.fit(data, epochs=2, shuffle=False, verbose=0)
        assert session.local_step == 6
        _agree(ours, alone)


def a_session_cannot_be_given_to_another_process() -> None:
    with lockstep.local() as session, _refused("belongs to one process: it cannot be copied or pickled", TypeError):
        copy.deepcopy(session)  # as pickle does it


FORK = """
import os, warnings
warnings.filterwarnings("ignore")
import keras, numpy as np, lockstep.keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
with lockstep.local() as session:
    model.compile(optimizer=lockstep.keras.Optimizer(session, "sgd"), loss="mse", run_eagerly=keras.backend.backend() != "torch")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    child = os.fork()
    if not child:
        try:
            session.step(dict.fromkeys(session.views()))
        except RuntimeError as error:
            print("a fork must connect anew" in str(error), flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    print(session.local_step)
"""


def a_forked_child_has_a_sentence_and_the_parent_goes_on() -> None:
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["True", "0", "2"]), ended.stdout + ended.stderr


CLAIMS = (
    servers_train_as_each_optimizer_does,
    a_layer_of_rows_with_any_keys_trains_as_a_layer_of_all_rows,
    callbacks_may_set_the_learning_rate,
    a_functional_model_trains_as_with_keras_alone,
    an_optimizer_may_be_given_by_name,
    a_worker_begins_with_the_values_of_the_cluster,
    gradients_that_are_there_before_the_model_is_joined_are_left_out,
    averaged_updates_are_what_sgd_does,
    statistics_are_averaged,
    fit_ends_with_the_training_of_the_cluster,
    a_saved_model_loads_with_the_optimizer_of_keras,
    a_step_that_is_compiled_has_a_sentence,
    what_was_read_is_the_programs_own,
    freezing_and_thawing_is_what_new_optimizers_of_keras_do,
    averaged_updates_freeze_and_thaw,
    a_phase_that_cannot_be_is_refused_with_advice_that_works,
    frozen_variables_are_those_of_the_cluster,
    a_changed_model_on_one_worker_is_refused,
    what_servers_cannot_do_is_refused,
    gradients_of_other_variables_are_refused,
    a_forgotten_zero_grad_is_said_once,
    values_set_between_two_fits_are_said_to_be_replaced_once,
    all_workers_have_the_values_of_the_last_step_when_the_data_ends,
    a_model_without_values_is_refused,
    workers_that_load_data_do_no_harm,
    a_session_cannot_be_given_to_another_process,
    a_forked_child_has_a_sentence_and_the_parent_goes_on,
)

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    failures: dict[str, str] = {}
    for claim in CLAIMS:
        print(claim.__name__, flush=True)
        try:
            claim()
        except Exception:  # what failed is printed, and the others are looked at as well
            failures[claim.__name__] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(failures), encoding="utf-8")
