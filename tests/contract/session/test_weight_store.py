"""The weights of a cluster in a store: whole steps, written by one and read by others who talk to no cluster, whatever is wrong there."""

import errno
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.checkpoint.manifest import manifest_end
from ps_protocol.checkpoint.storage import CheckpointStorage, storage_failures
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import DataLoss, DeadlineExceeded, InvalidSpec, NotInitialized, PsError, Superseded, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ParticipantKind
from ps_protocol.roles.fence import Era
from ps_protocol.roles.weights import FetchRequest, KeptWeights
from tests.support.chief.rolling import RollingCluster
from tests.support.waiting import wait_until
from worker_client import Buffer, EmbeddingTable, Follower, IndexedSlices, Session
from worker_client.following.index import INDEX, Index, decode_index
from worker_client.following.keeper import StoreKeeper
from worker_client.following.sources import ClusterSource
from worker_client.following.store import StoreSource
from worker_client.opening import enter_locally

# Split over both servers; a row of its own; a scalar that is not encoded; nothing at all.
VALUES: dict[str, Array] = {
    "w": np.linspace(-1, 1, 60_000, dtype=np.float32).reshape(300, 200),
    "b": np.full(3, 0.5, np.float32),
    "d": np.array(2.5),
    "none": np.zeros((0, 3), np.float32),
}
BEAT_S = 0.1
_numbers = itertools.count()


@pytest.fixture(params=["directory", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"directory": str(tmp_path / "w"), "file": f"file://{tmp_path}/w", "memory": f"memory://w-{next(_numbers)}"}[request.param]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "w")


class Trained:
    """A cluster with one worker, those who keep its weights, and those who follow them."""

    def __init__(self, stack: ExitStack, *, rate: float = 1e-5, max_steps: int | None = None) -> None:
        self.stack, self.rng, self.errors = stack, np.random.default_rng(0), list[PsError]()
        self.cluster = InProcessCluster(num_ps=2, max_steps=max_steps)
        self.session = stack.enter_context(closing(worker_client.local(self.cluster)))
        self.session.create_or_join(VALUES, optimizer=worker_client.adam(rate))

    def step(self, count: int = 1) -> int:
        for _ in range(count):
            self.session.read()
            self.session.step({name: self.rng.normal(size=value.shape).astype(value.dtype) for name, value in VALUES.items()})
        return self.session.global_step

    def keeping(self, storage: CheckpointStorage | str, **more: Any) -> Callable[[], None]:
        """Has the weights kept there, and returns what ends that."""
        source = ClusterSource(*enter_locally(self.cluster))
        return keeping(self.stack, Follower(source, encoding=FloatEncoding.BFLOAT16), storage, self.errors, **more)

    def reader(self, place: str, **more: Any) -> Follower:
        return self.stack.enter_context(closing(worker_client.follow(place, interval_s=0.01, **more)))

    def check(self, weights: Follower) -> None:
        """The follower shows the newest step, bit by bit."""
        assert weights.wait(step=self.session.global_step, timeout_s=20) == self.session.global_step
        for name, value in self.session.read().items():
            expected = value.astype(ml_dtypes.bfloat16).astype(np.float32) if value.dtype == np.float32 else value
            np.testing.assert_array_equal(weights.arrays[name], expected)


def keeping(
    stack: ExitStack, follower: Follower, storage: CheckpointStorage | str, errors: list[PsError], **more: Any
) -> Callable[[], None]:
    keeper = StoreKeeper(open_storage(storage) if isinstance(storage, str) else storage, **{"beat_s": BEAT_S, **more})

    def run() -> None:
        try:
            with suppress_closed():
                keeper.keep(follower)
        except PsError as error:
            errors.append(error)

    keeper.claim()
    thread = threading.Thread(target=run)

    def end() -> None:
        follower.close()
        thread.join(20)
        keeper.close()

    stack.callback(end)
    thread.start()
    return end


@contextmanager
def suppress_closed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        assert "closed" in str(error)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def trained(stack: ExitStack) -> Trained:
    return Trained(stack)


def index_of(place: str) -> Index:
    return decode_index(open_storage(place).get(INDEX), where=INDEX)


def is_kept(place: str, step: int) -> Callable[[], bool]:
    def look() -> bool:
        try:
            return index_of(place).step == step
        except PsError:
            return False

    return look


def await_kept(place: str, step: int) -> Index:
    wait_until(is_kept(place, step), what=f"step {step} is in the store")
    return index_of(place)


