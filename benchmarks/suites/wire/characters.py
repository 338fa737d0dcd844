"""A small language model of characters on the text of Python's standard library: how much of its weights a step changes, by learning rate.

The model has one hidden layer over a window of characters. Its gradients are real, AdamW runs on the servers, and a follower counts.
"""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model.variables import Array
from worker_client.following.follower import Follower
from worker_client.following.sources import ClusterSource
from worker_client.opening import enter_locally

RATES = (1e-3, 1e-4, 1e-5, 3e-6, 1e-6)
_WINDOW, _EMBEDDING, _HIDDEN, _BATCH = 24, 32, 640, 128
_NUM_WARMUP, _NUM_MEASURED = 150, 20
_FIRST, _NUM_CHARACTERS = 32, 96


def text() -> Array:
    """Returns the printable characters of the standard library's modules, as numbers from 0 to 95."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    raw = np.frombuffer(b"".join(path.read_bytes() for path in modules), np.uint8)
    return np.clip(raw.astype(np.int64) - _FIRST, 0, _NUM_CHARACTERS - 1)


def first_weights() -> dict[str, Array]:
    """Returns the model's first weights: 0.56 million."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (_NUM_CHARACTERS, _EMBEDDING), "hidden": (_WINDOW * _EMBEDDING, _HIDDEN), "out": (_HIDDEN, _NUM_CHARACTERS)}
    return {name: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32) for name, shape in shapes.items()}


def gradients(weights: Mapping[str, Array], windows: Array, following: Array) -> tuple[float, dict[str, Array]]:
    """Returns the mean cross entropy of the characters that follow windows, and its gradients."""
    embedded = weights["embedding"][windows].reshape(len(windows), -1)
    hidden = np.tanh(embedded @ weights["hidden"])
    scores = hidden @ weights["out"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances = scores / scores.sum(axis=1, keepdims=True)
    rows = np.arange(len(windows))
    loss = float(-np.log(chances[rows, following] + 1e-9).mean())
    chances[rows, following] -= 1.0
    chances /= len(windows)
    back = (chances @ weights["out"].T) * (1 - hidden**2)
    of_embedding = np.zeros_like(weights["embedding"])
    np.add.at(of_embedding, windows, (back @ weights["hidden"].T).reshape(len(windows), _WINDOW, _EMBEDDING))
    return loss, {"embedding": of_embedding, "hidden": embedded.T @ back, "out": hidden.T @ chances}


def changes_at(rate: float) -> dict[str, Any]:
    """Trains 150 steps at 1e-3, then some at `rate`; returns what a follower in bfloat16 receives a step, and the share that changes."""
    characters, rng = text(), np.random.default_rng(1)
    cluster = InProcessCluster(total_num_replicas=1)
    session = worker_client.local(cluster)
    session.create_or_join(first_weights(), optimizer=worker_client.adamw(1e-3))

    def step(now: float) -> float:
        starts = rng.integers(0, len(characters) - _WINDOW - 1, _BATCH)
        windows = characters[starts[:, None] + np.arange(_WINDOW)]
        loss, found = gradients(session.read(), windows, characters[starts + _WINDOW])
        session.step(found, hyperparameters={"learning_rate": now})
        return loss

    for _ in range(_NUM_WARMUP):
        loss = step(1e-3)
    with session, Follower(ClusterSource(*enter_locally(cluster)), encoding=FloatEncoding.BFLOAT16) as weights:
        weights.wait()
        before, whole, shares = weights.received_bytes, weights.received_bytes, []
        for _ in range(_NUM_MEASURED):
            held = {name: array.copy() for name, array in weights.arrays.items()}
            loss = step(rate)
            weights.wait(step=session.global_step)
            changed = sum(int((weights.arrays[name] != array).sum()) for name, array in held.items())
            shares.append(changed / sum(array.size for array in held.values()))
        return {
            "rate": rate,
            "share": float(np.mean(shares)),
            "bytes": (weights.received_bytes - before) / _NUM_MEASURED,
            "whole": whole,
            "loss": loss,
        }
