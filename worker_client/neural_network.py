"""A feed-forward network as plain arrays: its first values, loss, gradients and predictions. Pure NumPy; knows no cluster."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array

Variables = Mapping[str, Array]


@light_dataclass(frozen=True, slots=True)
class _Activation:
    """A function of the inputs, its derivative as a function of the outputs, and the variance of first weights that suits it."""

    apply: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    gain: float


def _logistic(x: Array) -> Array:
    # By tanh, which never overflows.
    half: Array = 0.5 * np.tanh(0.5 * x) + 0.5
    return half


ACTIVATIONS: dict[str, _Activation] = {
    "relu": _Activation(lambda x: np.maximum(x, 0), lambda y: (y > 0).astype(y.dtype), 2.0),
    "tanh": _Activation(np.tanh, lambda y: 1 - y * y, 1.0),
    "logistic": _Activation(_logistic, lambda y: y * (1 - y), 1.0),
    "identity": _Activation(lambda x: x, np.ones_like, 1.0),
}


@light_dataclass(frozen=True, slots=True)
class _Head:
    """What the last layer's sums mean: the stem of its variables' names, what is predicted, and the loss.

    `loss(sums, targets)` returns the mean loss of the examples, and replaces the sums by its derivatives.
    """

    stem: str
    predict: Callable[[Array], Array]
    loss: Callable[[Array, Array], float]


def _softmax(logits: Array) -> Array:
    exponentials: Array = np.exp(logits - logits.max(axis=1, keepdims=True))  # so that no exponential overflows
    exponentials /= exponentials.sum(axis=1, keepdims=True)
    return exponentials


def _cross_entropy(logits: Array, labels: Array) -> float:
    logits[...] = _softmax(logits)
    examples = np.arange(len(labels))
    # A probability can round to zero, and its logarithm must stay finite.
    loss = -float(np.log(np.maximum(logits[examples, labels], np.finfo(logits.dtype).tiny)).mean())
    logits[examples, labels] -= 1
    logits /= len(labels)
    return loss


def _squared_error(outputs: Array, targets: Array) -> float:
    outputs -= targets
    loss = 0.5 * float(np.square(outputs).sum()) / len(targets)
    outputs /= len(targets)
    return loss


# "classes": their probabilities; targets are the number of each example's class. "numbers": themselves; targets are (examples, outputs).
HEADS: dict[str, _Head] = {
    "classes": _Head("logits", _softmax, _cross_entropy),
    "numbers": _Head("outputs", lambda outputs: outputs, _squared_error),
}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Layers of `sizes` units, the first of them features and the last predictions; `activation` is between them, the `head` at the end."""

    sizes: tuple[int, ...]
    activation: str
    dtype: npt.DTypeLike
    head: str = "classes"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise InvalidSpec(f"activation: got {self.activation!r}, want one of {', '.join(ACTIVATIONS)}")

    @property
    def _layers(self) -> list[tuple[str, str]]:
        """Names of the weights and biases, from the features on."""
        last = len(self.sizes) - 2
        stems = [f"hidden_{index}" if index < last else HEADS[self.head].stem for index in range(last + 1)]
        return [(f"{stem}/weights", f"{stem}/biases") for stem in stems]

    def initial_values(self, random: np.random.Generator) -> dict[str, Array]:
        """Returns the variables before training, weights drawn from a normal distribution, biases 0; names are those of the variables."""
        gain, values = ACTIVATIONS[self.activation].gain, {}
        for (weights, biases), num_inputs, num_outputs in zip(self._layers, self.sizes, self.sizes[1:], strict=False):
            drawn = random.standard_normal((num_inputs, num_outputs)) * np.sqrt(gain / num_inputs)
            values[weights] = drawn.astype(self.dtype)
            values[biases] = np.zeros(num_outputs, self.dtype)
        return values

    def loss_and_gradients(self, variables: Variables, features: Array, targets: Array, *, into: Mapping[str, Array]) -> float:
        """Returns the mean loss of the examples and writes its gradients into the arrays of `into`.

        `features` is (examples, features), `targets` what the head takes, both of at least one example.
        """
        outputs = self._outputs(variables, features)
        error = outputs.pop()
        loss = HEADS[self.head].loss(error, targets)
        for weights, biases in reversed(self._layers):
            inputs = outputs.pop()
            np.matmul(inputs.T, error, out=into[weights])
            np.sum(error, axis=0, out=into[biases])
            if outputs:
                error = (error @ variables[weights].T) * ACTIVATIONS[self.activation].derivative(inputs)
        return loss

    def predictions(self, variables: Variables, features: Array) -> Array:
        """Returns what the head predicts for each example: the probability of each class, or the numbers."""
        return HEADS[self.head].predict(self._outputs(variables, features)[-1])

    def _outputs(self, variables: Variables, features: Array) -> list[Array]:
        """The features, and each layer's outputs; the last ones are the sums."""
        apply, outputs = ACTIVATIONS[self.activation].apply, [features]
        for index, (weights, biases) in enumerate(self._layers):
            sums: Any = outputs[-1] @ variables[weights] + variables[biases]
            outputs.append(sums if index == len(self._layers) - 1 else apply(sums))
        return outputs
