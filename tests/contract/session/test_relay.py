"""A relay of the weights: who follows it has what who follows the servers has, whatever becomes of the relay or of its cluster."""

import argparse
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.cli.clusters import relay as relay_command
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, PsError, StepGone, StepNotReady, Unauthenticated, Unavailable, WrongRole
from ps_protocol.process import waiting
from ps_protocol.roles.chief import ParticipantKind
from ps_protocol.roles.fence import Era
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.rpc import admission
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.security.options import Security
from tests.contract.session.test_following import VALUES, Trained, bfloat16, join
from tests.support.chief.rolling import RollingCluster
from tests.support.cluster.here import ObjectCluster
from tests.support.cluster.shape import Shape
from tests.support.waiting import wait_until
from worker_client import Follower
from worker_client.cluster.chief import ChiefLink
from worker_client.following.follow import encoding_of
from worker_client.following.relay import Relay
from worker_client.opening import enter_as_observer, enter_locally


class Relays:
    """Relays and their readers, which end with the test."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.stack, self._directory = stack, directory
        self.errors: list[PsError] = []
        self.threads: list[threading.Thread] = []

    def of(self, source: Any, *, name: str = "relay", wire: str | None = "bfloat16", **more: Any) -> Relay:
        """Begins to relay a cluster in this process, or what is at an address."""
        if isinstance(source, str):
            entered = enter_as_observer(source, cluster=None, timeout_s=20, wire=None, security=None)
        elif isinstance(source, RollingCluster):
            link: ChiefLink = source.link()
            entered = link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False)
        else:
            entered = enter_locally(source)
        more = {"encoding": encoding_of(wire), "takes_kept": wire is None, **more}
        relay = Relay(*entered, address=f"unix:{self._directory}/{name}", **more)
        thread = threading.Thread(target=self._run, args=(relay,))
        self.threads.append(thread)
        thread.start()
        self.stack.callback(thread.join, 20)
        self.stack.callback(relay.close)
        return relay

    def reader(self, relay: Relay, wire: str | None = "bfloat16", **more: Any) -> Follower:
        return self.stack.enter_context(closing(worker_client.follow(relay.address, wire=wire, timeout_s=20, **more)))

    def _run(self, relay: Relay) -> None:
        try:
            with suppress(RuntimeError):  # it was closed
                relay.run()
        except PsError as error:
            self.errors.append(error)


@pytest.fixture
def relays(socket_dir: Path) -> Iterator[Relays]:
    with ExitStack() as stack:
        yield Relays(stack, socket_dir)


@pytest.fixture
def trained(relays: Relays) -> Trained:
    return Trained(ObjectCluster(Shape(num_ps=2, num_workers=1), relays.stack), rate=1e-4)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_relays", [1, 2])
def test_a_reader_has_each_step_that_the_servers_have_bit_by_bit(trained: Trained, relays: Relays, wire: str, num_relays: int) -> None:
    source: Any = trained.cluster
    for number in range(num_relays):
        relay = relays.of(source, name=f"relay {number}", wire=wire)
        source = relay.address
    direct, weights = trained.cluster.follower(wire), relays.reader(relay, wire)
    for _ in range(5):
        newest = trained.step(2)
        assert direct.wait(step=newest) == weights.wait(step=newest) == newest
        trained.check(dict(weights.arrays), wire)
        assert weights.version == direct.version
        wait_until(lambda: weights.lag == 0, what="the relay hears of no newer step")
    assert weights.num_mended == 0
    assert (wire == "float32") or weights.num_patches > 0


def test_tables_are_relayed_where_they_are_wanted(relays: Relays) -> None:
    cluster = ObjectCluster(Shape(num_ps=2, num_workers=1), relays.stack)
    session = cluster.session()
    session.create_or_join({"w": VALUES["w"], "t": worker_client.EmbeddingTable((5000, 4))}, optimizer=worker_client.sgd(0.1))
    weights = relays.reader(relays.of(cluster, tables=True), tables=True)
    for row in range(4):
        rows = worker_client.IndexedSlices([row, 3000 + row], np.full((2, 4), 0.3, np.float32))
        session.step({"w": None, "t": rows}, timeout_s=20)
        weights.wait(step=session.global_step, timeout_s=20)
        values = session.read_rows("t")
        np.testing.assert_array_equal(weights.arrays["t"], bfloat16(values).reshape(values.shape))
    without = relays.of(cluster, name="dense")
    relays.reader(without).wait(timeout_s=20)
    with pytest.raises(InvalidSpec, match="has no tables; start what keeps the weights there with --tables"):
        relays.reader(without, tables=True).wait(timeout_s=20)


@pytest.mark.parametrize("num_relays", [1, 2])
def test_a_reader_that_names_no_wire_has_that_of_the_relay(trained: Trained, relays: Relays, num_relays: int) -> None:
    relay = relays.of(trained.cluster)
    for number in range(1, num_relays):
        relay = relays.of(relay.address, name=f"relay {number}", wire=None)
    weights = relays.reader(relay, wire=None)
    weights.wait(step=trained.step(), timeout_s=20)
    trained.check(dict(weights.arrays), "bfloat16")


def test_a_reader_that_asks_for_another_wire_is_told_which_there_is(trained: Trained, relays: Relays) -> None:
    weights = relays.reader(relays.of(trained.cluster), "float32")
    with pytest.raises(InvalidSpec, match="has bfloat16, and wire='float32' is wanted; leave wire out"):
        weights.wait(timeout_s=20)


def test_a_worker_is_refused_and_sent_to_the_chief(trained: Trained, relays: Relays) -> None:
    relay = relays.of(trained.cluster)
    with pytest.raises(WrongRole, match=r"a relay of the weights of cluster .* workers join its chief"):
        worker_client.connect(relay.address, timeout_s=20)


def test_the_status_is_that_of_the_cluster(trained: Trained, relays: Relays) -> None:
    leaf = relays.of(relays.of(trained.cluster).address, name="leaf")
    trained.step(2)
    with closing(worker_client.observe(leaf.address, timeout_s=20)) as observer:
        status = observer.status()
    assert (status.global_step, len(status.shards)) == (2, 2)


def test_the_end_of_training_is_told_with_its_last_step_and_the_relay_ends_when_all_have_heard(
    relays: Relays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_client.following.relay._LEASE_S", 0.6)
    cluster = ObjectCluster(Shape(num_ps=2, num_workers=1, max_steps=3), relays.stack)
    trained = Trained(cluster)
    relay = relays.of(cluster)
    leaf = relays.of(relay.address, name="leaf")
    readers = [relays.reader(relay), relays.reader(leaf)]
    trained.step(3)
    trained.session.close()
    wait_until(lambda: all(weights.has_ended for weights in readers), what="readers hear of the end", timeout_s=30)
    assert [weights.wait(max_lag=0) for weights in readers] == [3, 3]
    wait_until(lambda: not any(thread.is_alive() for thread in relays.threads), what="the relays have ended")
    assert relays.errors == []


@pytest.mark.shows("F40")
def test_words_that_are_damaged_at_a_relay_are_never_shown(trained: Trained, relays: Relays) -> None:
    relay = relays.of(trained.cluster)
    known = relays.reader(relay)
    known.wait(step=trained.step(), timeout_s=20)
    for copy in relay._follower._copies:
        copy.words[::100] ^= np.uint16(3)
    newcomer = relays.reader(relay)
    with pytest.raises(DeadlineExceeded, match="a slice differs from its digest, also fetched whole"):
        newcomer.wait(timeout_s=2)
    newest = trained.step()
    for weights in (known, newcomer):
        assert weights.wait(step=newest, timeout_s=20) == newest
        trained.check(dict(weights.arrays))


def test_more_readers_wait_at_a_relay_than_guests_may_at_a_server(
    trained: Trained, relays: Relays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_GUEST_CALLS", 1)
    (tmp_path / "tokens").write_text("observer a-token-of-observers\n")
    (tmp_path / "tokens").chmod(0o600)
    relay = relays.of(trained.cluster, security=Security(token_file=tmp_path / "tokens"))
    readers = [relays.reader(relay, security=Security(token="a-token-of-observers")) for _ in range(4)]
    for _ in range(3):
        newest = trained.step()
        assert [weights.wait(step=newest, timeout_s=20) for weights in readers] == [newest] * 4
    with pytest.raises(Unauthenticated):
        relays.reader(relay)


@pytest.mark.shows("F39")
def test_a_relay_that_is_started_again_goes_on_with_its_readers(trained: Trained, relays: Relays) -> None:
    first = relays.of(trained.cluster)
    weights = relays.reader(first)
    weights.wait(step=trained.step(3), timeout_s=20)
    before = weights.version
    first.close()
    trained.step(2)
    with pytest.raises(DeadlineExceeded, match="step 5 is wanted and 3 is there"):
        weights.wait(step=5, timeout_s=0.5)
    second = relays.of(trained.cluster)
    assert second.address == first.address
    assert weights.wait(step=5, timeout_s=20) == 5
    trained.check(dict(weights.arrays))
    assert before is not None and weights.version is not None
    assert weights.version[:2] == before[:2], "the same era"


@pytest.mark.parametrize("how", [RollingCluster.roll_back, RollingCluster.begin_anew])
def test_weights_never_go_back_silently(how: Callable[[RollingCluster], None], relays: Relays, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster = RollingCluster(join)
    with cluster.session() as session:
        weights = relays.reader(relays.of(cluster))
        for _ in range(2):
            session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
        weights.wait(step=2, timeout_s=20)
        before = weights.version
        how(cluster)
        wait_until(lambda: weights.wait(timeout_s=20) == 0, what="the step of the checkpoint", timeout_s=30)
        assert before is not None and weights.version is not None
        assert weights.version > before
        np.testing.assert_array_equal(weights.arrays["b"], bfloat16(VALUES["b"]))
        assert any("the weights go from step 2 to step 0" in text for text in caplog.messages)


@pytest.fixture
def asked(trained: Trained, relays: Relays) -> Iterator[Callable[..., FetchReply]]:
    """Asks a relay at step 3 for the weights of the first server, as a reader does."""
    relay = relays.of(trained.cluster)
    weights = relays.reader(relay)
    weights.wait(step=trained.step(3), timeout_s=20)
    followed = weights._followed
    assert followed is not None
    known = {"era": followed.era, "layout_hash": followed.layouts[0].hash, "encoding": encoding_of("bfloat16")}
    with closing(GrpcShard(relay.address)) as shard:
        yield lambda **more: shard.call(FetchRequest(**{**known, **more}))


def test_of_the_steps_that_it_does_not_hold_a_relay_says_which_there_is(asked: Callable[..., FetchReply]) -> None:
    with pytest.raises(StepGone) as gone:
        asked(step=1)
    with pytest.raises(StepNotReady) as early:
        asked(step=9, max_wait_s=0.1)
    assert gone.value.facts["step"] == early.value.facts["step"] == "3"


def test_words_that_a_relay_does_not_have_are_refused(asked: Callable[..., FetchReply]) -> None:
    with pytest.raises(InvalidSpec, match="encoding AS_IS: only BFLOAT16 is kept here"):
        asked(encoding=encoding_of("float32"))


def test_a_reader_that_aims_ahead_gets_the_next_step_that_the_relay_has(trained: Trained, asked: Callable[..., FetchReply]) -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(asked, step=4, held_step=3, max_wait_s=20.0)
        assert asked(held_step=None).step == 3
        trained.step(2)
        assert found.result(20).step in (4, 5)


def test_a_relay_that_is_behind_its_reader_has_it_wait(trained: Trained, asked: Callable[..., FetchReply]) -> None:
    era = trained.session.membership.participant.era
    with pytest.raises(Unavailable, match="this relay is at epoch 1 still, and the caller has seen epoch 2"):
        asked(era=Era(era.life, era.epoch + 1))


def test_a_relay_that_hears_nothing_does_not_have_its_readers_take_what_they_have_for_fresh(
    relays: Relays, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker_client.following.relay._SILENT_S", 0.5)
    cluster = RollingCluster(join)
    with cluster.session():
        weights = relays.reader(relays.of(cluster))
        weights.wait(timeout_s=20)
        cluster.shards[0].refuse("FetchRequest", *[Unavailable("away")] * 100)
        wait_until(lambda: "this relay has heard nothing for" in caplog.text, what="words about it")


def test_a_relay_that_is_started_before_its_cluster_waits_for_it_in_one_line_at_a_time(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.1)
    monkeypatch.setattr(relay_command, "TIMEOUT_S", 0.5)
    ends = iter([None, None, KeyboardInterrupt()])

    def still_waiting(*_: object) -> None:
        if (end := next(ends)) is not None:
            raise end

    monkeypatch.setattr(relay_command.log, "warning", still_waiting)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process has handlers of its own
    parser = argparse.ArgumentParser()
    relay_command.add_relay_arguments(parser)
    arguments = parser.parse_args([f"unix:{socket_dir}/chief", "--listen", f"unix:{socket_dir}/relay"])
    with pytest.raises(KeyboardInterrupt):
        relay_command.run_relay(arguments)
    assert next(ends, None) is None
    assert all("still trying what=the chief at" in text for text in caplog.messages) and caplog.messages, caplog.messages
