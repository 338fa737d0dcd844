"""Followers of the weights while servers and chiefs are killed, stopped and cut off: what they show is always one step, bit by bit."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import worker_client
from ps_protocol.errors import DeadlineExceeded
from ps_protocol.roles.chief import ClusterStatus
from tests.chaos import publisher, script
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import ENDLESS, Plan
from tests.support.processes.processes import end_of, speaking
from tests.support.repository import ROOT
from tests.support.waiting import wait_until
from worker_client.following.sources import Version

pytestmark = pytest.mark.timeout(150)
NUM_STEPS = 60
# From the first step that is made again to when a follower has it.
RESUME_S = 2.0
Storing = Callable[[Cluster], "subprocess.Popen[str]"]


class Watching:
    """A follower whose program takes each step that it can, and checks it against a run without a fault."""

    def __init__(self, place: str | Path, expected: dict[int, script.Values]) -> None:
        self.weights = worker_client.follow(place, timeout_s=20, interval_s=0.02)
        self.taken: list[tuple[float, Version]] = []
        self.wrong: list[str] = []
        self._expected = expected
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(20)
        self.weights.close()

    def newest(self) -> Version:
        return self.taken[-1][1] if self.taken else Version(0, 0, -1)

    def _run(self) -> None:
        known = None
        while not self._is_over.is_set():
            try:
                step = self.weights.wait(timeout_s=0.2)
            except DeadlineExceeded:
                continue
            version = self.weights.version
            if version is None or version == known:
                self._is_over.wait(0.002)
                continue
            known = version
            self.taken.append((time.monotonic(), version))
            try:
                script.assert_same_bytes(dict(self.weights.arrays), self._expected[step])
            except AssertionError as error:
                self.wrong.append(f"{version}: {error}")


Following = Callable[[Cluster | str | Path], Watching]


@pytest.fixture(scope="module")
def expected() -> dict[int, script.Values]:
    """The values at each step of a run without a fault."""
    found: dict[int, script.Values] = {}

    def see(step: int, values: script.Values) -> None:
        found[step] = {name: value.copy() for name, value in values.items()}

    script.reference(num_steps=NUM_STEPS, num_workers=Plan().num_workers, see=see)
    return found


@pytest.fixture
def follow(stack: ExitStack, expected: dict[int, script.Values]) -> Iterator[Following]:
    """Starts a follower of a cluster, of a relay by its address, or of a store, that is checked, and closed, at the end."""
    found: list[Watching] = []

    def begin(followed: Cluster | str | Path) -> Watching:
        watching = Watching(followed.chief_address if isinstance(followed, Cluster) else followed, expected)
        found.append(watching)
        stack.callback(watching.close)
        return watching

    yield begin
    for watching in found:
        assert not watching.wrong
        versions = [version for _, version in watching.taken]
        for life in {version.life for version in versions}:  # a number that is chosen at random
            of_life = [version for version in versions if version.life == life]
            assert of_life == sorted(set(of_life)), "a follower went back, or showed a version twice"


def resumed_s(cluster: Cluster, watching: Watching, since: float) -> float:
    """How long after the first step that workers had after a moment the follower had that step, or a later one."""
    first_at, first_step = min(
        (event["at"], event["after"]) for event in cluster.events() if event["event"] == "step" and event["at"] > since
    )
    had_at = min(at for at, version in watching.taken if at > since and version.step >= first_step)
    return max(0.0, had_at - float(first_at))


def await_step(watching: Watching, step: int) -> None:
    wait_until(lambda: watching.newest().step >= step, timeout_s=40, what=f"the follower has step {step}")


FAULTS = {
    "ps killed": lambda cluster: (cluster.kill("ps 1"), cluster.restart("ps 1"))[0],
    "chief killed": lambda cluster: (cluster.kill("chief"), cluster.restart("chief"))[0],
    "all servers killed": lambda cluster: (cluster.kill("ps 0", "ps 1"), cluster.restart("ps 0", "ps 1"))[0],
    "everything killed": lambda cluster: (cluster.kill("ps 0", "ps 1", "chief"), cluster.restart("ps 0", "ps 1", "chief"))[0],
}


@pytest.mark.shows("F39")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_follower_shows_no_wrong_bit_and_goes_on_with_the_next_step(
    start: Started, follow: Following, record: Record, fault: str
) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS))
    cluster.await_step(2)
    watching = follow(cluster)
    await_step(watching, 12)
    at = FAULTS[fault](cluster)
    await_step(watching, 25)
    cluster.await_end()
    assert resumed_s(cluster, watching, at) <= RESUME_S
    record(f"{fault}, a follower's next step after the workers'", standstill_s=resumed_s(cluster, watching, at), target_s=RESUME_S)


@pytest.mark.shows("F39")
def test_readers_of_relays_that_are_killed_go_on_when_these_are_there_again(start: Started, follow: Following, record: Record) -> None:
    cluster = start(Plan(max_steps=ENDLESS, pace_s=1.0))
    cluster.await_step(2)
    relays = {"relay 0": cluster.chief_address, "relay 1": cluster.address("relay 0")}
    for name, followed in relays.items():
        cluster.start_one(name, address=followed)
    readers = [follow(cluster.address(name)) for name in ("relay 0", "relay 1", "relay 1")]

    def serves_again(name: str) -> bool:
        return cluster.text_of(name).count("relaying the weights") == cluster.lives[name]

    for killed in (["relay 1"], ["relay 0"], ["relay 0", "relay 1"]):
        for watching in readers:
            await_step(watching, cluster.reached())
        cluster.kill(*killed)
        for name in killed:
            cluster.restart(name, address=relays[name])
        cluster.await_(lambda: all(map(serves_again, relays)), what="the relays serve again")
        back_at, reached = time.monotonic(), cluster.reached()
        for watching in readers:
            await_step(watching, reached)
        record(f"{' and '.join(killed)} killed, readers after they serve again", standstill_s=time.monotonic() - back_at, target_s=RESUME_S)
        assert time.monotonic() - back_at <= RESUME_S
    assert cluster.reached() < NUM_STEPS, "the run went beyond what is expected"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_of_a_relay_shows_no_wrong_bit_and_hears_of_the_end(start: Started, follow: Following, fault: str) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS, pace_s=0.3))  # a relay takes seconds to start, and must be there long before the end
    cluster.start_one("relay 0")
    watching = follow(cluster.address("relay 0"))
    await_step(watching, 12)
    FAULTS[fault](cluster)
    await_step(watching, 25)
    cluster.await_end()
    wait_until(lambda: watching.weights.has_ended, what="the reader hears of the end")
    assert watching.weights.wait(max_lag=0) == NUM_STEPS
    cluster.await_death("relay 0", code=0)


@pytest.mark.parametrize("name", ["ps 1", "chief"])
def test_a_server_that_stands_still_costs_a_follower_time_only(start: Started, follow: Following, name: str) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS))
    cluster.await_step(2)
    watching = follow(cluster)
    await_step(watching, 8)
    cluster.signal(name, signal.SIGSTOP)
    wait_until(lambda: time.monotonic() > watching.taken[-1][0] + 3, timeout_s=30, what="the follower stands still")
    at = cluster.signal(name, signal.SIGCONT)
    await_step(watching, 25)
    cluster.await_end()
    assert resumed_s(cluster, watching, at) <= RESUME_S


def test_a_standby_takes_over_without_a_step_back_for_a_follower(start: Started, follow: Following) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS, has_standbys=True))
    cluster.await_step(2)
    watching = follow(cluster)
    await_step(watching, 12)
    at = cluster.kill("ps 1")
    await_step(watching, 25)
    assert {version.epoch for _, version in watching.taken} == {1}
    assert resumed_s(cluster, watching, at) <= RESUME_S


@pytest.mark.shows("F39")
@pytest.mark.parametrize("way", ["both ways", "there", "back"])
def test_a_follower_that_was_cut_off_is_current_again_within_2_s(start: Started, follow: Following, record: Record, way: str) -> None:
    cluster = start(Plan(max_steps=ENDLESS, transport="grpc", has_proxies=True, pace_s=0.2))
    cluster.await_step(2)
    watching = follow(cluster)
    await_step(watching, 5)
    cluster.own_conditions.to_server, cluster.own_conditions.to_client = way == "back", way == "there"
    wait_until(lambda: time.monotonic() > watching.taken[-1][0] + 6, timeout_s=30, what="the follower stands still")
    with pytest.raises(DeadlineExceeded, match=r"nothing was heard of newer steps|ps \d at"):
        watching.weights.wait(max_lag=0, timeout_s=0.01)
    cluster.own_conditions.to_server = cluster.own_conditions.to_client = True
    healed_at, reached = time.monotonic(), cluster.reached()
    await_step(watching, reached)
    record(f"a follower was cut off, {way}: after healing", standstill_s=time.monotonic() - healed_at, target_s=RESUME_S)
    assert time.monotonic() - healed_at <= RESUME_S
    assert reached < NUM_STEPS, "the run went beyond what is expected"


def test_connections_of_a_follower_that_break_again_and_again_cost_it_nothing(start: Started, follow: Following) -> None:
    cluster = start(Plan(max_steps=ENDLESS, transport="grpc", has_proxies=True))
    cluster.await_step(2)
    watching = follow(cluster)
    for step in (6, 9, 12, 15):
        await_step(watching, step)
        for proxy in cluster.proxies:
            proxy.sever(cluster.own_conditions)
    await_step(watching, 20)


@pytest.fixture
def store(stack: ExitStack, tmp_path: Path) -> Storing:
    """Starts `lockstep store`, which writes to the test's directory."""

    def begin(cluster: Cluster) -> "subprocess.Popen[str]":
        words = ["-m", "lockstep", "store", "--chief", cluster.chief_address, "--to", tmp_path / "weights", "--anchor-steps", "5"]
        return stack.enter_context(speaking(*words))

    return begin


