"""One chief as a gRPC server on an event loop: listening, health, and an orderly end. Decides nothing."""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from chief.config import ChiefConfig
from chief.runner import Runner
from chief.service import SERVICE, ChiefService, chief_service_handler
from chief.shard_links import GrpcShardLink, ShardLink
from ps_protocol.addresses import parse_address
from ps_protocol.channel import server_options
from ps_protocol.chief import ClusterState
from ps_protocol.errors import InvalidSpec
from ps_protocol.handshake import Identity, Role
from ps_protocol.handshake_servicer import handshake_handler_aio
from ps_protocol.listening import announce, check_address_is_free

log = logging.getLogger(__name__)

_READY_STATES = (ClusterState.WAITING_FOR_MODEL, ClusterState.TRAINING)
# Two for each of ten thousand workers; a caller that opens calls without end is refused.
_MAX_CONCURRENT_RPCS = 20_000
# How long answers under way may still take when the process ends.
_GRACE_S = 0.5


class ChiefServer:
    """A chief. To be made and used in one event loop; `start`, `wait` and `stop` are called once each.

    `links`: its parameter servers, by index, where they are reached otherwise than by the addresses of the configuration.
    """

    def __init__(self, config: ChiefConfig, *, links: Sequence[ShardLink] | None = None) -> None:
        self._config = config
        self._address = ""
        cluster = config.coordination.cluster
        if links is None:
            links = [GrpcShardLink(address, index=index, cluster=cluster) for index, address in enumerate(config.ps)]
        self._runner = Runner(links, config=config.coordination, on_state=self._announce_state)
        self._service = ChiefService(self._runner)
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=server_options(), maximum_concurrent_rpcs=_MAX_CONCURRENT_RPCS)
        self._health_updates: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where it listens; empty before `start`."""
        return self._address

    async def start(self) -> None:
        """Begins to serve, and announces the address. Raises InvalidSpec if it cannot listen there."""
        cluster = self._config.coordination.cluster
        identity = Identity(cluster=cluster, role=Role.CHIEF, index=0, process_incarnation=secrets.randbits(63) | 1)
        self._server.add_generic_rpc_handlers(
            (chief_service_handler(self._service), handshake_handler_aio(identity, epoch=lambda: self._runner.epoch))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._address = self._listen(self._config.address)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        if self._config.announce is not None:
            announce(self._config.announce, address=self._address)
        log.info("chief ready address=%s cluster=%s ps=%d", self._address, cluster, len(self._config.ps))

    async def wait(self) -> int:
        """Returns the exit code when training is over and nobody needs the cluster. Raises PsError if the shards are not to be had."""
        return await self._runner.run()

    def request_stop(self, reason: str) -> None:
        """Finishes training and makes `wait` return within 2 s. To be called in the event loop."""
        self._runner.stop(reason)

    async def stop(self) -> None:
        """Lets calls under way finish for a moment, then ends the server."""
        await self._health.enter_graceful_shutdown()
        # They would last as long as their callers like.
        self._service.end_conversations()
        await self._server.stop(_GRACE_S)
        await self._runner.close()
        log.info("chief ended")

    def _listen(self, address: str) -> str:
        check_address_is_free(address)
        parsed = parse_address(address, is_bind=True)
        try:
            port = self._server.add_insecure_port(str(parsed))
        except RuntimeError as error:
            raise InvalidSpec(f"cannot listen at {address}: {error}") from None
        return str(parsed if parsed.is_unix else dataclasses.replace(parsed, port=port))

    def _announce_state(self, state: ClusterState) -> None:
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if state in _READY_STATES else answers.NOT_SERVING
        update = asyncio.get_running_loop().create_task(self._health.set(SERVICE, status))
        # The loop itself keeps only weak references.
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)
