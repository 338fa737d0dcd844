"""`python -m lockstep.combined`: a parameter server and the chief in one process. Parses its flags; decides nothing.

    python -m lockstep.combined --index 0 FLAGS OF THE PARAMETER SERVER --with-chief FLAGS OF THE CHIEF

In the chief's --ps, the word "self" stands for this parameter server, at its index; without --ps there is no other one. Each role serves at
an address of its own. Both end together, when a chief in a process of its own would end.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial

from ps_protocol.process.memory import importing_for_good

with importing_for_good():
    from chief.config import ChiefConfig
    from chief.config import parse_config as parse_chief_config
    from ps_protocol.errors import InvalidSpec
    from ps_protocol.process import polling
    from ps_protocol.process.failpoints import enable_failpoints
    from ps_protocol.process.logs import run_role
    from ps_protocol.process.memory import keep_freed_memory
    from ps_server.config import ParameterServerConfig
    from ps_server.config import parse_config as parse_ps_config

WITH_CHIEF = "--with-chief"
_SELF = "self"
# Stands for the server's own address before it has one.
_NOWHERE = "unix:/address-not-known-yet"
# These variables apply to the parameter server only; the chief takes flags instead.
_OF_PS = ("LOCKSTEP_ADDRESS", "LOCKSTEP_METRICS", "TF_CONFIG")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after training, 1 if it failed, 2 if it could not start, with one line that says why."""
    keep_freed_memory(num_heaps=1)
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    split = words.index(WITH_CHIEF) if WITH_CHIEF in words else len(words)

    def run() -> int:
        config = parse_ps_config(words[:split], environment=os.environ)
        settings_at = partial(_chief_config, words[split + 1 :], config)
        # Checked now, so that a mistake is reported before either role runs.
        its_chief = settings_at(_NOWHERE)
        enable_failpoints(os.environ, is_enabled=config.enable_failpoints or its_chief.enable_failpoints)
        polling.expect_workers(its_chief.coordination.num_workers)
        # Imported late, because it imports grpc.
        with importing_for_good():
            from lockstep.combined.server import serve

        return asyncio.run(serve(config, settings_at))

    return run_role(f"lockstep server {WITH_CHIEF}", words, run)


def _chief_config(words: Sequence[str], ps: ParameterServerConfig, address: str) -> ChiefConfig:
    """Returns the chief's configuration beside a parameter server that serves at `address`. Raises InvalidSpec."""
    environment = os.environ
    # "--ps=self" means "--ps self": the code below looks for flags as separate words.
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


if __name__ == "__main__":
    sys.exit(main())
