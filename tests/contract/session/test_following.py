"""A follower of the weights: whole steps, as they are made, for programs that generate or serve."""

import logging
import re
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import Cancelled, DeadlineExceeded, InvalidSpec, NotInitialized, PsError, StepGone, Unavailable, VariableNotFound
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ParticipantKind
from tests.support.chief.rolling import RollingCluster
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Cluster, Shape, Start
from tests.support.waiting import wait_until
from worker_client import Follower, Part, Session
from worker_client.cluster.chief import ChiefLink
from worker_client.following import sources
from worker_client.following.sources import ClusterSource

# Larger than one page; split over both servers; a row of its own; a scalar.
VALUES: dict[str, Array] = {
    "w": np.linspace(-1, 1, 60_000, dtype=np.float32).reshape(300, 200),
    "b": np.full(3, 0.5, np.float32),
    "d": np.array(2.5),
}
MEAN = np.linspace(0, 1, 7, dtype=np.float32)


def bfloat16(values: Array) -> Array:
    """Rounds to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


class Trained:
    """A cluster with one worker, whose values are known at each step."""

    def __init__(self, cluster: Cluster, *, rate: float = 1e-3) -> None:
        self.cluster, self.rng = cluster, np.random.default_rng(0)
        self.session = cluster.session()
        self.session.create_or_join({**VALUES, "mean": worker_client.Buffer(MEAN)}, optimizer=worker_client.adam(rate))

    def step(self, count: int = 1) -> int:
        for _ in range(count):
            self.session.read()
            gradients = {name: self.rng.normal(size=value.shape).astype(value.dtype) for name, value in VALUES.items()}
            updates = {"mean": self.rng.normal(size=7).astype(np.float32)}
            assert self.session.step(gradients, updates=updates, timeout_s=20).is_accepted
        return self.session.global_step

    def check(self, arrays: "dict[str, Array]", wire: str = "bfloat16") -> None:
        """The arrays have the cluster's bits, as they travel."""
        for name, value in self.session.read().items():
            is_rounded = wire == "bfloat16" and value.dtype == np.float32 and name != "mean"  # statistics travel as they are
            expected = bfloat16(value).reshape(value.shape) if is_rounded else value
            np.testing.assert_array_equal(arrays[name], expected)


@pytest.fixture
def trained(start: Start) -> Trained:
    return Trained(start(Shape(num_ps=2, num_workers=1)))


@also_over("grpc")
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_follower_has_each_step_as_it_travels_bit_by_bit(trained: Trained, wire: str) -> None:
    weights = trained.cluster.follower(wire)
    assert weights.wait() == 0
    arrays = weights.arrays
    for _ in range(5):
        newest = trained.step(2)
        assert weights.wait(step=newest) == weights.step == newest
        assert weights.lag == 0
        trained.check(dict(arrays), wire)


@also_over("grpc")
def test_small_changes_travel_as_patches(start: Start) -> None:
    trained = Trained(start(Shape(num_ps=2, num_workers=1)), rate=1e-5)
    weights = trained.cluster.follower()
    weights.wait()
    first = weights.received_bytes
    weights.wait(step=trained.step(10))
    trained.check(dict(weights.arrays))
    # A server with a few numbers sends all of them where most have changed.
    assert weights.num_patches > 0
    assert weights.received_bytes - first < first


def test_what_a_program_sees_changes_in_its_own_calls_only(trained: Trained) -> None:
    weights = trained.cluster.follower()
    weights.wait()
    before = {name: array.copy() for name, array in weights.arrays.items()}
    newest = trained.step(3)
    wait_until(lambda: weights.lag == 3, what="the follower hears of the step")
    assert weights.step == 0
    for name, array in weights.arrays.items():
        np.testing.assert_array_equal(array, before[name])
    assert weights.wait(max_lag=0) == newest
    trained.check(dict(weights.arrays))
    with pytest.raises(ValueError, match="read-only"):
        weights.arrays["b"][:] = 0


def test_weights_go_into_arrays_of_the_programs_own_in_their_types(trained: Trained) -> None:
    weights = trained.cluster.follower("float32")
    own = {"w": np.zeros((300, 200), np.float64), "d": np.zeros(())}
    for _ in range(3):
        weights.wait(step=trained.step())
        assert weights.into(own) == weights.step
        values = trained.session.read()
        np.testing.assert_array_equal(own["w"], values["w"].astype(np.float64))
        assert own["d"] == values["d"]


