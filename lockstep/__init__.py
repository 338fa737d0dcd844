"""Lockstep: a parameter server for any training loop that makes gradients as NumPy arrays. What a training program imports.

import lockstep

with lockstep.connect() as session:
    session.create_or_join({"w": w, "b": b}, optimizer=lockstep.sgd(0.1))
    while not session.is_finished:
        variables = session.read()
        session.step({"w": ..., "b": ...})  # the gradients, arrays of the variables' shapes and types

`lockstep.errors` has the errors that a program may catch. Names are loaded when they are first asked for, from `worker_client`, which has
them all; the API of tf.compat.v1.train is `worker_client.sync_replicas`. The folders here are the `lockstep` command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import ps_protocol as ps_protocol  # before anything of it imports grpc: see `prepare_import` there

if TYPE_CHECKING:
    from lockstep import errors
    from worker_client import (
        AverageSpec,
        Buffer,
        ClusterState,
        ClusterStatus,
        ConditionalAccumulator,
        Constraint,
        EmbeddingTable,
        IndexedSlices,
        Initializer,
        MetricReport,
        Observer,
        OptimizerSpec,
        Placement,
        PolicySpec,
        PsError,
        Push,
        PushOutcome,
        Schedule,
        Security,
        Session,
        SparseConditionalAccumulator,
        Variable,
        WireFormat,
        WorkerMetric,
        adadelta,
        adagrad,
        adagrad_da,
        adam,
        async_policy,
        clip_to,
        connect,
        constant_initializer,
        cosine_decay,
        exponential_decay,
        fixed_size_partitioner,
        ftrl,
        inverse_time_decay,
        local,
        max_norm,
        min_max_variable_partitioner,
        momentum,
        moving_average,
        non_negative,
        normal_initializer,
        observe,
        observe_local,
        piecewise_constant,
        polynomial_decay,
        proximal_adagrad,
        proximal_sgd,
        rmsprop,
        sgd,
        ssp_policy,
        sync_policy,
        top_k,
        uniform_initializer,
        unit_norm,
        variable_axis_size_partitioner,
        zeros_initializer,
    )
    from worker_client import DNNClassifier as DNNClassifier  # not in __all__: it needs scikit-learn

__version__ = "0.1.0"

__all__ = [
    "AverageSpec",
    "Buffer",
    "ClusterState",
    "ClusterStatus",
    "ConditionalAccumulator",
    "Constraint",
    "EmbeddingTable",
    "IndexedSlices",
    "Initializer",
    "MetricReport",
    "Observer",
    "OptimizerSpec",
    "Placement",
    "PolicySpec",
    "PsError",
    "Push",
    "PushOutcome",
    "Schedule",
    "Security",
    "Session",
    "SparseConditionalAccumulator",
    "Variable",
    "WireFormat",
    "WorkerMetric",
    "adadelta",
    "adagrad",
    "adagrad_da",
    "adam",
    "async_policy",
    "clip_to",
    "connect",
    "constant_initializer",
    "cosine_decay",
    "errors",
    "exponential_decay",
    "fixed_size_partitioner",
    "ftrl",
    "inverse_time_decay",
    "local",
    "max_norm",
    "min_max_variable_partitioner",
    "momentum",
    "moving_average",
    "non_negative",
    "normal_initializer",
    "observe",
    "observe_local",
    "piecewise_constant",
    "polynomial_decay",
    "proximal_adagrad",
    "proximal_sgd",
    "rmsprop",
    "sgd",
    "ssp_policy",
    "sync_policy",
    "top_k",
    "uniform_initializer",
    "unit_norm",
    "variable_axis_size_partitioner",
    "zeros_initializer",
]


def __getattr__(name: str) -> Any:
    """Loads a name of the public surface when it is first asked for."""
    if name == "errors":
        return import_module("lockstep.errors")
    if name not in __all__ and name != "DNNClassifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("worker_client"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
