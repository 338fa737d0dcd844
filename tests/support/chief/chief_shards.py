"""The chief's side of shards on an event loop, with shards that give prepared answers, and instructions for it. Asserts nothing."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from chief.core import messages
from chief.shards.checkpoint_store import CheckpointStore
from chief.shards.side import ShardSide
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import DEFAULT_POLICY
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, ShardSettings, ShardSpec
from tests.support.chief.chief_runner import FakeLink
from tests.support.chief.eras import fence
from tests.support.sessions import skipping_loop

APPLY = messages.ApplyStep(request=ApplyRequest(fence=fence(1, 5), step=3, contributors=(PushId(worker=0, incarnation=1, sequence=1),)))
COPY = messages.CopyStep(fence=fence(1, 5), step=3, tag="step-000000003")
WRITE = messages.WriteStep(fence=COPY.fence, step=COPY.step, tag=COPY.tag)
RECORD = ChiefRecord(model=None, policy=DEFAULT_POLICY, num_rollbacks=4)
SGD = OptimizerSpec(name="sgd", learning_rate=constant(0.1))


def adopting(epoch: int = 1) -> messages.AdoptShards:
    return messages.AdoptShards(fence=fence(epoch, 5))


def keeping(version: int) -> messages.KeepRecord:
    settings = ShardSettings(fence=fence(1), version=1)
    return messages.KeepRecord(fence=fence(1), version=version, settings=settings, record=RECORD)


def restoring(epoch: int = 2) -> messages.RestoreShards:
    return messages.RestoreShards(
        fence=fence(epoch, 5),
        tag="step-000000003",
        manifest_sha256="ab",
        specs=tuple(ShardSpec(epoch=epoch, shard=index, layout=Layout(()), optimizer=SGD, initial_step=3) for index in range(2)),
        settings=ShardSettings(fence=fence(epoch, 5), version=0),
    )


class Scene:
    """A shard side over two fake shards, and what it has reported."""

    def __init__(self, place: Path | None = None) -> None:
        self.links = [FakeLink(index) for index in range(2)]
        self.events: list[messages.Event] = []
        self.defects: list[BaseException] = []
        self.superseded: list[str] = []
        self.failures: list[PsError] = []
        self.now = 100.0
        store = None if place is None else CheckpointStore(LocalStorage(place), cluster="lockstep")
        self.side = ShardSide(
            self.links,
            store=store,
            report=self.events.append,
            on_defect=self.defects.append,
            on_superseded=self.superseded.append,
            clock=lambda: self.now,
            session_key=b"chief",
        )

    def begin(self, *, is_takeover: bool = False) -> None:
        self.side.begin(chief_address="host-c:1", is_takeover=is_takeover, on_failure=self.failures.append)

    def all_of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    async def one_of(self, *kinds: type) -> Any:
        async with asyncio.timeout(10):
            while not (found := self.all_of(*kinds)):
                await asyncio.sleep(0)
        return found[0]

    async def end_of(self, work: messages.Work) -> Any:
        """Returns the event with which an instruction ends."""
        async with asyncio.timeout(10):
            while not (found := self.has_ended(work)):
                await asyncio.sleep(0)
        return found[0]

    def has_ended(self, work: messages.Work) -> list[Any]:
        return [event for event in self.all_of(messages.Done, messages.Failed) if event.work is work]

    async def adopted(self) -> messages.Adopted:
        """Returns the result of the first adoption that is done."""
        async with asyncio.timeout(10):
            while not (found := [one.result for one in self.all_of(messages.Done) if isinstance(one.work, messages.AdoptShards)]):
                await asyncio.sleep(0)
        return found[0]  # type: ignore[no-any-return]  # of that instruction

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], place: Path | None = None) -> None:
    async def run() -> None:
        scene = Scene(place)
        try:
            await act(scene)
        finally:
            await scene.side.cancel_all()
            await scene.side.close()
        assert not scene.defects

    # A place for checkpoints has a thread, which needs the time that it takes.
    (skipping_loop.run if place is None else asyncio.run)(run())
