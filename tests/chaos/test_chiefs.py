"""Chiefs that are killed at every point of a step, moved, or two at once: each step counts once, and only the chief is restarted."""

import signal

import pytest

from tests.chaos import claims
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import ENDLESS, Plan

pytestmark = pytest.mark.timeout(150)
CHIEF_TARGET_S = 5.0


@pytest.mark.parametrize("failpoint", ["", "chief.apply.before", "chief.apply.after", "chief.tokens.half"])
@pytest.mark.parametrize("durability", [None, "interval"])
@pytest.mark.shows("F10")
def test_a_killed_chief_is_followed_by_another_at_the_same_step(
    start: Started, record: Record, failpoint: str, durability: str | None
) -> None:
    """The parameter servers keep what the next chief must know, so that nothing is rolled back, with checkpoints or without."""
    cluster = start(Plan(durability=durability, history=True, failpoints={"chief": f"{failpoint}=kill@12"} if failpoint else None))
    if failpoint:
        died_at = cluster.await_death("chief")
    else:
        cluster.await_step(12)
        died_at = cluster.kill("chief")
    cluster.restart("chief")
    cluster.await_end()
    where = f" at {failpoint}" if failpoint else ""
    record(f"chief killed{where} ({durability or 'no'} checkpoints)", standstill_s=cluster.standstill_s(died_at), target_s=CHIEF_TARGET_S)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()
    claims.assert_history_is_clean(cluster.history)


@pytest.mark.shows("F11")
def test_a_chief_that_comes_back_at_another_address_is_found(start: Started, record: Record) -> None:
    """The parameter servers say where it is."""
    cluster = start(Plan())
    cluster.await_step(12)
    died_at = cluster.kill("chief")
    cluster.restart("chief", address=f"unix:{cluster.sockets}/chief-2")
    cluster.await_end()
    record("chief killed, back at another address", standstill_s=cluster.standstill_s(died_at), target_s=CHIEF_TARGET_S)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.shows("F12")
def test_a_chief_that_wakes_after_it_was_replaced_ends_without_harm(start: Started) -> None:
    cluster = start(Plan(max_steps=60))
    cluster.await_step(12)
    sleeper = cluster.processes["chief"]
    cluster.signal("chief", signal.SIGSTOP)
    cluster.start_one("chief", flags=["--takeover"], address=f"unix:{cluster.sockets}/chief-2")
    cluster.await_step(25)
    sleeper.send_signal(signal.SIGCONT)
    assert sleeper.wait(20) == 1, cluster.logs()
    assert "superseded" in cluster.text_of("chief")
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


@pytest.mark.shows("F12")
def test_a_second_chief_without_takeover_gives_up_while_the_first_is_heard(start: Started) -> None:
    """It was started by mistake."""
    cluster = start(Plan(max_steps=ENDLESS))
    cluster.await_step(5)
    first = cluster.processes["chief"]
    second = cluster.start_one("chief", address=f"unix:{cluster.sockets}/chief-2")
    assert second.wait(40) in (1, 2), cluster.logs()
    assert first.poll() is None
    cluster.processes["chief"] = first
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def test_chief_and_parameter_server_killed_together_come_back_together(start: Started, record: Record) -> None:
    cluster = start(Plan())
    cluster.await_step(12)
    cluster.kill("ps 0")
    died_at = cluster.kill("chief")
    cluster.restart("ps 0")
    cluster.restart("chief")
    cluster.await_end()
    record("chief and ps killed", standstill_s=cluster.standstill_s(died_at), target_s=10.0)
    cluster.assert_as_without_faults()


def test_everything_killed_at_once_continues_from_the_newest_checkpoint(start: Started, record: Record) -> None:
    """A machine that loses its power."""
    cluster = start(Plan())
    cluster.await_step(12)
    died_at = cluster.kill(*cluster.everybody)
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    record("everything killed", standstill_s=cluster.standstill_s(died_at), target_s=10.0)
    assert min(event["step"] for event in cluster.events() if event["event"] == "step" and event["at"] > died_at) >= 5
    cluster.assert_as_without_faults()


def test_a_chief_killed_again_and_again_is_replaced_each_time(start: Started) -> None:
    cluster = start(Plan(max_steps=60))
    for step in (10, 20, 30, 40):
        cluster.await_step(step)
        cluster.kill("chief")
        cluster.restart("chief")
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


def test_a_chief_that_was_stopped_still_ends_leases_and_explains_its_refusals(start: Started) -> None:
    """What is due by time comes due again, though others talk to it all the while."""
    cluster = start(Plan(max_steps=ENDLESS))
    cluster.await_step(12)
    cluster.signal("chief", signal.SIGSTOP)
    cluster.await_standstill(silence_s=5.0)
    cluster.signal("chief", signal.SIGCONT)
    cluster.await_step(cluster.reached() + 10)
    cluster.kill("worker 1")
    cluster.await_(lambda: _has_lapsed(cluster, 1), what="the lease of worker 1 ends", timeout_s=15)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.restart("worker 1")
    cluster.await_step(cluster.reached() + 10)
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def test_a_stopped_chief_that_nobody_replaced_continues_when_it_wakes(start: Started) -> None:
    cluster = start(Plan(durability=None, lease_s=20.0))
    cluster.await_step(12)
    cluster.signal("chief", signal.SIGSTOP)
    cluster.await_standstill()
    at = cluster.reached()
    cluster.kill("worker 2")
    cluster.restart("worker 2")
    cluster.signal("chief", signal.SIGCONT)
    cluster.await_end()
    assert cluster.reached() > at
    cluster.assert_as_without_faults()


def _has_lapsed(cluster: Cluster, index: int) -> bool:
    status = cluster.status()
    return status is not None and any(one.index == index and one.state == "lapsed" for one in status.participants)