def test_a_reader_has_each_step_bit_by_bit_mostly_by_patches(trained: Trained, place: str) -> None:
    trained.keeping(place)
    weights = trained.reader(place)
    for _ in range(5):
        trained.step(2)
        trained.check(weights)
    assert weights.num_wholes == 2
    assert weights.num_mended == 0
    assert weights.lag == 0


def test_a_reader_that_comes_late_or_was_away_gets_an_anchor_or_merged_patches(trained: Trained, place: str) -> None:
    trained.keeping(place, anchor_steps=4)
    slow = trained.reader(place)
    slow.wait(timeout_s=20)
    for _ in range(6):
        await_kept(place, trained.step())
    trained.check(trained.reader(place))
    trained.check(slow)


def test_where_all_words_change_each_step_is_an_anchor(stack: ExitStack, directory: str) -> None:
    trained = Trained(stack, rate=1e-2)
    trained.keeping(directory)
    weights = trained.reader(directory)
    for _ in range(3):
        trained.step()
        trained.check(weights)
        assert index_of(directory).entries[-1].before is None
    assert weights.num_patches == 0


def test_a_reader_of_some_variables_gets_those(trained: Trained, directory: str) -> None:
    trained.keeping(directory)
    weights = trained.reader(directory, names={"bias": "b", "d": "d"})
    newest = trained.step(3)
    assert weights.wait(step=newest, timeout_s=20) == newest
    assert set(weights.arrays) == {"bias", "d"}
    assert weights.arrays["d"] == trained.session.read()["d"]


@pytest.mark.parametrize("tables", [False, True])
def test_buffers_travel_as_they_are_and_tables_when_they_are_wanted(stack: ExitStack, directory: str, tables: bool) -> None:
    cluster = InProcessCluster(num_ps=2)
    session = stack.enter_context(closing(worker_client.local(cluster)))
    values = {"w": VALUES["w"], "m": Buffer(np.full(7, 0.3, np.float32)), "t": EmbeddingTable((5000, 4))}
    session.create_or_join(values, optimizer=worker_client.sgd(0.1))
    follower = Follower(ClusterSource(*enter_locally(cluster)), encoding=FloatEncoding.BFLOAT16, tables=tables)
    for weights in (follower, stack.enter_context(closing(worker_client.follow(directory, tables=tables)))):
        if weights is not follower:
            keeping(stack, follower, directory, [])
        for row in range(3):
            session.step({"w": None, "t": IndexedSlices([row, 4000 + row], np.full((2, 4), 0.1, np.float32))})
            weights.wait(step=session.global_step, timeout_s=20)
        assert set(weights.arrays) == {"w", "m", *(["t"] if tables else [])}
        np.testing.assert_array_equal(weights.arrays["m"], np.full(7, 0.3, np.float32))
        if tables:
            rows = session.read_rows("t")
            np.testing.assert_array_equal(weights.arrays["t"], rows.astype(ml_dtypes.bfloat16).astype(np.float32))
            assert rows[:, 0].nonzero()[0].tolist() == [0, 1, 2, 4000, 4001, 4002]
    with closing(ClusterSource(*enter_locally(cluster))) as source:
        assert index_of(directory).continues(replace(source.open(), kept=KeptWeights(encoding=FloatEncoding.BFLOAT16, has_tables=tables)))


def test_files_open_with_the_safetensors_library(trained: Trained, directory: str) -> None:
    trained.keeping(directory)
    await_kept(directory, 0)
    index = await_kept(directory, trained.step())
    found: dict[str, Array] = {}
    patch, anchor = (next(one for one in index.entries if (one.before is None) is is_anchor) for is_anchor in (False, True))
    for file in anchor.files:
        found |= safetensors.numpy.load_file(Path(directory, anchor.tag, file.name))
    assert set(found) == set(VALUES)
    np.testing.assert_array_equal(found["w"], VALUES["w"].astype(ml_dtypes.bfloat16))
    for file in patch.files:
        tensors = safetensors.numpy.load_file(Path(directory, patch.tag, file.name))
        assert {name: array.dtype for name, array in tensors.items()} == {"patch": np.uint8}


def test_what_the_index_drops_is_removed_later_and_a_reader_in_the_middle_goes_on(trained: Trained, directory: str) -> None:
    trained.keeping(directory, keep_steps=2, anchor_steps=3, keep_s=0.3)
    weights = trained.reader(directory)
    weights.wait(timeout_s=20)
    for _ in range(12):
        await_kept(directory, trained.step())
    named = {entry.tag for entry in index_of(directory).entries}
    assert len(named) < 12
    wait_until(lambda: {one.tag for one in open_storage(directory).stored()} == named, what="the others are gone")
    trained.check(weights)


