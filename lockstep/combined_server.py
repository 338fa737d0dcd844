"""A parameter server and the chief in one process, as servers: what they are to each other, and how they end together. Decides nothing."""

import asyncio
import signal
from collections.abc import Callable

from chief.config import ChiefConfig
from chief.server import ChiefServer
from chief.shard_links import GrpcShardLink, ShardLink
from lockstep.store_link import StoreLink
from ps_protocol.access import Access
from ps_protocol.authorization import CallerRole
from ps_protocol.errors import PsError
from ps_protocol.handshake import Identity, Role
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer


async def serve(config: ParameterServerConfig, settings_at: Callable[[str], ChiefConfig]) -> int:
    """Returns the exit code: 0 after training, 1 if it failed. Raises PsError if one of the two cannot serve.

    `settings_at` returns the chief's settings, once it is known where the parameter server listens.
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
        loop.add_signal_handler(number, chief.request_stop, f"the chief got {number.name}")
    try:
        await chief.start()
        # Somebody else than this chief may tell the server to end.
        ending.add_done_callback(lambda task: chief.request_stop(f"its parameter server ends: {task.result()}"))
        return await chief.wait()
    finally:
        await chief.stop()


def _links(settings: ChiefConfig, config: ParameterServerConfig, server: ParameterServer) -> list[ShardLink]:
    cluster = config.cluster
    links: list[ShardLink] = []
    for index, address in enumerate(settings.ps):
        if index == config.index:
            incarnation = server.store.process_incarnation
            identity = Identity(cluster=cluster, role=Role.PARAMETER_SERVER, index=index, process_incarnation=incarnation)
            links.append(StoreLink(server, identity=identity))
        else:
            access = Access(settings.security, role=CallerRole.CHIEF)
            links.append(GrpcShardLink(address, index=index, cluster=cluster, access=access))
    return links
