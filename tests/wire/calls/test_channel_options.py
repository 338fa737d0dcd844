"""Options of channels: gRPC ignores unknown names silently, so that its default would apply."""

import importlib
from pathlib import Path

import pytest

from ps_protocol.rpc.channel import CHANNEL_OPTIONS, server_options

LIBRARY = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()


@pytest.mark.parametrize("name", sorted({name for name, _ in (*CHANNEL_OPTIONS, *server_options())}))
def test_grpc_knows_the_name_of_the_option(name: str) -> None:
    assert name.encode() + b"\0" in LIBRARY


def test_servers_take_the_pings_of_idle_clients() -> None:
    """Else they cut a connection that rests, after a minute, as one that pings too often: and with it all long-lived streams."""
    assert dict(server_options())["grpc.http2.max_ping_strikes"] == 0  # as many as they like
