"""A chief that fails because a parameter server lost its variables also ends that server, though no chief has adopted the new process."""

import contextlib
from pathlib import Path

import pytest

from ps_protocol.errors import EpochMismatch, Superseded
from ps_protocol.roles.chief import ClusterState, DeregisterRequest
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import AdoptRequest, ShutdownRequest
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import RunningChief, Worker, client_of, parameter_server
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.waiting import wait_until


def test_a_failing_chief_ends_all_servers_also_the_one_that_was_restarted(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix:{socket_dir / 'ps'}"
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(parameter_server(0))
        lost = stack.enter_context(contextlib.ExitStack())
        first = lost.enter_context(parameter_server(1, address=address))
        chief = stack.enter_context(RunningChief(other.address, first.address))
        client = stack.enter_context(client_of(chief))
        with Worker(client) as worker:
            worker.join_model()
            lost.close()
            second = stack.enter_context(parameter_server(1, address=address))
            wait_until(lambda: client.status().state is ClusterState.FAILED, timeout_s=20, what="the chief sees that its shard is new")
            client.call(DeregisterRequest(participant=worker.participant))
        assert chief.ended() == 1
        assert "was restarted and has lost its variables" in other.wait()
        assert "was restarted and has lost its variables" in second.wait()
    assert "could not be told to end" not in caplog.text


def test_a_server_ends_for_its_own_chief_and_for_every_chief_if_none_has_adopted_it() -> None:
    with parameter_server() as server, contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(AdoptRequest(fence=fence(1, 2)))
        for another in (NOBODY, fence(1, 1), fence(1, 2, life=8)):
            with pytest.raises(Superseded):
                shard.call(ShutdownRequest(fence=another, reason="not mine"))
        with pytest.raises(EpochMismatch):
            shard.call(ShutdownRequest(fence=fence(2, 2), reason="of another epoch"))
        assert shard.call(AdoptRequest(fence=fence(1, 2))).step is None
    with parameter_server() as server, contextlib.closing(CommandedShard(server.address)) as shard:
        shard.call(ShutdownRequest(fence=fence(4, 4), reason="nobody's"))
        assert server.wait() == "nobody's"
