"""The chaos tests' own claims can fail, and the relay does what they ask of it."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.relay import Conditions, Relay
from tests.chaos import claims, script
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick


def step(worker: int, number: int, *, outcome: str = "ACCEPTED", epoch: int = 1) -> claims.Event:
    return {"event": "step", "worker": worker, "step": number, "after": number + 1, "outcome": outcome, "epoch": epoch}


def test_a_step_that_counted_twice_in_one_epoch_is_found() -> None:
    claims.assert_each_step_once([step(0, 1), step(1, 1), step(0, 1, epoch=2), step(0, 2), step(0, 2, outcome="STALE")])
    with pytest.raises(AssertionError, match="more than once"):
        claims.assert_each_step_once([step(0, 1), step(1, 1), step(0, 1)])


def test_a_rollback_is_found_whether_a_worker_was_told_or_only_its_epoch_rose() -> None:
    assert claims.rollbacks([step(0, 1), step(1, 1)]) == 0
    assert claims.rollbacks([step(0, 1), step(0, 0, outcome="ROLLED_BACK")]) == 1
    assert claims.rollbacks([step(0, 1), step(1, 1, epoch=2)]) == 1


def test_one_bit_makes_values_different() -> None:
    values = script.reference(num_steps=2, num_workers=2)
    script.assert_same_bytes({name: value.copy() for name, value in values.items()}, values)
    values["w"].view(np.uint8)[3, 5] ^= 1
    with pytest.raises(AssertionError, match="w differs in 1 of 427 elements"):
        script.assert_same_bytes(values, script.reference(num_steps=2, num_workers=2))


def test_a_contribution_more_or_less_makes_values_different() -> None:
    def without_one(step: int, worker: int) -> script.Values:
        found = script.gradients(step, worker)
        return {name: 0 * value for name, value in found.items()} if (step, worker) == (1, 1) else found

    found = script.reference(num_steps=3, num_workers=2, gradients_of=without_one)
    with pytest.raises(AssertionError, match="differs"):
        script.assert_same_bytes(found, script.reference(num_steps=3, num_workers=2))


def test_the_relay_cuts_a_connection_behind_the_very_byte(socket_dir: Path) -> None:
    conditions, told = Conditions(), list[int]()
    conditions.on_cut = told.append
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(f"{socket_dir}/server")
        server.listen()
        relay = stack.enter_context(Relay(f"unix:{socket_dir}/server", conditions_of=lambda pid: conditions))
        client = stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(relay.address.removeprefix("unix:"))
        behind = stack.enter_context(server.accept()[0])
        client.sendall(b"a" * 50)
        wait_until(lambda: len(behind.recv(100, socket.MSG_PEEK)) == 50, what="the first bytes pass")
        conditions.cut_in = 70
        client.sendall(b"b" * 100)
        received = b"".join(iter(lambda: behind.recv(100), b""))
        assert received == b"a" * 50 + b"b" * 70
        assert client.recv(1) == b""
    assert told == [os.getpid()]
    assert conditions.num_cuts == 1
    assert relay.num_up == 150