def test_arrays_of_another_shape_or_name_are_refused_and_nothing_is_copied(trained: Trained) -> None:
    weights = trained.cluster.follower()
    own = {"b": np.zeros(3, np.float32), "w": np.zeros((3, 3), np.float32)}
    with pytest.raises(InvalidSpec, match=r"'w': want a writable array of shape \(300, 200\)"):
        weights.into(own)
    with pytest.raises(VariableNotFound, match="'c' is not followed"):
        weights.into({"b": own["b"], "c": own["w"]})
    assert not own["b"].any()


def test_a_follower_of_a_part_has_that_under_its_own_names(trained: Trained) -> None:
    weights = trained.cluster.follower("float32", names={"scale": "d", "bias": Part("b", index=np.s_[1:])})
    for _ in range(2):
        weights.wait(step=trained.step())
        values = trained.session.read()
        assert sorted(weights.arrays) == ["bias", "scale"]
        np.testing.assert_array_equal(weights.arrays["bias"], values["b"][1:])
        assert weights.arrays["scale"] == values["d"]
    assert weights.received_bytes < VALUES["w"].nbytes


@also_over("grpc")
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("chosen", [{"tables": True}, {"names": ["w", "users"]}, {"names": {"mine": "users"}}], ids=str)
def test_tables_that_are_wanted_are_followed_with_the_rest(start: Start, wire: str, chosen: dict[str, Any]) -> None:
    cluster, rng = start(Shape(num_ps=2, num_workers=1)), np.random.default_rng(0)
    session = cluster.session()
    users = worker_client.EmbeddingTable((5000, 8), initializer=worker_client.normal_initializer(0.0, 0.1, seed=3))
    session.create_or_join({"w": VALUES["w"], "users": users}, optimizer=worker_client.adagrad(0.1))
    weights = cluster.follower(wire, **chosen)
    name, target = "mine" if "mine" in str(chosen) else "users", np.zeros((5000, 8), np.float64)
    for _ in range(4):
        rows = rng.choice(5000, 20, replace=False)
        slices = worker_client.IndexedSlices(rows, rng.normal(size=(20, 8)).astype(np.float32))
        assert session.step({"w": rng.normal(size=VALUES["w"].shape).astype(np.float32), "users": slices}, timeout_s=20).is_accepted
        weights.wait(step=session.global_step, timeout_s=20)
        values = session.read_rows("users")
        expected = bfloat16(values).reshape(values.shape) if wire == "bfloat16" else values
        np.testing.assert_array_equal(weights.arrays[name], expected)
        assert weights.into({name: target}) == session.global_step
        np.testing.assert_array_equal(target, expected)
    if name == "mine":
        assert weights.received_bytes < 2 * target.size * (2 if wire == "bfloat16" else 4)


def test_who_wants_a_table_with_keys_hears_what_gives_its_rows(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    words = r"'users' is a table with keys, which are not followed: lockstep\.checkpoint_changes\.changes\(\) gives the rows"
    cluster = start(Shape(num_ps=1, num_workers=1))
    session = cluster.session()
    users = worker_client.EmbeddingTable(2, keys="int64")
    session.create_or_join({"w": VALUES["b"], "users": users}, optimizer=worker_client.sgd(0.5), timeout_s=20)
    with pytest.raises(InvalidSpec, match=words):
        cluster.follower("float32", names=["users"]).wait(timeout_s=20)
    weights = cluster.follower("float32", tables=True)
    weights.wait(timeout_s=20)
    assert weights.arrays.keys() == {"w"}
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["nobody"], "no variable 'nobody'"),
        ("w", "got the str 'w'"),
        ([], "there are none"),
        ({"bias": Part("b", 3)}, r"'b' has shape \(3,\), and no part 3: index 3 is out of bounds"),
        ({"bias": Part("b", np.s_["first":])}, r"'b' has shape \(3,\), and no part slice"),
    ],
)
def test_names_that_cannot_be_followed_are_refused(trained: Trained, names: object, words: str) -> None:
    with pytest.raises((VariableNotFound, InvalidSpec), match=words):
        trained.cluster.follower(names=names).wait(timeout_s=20)


