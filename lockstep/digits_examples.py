"""The handwritten digits that come with scikit-learn: the split, each worker's part, each step's batch. Knows no model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ps_protocol.tensors import Array

_NUM_TEST = 360
_SPLIT_SEED = 20240229
_MAX_PIXEL = 16.0

MISSING = "the handwritten digits come with scikit-learn, which is not installed: pip install 'lockstep-ps[demo]'"


class ExamplesMissing(Exception):
    """scikit-learn is not there; the text says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Images of 64 pixels from 0 to 1, one a row, and the digits that they show."""

    images: Array
    labels: Array

    def part(self, index: int, *, num_parts: int) -> Self:
        """Returns every `num_parts`-th example, from `index` on: one worker's data."""
        return type(self)(images=self.images[index::num_parts], labels=self.labels[index::num_parts])

    def batch(self, size: int, *, worker: int, step: int) -> Self:
        """Draws a batch; the same worker and step always get the same one, so that a worker that is replaced goes on alike."""
        chosen = np.random.default_rng((worker, step)).integers(len(self.labels), size=size)
        return type(self)(images=self.images[chosen], labels=self.labels[chosen])


def save_examples(train: Examples, test: Examples, *, path: Path) -> None:
    """Writes them to a file for `read_examples`: scikit-learn takes a second to import, and each process that needn't saves it."""
    np.savez(path, train_images=train.images, train_labels=train.labels, test_images=test.images, test_labels=test.labels)


def read_examples(path: Path) -> tuple[Examples, Examples]:
    """Returns what `save_examples` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        train, test = (Examples(images=arrays[f"{name}_images"], labels=arrays[f"{name}_labels"]) for name in ("train", "test"))
    return train, test


def load_examples() -> tuple[Examples, Examples]:
    """Returns examples to train on and examples to test with; the split is always the same. Raises ExamplesMissing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ExamplesMissing(MISSING) from error
    digits = load_digits()
    images = (digits.data / _MAX_PIXEL).astype(np.float32)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    test, train = order[:_NUM_TEST], order[_NUM_TEST:]
    return Examples(images=images[train], labels=digits.target[train]), Examples(images=images[test], labels=digits.target[test])
