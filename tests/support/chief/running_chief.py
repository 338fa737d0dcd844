"""A real chief on an event loop in a thread, real parameter servers beside it, and workers that speak to both."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from chief.config import ChiefConfig
from chief.options import CoordinationConfig
from chief.serving.server import ChiefServer
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy, layouts
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    CommitPushRequest,
    CommitResult,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    ModelReply,
    ModelState,
    ParticipantKind,
    PushCommit,
    RegisterModelRequest,
    RegisterRequest,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import KEY_BYTES
from ps_protocol.roles.shard import PushHeader, PushResult, ReadRequest, ShardSpec
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.options import OPEN, Security
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.chief.eras import LIFE
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import open_server

_requests = itertools.count(1)

# Of every chief here, as the life is: so that a raw message can be written down beforehand.
SESSION_KEY = b"k" * KEY_BYTES

MODEL = ModelSpec(
    variables=tuple(VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(3,)) for name in ("w", "b")),
    optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)),
    placement=PlacementPolicy(strategy="round_robin"),
)


class RunningChief:
    """A chief that serves until the block ends. `ended` tells its exit code, or the error that kept it from starting."""

    def __init__(
        self,
        *ps: str,
        address: str = "127.0.0.1:0",
        security: Security = OPEN,
        page: str = "",
        **coordination: Any,
    ) -> None:
        self._config = ChiefConfig(
            ps=ps,
            address=address,
            security=security,
            coordination=CoordinationConfig(**coordination),
            page=page,
        )
        self._started, self._over = threading.Event(), threading.Event()
        self._outcome: int | PsError | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="chief")
        self.address = self.page_url = ""

    def __enter__(self) -> "RunningChief":
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._over.is_set():
            # Twice: at once, without waiting for participants to leave.
            for _ in range(2):
                self.request_stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def request_stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it ended meanwhile
            self._loop.call_soon_threadsafe(self._server.request_stop, "the test")

    def ended(self, timeout_s: float = 20.0) -> int | PsError | None:
        """Waits for the end."""
        assert self._over.wait(timeout_s), "the chief does not end"
        return self._outcome

    def client(self) -> GrpcChief:
        return GrpcChief(self.address)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with (
            mock.patch("chief.serving.runner.new_life", return_value=LIFE),
            mock.patch("chief.serving.runner.new_session_key", return_value=SESSION_KEY),
        ):
            self._server = ChiefServer(self._config)
        try:
            await self._server.start()
            self.address, self.page_url = self._server.address, self._server.page_url
            self._started.set()
            self._outcome = await self._server.wait()
        except PsError as error:
            self._outcome = error
        finally:
            await self._server.stop()
            self._over.set()
            self._started.set()


def parameter_server(
    index: int = 0, *, address: str = "127.0.0.1:0", cluster: str = "lockstep"
) -> contextlib.AbstractContextManager[ParameterServer]:
    """A parameter server that serves until the block ends."""
    return open_server(ParameterServerConfig(index=index, address=address, cluster=cluster))


@contextlib.contextmanager
def cluster(*, num_ps: int = 1, **coordination: Any) -> Iterator[RunningChief]:
    """Parameter servers and their chief."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(parameter_server(index)) for index in range(num_ps)]
        yield stack.enter_context(RunningChief(*(server.address for server in servers), **coordination))


class Worker:
    """A worker as another language would write it: straight calls, no retries, no heartbeats."""

    def __init__(
        self, chief: GrpcChief, index: int | None = None, *, kind: ParticipantKind = ParticipantKind.WORKER, **fields: Any
    ) -> None:
        self.chief = chief
        request: dict[str, Any] = {"host": "host-b", "pid": 912, "request_id": next(_requests), **fields}
        self.registration = chief.call(RegisterRequest(kind=kind, index=index, **request))
        self.participant = self.registration.participant
        self.local_step = self.registration.global_step
        self.shards = [CommandedShard(address) for address in self.registration.shard_addresses]
        self._sequence = 0
        self.request_id = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        for shard in self.shards:
            shard.close()

    def join_model(self) -> ModelReply:
        """Presents the model, and initialises it if it shall."""
        reply = self.chief.call(RegisterModelRequest(participant=self.participant, model=MODEL, max_wait_s=10.0))
        self._layouts = layouts(reply.placement, num_shards=len(self.shards))
        if reply.state is ModelState.INITIALIZE:
            for index, (shard, layout) in enumerate(zip(self.shards, self._layouts, strict=True)):
                spec = ShardSpec(
                    epoch=self.participant.era.epoch, shard=index, layout=layout, optimizer=MODEL.optimizer, attempt=reply.attempt
                )
                shard.create_variables(spec, Segments([aligned_bytes(layout.nbytes)]))
            self.chief.call(CompleteInitializationRequest(participant=self.participant, attempt=reply.attempt))
        return reply

    def push(self, *, is_sent: bool = True, num_shards: int | None = None, value: float = 0.0) -> PushCommit:
        """Sends a contribution whose gradients are all `value` to (the first) shards; returns what is to be committed."""
        self._sequence += 1
        push_id = PushId(worker=self.participant.index, incarnation=self.participant.incarnation, sequence=self._sequence)
        results = set()
        for shard, layout in list(zip(self.shards, self._layouts, strict=True))[:num_shards]:
            if is_sent:
                header = PushHeader(
                    era=self.participant.era, push_id=push_id, step=self.local_step, layout_hash=layout.hash, secret=self.participant.secret
                )
                arena = aligned_bytes(layout.nbytes)
                for index in range(len(layout.slices)):
                    layout.view(arena, index)[...] = value
                results.add(shard.push_gradients(header, Segments([arena])).result)
        return PushCommit(push_id=push_id, step=self.local_step, staged=True, is_applied=PushResult.APPLIED in results)

    def read(self) -> dict[str, list[float]]:
        """The newest variables, by name."""
        values = {}
        for shard, layout in zip(self.shards, self._layouts, strict=True):
            arena = aligned_bytes(layout.nbytes)
            shard.read(ReadRequest(epoch=self.participant.era.epoch, step=None, layout_hash=layout.hash), Segments([arena]))
            values.update({piece.variable.name: layout.view(arena, index).tolist() for index, piece in enumerate(layout.slices)})
        return values

    def commit(self, commit: PushCommit) -> CommitResult:
        return self.chief.call(CommitPushRequest(participant=self.participant, commit=commit))

    def wait(self, commit: PushCommit | None = None, *, max_wait_s: float = 10.0) -> TokenReply:
        self.request_id += 1
        reply = self.chief.call(
            DequeueTokenRequest(
                participant=self.participant, local_step=self.local_step, request_id=self.request_id, max_wait_s=max_wait_s, commit=commit
            )
        )
        # A token may be older than the one before: those of "sync, fifo tokens" keep their order.
        self.local_step = reply.step if reply.result is TokenResult.TOKEN else max(self.local_step, reply.step)
        return reply


@contextlib.contextmanager
def client_of(chief: RunningChief) -> Iterator[GrpcChief]:
    client = chief.client()
    try:
        yield client
    finally:
        client.close()
