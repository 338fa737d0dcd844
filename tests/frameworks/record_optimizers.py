"""Records what the libraries' own optimizers compute, for tests that run without them: tests/unit/ps_server/optimizers/recorded.json.

python tests/frameworks/record_optimizers.py
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch

from tests.support.sessions.framework_optimizers import NUM_STEPS, PAIRS, Pair

RECORDED = Path(__file__).parents[1] / "unit" / "ps_server" / "optimizers" / "recorded.json"
_SIZE = 5
_KEPT = (1, 2, 10, NUM_STEPS)


def steps_of(pair: Pair, initial: Any, gradients: Any) -> Any:
    """Returns the variable after each step, as the library computes it, in the type of `initial`."""
    return _torch(pair, initial, gradients) if pair.library == "torch" else _optax(pair, initial, gradients)


def _torch(pair: Pair, initial: Any, gradients: Any) -> Any:
    parameter = torch.nn.Parameter(torch.tensor(initial))
    optimizer = getattr(torch.optim, pair.name)([parameter], **pair.arguments)
    values = []
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        values.append(parameter.detach().numpy().copy())
    return np.array(values)


def _optax(pair: Pair, initial: Any, gradients: Any) -> Any:
    jax.config.update("jax_enable_x64", True)
    optimizer = getattr(optax, pair.name)(**pair.arguments)
    value = jax.numpy.asarray(initial)
    state, values = optimizer.init(value), []
    for gradient in gradients:
        update, state = optimizer.update(jax.numpy.asarray(gradient), state, value)
        value = optax.apply_updates(value, update)
        values.append(np.asarray(value))
    return np.array(values)


def main() -> None:
    """Records all pairs."""
    rng = np.random.default_rng(16)
    initial, gradients = rng.standard_normal(_SIZE).round(6), rng.standard_normal((NUM_STEPS, _SIZE)).round(6)
    recorded: dict[str, Any] = {
        "source": f"torch {torch.__version__}, optax {optax.__version__} with jax {jax.__version__}",
        "initial": initial.tolist(),
        "gradients": gradients.tolist(),
        "after": {},
    }
    for name, pair in PAIRS.items():
        for dtype in (np.float32, np.float64):
            values = steps_of(pair, initial.astype(dtype), gradients.astype(dtype))
            recorded["after"].setdefault(name, {})[np.dtype(dtype).name] = {step: values[step - 1].tolist() for step in _KEPT}
    RECORDED.write_text(json.dumps(recorded).replace('}, "', '},\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
