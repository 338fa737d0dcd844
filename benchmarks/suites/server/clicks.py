"""Measures what admission and eviction cost a model of clicks: a factorisation machine over keys. Knows the data's generator, too.

The data is made, with what is known of Criteo's (26 columns of categories, of 10 to 10^6 values each that occur by a power law, a quarter
of the examples clicked); each value has a hidden weight and a hidden vector. It is not Criteo's.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness.arguments import add_json, show
from benchmarks.report.figures import human_bytes
from ps_protocol.model.keys import draws, spread
from worker_client import EmbeddingTable, IndexedSlices, Session, adagrad, local, normal_initializer

NUM_COLUMNS, FACTORS, BATCH_SIZE, EXPONENT = 26, 8, 1024, 1.1
DESCRIPTION = "Trains a factorisation machine of clicks over a table of a size and over tables with keys: AUC and rows."
_COLUMN_BITS = 32


def examples(count: int, *, seed: int) -> tuple[Any, Any]:
    """Returns keys (a row for each example, a column for each category) and whether each was clicked."""
    random = np.random.default_rng(seed)
    sizes, power = np.geomspace(10, 1e6, NUM_COLUMNS), 1 - EXPONENT
    ranks = np.floor((random.random((count, NUM_COLUMNS)) * (sizes**power - 1) + 1) ** (1 / power)).astype(np.int64)
    keys = (np.arange(NUM_COLUMNS) << _COLUMN_BITS) + ranks
    hidden = np.stack([_normal(keys, place) for place in range(3)])
    sums = hidden[1:].sum(axis=2)
    pairs = 0.5 * (sums**2 - (hidden[1:] ** 2).sum(axis=2)).sum(axis=0)
    logits = -1.6 + 0.25 * hidden[0].sum(axis=1) + 0.05 * pairs
    return keys, random.random(count) < _sigmoid(logits)


def _normal(keys: Any, place: int) -> Any:
    """A hidden number of each key, always the same: nearly normal, of uniform ones."""
    words = spread(keys.reshape(-1))
    return np.sum([draws(words, seed=place, step=step) for step in range(12)], axis=0).reshape(keys.shape) - 6


def _sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


def auc(scores: Any, clicked: Any) -> float:
    """Returns the probability that an example that was clicked has a higher score than one that was not."""
    ranks = np.empty(scores.size)
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, scores.size + 1)
    num_clicked = int(clicked.sum())
    return float((ranks[clicked].sum() - num_clicked * (num_clicked + 1) / 2) / (num_clicked * (scores.size - num_clicked)))


def measure(kind: str, table: EmbeddingTable, *, num_examples: int, seed: int, known: Any = None) -> dict[str, Any]:
    """Trains once over the examples and scores as many others by a quarter. `known`: all keys, of a table of a size."""
    keys, clicked = examples(num_examples + num_examples // 4, seed=seed)
    if known is not None:
        keys = np.searchsorted(known, keys)
    with local() as session:
        session.create_or_join({"rows": table, "bias": np.zeros(1, np.float32)}, optimizer=adagrad(0.05))
        for at in _batches(0, num_examples):
            _step(session, keys[at], clicked[at])
        scores = np.concatenate([_logits(*_read(session, keys[at])[1:]) for at in _batches(num_examples, len(keys))])
        report = session.status().shards[0].report
    num_rows = len(known) if known is not None else report.num_rows if report is not None else 0
    result, sizes = auc(scores, clicked[num_examples:]), {"num_rows": num_rows, "row_bytes": 2 * 4 * (1 + FACTORS)}
    return {"kind": kind, "num_examples": num_examples, "seed": seed, "auc": result, **sizes}


def _first_values(table: EmbeddingTable, keys: Any) -> Any:
    with local() as session:
        session.create_or_join({"rows": table}, optimizer=adagrad(0.05))
        return session.read_rows("rows", keys)


def _batches(start: int, stop: int) -> Iterator[slice]:
    return (slice(first, min(first + BATCH_SIZE, stop)) for first in range(start, stop, BATCH_SIZE))


def _read(session: Session, keys: Any) -> tuple[Any, Any, Any]:
    return keys, session.read_rows("rows", keys), session.read()["bias"][0]


def _logits(rows: Any, bias: Any) -> Any:
    factors = rows[..., 1:]
    return bias + rows[..., 0].sum(axis=1) + 0.5 * (factors.sum(axis=1) ** 2 - (factors**2).sum(axis=1)).sum(axis=1)


def _step(session: Session, keys: Any, clicked: Any) -> None:
    _, rows, bias = _read(session, keys)
    # Of the sum over the batch: Adagrad makes up for how often a row occurs.
    error = (_sigmoid(_logits(rows, bias)) - clicked).astype(np.float32)
    factors = rows[..., 1:]
    gradient = np.empty_like(rows)
    gradient[..., 0] = error[:, None]
    gradient[..., 1:] = error[:, None, None] * (factors.sum(axis=1, keepdims=True) - factors)
    flat = IndexedSlices(keys.reshape(-1), gradient.reshape(-1, 1 + FACTORS))
    session.step({"rows": flat, "bias": error.sum(keepdims=True)})


def run(options: argparse.Namespace) -> int:
    """Trains over each kind of table by turns, prints the figures, and returns the exit code."""
    for seed in range(options.seeds):
        known = np.unique(examples(options.examples + options.examples // 4, seed=seed)[0])
        width, initializer = 1 + FACTORS, normal_initializer(0.0, 0.001, seed=1)
        bound = len(known) // 4
        any_keys = EmbeddingTable(width, keys="int64", initializer=initializer)
        tables = {
            "a table of a size, all keys numbered": EmbeddingTable((len(known), width), initializer=initializer),
            "the same, with the first values of any keys": EmbeddingTable(_first_values(any_keys, known)),
            "any keys": any_keys,
            "from the 3rd time": EmbeddingTable(width, keys="int64", initializer=initializer, admit_after=3),
            f"from the 3rd time, {bound} rows at most": EmbeddingTable(
                width, keys="int64", initializer=initializer, admit_after=3, max_rows=bound
            ),
        }
        for kind, table in tables.items():
            report = measure(kind, table, num_examples=options.examples, seed=seed, known=known if table.keys is None else None)
            show(report, in_words, options)
    return 0


def in_words(report: dict[str, Any]) -> str:
    """Returns the figures for a reader."""
    memory = human_bytes(report["num_rows"] * report["row_bytes"])
    return f"seed {report['seed']}, {report['kind']}: AUC {report['auc']:.4f}, {report['num_rows']} rows, {memory} with slots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.add_argument("--examples", type=int, default=400_000, help="examples that it is trained with, once (default 400,000)")
    parser.add_argument("--seeds", type=int, default=3, help="how often, each time with other data (default 3)")
    add_json(parser)