@pytest.mark.shows("F39")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_reader_of_a_store_sees_no_wrong_bit_and_has_the_last_step(
    start: Started,
    follow: Following,
    store: Callable[[Cluster], "subprocess.Popen[str]"],
    fault: str,
    tmp_path: Path,
) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS, pace_s=0.3))
    cluster.await_step(2)
    keeping, watching = store(cluster), follow(tmp_path / "weights")
    await_step(watching, 12)
    FAULTS[fault](cluster)
    await_step(watching, NUM_STEPS)
    cluster.await_end()
    assert keeping.wait(30) == 0, end_of(keeping)


@pytest.mark.shows("F39")
def test_a_store_whose_writer_is_stopped_and_killed_shows_no_wrong_bit_and_goes_on(
    start: Started, follow: Following, store: Storing, tmp_path: Path
) -> None:
    cluster = start(Plan(max_steps=NUM_STEPS, pace_s=0.3))
    cluster.await_step(2)
    keeping, watching = store(cluster), follow(tmp_path / "weights")
    await_step(watching, 5)
    keeping.send_signal(signal.SIGSTOP)
    wait_until(lambda: time.monotonic() > watching.taken[-1][0] + 3, timeout_s=30, what="the reader stands still")
    keeping.send_signal(signal.SIGCONT)
    await_step(watching, cluster.reached())
    keeping.kill()
    keeping.wait()
    store(cluster)
    await_step(watching, NUM_STEPS)
    cluster.await_end()