def test_a_follower_may_come_before_the_model(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=1))
    weights = cluster.follower()
    with pytest.raises(DeadlineExceeded, match="the model has no values yet"):
        weights.wait(timeout_s=1.5)
    trained = Trained(cluster)
    assert weights.wait(step=trained.step(), timeout_s=20) == 1
    trained.check(dict(weights.arrays))


def test_a_wait_for_a_step_that_does_not_come_says_what_is_there(trained: Trained) -> None:
    weights = trained.cluster.follower()
    with pytest.raises(DeadlineExceeded, match="step 7 is wanted and 0 is there"):
        weights.wait(step=7, timeout_s=0.3)


@also_over("grpc")
@pytest.mark.shows("F40")
def test_a_word_that_was_damaged_is_noticed_and_mended(trained: Trained, caplog: pytest.LogCaptureFixture) -> None:
    weights = trained.cluster.follower()
    weights.wait()
    for copy in weights._copies:
        copy.words[::100] ^= np.uint16(3)
    weights.wait(step=trained.step())
    trained.check(dict(weights.arrays))
    assert weights.num_mended
    assert any("differ from what the server has" in text for text in caplog.messages)


@also_over("grpc")
def test_the_end_of_training_is_told_with_its_last_step(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=1, max_steps=3))
    trained = Trained(cluster)
    weights = cluster.follower()
    trained.step(3)
    trained.session.close()
    wait_until(lambda: weights.has_ended, what="the follower hears of the end")
    assert not weights.is_over, "the program has not taken the last step"
    assert weights.wait(max_lag=0) == 3
    assert weights.is_over


def test_where_training_ends_before_there_are_weights_a_wait_ends_too() -> None:
    cluster = RollingCluster(lambda session: None)
    with closing(follower_of(cluster)) as weights, cluster.session() as session:
        session.finish("done")
        with pytest.raises(NotInitialized, match="training ended before any worker gave the model its first values"):
            weights.wait(timeout_s=30)
        assert weights.is_over


@pytest.mark.parametrize(("num_rows", "is_kept"), [(10, False), (200_000, True)])
def test_memory_for_pages_of_a_large_model_is_kept(start: Start, monkeypatch: pytest.MonkeyPatch, num_rows: int, is_kept: bool) -> None:
    calls: list[None] = []
    monkeypatch.setattr(sources, "keep_freed_memory", lambda: calls.append(None))
    cluster = start(Shape(num_ps=1, num_workers=1))
    cluster.session().create_or_join({"w": np.zeros((num_rows, 2), np.float32)}, optimizer=worker_client.sgd(1.0))
    cluster.follower().wait(timeout_s=20)
    assert bool(calls) is is_kept


def test_a_program_that_takes_no_weights_is_reported(trained: Trained) -> None:
    weights = trained.cluster.follower()
    trained.step(2)
    wait_until(lambda: weights._report().behind_s > 0, what="weights are there")
    assert weights._report().step is None
    weights.wait(step=2)
    assert (weights._report().step, weights._report().behind_s) == (2, 0.0)


def test_where_each_worker_makes_steps_of_its_own_a_follower_has_the_newest_of_each_server(start: Start) -> None:
    trained = Trained(start(Shape(num_ps=2, num_workers=1, chief_flags=["--policy", "async"])))
    weights = trained.cluster.follower()
    trained.step(5)
    wait_until(lambda: weights.wait() == 5, what="the newest step")
    trained.check(dict(weights.arrays))


def test_a_closed_follower_says_so(trained: Trained) -> None:
    weights = trained.cluster.follower()
    weights.close()
    with pytest.raises(RuntimeError, match="closed"):
        weights.wait(step=99)


def test_closing_a_follower_takes_2_s_at_most_also_where_all_are_away() -> None:
    cluster = RollingCluster(join, lease_s=0.3)
    with cluster.session():
        weights = follower_of(cluster)
        weights.wait(timeout_s=20)
        for one in (cluster.chief, *cluster.shards):
            for name in ("FetchRequest", "HeartbeatRequest", "DeregisterRequest"):
                one.refuse(name, *[Unavailable("gone")] * 1000)
        wait_until(lambda: len(cluster.chief.arguments_of("HeartbeatRequest")) > 2, what="the chief is known to be away")
        begin = time.monotonic()
        weights.close()
        assert time.monotonic() - begin < 2.0


# A cluster that goes back, or is away.


