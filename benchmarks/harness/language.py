"""A character model of the text of Python's own library: real gradients for real updates. Knows NumPy; no session."""

import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ps_protocol.model.variables import Array

_CONTEXT, _WIDTH, _HIDDEN = 16, 32, 768
_MAX_CHARACTERS = 4 << 20
# Of the text, what no batch is drawn from; and how many places of it are looked at.
_HELD_OUT, _NUM_HELD_OUT = 1 / 20, 20_000


class Language:
    """Characters are embedded, sixteen of them give a hidden layer, and that the next one: 0.47 million parameters.

    `seed`: of the batches, of `batch_size` characters each; the first values are always the same.
    """

    def __init__(self, *, seed: int = 0, batch_size: int = 128) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:_MAX_CHARACTERS], np.uint8)
        characters, self._text = np.unique(text, return_inverse=True)
        self._num_seen = int(self._text.size * (1 - _HELD_OUT))
        first = np.random.default_rng(0)
        self._random, self._batch_size = np.random.default_rng(seed), batch_size
        shapes = {"embedding": (characters.size, _WIDTH), "hidden": (_CONTEXT * _WIDTH, _HIDDEN), "out": (_HIDDEN, characters.size)}
        self.values: dict[str, Array] = {
            name: (first.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()
        }
        self.values |= {"hidden/bias": np.zeros(_HIDDEN, np.float32), "out/bias": np.zeros(characters.size, np.float32)}
        self.loss = 0.0
        self.sizes = characters.size, _WIDTH, _CONTEXT, _HIDDEN

    def prepare(self) -> None:
        """Nothing: its gradients are the work."""

    def fill(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Computes the gradients of a batch at these values."""
        before, inputs, hidden, chances = self._look(values, *self.batch())
        chances /= len(before)
        inner = (chances @ values["out"].T) * (1.0 - hidden * hidden)
        np.matmul(hidden.T, chances, out=gradients["out"])
        np.sum(chances, axis=0, out=gradients["out/bias"])
        np.matmul(inputs.T, inner, out=gradients["hidden"])
        np.sum(inner, axis=0, out=gradients["hidden/bias"])
        gradients["embedding"].fill(0.0)
        np.add.at(gradients["embedding"], before, (inner @ values["hidden"].T).reshape(len(before), _CONTEXT, _WIDTH))

    def batch(self) -> tuple[Array, Array]:
        """Returns the characters before some places of the text, a row for each place, and those that follow."""
        return self._at(self._random.integers(0, self._num_seen - _CONTEXT - 1, self._batch_size))

    def held_out(self) -> Iterator[tuple[Array, Array]]:
        """Yields the same of text that no batch has."""
        starts = np.linspace(self._num_seen, self._text.size - _CONTEXT - 1, _NUM_HELD_OUT).astype(np.int64)
        yield from map(self._at, np.array_split(starts, 10))

    def loss_of(self, values: Mapping[str, Array]) -> float:
        """Returns the loss at these values on text that no batch has."""
        losses = []
        for before, following in self.held_out():
            self._look(values, before, following)
            losses.append(self.loss)
        return float(np.mean(losses))

    def _at(self, starts: Array) -> tuple[Array, Array]:
        window = self._text[starts[:, None] + np.arange(_CONTEXT + 1)]
        return window[:, :-1], window[:, -1]

    def _look(self, values: Mapping[str, Array], before: Array, following: Array) -> tuple[Array, Array, Array, Array]:
        """Returns what the layers make of the characters `before`, and the loss by the scores; keeps the loss."""
        inputs = values["embedding"][before].reshape(len(before), -1)
        hidden = np.tanh(inputs @ values["hidden"] + values["hidden/bias"])
        scores = hidden @ values["out"] + values["out/bias"]
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        rows = np.arange(len(before))
        self.loss = float(-np.log(chances[rows, following]).mean())
        chances[rows, following] -= 1.0
        return before, inputs, hidden, chances
