"""`lockstep top` fits the terminal, names what the cluster waits for, and lets no text move the cursor."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from chief.page.cost import CostCount
from chief.page.feed import snapshot
from chief.page.recorder import Look
from lockstep.cli.watch.screen import frame, sparkline
from ps_protocol.roles.chief import ClusterState, ClusterStatus, LedgerEntry, ParticipantKind, WorkerTraffic
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status

POINTS = [(float(number), number, number / 7) for number in range(300)]


def steps(number: int) -> tuple[LedgerEntry, ...]:
    who = (PushId(worker=0, incarnation=1, sequence=1),)
    return tuple(
        LedgerEntry(
            step=step, contributors=who, num_stale=0, num_late=0, duration_s=0.1, apply_duration_s=0.02, last_worker=0, wait_duration_s=0.03
        )
        for step in range(number)
    )


def look(status: ClusterStatus, **changes: Any) -> Mapping[str, Any]:
    known = {"number": 1, "at": 0.0, "wall": 0.0, "steps_per_s": 12.5, "contributions_per_s": {0: 12.5}, "read_s": {}, "num_last": {0: 5}}
    known |= {"cost": CostCount().add(status, at=0.0), "is_held_up": False}
    return snapshot(Look(status=status, **{**known, **changes}))


def shown(
    status: ClusterStatus, *, width: int = 100, height: int = 50, metrics: Mapping[str, Sequence[Any]] | None = None, **options: Any
) -> list[str]:
    return frame(look(status), speed=POINTS, metrics=metrics or {"loss": POINTS}, width=width, height=height, **options)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [3, 10, 24, 100])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    workers = [worker_status(index, num_accepted=10**9) for index in range(100)]
    status = cluster_status(
        *workers, ledger=steps(200), shards=tuple(server_status(index) for index in range(3)), waiting_for="step 4 " * 200
    )
    lines = shown(status, width=width, height=height, has_colours=True)
    assert len(lines) <= height
    assert max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines) < max(width, 21)


def test_the_screen_shows_the_reason_of_a_wait() -> None:
    text = "\n".join(shown(cluster_status(worker_status(0), worker_status(1))))
    assert "Step 41 has 1 of 2 contributions; worker 1 is missing, last seen 3.0 s ago" in text
    assert "step 41 of 600" in text
    assert "12.5 steps/s" in text


def test_the_screen_shows_processor_time_of_all_roles_and_bytes_moved() -> None:
    worker = worker_status(0, traffic=WorkerTraffic(sent_bytes=2048, received_bytes=4096, cpu_s=90.0))
    servers = (server_status(0, report=ShardReport(cpu_s=7.5)),)
    lines = shown(cluster_status(worker, shards=servers, chief_cpu_s=1.25))
    assert "CPU so far: workers 90.0 s, servers 7.5 s, chief 1.2 s  sent 2.0 KiB, received 4.0 KiB" in lines
    assert [line for line in lines if line.startswith("worker 0") and "90.0 s" in line]
    watcher = worker_status(0, pid=2, kind=ParticipantKind.OBSERVER, traffic=WorkerTraffic(cpu_s=3.0))
    assert [line for line in shown(cluster_status(worker, watcher)) if ", observers 3.0 s" in line]
    assert [line for line in lines if line.startswith("ps 0") and "7.5 s" in line]


def test_the_screen_gives_no_time_left_while_training_waits() -> None:
    seen = look(cluster_status(worker_status(0)), is_held_up=True)
    text = "\n".join(frame(seen, speed=POINTS, metrics={}, width=120, height=50))
    assert "time left unknown while training waits" in text
    assert " left  " not in text.replace("time left unknown", "")


def test_a_small_screen_shows_lost_workers_first() -> None:
    workers = [worker_status(index, state="lapsed" if index == 77 else "live") for index in range(100)]
    text = "\n".join(shown(cluster_status(*workers), height=20))
    assert "worker 77  silent: its lease has ended" in text
    assert re.search(r"… and \d+ more", text)


def test_no_text_moves_the_cursor() -> None:
    evil = "\x1b[2J\x07\r\n"
    status = cluster_status(worker_status(0, host=evil, failure=evil, state="left"), waiting_for=evil, cluster=evil)
    lines = shown(status, metrics={evil: POINTS})
    assert not re.search(r"[\x00-\x1f\x7f]", "".join(lines))


def test_without_colours_there_are_no_control_sequences() -> None:
    assert "\x1b" not in "".join(shown(cluster_status(worker_status(0)), gone_since="12:00:00"))


def test_the_screen_distinguishes_a_lost_chief_from_a_finished_training() -> None:
    assert "NOT ANSWERING since 12:00:00" in shown(cluster_status(), gone_since="12:00:00")[0]
    over = cluster_status(state=ClusterState.FINISHED, reason="enough", waiting_for="")
    assert "the chief has ended" in shown(over, gone_since="12:00:00")[0]


def test_dropped_contributions_of_backup_workers_are_explained() -> None:
    status = cluster_status(worker_status(0), total_num_replicas=3, num_stale=365, num_accepted=800)
    assert "800 counted, 365 dropped (as it should be: a step takes the first 2)" in "\n".join(shown(status))


def test_a_higher_value_has_a_taller_bar_in_the_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
