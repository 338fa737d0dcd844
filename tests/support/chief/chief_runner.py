"""A runner on an event loop, with shards that answer at once, or fail on request. Asserts nothing of the runner."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from chief.options import CoordinationConfig
from chief.serving.runner import Runner
from ps_protocol.errors import PsError, Superseded
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import (
    ClusterState,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    Participant,
    ParticipantKind,
    PushCommit,
    RegisterModelRequest,
    RegisterRequest,
    TokenReply,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.roles.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    CheckpointFile,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    ShardReport,
    ShardSettings,
    ShardStatus,
)
from tests.support.chief import eras
from tests.support.chief.running_chief import MODEL
from tests.support.sessions import skipping_loop


class FakeLink:
    """A shard that answers at once, unless `errors` has one for the next call of a method."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.address = f"host-p:{5000 + index}"
        self.errors: dict[str, list[PsError]] = {}
        self.always: dict[str, PsError] = {}
        self.process_incarnation = 7
        self.step: int | None = None
        self.epoch = self.chief_incarnation = 0
        self.life = eras.LIFE
        self.chief_address = ""
        self.num_looks = 0
        self.chief_heard_ago_s: float | None = None
        self.adoption = Adoption(step=None, layout_hash="")
        self.records: dict[int, bytes] = {}
        self.saved: list[SaveRequest] = []
        self.restored: list[RestoreRequest] = []
        # How far it says that it is, each time it is asked, before it is done.
        self.far: list[RestoreProgress] = []
        self.applied: list[ApplyRequest] = []
        self.configured: list[ShardSettings] = []
        self.sums: tuple[float, ...] = ()
        self.ended_because = ""
        self.is_closed = False
        self.never = asyncio.Event()
        self.hangs: set[str] = set()

    async def _answer(self, method: str) -> None:
        if method in self.hangs:
            await self.never.wait()
        if method in self.always:
            raise self.always[method]
        if self.errors.get(method):
            raise self.errors[method].pop(0)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        await self._answer("handshake")
        identity = Identity(cluster="lockstep", role=Role.PARAMETER_SERVER, index=self.index, process_incarnation=self.process_incarnation)
        return HandshakeReply(identity=identity, version=PROTOCOL_VERSION, epoch=0, warning="")

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        await self._answer("status")
        self.num_looks += 1
        fields: dict[str, Any] = dict.fromkeys(ShardStatus.__dataclass_fields__, 0)
        fields.update(shard=self.index, process_incarnation=self.process_incarnation, step=self.step, report=ShardReport())
        fields.update(chief_address=self.chief_address, chief_heard_ago_s=self.chief_heard_ago_s)
        return ShardStatus(**{**fields, "fence": self._fence})

    @property
    def _fence(self) -> Fence:
        return eras.fence(self.epoch, self.chief_incarnation, life=self.life) if self.chief_incarnation or self.epoch else NOBODY

    async def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = (), timeout_s: float) -> Adoption:
        await self._answer("adopt")
        self.epoch, self.chief_incarnation, self.chief_address = fence.epoch, fence.chief_incarnation, chief_address
        self.life = fence.life
        return self.adoption

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        await self._answer("keep_record")
        self.records[version] = record

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        await self._answer("save" if max_wait_s else "begin_save")
        self.saved.append(request)
        if not max_wait_s:
            return SaveProgress(state=SaveState.WRITING)
        return SaveProgress(state=SaveState.DONE, file=CheckpointFile(name=f"ps-{self.index}", shard=self.index, num_bytes=1, sha256="ab"))

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        await self._answer("restore")
        if self.far:
            return self.far.pop(0)
        self.restored.append(request)
        self.step = request.spec.initial_step
        return RestoreProgress(is_done=True)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        await self._answer("configure")
        self.configured.append(settings)

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        await self._answer("prepare_step")
        return self.sums

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        await self._answer("apply_step")
        self.applied.append(request)
        return ApplyReply(step=request.step + 1, repeated_request=False)

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        await self._answer("shutdown")
        if fence.is_overtaken_by(self._fence):
            raise Superseded("another chief has adopted it; end this chief")
        self.ended_because = reason

    async def close(self) -> None:
        self.is_closed = True


class Scene:
    """A runner with fake shards, and one worker."""

    def __init__(self, *, num_ps: int = 1, **coordination: Any) -> None:
        self.links = [FakeLink(index) for index in range(num_ps)]
        self.states: list[ClusterState] = []
        loop = asyncio.get_running_loop()
        self.runner = Runner(self.links, config=CoordinationConfig(**coordination), on_state=self.states.append, clock=loop.time)
        self.running = loop.create_task(self.runner.run())
        self.sequence = 0

    async def join(self) -> Participant:
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=None, host="h", pid=1, request_id=1)
        registration = await self.runner.call(request)
        self.participant = registration.participant
        return self.participant

    async def initialise(self, model: ModelSpec = MODEL) -> None:
        participant = await self.join()
        reply = await self.runner.call(RegisterModelRequest(participant=participant, model=model, max_wait_s=10.0))
        await self.runner.call(CompleteInitializationRequest(participant=participant, attempt=reply.attempt))

    async def take_step(self) -> TokenReply:
        self.sequence += 1
        step = self.runner.status(max_ledger_entries=0).global_step
        push_id = PushId(worker=self.participant.index, incarnation=self.participant.incarnation, sequence=self.sequence)
        return await self.runner.call(
            DequeueTokenRequest(
                participant=self.participant,
                local_step=step,
                request_id=self.sequence,
                max_wait_s=10.0,
                commit=PushCommit(push_id=push_id, step=step, staged=True),
            ),
        )

    def status(self) -> str:
        return self.runner.status(max_ledger_entries=0).waiting_for

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.runner.close()
        assert all(link.is_closed for link in self.links)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def run() -> None:
        scene = Scene(**options)
        try:
            async with asyncio.timeout(20):
                await act(scene)
        finally:
            await scene.close()

    skipping_loop.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
