"""A small neural network: its variables, its loss, its gradients, worked out by hand. Pure NumPy; knows no cluster."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ps_protocol.tensors import Array

Variables = Mapping[str, Array]

NUM_PIXELS = 64
NUM_CLASSES = 10
NUM_HIDDEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good a model is on some examples."""

    loss: float
    accuracy: float


def initial_values(*, seed: int, num_hidden: int = NUM_HIDDEN) -> dict[str, Array]:
    """Returns the variables before training; the same seed gives the same values everywhere."""
    random = np.random.default_rng(seed)
    return {
        "hidden/weights": _he_normal(random, NUM_PIXELS, num_hidden),
        "hidden/biases": np.zeros(num_hidden, np.float32),
        "output/weights": _he_normal(random, num_hidden, NUM_CLASSES),
        "output/biases": np.zeros(NUM_CLASSES, np.float32),
    }


def loss_and_gradients(variables: Variables, images: Array, labels: Array, *, into: Mapping[str, Array]) -> float:
    """Returns the mean cross-entropy of the examples and writes its gradients into the arrays of `into`."""
    hidden, probabilities = _forward(variables, images)
    examples = np.arange(len(labels))
    # A probability can round to zero, and its logarithm must stay finite.
    loss = -float(np.log(np.maximum(probabilities[examples, labels], np.finfo(probabilities.dtype).tiny)).mean())
    d_logits = probabilities
    d_logits[examples, labels] -= 1.0
    d_logits /= len(labels)
    d_hidden = (d_logits @ variables["output/weights"].T) * (hidden > 0)
    np.matmul(hidden.T, d_logits, out=into["output/weights"])
    np.sum(d_logits, axis=0, out=into["output/biases"])
    np.matmul(images.T, d_hidden, out=into["hidden/weights"])
    np.sum(d_hidden, axis=0, out=into["hidden/biases"])
    return loss


def evaluate(variables: Variables, images: Array, labels: Array) -> Evaluation:
    """Returns loss and accuracy on the examples."""
    _, probabilities = _forward(variables, images)
    chosen = np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(probabilities.dtype).tiny)
    return Evaluation(loss=-float(np.log(chosen).mean()), accuracy=float((probabilities.argmax(axis=1) == labels).mean()))


def _forward(variables: Variables, images: Array) -> tuple[Array, Array]:
    hidden = np.maximum(images @ variables["hidden/weights"] + variables["hidden/biases"], 0.0)
    logits = hidden @ variables["output/weights"] + variables["output/biases"]
    logits -= logits.max(axis=1, keepdims=True)  # so that no exponential overflows
    exponentials = np.exp(logits)
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def _he_normal(random: np.random.Generator, num_inputs: int, num_outputs: int) -> Array:
    values: Array = random.standard_normal((num_inputs, num_outputs)) * np.sqrt(2.0 / num_inputs)
    return values.astype(np.float32)
