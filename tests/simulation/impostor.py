"""A process with a worker's token but no worker's place: it sends made-up messages in a worker's name, which must have no effect."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import CommitPushRequest, DeregisterRequest, PushCommit
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushHeader
from tests.simulation.tasks import Answer, Call, Life
from tests.simulation.worker_node import WorkerNode
from tests.simulation.world import World

_names = itertools.count(1)


class ImpostorNode:
    """Knows of a worker what the status says, and what any worker knows; speaks once, and ends."""

    def __init__(self, world: World, life: Life, *, victim: WorkerNode, shards: tuple[str, ...], chief: str) -> None:
        self._world, self._life, self._victim, self._shards, self._chief = world, life, victim, shards, chief
        world.spawn(life, self._run(), lambda _: world.kill(life.name))

    def serve(self, method: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Nobody calls it."""
        raise AssertionError(method)

    async def _run(self) -> None:
        me = replace(self._victim.participant, secret=0)
        own = PushId(worker=me.index, incarnation=me.incarnation, sequence=1 << 40)
        for push_id in (own, own._replace(incarnation=(1 << 64) - 1)):
            for shard, layout in zip(self._shards, self._victim.layouts, strict=False):
                header = PushHeader(
                    era=me.era,
                    push_id=push_id,
                    step=self._victim.local_step,
                    layout_hash=layout.hash,
                    # What the worker may have given.
                    refused=tuple(range(1, 60)),
                )
                await self._say(Call(shard, "push", (header, np.zeros(layout.nbytes, np.uint8))))
        commit = PushCommit(push_id=own, step=self._victim.local_step, staged=True)
        await self._say(Call(self._chief, "ask", (CommitPushRequest(participant=me, commit=commit),)))
        await self._say(Call(self._chief, "ask", (DeregisterRequest(participant=me),)))

    async def _say(self, call: Call) -> None:
        try:
            await call
        except PsError as error:
            self._world.seen[f"impostor told {type(error).__name__}"] += 1
        else:
            self._world.seen["impostor heard"] += 1


def start_impostor(world: World, *, victim: WorkerNode, shards: tuple[str, ...], chief: str) -> None:
    """Starts one."""
    world.start(f"impostor-{next(_names)}", lambda life: ImpostorNode(world, life, victim=victim, shards=shards, chief=chief))
