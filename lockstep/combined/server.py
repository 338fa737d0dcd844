"""Runs a parameter server and the chief in one process: links one to the other, and ends them together. Decides nothing."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from chief.config import ChiefConfig
from chief.serving.server import ChiefServer
from chief.shards.link import BlockingCaller, GrpcShardLink, ShardLink
from ps_protocol.errors import PsError
from ps_protocol.roles.fence import NOBODY, Fence
from ps_protocol.roles.identity import PROTOCOL_VERSION, HandshakeReply, Identity, Role
from ps_protocol.roles.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardStatus,
)
from ps_protocol.rpc.channel import Access
from ps_protocol.security.permissions import CallerRole
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer

# The chief's link to the parameter server of this process: calls its store directly, without a network.
#
# Calls that may take long run in a thread, so that the chief keeps serving its workers. No message can be lost, so no call needs a
# deadline.


Result = TypeVar("Result")

# One thread for the step under way, and one for other calls meanwhile.
_NUM_THREADS = 2


class StoreLink:
    """Implements the chief's ShardLink over a started server. Use it in one event loop only."""

    def __init__(self, server: ParameterServer, *, identity: Identity) -> None:
        self._server = server
        self._store = server.shard
        self._identity = identity
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chief-shard")
        # For calls that wait until a checkpoint is written or read: steps continue meanwhile.
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="chief-checkpoint")

    @property
    def address(self) -> str:
        """The address at which others reach the server."""
        return self._server.address

    def open_caller(self) -> BlockingCaller:
        """Returns a caller for threads."""

        def apply_step(request: ApplyRequest) -> None:
            self._server.hear_chief()
            self._store.apply_step(request)

        return BlockingCaller(apply_step, is_quick=lambda: self._store.is_quick, name=f"steps of ps {self._store.index}")

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns the server's identity and protocol version."""
        return HandshakeReply(identity=self._identity, version=PROTOCOL_VERSION, epoch=self._store.epoch, warning="")

    async def status(self, *, timeout_s: float, fence: Fence = NOBODY) -> ShardStatus:
        """Returns step, memory and counters."""
        self._store.hear_chief(fence)
        return await self._run(self._store.status)

    async def adopt(self, fence: Fence, *, chief_address: str = "", session_keys: tuple[bytes, ...] = (), timeout_s: float) -> Adoption:
        """Puts the shard under this chief's command."""
        adopt = partial(self._store.adopt, fence, chief_address=chief_address, session_keys=session_keys)
        return await self._run(adopt)

    async def keep_record(self, fence: Fence, *, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""
        await self._run(partial(self._store.keep_record, fence, version=version, record=record))

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them."""
        return await self._run(partial(self._store.save, request, max_wait_s=max_wait_s), is_long=True)

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces the shard's values by a checkpoint's."""
        return await self._run(partial(self._store.restore, request, max_wait_s=max_wait_s), is_long=True)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""
        await self._run(partial(self._store.configure, settings))

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""
        return await self._run(partial(self._store.prepare_step, request))

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Averages the contributions and makes the next step."""
        return await self._run(partial(self._store.apply_step, request))

    async def shutdown(self, fence: Fence, *, reason: str, timeout_s: float) -> None:
        """Ends the server."""
        self._store.shutdown(fence, reason=reason)

    async def close(self) -> None:
        """Ends the threads; the server keeps running."""
        self._threads.shutdown(wait=False)
        self._waiting.shutdown(wait=False)

    async def _run(self, work: Callable[[], Result], *, is_long: bool = False) -> Result:
        self._server.hear_chief()
        return await asyncio.get_running_loop().run_in_executor(self._waiting if is_long else self._threads, work)


async def serve(config: ParameterServerConfig, settings_at: Callable[[str], ChiefConfig]) -> int:
    """Runs both roles to their end, and returns the exit code: 0 after training, 1 if it failed. Raises PsError if a role cannot serve.

    `settings_at` returns the chief's settings for the address at which the parameter server listens.
    """
    server = ParameterServer(config)
    try:
        server.start()
    except PsError:
        server.stop(0.0, reason="could not start")
        raise
    ending = asyncio.create_task(asyncio.to_thread(server.wait))
    try:
        return await _serve_chief(config, settings_at(server.address), server=server, ending=ending)
    finally:
        server.request_stop("the chief has ended")
        await asyncio.to_thread(server.stop, reason=await ending)


async def _serve_chief(
    config: ParameterServerConfig, settings: ChiefConfig, *, server: ParameterServer, ending: "asyncio.Task[str]"
) -> int:
    chief = ChiefServer(settings, links=_links(settings, config, server))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, chief.request_stop, number.name)
    try:
        await chief.start()
        # The server may be asked to end by something other than this chief.
        ending.add_done_callback(lambda task: chief.request_stop(f"its parameter server ends: {task.result()}"))
        return await chief.wait()
    finally:
        await chief.stop()


def _links(settings: ChiefConfig, config: ParameterServerConfig, server: ParameterServer) -> list[ShardLink]:
    cluster = config.cluster
    links: list[ShardLink] = []
    for index, address in enumerate(settings.ps):
        if index == config.index:
            incarnation = server.shard.process_incarnation
            identity = Identity(cluster=cluster, role=Role.PARAMETER_SERVER, index=index, process_incarnation=incarnation)
            links.append(StoreLink(server, identity=identity))
        else:
            access = Access(settings.security, role=CallerRole.CHIEF)
            links.append(GrpcShardLink(address, index=index, cluster=cluster, access=access))
    return links