def join(session: Session) -> None:
    session.create_or_join({name: value.copy() for name, value in VALUES.items()}, optimizer=worker_client.sgd(1.0))


def follower_of(cluster: RollingCluster) -> Follower:
    link = cluster.link()
    source = ClusterSource(link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False))
    return Follower(source, encoding=FloatEncoding.BFLOAT16)


@pytest.mark.parametrize("how", [RollingCluster.roll_back, RollingCluster.begin_anew])
def test_weights_never_go_back_silently(how: Callable[[RollingCluster], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster = RollingCluster(join)
    with cluster.session() as session, closing(follower_of(cluster)) as weights:
        for _ in range(2):
            session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
        weights.wait(step=2, timeout_s=20)
        before = weights.version
        how(cluster)
        wait_until(lambda: weights.wait(timeout_s=20) == 0, what="the step of the checkpoint")
        assert before is not None
        assert weights.version is not None
        assert weights.version > before
        np.testing.assert_array_equal(weights.arrays["b"], bfloat16(VALUES["b"]))
        assert any("the weights go from step 2 to step 0" in text for text in caplog.messages)


@pytest.mark.parametrize("error", [Unavailable, Cancelled])
def test_a_server_that_is_away_for_a_while_costs_time_only(error: type[PsError]) -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session, closing(follower_of(cluster)) as weights:
        weights.wait(timeout_s=20)
        for shard in cluster.shards:
            shard.refuse("FetchRequest", *[error("away")] * 3)
        session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
        assert weights.wait(step=1, timeout_s=20) == 1


def test_a_silence_is_one_line_for_all_servers_which_says_what_is_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cluster = RollingCluster(join)
    with cluster.session(), closing(follower_of(cluster)) as weights:
        weights.wait(timeout_s=20)
        for shard in cluster.shards:
            shard.refuse("FetchRequest", *[Unavailable("ps at a:1 is away")] * 100)
        with pytest.raises(DeadlineExceeded, match=r"step 1 is wanted and 0 is there; the cluster of the chief .* ps at a:1 is away"):
            weights.wait(step=1, timeout_s=3)
        wait_until(lambda: weights.lag == 0 and len(caplog.messages) > 1, what="the thread goes on saying it")
    waits = [text for text in caplog.messages if "is away" in text]
    assert len(waits) == 2 and all(text.startswith("the follower waits for weights: waiting for") for text in waits), caplog.messages


def test_who_has_heard_of_the_end_asks_no_chief_what_has_become_of_servers_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RollingCluster(join)
    link = cluster.link()
    with cluster.session() as session:
        source = ClusterSource(link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False))
        with closing(source):
            session.finish("done")
            wait_until(lambda: source.is_over, what="the follower hears of the end")
            assert source.poll_s == 0
            monkeypatch.delattr(ChiefLink, "register_again")
            source.lost(Cancelled("the server is ending"))


def test_the_end_is_told_though_the_servers_end_with_it() -> None:
    cluster = RollingCluster(join)
    with closing(follower_of(cluster)) as weights:
        with cluster.session() as session:
            session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
            weights.wait(step=1, timeout_s=20)
            session.finish("done")
            for shard in cluster.shards:
                shard.refuse("FetchRequest", *[Unavailable("gone")] * 1_000)
            wait_until(lambda: weights.wait() == 1 and weights.is_over, what="the follower hears of the end")


def test_steps_that_pass_faster_than_servers_can_be_asked_are_aimed_for() -> None:
    cluster = RollingCluster(join)
    with cluster.session() as session, closing(follower_of(cluster)) as weights:
        weights.wait(timeout_s=20)
        cluster.shards[1].refuse("FetchRequest", *[StepGone("gone", facts={"step": "1"})] * 2)
        for _ in range(4):
            session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
        wait_until(lambda: weights.wait(timeout_s=20) >= 3, what="a later step")


def test_a_follower_says_that_steps_pass_too_fast_for_it() -> None:
    cluster = RollingCluster(join)
    with cluster.session(), closing(follower_of(cluster)) as weights:
        for shard in cluster.shards:
            shard.refuse("FetchRequest", *[StepGone("step 7 was overwritten", facts={"step": "7"})] * 1_000)
        words = "steps pass faster than the cluster of the chief .* gives them: step 7 was overwritten"
        wait_until(lambda: re.match(words, weights.silence()[1]), what="it says so")
