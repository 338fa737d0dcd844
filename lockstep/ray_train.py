"""Lockstep in Ray Train: a backend by which the workers of a trainer are those of one cluster. Programs import this module.

from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

DataParallelTrainer(train, backend_config=lockstep.ray_train.LockstepConfig("--ps 2"), …).fit()     # train() calls lockstep.connect()
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

try:
    import ray
    from ray.train.backend import Backend, BackendConfig
except ImportError as error:
    raise ImportError("lockstep.ray_train needs Ray Train: pip install 'lockstep-ps[ray]' 'ray[train]'") from error

from lockstep.launcher.engines import ranks
from lockstep.launcher.engines.ray_train import WORKERS_VARIABLE, ranks_of
from ps_protocol.errors import InvalidSpec
from ps_protocol.process.options import UP_FLAGS

__all__ = ["LockstepConfig"]


@dataclass
class LockstepConfig(BackendConfig):  # type: ignore[misc, unused-ignore]  # Ray may not be installed where types are checked
    """Starts a cluster on the node of the first worker, with these flags of `lockstep up`. It ends with that worker.

    Where Ray Train starts its workers again, a new cluster continues from the newest checkpoint of `--checkpoint-dir`.
    """

    flags: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls."""
        return _LockstepBackend


class _LockstepBackend(Backend):  # type: ignore[misc, unused-ignore]
    def on_start(self, worker_group: Any, backend_config: LockstepConfig) -> None:
        places = worker_group.execute(ray.util.get_node_ip_address)
        texts = ray.remote(_Texts).options(num_cpus=0).remote()
        for rank in range(len(places)):
            said = {WORKERS_VARIABLE: f"{rank} {' '.join(places)}", UP_FLAGS.variable: backend_config.flags}
            worker_group.execute_single(rank, _tell, texts, said)


def _tell(texts: Any, said: dict[str, str]) -> None:
    _Store.texts = texts
    os.environ.update(said)


class _Texts:
    """An actor: what the ranks of a run tell each other."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def do(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the dictionary."""
        return getattr(self._texts, method)(*arguments)


class _Store:
    """The actor of this run, as ranks take it."""

    texts: Any = None

    def check(self, keys: list[str]) -> bool:
        return all(self.get(key) is not None for key in keys)

    def get(self, key: str) -> str:
        return ray.get(self.texts.do.remote("get", key))  # type: ignore[no-any-return, unused-ignore]

    def set(self, key: str, text: str) -> object:
        return ray.get(self.texts.do.remote("__setitem__", key, text))

    def delete_key(self, key: str) -> object:
        return ray.get(self.texts.do.remote("pop", key, None))


def join(environment: Mapping[str, str]) -> dict[str, str]:
    """Does what `ranks.join` says. Raises InvalidSpec in a process that a worker of Ray Train has started."""
    if _Store.texts is None:
        raise InvalidSpec(f"{WORKERS_VARIABLE}: this is not the process of the worker itself: connect there, or name the chief here")
    return ranks.join(ranks_of(environment), _Store(), environment)
