"""Lockstep for JAX: any pytree of arrays is the model, optax optimizers run on the parameter servers. What a JAX program imports.

import lockstep.jax as lj                          # pip install 'lockstep-ps[jax]'

params = lj.create_or_join(session, params, optax.adamw(1e-3))
while not session.is_finished:
    loss, gradients = loss_and_gradients(params, batch)     # your jitted function
    params = lj.step(session, gradients, metrics={"loss": loss})

`training` has what a program calls, `trees` turns pytrees into named arrays and back, `recognition` turns an optax transformation into a
formula for the servers, and `proof` compares the two before anything is trained with them.
"""

try:
    import jax  # noqa: F401
except ImportError as error:
    raise ImportError("lockstep.jax needs JAX: pip install 'lockstep-ps[jax]'") from error

from lockstep.jax.training import create_or_join, local_updates, outcome, read, step

__all__ = ["create_or_join", "local_updates", "outcome", "read", "step"]