@pytest.mark.parametrize("keep_s", [60.0, 0.0])
def test_a_reader_of_the_index_before_still_finds_its_files_for_a_while(keep_s: float, stack: ExitStack, directory: str) -> None:
    trained = Trained(stack, rate=1e-2)  # each step is an anchor
    trained.keeping(directory, keep_steps=1, keep_s=keep_s)
    await_kept(directory, 0)
    source = StoreSource(directory)
    followed = source.open()
    for _ in range(5):
        index = await_kept(directory, trained.step())
    assert all(entry.step > 0 for entry in index.entries)
    request = FetchRequest(era=followed.era, layout_hash=followed.layouts[0].hash, encoding=FloatEncoding.BFLOAT16, step=0, max_wait_s=0.0)
    if keep_s:
        assert source.fetch({0: request})[0].step == 0
    else:
        wait_until(lambda: len(open_storage(directory).stored()) == len(index.entries), what="the others are gone")
        with pytest.raises(Unavailable, match="step 0 cannot be read"):
            source.fetch({0: request})
        request = replace(request, step=None)
        assert source.fetch({0: request})[0].step == 5, "it has read the index again"


def test_the_end_of_training_is_told_with_its_last_step(stack: ExitStack, directory: str) -> None:
    trained = Trained(stack, max_steps=3)
    trained.keeping(directory)
    weights = trained.reader(directory)
    trained.step(3)
    trained.session.close()
    wait_until(lambda: weights.has_ended, what="the reader hears of the end")
    late = trained.reader(directory)
    wait_until(lambda: late.has_ended, what="one who comes later hears of it, too")
    for one in (weights, late):
        assert not one.is_over, "its program has not taken the last step"
        assert one.wait(max_lag=0) == 3
        assert one.is_over


def test_one_who_goes_on_in_a_place_is_followed_and_takes_nothing_back(trained: Trained, place: str) -> None:
    end = trained.keeping(place)
    weights = trained.reader(place)
    trained.step(3)
    trained.check(weights)
    end()
    trained.step()
    trained.keeping(place)
    for _ in range(3):
        trained.step()
        trained.check(weights)
    assert len({entry.tag.split("-")[-2] for entry in index_of(place).entries}) == 2, "what the first one wrote is named still"


def join(session: Session) -> None:
    session.create_or_join({name: value.copy() for name, value in VALUES.items()}, optimizer=worker_client.sgd(1.0))


@pytest.mark.parametrize("how", [RollingCluster.roll_back, RollingCluster.begin_anew])
def test_a_rollback_or_another_training_is_told_and_never_mixed(
    how: Callable[[RollingCluster], None], directory: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    cluster = RollingCluster(join)
    link = cluster.link()
    source = ClusterSource(link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False))
    session = stack.enter_context(cluster.session())
    keeping(stack, Follower(source, encoding=FloatEncoding.AS_IS), directory, [])
    weights = stack.enter_context(closing(worker_client.follow(directory, interval_s=0.01)))
    for _ in range(2):
        session.step({name: np.ones_like(value) for name, value in VALUES.items()}, timeout_s=20)
    weights.wait(step=2, timeout_s=20)
    before = weights.version
    how(cluster)
    wait_until(lambda: weights.wait(timeout_s=20) == 0, what="the step of the checkpoint")
    assert before is not None
    assert weights.version is not None
    assert weights.version > before
    for name, value in VALUES.items():
        np.testing.assert_array_equal(weights.arrays[name], value)
    assert any("is begun anew: another training, or one that was rolled back" in text for text in caplog.messages)
    assert any("the weights go from step 2 to step 0" in text for text in caplog.messages)


