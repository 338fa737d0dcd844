"""All wrong calls, twice over, at servers that are processes of their own: nothing grows, and the next right call works."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.protobuf.message import Message

from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from tests.support.chief.eras import LIFE
from tests.support.chief.running_chief import Worker
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, Server
from tests.support.parameter_servers.shards import Trainer
from tests.support.processes.processes import Process, announced, start_role
from tests.support.waiting import wait_until
from tests.wire.bad_input import test_accumulators as accumulators
from tests.wire.bad_input import test_chief as chief
from tests.wire.bad_input import test_encodings as encodings
from tests.wire.bad_input import test_parameter_service as shard
from tests.wire.bad_input import test_recovery as recovery
from tests.wire.bad_input import test_rows as tables

# What a process may hold more of after all calls were made once more: threads and sockets that wait for the next call.
MAX_MORE_THREADS, MAX_MORE_DESCRIPTORS, MAX_MORE_BYTES = 8, 8, 24 << 20
# What it is, the call, and the reason that it ends with; None: any.
Call = tuple[str, Callable[[], Outcome], str | None]


def _of_the_chief(message: Message | bytes, workers: dict[int, pb.Participant]) -> bytes:
    """A case's message with the life and secrets of this chief: cases are written before they are known."""
    if isinstance(message, bytes):
        return message
    for part in (message, getattr(message, "commit", None), getattr(message, "token", None)):
        participant: Any = getattr(part, "participant", None)
        if participant is not None and participant.era.life == LIFE:
            participant.era.life = workers[0].era.life
            if participant.index in workers:
                participant.secret = workers[participant.index].secret
    return message.SerializeToString()


@pytest.fixture
def called(tmp_path: Path) -> Iterator[tuple[dict[str, Process], list[Call]]]:
    """Servers in processes, and what to call them: right calls, all wrong ones, and right ones again."""
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}

        def start(name: str, module: str, *words: object) -> str:
            processes[name] = start_role(stack, module, "--cluster", "job-a", *words, announce=tmp_path / name)
            return announced(processes[name], tmp_path / name)

        checkpoints = tmp_path / "checkpoints"
        checkpoints.mkdir()
        addresses = {
            "shard": start("shard", "ps_server", "--index", 0, "--checkpoint-dir", checkpoints),
            "table": start("table", "ps_server", "--index", 0),
        }
        of_chief = start(
            "chief", "chief", "--ps", start("ps", "ps_server", "--index", 0), "--replicas-to-aggregate", 1, "--workers", 3, "--lease", 600
        )
        raw = {name: stack.enter_context(RawShard(address)) for name, address in addresses.items()}
        clients = {name: stack.enter_context(contextlib.closing(CommandedShard(address))) for name, address in addresses.items()}
        trainer = Trainer(clients["shard"])
        trainer.create()
        trainer.train(0)
        server, table = Server(raw["shard"], trainer), tables.Server(raw["table"], clients["table"])
        accumulator = stack.enter_context(accumulators.serving_accumulators(addresses["table"], raw["table"]))
        client = stack.enter_context(contextlib.closing(GrpcChief(of_chief)))
        first, second = stack.enter_context(Worker(client)), stack.enter_context(Worker(client))
        first.join_model()
        assert first.wait(first.push()).step == 1
        workers = {one.participant.index: codec.encode(one.participant) for one in (first, second)}
        channel = stack.enter_context(DEFAULT_ACCESS.open_channel(of_chief))

        def ask_chief(method: str, message: Message | bytes) -> Outcome:
            return chief.ask(channel, method, _of_the_chief(message, workers))

        def right() -> Outcome:
            server.apply_one()
            table.apply_one(3)
            return ask_chief("Heartbeat", pb.HeartbeatRequest(participant=chief.participant()))

        def at_shard(call: Callable[[Server], Outcome]) -> Outcome:
            server.apply_one()
            return call(server)

        calls: list[Call] = [("right calls", right, "")]
        calls += [(case, partial(at_shard, call), reason) for case, call, _, reason, _ in shard.ROWS]
        calls += [(case, partial(encodings.push, trainer, *bad[:3]), bad[3]) for case, bad in encodings.BAD.items()]
        calls += [(case, partial(call, table), reason) for case, call, _, reason, _ in tables.ROWS]
        calls += [(case, partial(call, accumulator), reason) for case, call, _, reason, _ in accumulators.ROWS]
        calls += [(case, partial(ask_chief, method, message), reason) for case, method, message, _, reason, _ in chief.BAD_INPUT]
        # Saves of the step before the first are refused for that here.
        calls += [(method, partial(raw["shard"].call, method, request.SerializeToString()), None) for method, request, *_ in recovery.WRONG]
        yield processes, [*calls, calls[0]]


def _measured(processes: dict[str, Process]) -> dict[str, tuple[int, int, int]]:
    """Threads, descriptors and resident bytes of each process."""
    gc.collect()
    found = {name: psutil.Process(process.pid) for name, process in processes.items()}
    return {name: (about.num_threads(), about.num_fds(), about.memory_info().rss) for name, about in found.items()}


@pytest.mark.timeout(180)
def test_repeated_bad_input_does_not_make_a_server_grow(called: tuple[dict[str, Process], list[Call]]) -> None:
    processes, calls = called

    def all_calls() -> None:
        for case, call, reason in calls:
            ended = call()
            assert reason in (ended.reason, None), (case, ended)

    # Threads, buffers and modules that the first of a kind brings stay.
    all_calls()
    before = _measured(processes)
    all_calls()

    def grown() -> list[str]:
        limits, kinds = (MAX_MORE_THREADS, MAX_MORE_DESCRIPTORS, MAX_MORE_BYTES), ("threads", "descriptors", "bytes")
        return [
            f"{name}: {kind} {old} -> {new}"
            for name, now in _measured(processes).items()
            for kind, old, new, limit in zip(kinds, before[name], now, limits, strict=True)
            if new > old + limit
        ]

    wait_until(lambda: not grown(), timeout_s=20, what="what was opened is closed again")
    assert all(process.poll() is None for process in processes.values())
