"""`python -m lockstep.combined`: a parameter server and the chief in one process. Puts the two roles together; decides nothing.

    python -m lockstep.combined --index 0 FLAGS OF THE PARAMETER SERVER --with-chief FLAGS OF THE CHIEF

In the chief's --ps, the word "self" stands for this parameter server, at its index; without --ps there is no other one. Both roles serve at
addresses of their own, and end together: as the chief does when it is alone.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from chief.config import ChiefConfig
from chief.config import parse_config as parse_chief_config
from chief.server import ChiefServer
from chief.shard_links import GrpcShardLink, ShardLink
from lockstep.store_link import StoreLink
from ps_protocol.access import Access
from ps_protocol.allocator import keep_freed_memory
from ps_protocol.authorization import CallerRole
from ps_protocol.errors import InvalidSpec, PsError
from ps_protocol.failpoints import enable_failpoints
from ps_protocol.handshake import Identity, Role
from ps_protocol.listening import allow_many_connections
from ps_server.config import ParameterServerConfig
from ps_server.config import parse_config as parse_ps_config
from ps_server.server import ParameterServer

WITH_CHIEF = "--with-chief"
_SELF = "self"
_EXIT_USAGE = 2
# Stands for the server's own address before it has one.
_NOWHERE = "unix:/address-not-known-yet"
# Of the two roles, these are the parameter server's alone; the chief has flags for its own.
_OF_PS = ("LOCKSTEP_ADDRESS", "TF_CONFIG")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after training, 1 if it failed, 2 if it could not start, with one line that says why."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_freed_memory(num_heaps=1)
    allow_many_connections()
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        split = words.index(WITH_CHIEF) if WITH_CHIEF in words else len(words)
        config = parse_ps_config(words[:split], environment=os.environ)
        chief_words = words[split + 1 :]
        # Now, or it would only be found out when half of it runs.
        its_chief = chief_config(chief_words, ps=config, address=_NOWHERE, environment=os.environ)
        enable_failpoints(os.environ, is_enabled=config.enable_failpoints or its_chief.enable_failpoints)
        return asyncio.run(_serve(config, chief_words))
    except PsError as error:
        sys.stderr.write(f"lockstep ps {WITH_CHIEF}: {error.message}\n")
        return _EXIT_USAGE


def chief_config(words: Sequence[str], *, ps: ParameterServerConfig, address: str, environment: Mapping[str, str]) -> ChiefConfig:
    """Returns the chief's configuration beside a parameter server that serves at `address`. Raises InvalidSpec."""
    # "--ps=self" is "--ps self": what is looked for below, and must not be given twice.
    flags = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if "--cluster" not in flags:
        flags += ["--cluster", ps.cluster]
    if "--ps" not in flags:
        flags += ["--ps", environment.get("LOCKSTEP_PS") or _SELF]
    position = flags.index("--ps") + 1
    servers = [part.strip() for part in flags[position].split(",")] if position < len(flags) else []
    if servers.count(_SELF) != 1 or servers.index(_SELF) != ps.index:
        raise InvalidSpec(f"--ps: want the word {_SELF} once, at index {ps.index}, for the parameter server in this process")
    flags[position] = ",".join(address if server == _SELF else server for server in servers)
    if environment.get("LOCKSTEP_STANDBYS") or any(flag.startswith("--standbys") for flag in flags):
        raise InvalidSpec("--standbys: a server with the chief in its process has no standby; give the chief a process of its own")
    rest = {name: value for name, value in environment.items() if name not in _OF_PS}
    config = parse_chief_config(flags, environment=rest)
    if config.coordination.cluster != ps.cluster:
        raise InvalidSpec(f"--cluster: the chief is of {config.coordination.cluster!r}, its parameter server of {ps.cluster!r}")
    return config


async def _serve(config: ParameterServerConfig, chief_words: Sequence[str]) -> int:
    server = ParameterServer(config)
    try:
        server.start()
    except PsError:
        server.stop(0.0, reason="could not start")
        raise
    ending = asyncio.create_task(asyncio.to_thread(server.wait))
    try:
        return await _serve_chief(config, chief_words, server=server, ending=ending)
    finally:
        server.request_stop("the chief has ended")
        await asyncio.to_thread(server.stop, reason=await ending)


async def _serve_chief(
    config: ParameterServerConfig, chief_words: Sequence[str], *, server: ParameterServer, ending: "asyncio.Task[str]"
) -> int:
    settings = chief_config(chief_words, ps=config, address=server.address, environment=os.environ)
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


if __name__ == "__main__":
    sys.exit(main())
