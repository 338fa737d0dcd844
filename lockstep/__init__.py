"""Lockstep: a parameter server for any training loop that makes gradients as NumPy arrays. What a training program imports.

import lockstep

with lockstep.connect() as session:
    session.create_or_join({"w": w, "b": b}, optimizer=lockstep.sgd(0.1))
    while not session.is_finished:
        variables = session.read()
        session.step({"w": ..., "b": ...})  # the gradients, arrays of the variables' shapes and types

`lockstep.errors` has the errors that a program may catch. All other names are loaded from `worker_client` on first use; the API of
tf.compat.v1.train is `worker_client.sync_replicas`. The folders here are the adapters and the `lockstep` command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import errors as errors
    from worker_client import *  # noqa: F403 (this module exports every name of the SDK and keeps no list of its own)
    from worker_client import DNNClassifier as DNNClassifier  # not in __all__: they need scikit-learn
    from worker_client import DNNRegressor as DNNRegressor
    from worker_client.model.declarations import *  # noqa: F403
    from worker_client.model.optimizers import *  # noqa: F403
    from worker_client.model.policies import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: `errors`, or a name that `worker_client` exports."""
    if name == "errors":
        return import_module("lockstep.errors")
    if name.startswith("__") and name != "__all__":  # names that the import system looks up must not load the SDK
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        sdk = import_module("worker_client")
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted while Lockstep was imported") from None
    if name == "__all__":
        value: Any = sorted([*sdk.__all__, "errors"])
    elif name in sdk.__all__ or name in ("DNNClassifier", "DNNRegressor"):
        value = getattr(sdk, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("worker_client").__all__, "errors"})
