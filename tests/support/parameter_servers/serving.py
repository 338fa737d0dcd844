"""A shard of a test's own behind a server that lets everybody in. Asserts nothing."""

import contextlib
from collections.abc import Iterator

from ps_protocol.rpc.door import CallThreads, Door
from ps_server.serving.calls import ParameterService, Serving
from ps_server.serving.streams import IdleStreams, StreamService
from ps_server.shard.shard import ServedShard
from tests.support.network.servers import serving


@contextlib.contextmanager
def serving_shard(shard: ServedShard, idle_streams: IdleStreams) -> Iterator[str]:
    """Serves a shard until the block ends; yields the address."""
    threads = CallThreads(server_name="ps 0")
    service = ParameterService(shard, Serving(idle_streams=idle_streams, threads=threads))
    streams = StreamService(shard, idle_streams=idle_streams)
    with serving(Door({**service.methods, **streams.methods}, server_name="ps 0")) as address:
        yield address
    threads.close()
