"""The handwritten digits of scikit-learn, a small network that learns them, and suitable optimizers. Knows no cluster."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import numpy as np

import worker_client
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS, OptimizerSpec
from ps_protocol.model.variables import Array
from worker_client.neural_network import Network

# The data: the split into training and test examples, each worker's part, each step's batch.


_NUM_TEST = 360
_SPLIT_SEED = 20240229
_MAX_PIXEL = 16

MISSING = "the handwritten digits come with scikit-learn, which is not installed: pip install 'lockstep-ps[demo]'"


class ExamplesMissing(Exception):
    """scikit-learn is not installed; the text says how to install it."""


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images of 64 pixels from 0 to 1, one a row, and the digits that they show."""

    images: Array
    labels: Array

    def part(self, index: int, *, num_parts: int) -> Self:
        """Returns every `num_parts`-th example, from `index` on: one worker's data."""
        return type(self)(images=self.images[index::num_parts], labels=self.labels[index::num_parts])

    def batch(self, size: int, *, worker: int, step: int) -> Self:
        """Draws a batch. The same worker and step always get the same one, so that a replacement continues as its predecessor would."""
        chosen = np.random.default_rng((worker, step)).integers(len(self.labels), size=size)
        return type(self)(images=self.images[chosen], labels=self.labels[chosen])


def load_digits() -> Array:
    """Returns scikit-learn's digits as bytes, one example a row: 64 pixels from 0 to 16, then the digit. Raises ExamplesMissing.

    Reads the file in scikit-learn's directory without importing scikit-learn, which takes a second.
    """
    found = importlib.util.find_spec("sklearn")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, np.uint8, delimiter=",")
    raise ExamplesMissing(MISSING)


def split(rows: Array) -> tuple[Examples, Examples]:
    """Returns the training examples and the test examples; the split is always the same."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows))
    train, test = (
        Examples(images=part[:, :NUM_PIXELS] / np.float32(_MAX_PIXEL), labels=part[:, NUM_PIXELS].astype(np.int64))
        for part in (rows[order[_NUM_TEST:]], rows[order[:_NUM_TEST]])
    )
    return train, test


# The network, and what it has learnt.


NUM_PIXELS = 64
NUM_CLASSES = 10
NETWORK = Network(sizes=(NUM_PIXELS, 64, NUM_CLASSES), activation="relu", dtype=np.float32)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model's loss and accuracy on some examples."""

    loss: float
    accuracy: float


def initial_values(*, seed: int) -> dict[str, Array]:
    """Returns the variables before training; the same seed gives the same values everywhere."""
    return NETWORK.initial_values(np.random.default_rng(seed))


def evaluate(variables: Mapping[str, Array], images: Array, labels: Array) -> Evaluation:
    """Returns loss and accuracy on the examples."""
    probabilities = NETWORK.predictions(variables, images)
    chosen = np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(probabilities.dtype).tiny)
    return Evaluation(loss=-float(np.log(chosen).mean()), accuracy=float((probabilities.argmax(axis=1) == labels).mean()))


# The optimizers to choose from, with a suitable learning rate for each.


# Found by experiment; a step is the mean of two batches of 32.
_RATES = {
    "sgd": 0.4,
    "momentum": 0.05,
    "adagrad": 0.1,
    "adagrad_da": 0.15,
    "adam": 0.005,
    "rmsprop": 0.003,
    "adadelta": 3.0,
    "ftrl": 0.15,
    "proximal_sgd": 0.4,
    "proximal_adagrad": 0.1,
    "adamw": 0.005,
    "nadam": 0.005,
    "lion": 0.001,
    "lamb": 0.005,
}
_USUAL_RATE = 0.05
NAMES = GRADIENT_OPTIMIZERS
DEFAULT = "momentum"


def optimizer_of(name: str, *, learning_rate: float | None = None) -> OptimizerSpec:
    """Returns the optimizer with the given learning rate, or with a suitable one. Raises InvalidSpec for an invalid rate."""
    factory: Callable[[float], OptimizerSpec] = getattr(worker_client, name)
    return factory(_RATES.get(name, _USUAL_RATE) if learning_rate is None else learning_rate)
