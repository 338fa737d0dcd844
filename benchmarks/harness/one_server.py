"""The core of one parameter server in this process, with the calls of a chief and workers. Knows no process and no network."""

import time

from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, PushHeader, ShardSpec
from ps_server.shard.shard import ServedShard
from ps_server.threads import ApplyThreads

_FENCE = Fence(era=Era(life=1, epoch=1), chief_incarnation=1)
NUM_CONTRIBUTIONS = 2


class OneServer:
    """A model of float32 variables with an optimizer, trained by two workers."""

    def __init__(self, nbytes: int, *, num_variables: int, optimizer: str, num_threads: int) -> None:
        shape = (nbytes // 4 // num_variables,)
        variables = [VariableSpec(name=f"v{index:02}", data_type=DataType.FLOAT32, shape=shape) for index in range(num_variables)]
        self._layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])
        self._threads = ApplyThreads(num_threads)
        self._shard = ServedShard(index=0, process_incarnation=1, apply_threads=self._threads)
        self._shard.call(AdoptRequest(fence=_FENCE))
        chosen = OptimizerSpec(name=optimizer, learning_rate=constant(0.001))
        self._gradient = bytes(self._layout.nbytes)
        with self._shard.open_creation(ShardSpec(epoch=1, shard=0, layout=self._layout, optimizer=chosen)) as creation:
            creation.write(0, self._gradient)
            creation.finish()
        self._step = 0

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
