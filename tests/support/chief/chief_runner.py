"""A runner on an event loop, with shards that answer at once, or fail on request. Asserts nothing of the runner."""

import asyncio
from collections.abc import Callable, Coroutine
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
    AdoptRequest,
    ApplyReply,
    ApplyRequest,
    CheckpointFile,
    KeepRecordRequest,
    PrepareRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    SaveState,
    ShardReport,
    ShardSettings,
    ShardStatus,
    ShardStatusRequest,
    ShutdownRequest,
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
        self._answers: dict[type, tuple[Callable[[Any], Any], str]] = {
            ShardStatusRequest: (self._status, "status"),
            AdoptRequest: (self._adopt, "adopt"),
            KeepRecordRequest: (self._keep_record, "keep_record"),
            SaveRequest: (self._save, "save"),
            RestoreRequest: (self._restore, "restore"),
            PrepareRequest: (lambda request: self.sums, "prepare_step"),
            ApplyRequest: (self._apply, "apply_step"),
            ShutdownRequest: (self._shut_down, "shutdown"),
        }

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

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        answer, name = self._answers[type(request)]
        await self._answer("begin_save" if isinstance(request, SaveRequest) and not request.max_wait_s else name)
        return answer(request)

    def _status(self, request: ShardStatusRequest) -> ShardStatus:
        self.num_looks += 1
        fields: dict[str, Any] = dict.fromkeys(ShardStatus.__dataclass_fields__, 0)
        fields.update(shard=self.index, process_incarnation=self.process_incarnation, step=self.step, report=ShardReport())
        fields.update(chief_address=self.chief_address, chief_heard_ago_s=self.chief_heard_ago_s)
        return ShardStatus(**{**fields, "fence": self._fence})

    @property
    def _fence(self) -> Fence:
        return eras.fence(self.epoch, self.chief_incarnation, life=self.life) if self.chief_incarnation or self.epoch else NOBODY

    def _adopt(self, request: AdoptRequest) -> Adoption:
        fence = request.fence
        self.epoch, self.chief_incarnation, self.chief_address = fence.epoch, fence.chief_incarnation, request.chief_address
        self.life = fence.life
        return self.adoption

    def _keep_record(self, request: KeepRecordRequest) -> None:
        self.records[request.version] = request.record
        self.configured.append(request.settings)

    def _save(self, request: SaveRequest) -> SaveProgress:
        self.saved.append(request)
        if not request.max_wait_s:
            return SaveProgress(state=SaveState.WRITING)
        return SaveProgress(state=SaveState.DONE, file=CheckpointFile(name=f"ps-{self.index}", shard=self.index, num_bytes=1, sha256="ab"))

    def _restore(self, request: RestoreRequest) -> RestoreProgress:
        if self.far:
            return self.far.pop(0)
        self.restored.append(request)
        self.step = request.spec.initial_step
        return RestoreProgress(is_done=True)

    def _apply(self, request: ApplyRequest) -> ApplyReply:
        self.applied.append(request)
        return ApplyReply(step=request.step + 1, repeated_request=False)

    def _shut_down(self, request: ShutdownRequest) -> None:
        if request.fence.is_overtaken_by(self._fence):
            raise Superseded("another chief has adopted it; end this chief")
        self.ended_because = request.reason

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
