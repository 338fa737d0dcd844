"""A process with many workers: each has a connection of its own, a lease and a wait for tokens. Knows messages, not the SDK.

They make the same calls as `worker_client`, without the threads that a session needs: a thousand of them fit into a few processes.
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.harness.worker import Station
from benchmarks.suites.scale.calls import Calls
from ps_protocol.model.layout import Segments
from ps_protocol.model.spec import layouts
from ps_protocol.roles.chief import GetModelRequest, Participant, ParticipantKind, PushCommit, RegisterRequest, Registration
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import PushHeader
from ps_protocol.rpc.channel import CHANNEL_OPTIONS
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.v1 import parameter_service_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.fields import decode_duration, encode_duration
from ps_protocol.wire.frames import encode_stream

_PUSH = "/ps_protocol.v1.ParameterService/Push"
_MAX_WAIT_S = 20.0
# The number of workers that register or push at once: an operator does not start all machines at once either.
_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The workers of a process: `count` from `first` on. Each contributes `num_rounds` times, with a pause of `pause_s` between."""

    chief: str
    first: int
    count: int
    num_rounds: int
    pause_s: float


class CrowdWorker:
    """One worker of the crowd."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        self._calls = Calls(crowd.chief)
        self._index = index
        self._step = self._sequence = 0
        self.participant = Participant(era=NOBODY.era, kind=ParticipantKind.WORKER, index=index, incarnation=0)
        self._heart: asyncio.Task[None] | None = None

    async def register(self) -> Sequence[str]:
        """Joins the cluster, begins to renew the lease, and returns the parameter servers' addresses."""
        request = RegisterRequest(
            kind=ParticipantKind.WORKER, index=self._index, host="crowd", pid=os.getpid(), request_id=random.getrandbits(62)
        )
        answer = await self._calls.register(codec.encode(request))
        self.participant = codec.decode(Registration, answer).participant
        self._step = answer.global_step
        self._heart = asyncio.get_running_loop().create_task(self._beat(decode_duration(answer.lease, field="lease") / 3))
        return tuple(answer.shard_addresses)

    async def push(self, shard: Any, header: Any, gradient: Segments) -> None:
        """Sends the only parameter server its contribution to the step."""
        self._sequence += 1
        message = parameter_service_pb2.PushRequest(header=codec.encode(header(self.participant, self._push_id, self._step)))
        await shard(b"".join(encode_stream(message, gradient)))

    async def take_token(self) -> tuple[int, float]:
        """Has the contribution counted, waits for a token, and returns its step and its time of arrival."""
        commit: PushCommit | None = PushCommit(push_id=self._push_id, step=self._step, staged=True)
        while True:
            request = pb.DequeueTokenRequest(
                participant=codec.encode(self.participant),
                local_step=self._step,
                request_id=self._sequence,
                max_wait=encode_duration(_MAX_WAIT_S),
                commit=None if commit is None else codec.encode(commit),
            )
            at, reply = await self._calls.dequeue(request)
            commit = None
            if reply.result != pb.TOKEN_RESULT_WAIT:
                self._step = reply.step
                return reply.step, at

    async def leave(self) -> None:
        """Leaves the cluster."""
        if self._heart is not None:
            self._heart.cancel()
        await self._calls.leave(pb.DeregisterWorkerRequest(participant=codec.encode(self.participant)))

    @property
    def _push_id(self) -> PushId:
        return PushId(worker=self._index, incarnation=self.participant.incarnation, sequence=self._sequence)

    async def _beat(self, interval_s: float) -> None:
        await asyncio.sleep(interval_s * random.random())  # machines do not start at the same moment
        while True:
            try:
                await self._calls.heartbeat(pb.HeartbeatRequest(participant=codec.encode(self.participant)))
            except Exception as error:
                print(f"ERROR heartbeat of worker {self._index}: {error!r}", flush=True)
                raise
            await asyncio.sleep(interval_s)


def work(orders: dict[str, Any], station: Station) -> None:
    """Runs the crowd until it is released."""
    asyncio.run(_run(Crowd(**orders), station))


async def _run(crowd: Crowd, station: Station) -> None:
    workers = [CrowdWorker(crowd, index) for index in range(crowd.first, crowd.first + crowd.count)]
    begin = time.monotonic()
    addresses = await _some_at_once([worker.register() for worker in workers])
    station.say("registered", begin=begin, end=time.monotonic())
    layout_hash, gradient = _gradient(crowd.chief)
    shard: Any = grpc.aio.insecure_channel(addresses[0][0], options=CHANNEL_OPTIONS).unary_unary(_PUSH)

    def header(who: Participant, push_id: PushId, step: int) -> PushHeader:
        return PushHeader(era=who.era, push_id=push_id, step=step, layout_hash=layout_hash, secret=who.secret)

    for _ in range(crowd.num_rounds):
        await _some_at_once([worker.push(shard, header, gradient) for worker in workers])
        tokens = await asyncio.gather(*(worker.take_token() for worker in workers))
        steps, times = {step for step, _ in tokens}, sorted(at for _, at in tokens)
        station.say("tokens", step=max(steps), is_one_step=len(steps) == 1, times=times)
        # The crowd's next calls must not take processor time from workers in other processes that still wait for tokens.
        await asyncio.sleep(crowd.pause_s)
    while not station.is_released:
        await asyncio.sleep(0.02)
    with suppress(Exception):  # the chief may end when the last one leaves
        await _some_at_once([worker.leave() for worker in workers])


def _gradient(chief_address: str) -> tuple[str, Segments]:
    chief = GrpcChief(chief_address)
    agreed = chief.call(GetModelRequest(max_wait_s=_MAX_WAIT_S))
    chief.close()
    (layout,) = layouts(agreed.placement, num_shards=1)
    return layout.hash, Segments([np.zeros(layout.nbytes, np.uint8)])


async def _some_at_once(works: Sequence[Any]) -> list[Any]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def through_gate(work: Any) -> Any:
        async with gate:
            return await work

    return await asyncio.gather(*(through_gate(work) for work in works))
