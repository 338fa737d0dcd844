"""The handwritten digits that come with scikit-learn: the split, each worker's part, each step's batch. Knows no model."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ps_protocol.tensors import Array

_NUM_TEST = 360
_SPLIT_SEED = 20240229
_MAX_PIXEL = 16
_NUM_PIXELS = 64

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


def load_digits() -> Array:
    """Returns scikit-learn's digits as bytes, one example a row: 64 pixels from 0 to 16, then the digit. Raises ExamplesMissing.

    Reads the file that lies in the package and leaves the package alone: it takes a second to import.
    """
    found = importlib.util.find_spec("sklearn")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(place, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, np.uint8, delimiter=",")
    raise ExamplesMissing(MISSING)


def split(rows: Array) -> tuple[Examples, Examples]:
    """Returns examples to train on and examples to test with; the split is always the same."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(rows))
    train, test = (
        Examples(images=part[:, :_NUM_PIXELS] / np.float32(_MAX_PIXEL), labels=part[:, _NUM_PIXELS].astype(np.int64))
        for part in (rows[order[_NUM_TEST:]], rows[order[:_NUM_TEST]])
    )
    return train, test
