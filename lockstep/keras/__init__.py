"""Lockstep for Keras 3, with its backends torch, JAX and TensorFlow: parameter servers run the optimizer.

Keras programs import this module.

import lockstep.keras                              # pip install 'lockstep-ps[keras]', and a backend

model.compile(optimizer=lockstep.keras.Optimizer(session, keras.optimizers.Adam(1e-3)), loss=…, run_eagerly=True)
model.fit(x, y, callbacks=[lockstep.keras.StopWhenFinished(session)])

`optimizer` sends gradients to the servers, `formulas` has the servers' formula for each of Keras' optimizers, `variables` turns variables
into named arrays and back, `rows` is a layer on a table of the servers, and `callbacks` is for training steps that cannot run eagerly: with
it, each worker runs its own optimizer.
"""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError("lockstep.keras needs Keras 3 and a backend: pip install 'lockstep-ps[keras]'") from error

from lockstep.keras.callbacks import AverageUpdates, StopWhenFinished
from lockstep.keras.optimizer import Optimizer
from lockstep.keras.rows import TableRows

__all__ = ["AverageUpdates", "Optimizer", "StopWhenFinished", "TableRows"]
