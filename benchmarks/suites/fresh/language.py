"""A character model of the text of Python's own library: real gradients for real updates. Knows NumPy; no session."""

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ps_protocol.model.variables import Array

_CONTEXT, _WIDTH, _HIDDEN, _BATCH = 16, 32, 768, 128
_MAX_CHARACTERS = 4 << 20


class Language:
    """Characters are embedded, sixteen of them give a hidden layer, and that the next one: 0.47 million parameters."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = np.frombuffer(b"".join(file.read_bytes() for file in files)[:_MAX_CHARACTERS], np.uint8)
        characters, self._text = np.unique(text, return_inverse=True)
        self._random = np.random.default_rng(0)
        shapes = {"embedding": (characters.size, _WIDTH), "hidden": (_CONTEXT * _WIDTH, _HIDDEN), "out": (_HIDDEN, characters.size)}
        self.values: dict[str, Array] = {
            name: (self._random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()
        }
        self.values |= {"hidden/bias": np.zeros(_HIDDEN, np.float32), "out/bias": np.zeros(characters.size, np.float32)}
        self.loss = 0.0

    def prepare(self) -> None:
        """Nothing: its gradients are the work."""

    def fill(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Computes the gradients of a batch at these values."""
        starts = self._random.integers(0, self._text.size - _CONTEXT - 1, _BATCH)
        window = self._text[starts[:, None] + np.arange(_CONTEXT + 1)]
        before, following = window[:, :-1], window[:, -1]
        inputs = values["embedding"][before].reshape(_BATCH, -1)
        hidden = np.tanh(inputs @ values["hidden"] + values["hidden/bias"])
        scores = hidden @ values["out"] + values["out/bias"]
        chances = np.exp(scores - scores.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        rows = np.arange(_BATCH)
        self.loss = float(-np.log(chances[rows, following]).mean())
        chances[rows, following] -= 1.0
        chances /= _BATCH
        inner = (chances @ values["out"].T) * (1.0 - hidden * hidden)
        np.matmul(hidden.T, chances, out=gradients["out"])
        np.sum(chances, axis=0, out=gradients["out/bias"])
        np.matmul(inputs.T, inner, out=gradients["hidden"])
        np.sum(inner, axis=0, out=gradients["hidden/bias"])
        gradients["embedding"].fill(0.0)
        np.add.at(gradients["embedding"], before, (inner @ values["hidden"].T).reshape(_BATCH, _CONTEXT, _WIDTH))
