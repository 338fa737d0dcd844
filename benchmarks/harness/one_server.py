"""The core of one parameter server in this process, with the calls of a chief and workers. Knows no process and no network."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, PushHeader, SaveProgress, SaveRequest, SaveState, ShardSpec
from ps_server.shard.shard import Shard
from ps_server.threads import ApplyThreads

_FENCE = Fence(era=Era(life=1, epoch=1), chief_incarnation=1)
NUM_CONTRIBUTIONS = 2
_LONGEST_S = 60.0


class OneServer:
    """A model of float32 variables with an optimizer, trained by two workers. `directory`: where checkpoints go."""

    def __init__(self, nbytes: int, *, num_variables: int, optimizer: str, num_threads: int, directory: Path | None = None) -> None:
        shape = (nbytes // 4 // num_variables,)
        variables = [VariableSpec(name=f"v{index:02}", data_type=DataType.FLOAT32, shape=shape) for index in range(num_variables)]
        self._layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])
        self._threads = ApplyThreads(num_threads)
        storage = None if directory is None else LocalStorage(directory)
        self._shard = Shard(index=0, process_incarnation=1, apply_threads=self._threads, storage=storage)
        self._shard.call(AdoptRequest(fence=_FENCE))
        chosen = OptimizerSpec(name=optimizer, learning_rate=constant(0.001))
        self._gradient = bytes(self._layout.nbytes)
        with self._shard.open_creation(ShardSpec(epoch=1, shard=0, layout=self._layout, optimizer=chosen)) as creation:
            creation.write(0, self._gradient)
            creation.finish()
        self._step = 0
        self._request: SaveRequest | None = None
        self.saved_bytes = 0

    def stop(self) -> None:
        """Ends its threads."""
        self._threads.stop()

    def step(self) -> float:
        """Stages contributions and applies them; returns the seconds of the apply."""
        push_ids = tuple(PushId(worker=worker, incarnation=1, sequence=self._step + 1) for worker in range(NUM_CONTRIBUTIONS))
        for push_id in push_ids:
            with self._shard.open_push(PushHeader(era=_FENCE.era, push_id=push_id, step=self._step, layout_hash=self._layout.hash)) as push:
                push.write(0, self._gradient)
                push.finish()
        request = ApplyRequest(fence=_FENCE, step=self._step, contributors=push_ids)
        started = time.perf_counter()
        self._shard.apply_step(request)
        self._step += 1
        return time.perf_counter() - started

    def begin_save(self) -> tuple[float, float]:
        """Begins to save the step; returns the seconds that steps had to wait for the copy, and the time when writing the file began."""
        self._request = SaveRequest(fence=_FENCE, step=self._step, tag=f"step-{self._step:09}", num_shards=1)
        started = time.perf_counter()
        self._shard.call(self._request)
        copied = time.perf_counter()
        return copied - started, copied

    def is_saved(self, *, max_wait_s: float = 1e-6) -> bool:
        """Whether the checkpoint has been written."""
        assert self._request is not None
        progress: SaveProgress = self._shard.call(replace(self._request, max_wait_s=max_wait_s))
        if progress.failure is not None:
            raise progress.failure
        if progress.file is not None:
            self.saved_bytes = progress.file.num_bytes
        return progress.state is SaveState.DONE

    def await_save(self) -> None:
        """Waits until the checkpoint has been written."""
        while not self.is_saved(max_wait_s=_LONGEST_S):
            pass


class PlainCopy:
    """The reference for a save: a copy of the same number of bytes, in one thread, into memory that has been used before."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def seconds(self) -> float:
        """Copies once, and returns the seconds."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started
