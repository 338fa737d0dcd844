"""Lockstep for JAX: the model is any pytree of arrays, and the parameter servers run optax optimizers. JAX programs import this module.

import lockstep.jax as lj                          # pip install 'lockstep-ps[jax]'

params = lj.create_or_join(session, params, optax.adamw(1e-3))
while not session.is_finished:
    loss, gradients = loss_and_gradients(params, batch)     # your jitted function
    params = lj.step(session, gradients, metrics={"loss": loss})

`training` has the functions for programs, `diloco` has workers step by themselves in between, `trees` turns pytrees into named arrays and
back, `recognition` turns an optax transformation into a formula for the servers, and `proof` compares the two before training.
"""

try:
    import jax  # noqa: F401
except ImportError as error:
    raise ImportError("lockstep.jax needs JAX: pip install 'lockstep-ps[jax]'") from error

from lockstep.jax.diloco import DiLoCo
from lockstep.jax.training import Rows, create_or_join, local_updates, outcome, read, read_rows, step

__all__ = ["DiLoCo", "Rows", "create_or_join", "local_updates", "outcome", "read", "read_rows", "step"]