def test_what_stays_of_an_era_that_is_over_is_not_passed_on_as_of_the_next(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower(ClusterSource(*enter_locally(trained.cluster)), encoding=FloatEncoding.BFLOAT16)
    assert follower.look(lambda held: held.version.step, timeout_s=20) == 0
    follower.close()  # its thread, so that nothing else happens
    monkeypatch.setattr(follower, "_check_open", lambda: None)
    followed = follower._followed
    assert followed is not None
    follower._begin(replace(followed, era=Era(life=followed.era.life, epoch=followed.era.epoch + 1)))
    assert follower.look(lambda held: held.version.step, timeout_s=0) is None


# What is wrong in a store.


def files_of(place: str, *, is_anchor: bool) -> list[Path]:
    entry = [entry for entry in index_of(place).entries if (entry.before is None) is is_anchor][-1]
    return [Path(place, entry.tag, file.name) for file in entry.files]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


class Failing:
    """A storage that is full, or away, for a while."""

    def __init__(self, place: str) -> None:
        self._storage, self.is_full, self.is_away, self.num_refused = open_storage(place), False, False, 0

    def create(self, tag: str, name: str, *, num_bytes: int) -> Any:
        self._refuse(errno.ENOSPC if self.is_full else 0)
        return self._storage.create(tag, name, num_bytes=num_bytes)

    def put(self, name: str, content: bytes) -> None:
        self._refuse(errno.ENOSPC if self.is_full else 0)
        self._storage.put(name, content)

    def get(self, name: str) -> bytes:
        self._refuse(errno.EIO if self.is_away else 0)
        return self._storage.get(name)

    def _refuse(self, number: int) -> None:
        if number:
            self.num_refused += 1
            with storage_failures("use it"):
                raise OSError(number, os.strerror(number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


@pytest.mark.parametrize("damage", [cut, flip, remove])
def test_a_damaged_patch_is_told_and_mended_from_the_next_anchor(
    damage: Callable[[Path], None], trained: Trained, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained.keeping(directory, anchor_steps=3)
    source, storage = StoreSource(directory, interval_s=0.01), Failing(directory)
    source._storage = storage
    weights = trained.stack.enter_context(closing(Follower(source, encoding=FloatEncoding.BFLOAT16)))
    await_kept(directory, trained.step())
    trained.check(weights)
    storage.is_away = True  # until the damage is done
    wait_until(lambda: storage.num_refused >= 1, what="it cannot look")
    await_kept(directory, trained.step())
    for path in files_of(directory, is_anchor=False):
        damage(path)
    storage.is_away = False
    trained.step(2)
    trained.check(weights)
    trained.step()
    trained.check(weights)
    assert any("another way is tried" in text for text in caplog.messages)


def test_a_damaged_anchor_is_said_until_there_is_another_one(trained: Trained, directory: str, caplog: pytest.LogCaptureFixture) -> None:
    trained.keeping(directory, anchor_steps=2)
    await_kept(directory, 0)
    flip(files_of(directory, is_anchor=True)[0])
    weights = trained.reader(directory)
    with pytest.raises(DeadlineExceeded, match="step 0 cannot be read; the next anchor is waited for"):
        weights.wait(timeout_s=0.5)
    assert sum("sha256 mismatch" in text for text in caplog.messages) == 1, "it is not read again and again"
    trained.step()
    trained.step()
    trained.check(weights)


def test_a_place_without_weights_is_waited_for_and_says_what_for(trained: Trained, place: str) -> None:
    weights = trained.reader(place)
    with pytest.raises(DeadlineExceeded, match="has no weights yet; `lockstep store --to` this place writes them"):
        weights.wait(timeout_s=0.1)
    with pytest.raises(NotInitialized):
        StoreSource(place).open()
    trained.keeping(place)
    trained.check(weights)


def sealed(fields: dict[str, Any]) -> bytes:
    content = json.dumps(fields, indent=1).removesuffix("\n}").encode()
    return content + manifest_end(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: b"{}", "its own sha256 is wrong"),
        (lambda fields: b"not JSON" + manifest_end(b"not JSON"), "it is not JSON"),
        (lambda fields: sealed({**fields, "format_version": 2}), "format version 2, this program reads 1; install a newer one"),
        (lambda fields: sealed({**fields, "format": "lockstep-checkpoint"}), "it is not of format 'lockstep-weights'"),
        (lambda fields: sealed({**fields, "agreed": {**fields["agreed"], "kept": {"encoding": 3}}}), "variables come as one of"),
        (lambda fields: sealed({**fields, "agreed": {"state": "MODEL_STATE_READY"}}), "it does not say which model it is of"),
        (lambda fields: sealed({**fields, "agreed": {"model": 3}}), "not a valid manifest"),
        (lambda fields: sealed({**fields, "num_shards": 1}), "not a valid manifest"),
        (lambda fields: sealed({**fields, "life": "x"}), "not a valid manifest"),
        (lambda fields: sealed({**fields, "anchors": [{"tag": "a", "before": None, "step": 1, "files": []}]}), "has 0 files"),
        (lambda fields: sealed({name: value for name, value in fields.items() if name != "patches"}), "not a valid manifest"),
    ],
)
def test_an_index_that_cannot_be_understood_is_refused_in_words(
    change: Callable[[dict[str, Any]], bytes], words: str, trained: Trained, directory: str
) -> None:
    end = trained.keeping(directory)
    await_kept(directory, 0)
    end()
    fields = json.loads(Path(directory, INDEX).read_bytes())
    del fields["sha256"]
    Path(directory, INDEX).write_bytes(change(fields))
    with pytest.raises(DataLoss, match=words):
        worker_client.follow(directory)
    with pytest.raises(DataLoss, match=words):
        StoreKeeper(open_storage(directory)).claim()


def test_a_file_is_no_place_for_weights(tmp_path: Path) -> None:
    Path(tmp_path, "model.py").touch()
    with pytest.raises(InvalidSpec, match="it is a file; want the directory"):
        worker_client.follow(str(tmp_path / "model.py"))


def test_an_index_that_becomes_unreadable_is_said_and_what_is_there_stays(trained: Trained, directory: str) -> None:
    end = trained.keeping(directory)
    weights = trained.reader(directory)
    trained.check(weights)
    end()
    good = Path(directory, INDEX).read_bytes()
    Path(directory, INDEX).write_bytes(b"{}")
    with pytest.raises(DeadlineExceeded, match="its own sha256 is wrong"):
        weights.wait(step=1, timeout_s=1.0)
    assert weights.wait() == 0
    Path(directory, INDEX).write_bytes(good)
    trained.keeping(directory)
    trained.step()
    trained.check(weights)


def test_an_older_index_out_of_a_cache_takes_no_reader_back(trained: Trained, directory: str) -> None:
    end = trained.keeping(directory)
    weights = trained.reader(directory)
    trained.check(weights)
    old = Path(directory, INDEX).read_bytes()
    trained.step(2)
    trained.check(weights)
    end()
    Path(directory, INDEX).write_bytes(old)
    with pytest.raises(DeadlineExceeded):
        weights.wait(step=3, timeout_s=0.5)
    assert weights.wait() == weights.step == 2


def test_readers_say_when_nobody_writes_any_more_and_do_not_count_that_as_news(trained: Trained, directory: str) -> None:
    end = trained.keeping(directory)
    weights = trained.reader(directory)
    trained.check(weights)
    end()
    with pytest.raises(DeadlineExceeded, match=r"nothing was written for .* start `lockstep store` again"):
        weights.wait(step=1, timeout_s=3)


def test_a_full_disk_is_said_and_tried_again_while_training_goes_on(
    trained: Trained, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk: Any = Failing(directory)
    trained.keeping(disk)
    weights = trained.reader(directory)
    await_kept(directory, 0)
    disk.is_full = True
    assert trained.step(5) == 5
    wait_until(lambda: disk.num_refused >= 2, what="it is tried again")
    assert any("the weights are not written" in text and "make room" in text for text in caplog.messages)
    disk.is_full = False
    trained.check(weights)
    assert trained.errors == []


def test_what_the_index_drops_makes_room_on_a_full_disk(trained: Trained, directory: str) -> None:
    disk: Any = Failing(directory)
    trained.keeping(disk, keep_steps=1, anchor_steps=1, keep_s=1.0)
    for _ in range(3):
        await_kept(directory, trained.step())
    disk.is_full = True
    trained.step()
    named = {entry.tag for entry in index_of(directory).entries}
    wait_until(lambda: {one.tag for one in open_storage(directory).stored()} == named, what="the others are gone")
    disk.is_full = False
    trained.check(trained.reader(directory))


def test_a_second_writer_is_refused_while_the_first_one_lives(trained: Trained, place: str) -> None:
    trained.keeping(place)
    await_kept(place, 0)
    with pytest.raises(Superseded, match=r"is written by another `lockstep store`, .*; end one of them"):
        StoreKeeper(open_storage(place), beat_s=BEAT_S).claim()
    trained.step()
    trained.check(trained.reader(place))


def test_one_that_was_silent_for_long_is_replaced_and_ends_when_it_comes_back(trained: Trained, directory: str) -> None:
    disk: Any = Failing(directory)
    trained.keeping(disk)
    await_kept(directory, 0)
    disk.is_full = True  # so that it cannot say that it lives
    wait_until(lambda: disk.num_refused, what="it is silent")
    other = StoreKeeper(open_storage(directory), beat_s=BEAT_S)
    other.claim()
    # Its disk stays full: else it may look before the other one writes, and write after it, which the other one would notice if it went on.
    wait_until(lambda: trained.errors, what="the first one notices")
    assert isinstance(trained.errors[0], Superseded)


def test_a_place_with_checkpoints_is_refused(directory: str) -> None:
    storage = open_storage(directory)
    with storage.create("step-1", "ps-0.safetensors", num_bytes=1) as writer:
        writer.write(b"x")
    with pytest.raises(InvalidSpec, match="has 'step-1', which is nothing of weights"):
        StoreKeeper(storage).claim()
