"""Every row of bad input: its status, reason and words, the next right call, and nothing that grows."""

import re
from collections.abc import Callable, Iterator

import pytest

from ps_protocol.v1 import chief_service_pb2 as pb
from tests.support.repository import ROOT
from tests.support.waiting import wait_until
from tests.wire.bad_input.rows import CODE, SHARD, TABLE, Case, HeldBy
from tests.wire.bad_input.scenes import Scene, greet, scene
from tests.wire.bad_input.test_chief import participant

CASES = [(f"{number}.{index}", row) for number, rows in TABLE.items() for index, row in enumerate(rows) if isinstance(row, Case)]
HELD = [(number, row) for number, rows in TABLE.items() for row in rows if isinstance(row, HeldBy)]
# What a process may hold more of after all cases were made three times over: threads and sockets that wait for the next call.
MAX_MORE_THREADS, MAX_MORE_DESCRIPTORS, MAX_MORE_BYTES = 8, 8, 24 << 20


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("scene")) as running:
        yield running


def _still_works(servers: Scene, server: str) -> None:
    rights: dict[str, Callable[[], object]] = {
        "shard": servers.shard.apply_one,
        "table": lambda: servers.table.apply_one(3),
        "chief": lambda: _ok(servers, "Heartbeat"),
        "tokens": lambda: _is_let_in(servers),
        "tls": lambda: greet(servers.addresses["tls"], servers.of_cluster_b()).code is CODE.OK,
    }
    assert rights[server]() is not False


def _ok(servers: Scene, method: str) -> None:
    ended = servers.chief(method, pb.HeartbeatRequest(participant=participant()))
    assert ended.code is CODE.OK, ended.text


def _is_let_in(servers: Scene) -> None:
    ended = servers.call("tokens", f"{SHARD}/GetShardStatus", access=servers.files.caller(tls=False))
    assert ended.code is CODE.OK, ended.text


def _try(servers: Scene, case: Case) -> None:
    ended = case.act(servers)
    assert (ended.code, ended.reason) == (case.code, case.reason), ended.text
    assert case.text in ended.text
    if case.answer is not None:
        assert case.answer(ended.messages[0])


@pytest.mark.parametrize(("number", "row"), HELD, ids=[f"{number} {row.test.partition('::')[2]}" for number, row in HELD])
def test_row_that_another_test_holds_is_held_there(number: int, row: HeldBy) -> None:
    path, _, name = row.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), row.test


def test_call_that_ends_well_says_what_became_of_it() -> None:
    """An OK alone does not tell a contribution that was dropped from one that counts: such a row looks at the answer."""
    plain = [number for number, row in CASES if row.code is CODE.OK and row.answer is None and not row.text]
    # These look at the answer, or at what has become of it, while they call.
    assert {number.partition(".")[0] for number in plain} == {"14", "43", "45", "53", "83"}


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_bad_input_is_answered_as_the_table_says_and_the_next_call_works(servers: Scene, case: Case) -> None:
    if case.server == "shard":
        servers.shard.apply_one()
    _try(servers, case)
    _still_works(servers, case.server)


@pytest.mark.timeout(180)
def test_repeated_bad_input_does_not_make_a_server_grow(servers: Scene) -> None:
    def all_cases() -> None:
        for _, case in CASES:
            if case.server == "shard":
                servers.shard.apply_one()
            _try(servers, case)

    # Threads, buffers and modules that the first of a kind brings stay.
    all_cases()
    before = servers.measured()
    for _ in range(2):
        all_cases()

    def grown() -> list[str]:
        limits, kinds = (MAX_MORE_THREADS, MAX_MORE_DESCRIPTORS, MAX_MORE_BYTES), ("threads", "descriptors", "bytes")
        return [
            f"{name}: {kind} {old} -> {new}"
            for name, now in servers.measured().items()
            for kind, old, new, limit in zip(kinds, before[name], now, limits, strict=True)
            if new > old + limit
        ]

    wait_until(lambda: not grown(), timeout_s=20, what="what was opened is closed again")
    assert all(process.poll() is None for process in servers.processes.values())