@pytest.mark.shows("F39")
@pytest.mark.parametrize("name", ["worker 0", "ps 1", "chief"])
def test_what_is_published_is_shown_whole_when_a_process_is_killed(start: Started, name: str) -> None:
    """A number among the values says what the others are, so that a mixture would show; and which step they are published as."""
    plan = Plan(program=("-m", "tests.chaos.publisher"), num_workers=1, max_steps=ENDLESS, checkpoint_steps=5)
    cluster = start(plan)
    with closing(worker_client.follow(cluster.chief_address, timeout_s=20)) as weights:
        taken: list[Version] = []
        for _ in range(3):
            reached = weights.wait(timeout_s=20)
            while (step := weights.wait(timeout_s=20)) < reached + 20:
                assert weights.version is not None
                taken.append(weights.version)
                number = int(weights.arrays["number"])
                script.assert_same_bytes(dict(weights.arrays), publisher.values_of(number))
                # A server that lost its values takes steps back, of which what was under way is published once more.
                assert number == step or name == "ps 1", "a step was published twice, or lost"
            cluster.kill(name)
            cluster.restart(name)
        assert taken == sorted(taken), "a follower went back"
        assert len({*taken}) > 5


@pytest.mark.shows("F39")
def test_a_follower_that_is_killed_holds_nobody_up(start: Started) -> None:
    program = "import lockstep\nwith lockstep.follow({!r}, wire='bfloat16') as weights:\n    while True: weights.wait(max_lag=0)"
    cluster = start(Plan(max_steps=NUM_STEPS, pace_s=0.3))
    cluster.await_step(2)
    followers = [subprocess.Popen([sys.executable, "-c", program.format(cluster.chief_address)], cwd=ROOT) for _ in range(3)]
    cluster.await_status(lambda status: _num_following(status) == 3, what="three follow")
    for process in followers:
        process.kill()
        process.wait(10)
    cluster.await_end()
    cluster.assert_as_without_faults()


def _num_following(status: ClusterStatus) -> int:
    return sum(one.doing.startswith("follows at step") for one in status.participants)
