"""The core of one parameter server in this process, with the calls of a chief and workers. Knows no process and no network."""

import time
from collections.abc import Sequence

from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, PushHeader, ShardSpec, SparsePart
from ps_server.config import default_apply_threads
from ps_server.shard.shard import ServedShard
from ps_server.threads import ApplyThreads

FENCE = Fence(era=Era(life=1, epoch=1), chief_incarnation=1)


class OneServer:
    """Variables that begin with zeros, and tables, with an optimizer. `at_step`: how many steps were applied."""

    def __init__(self, *variables: VariableSpec, optimizer: str, rate: float, storage: LocalStorage | None = None) -> None:
        self._layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows) for variable in variables])
        self._threads = ApplyThreads(default_apply_threads())
        self.shard = ServedShard(index=0, process_incarnation=1, apply_threads=self._threads, storage=storage)
        self.shard.call(AdoptRequest(fence=FENCE))
        chosen = OptimizerSpec(name=optimizer, learning_rate=constant(rate))
        with self.shard.open_creation(ShardSpec(epoch=1, shard=0, layout=self._layout, optimizer=chosen)) as creation:
            if self._layout.nbytes:
                creation.write(0, bytes(self._layout.nbytes))
            creation.finish()
        self.at_step = 0

    def stop(self) -> None:
        """Ends its threads."""
        self._threads.stop()

    def step(self, *contributions: bytes, sparse: tuple[SparsePart, ...] = ()) -> float:
        """Stages contributions and applies them; returns the seconds of the apply."""
        push_ids: Sequence[PushId] = [PushId(worker=one, incarnation=1, sequence=self.at_step + 1) for one in range(len(contributions))]
        for push_id, content in zip(push_ids, contributions, strict=True):
            header = PushHeader(era=FENCE.era, push_id=push_id, step=self.at_step, layout_hash=self._layout.hash, sparse=sparse)
            with self.shard.open_push(header) as push:
                push.write(0, content)
                push.finish()
        request = ApplyRequest(fence=FENCE, step=self.at_step, contributors=tuple(push_ids))
        started = time.perf_counter()
        self.shard.apply_step(request)
        self.at_step += 1
        return time.perf_counter() - started
