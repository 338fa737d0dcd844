"""Lockstep for Keras 3, with its backends torch, JAX and TensorFlow: the optimizer runs on parameter servers. What a Keras program imports.

import lockstep.keras                              # pip install 'lockstep-ps[keras]', and a backend

model.compile(optimizer=lockstep.keras.Optimizer(session, keras.optimizers.Adam(1e-3)), loss=…, run_eagerly=True)
model.fit(x, y, callbacks=[lockstep.keras.StopWhenFinished(session)])

`optimizer` gives gradients to the servers, `formulas` has what servers compute for each of Keras' optimizers, `variables` turns variables
into named arrays and back, and `callbacks` is for what cannot run eagerly: there each worker's own optimizer runs.
"""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError("lockstep.keras needs Keras 3 and a backend: pip install 'lockstep-ps[keras]'") from error

from lockstep.keras.callbacks import AverageUpdates, StopWhenFinished
from lockstep.keras.optimizer import Optimizer

__all__ = ["AverageUpdates", "Optimizer", "StopWhenFinished"]
