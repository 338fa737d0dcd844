"""A history: written records are read back, also when the writer was killed in the middle of one, and damaged ones are refused; a bound."""

import errno
import itertools
import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.model.layout import Layout, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.process.history import Chronicle, HistoryWriter, digest, read_history
from ps_protocol.roles import history as events
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, HiddenState, Metric, PushHeader, ShardSettings, ShardSpec
from tests.support.chief.eras import era, fence

_PUSH = PushId(worker=1, incarnation=3, sequence=9)
_STEP = events.Counted(epoch=2, step=5, contributors=(_PUSH,))
_APPLIED = events.Applied(request=ApplyRequest(fence=fence(2, 4), step=5, contributors=(_PUSH,)), sha256="00")


def _spec() -> ShardSpec:
    variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(4, 2))
    optimizer = OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters={"momentum": 0.3})
    return ShardSpec(epoch=2, shard=1, layout=Layout([VariableSlice(variable=variable, start=0, stop=3)]), optimizer=optimizer)


def _only(directory: Path) -> Chronicle:
    (chronicle,) = read_history(directory)
    return chronicle


def _kinds(directory: Path) -> list[str]:
    return [type(record.event).__name__ for record in _only(directory).records]


def _num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_records_of_a_history_are_read_back_as_written_without_the_workers_secret(tmp_path: Path) -> None:
    header = PushHeader(
        era=era(2), push_id=_PUSH, step=5, layout_hash="abc", metrics={"loss": Metric(value=float("inf"))}, encoding=FloatEncoding.BFLOAT16
    )
    request = ApplyRequest(fence=fence(2, 4), step=5, contributors=(_PUSH,), weights=(0.1,), scales=(1 / 3, 1.0))
    settings = ShardSettings(fence=fence(2, 4), version=1, accepts_stale=True)
    content = np.arange(64, dtype=np.uint8)
    written: list[events.Event] = [
        events.contributed(header, shard=1),
        events.Answered(push_id=_PUSH, epoch=2, outcome="ACCEPTED", applied_step=0),
        events.Created(spec=_spec(), process=77),
        events.Applied(request=request, sha256=digest(content)),
        events.Configured(step=5, settings=settings),
        events.StateKept(spec=_spec(), settings=settings, process=77, hidden=HiddenState(step=3), from_epoch=1),
        _STEP,
    ]
    writer = HistoryWriter(tmp_path, role="ps-1")
    for event in written:
        writer.write(event, [content[:10], content[10:]] if isinstance(event, (events.Contributed, events.Created)) else ())
    writer.close()
    chronicle = _only(tmp_path)
    begun, *others = chronicle.records
    assert begun.event == events.Begun(format=2, role="ps-1", pid=os.getpid(), segment=1)
    assert [record.event for record in others] == written
    assert [record.content.tobytes() for record in others[:3]] == [content.tobytes(), b"", content.tobytes()]
    assert not chronicle.is_torn and not chronicle.is_cut
    assert events.contributed(replace(header, secret=5), shard=1).header.secret == 0


def test_rows_with_others_between_them_are_written_whole_and_few_are_copied_at_a_time(tmp_path: Path) -> None:
    memory = np.arange(80_000 * 8, dtype=np.float32).reshape(80_000, 8)
    values, slots, scalar = memory[:, :4], memory[:, 4:], np.array(3.0, np.float32)
    writer = HistoryWriter(tmp_path, role="ps-1")
    tracemalloc.start()
    writer.write(events.Created(spec=_spec(), process=77), [scalar, values, slots])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.write(_STEP)
    writer.close()
    _, created, step = _only(tmp_path).records
    assert created.content.tobytes() == scalar.tobytes() + values.tobytes() + slots.tobytes()
    assert step.event == _STEP
    assert peak_bytes < values.nbytes / 4


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 12])
def test_an_unfinished_last_record_is_left_out_and_reported(tmp_path: Path, num_bytes: int) -> None:
    writer = HistoryWriter(tmp_path, role="chief")
    writer.write(_STEP)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    writer.write(_STEP)
    path.write_bytes(path.read_bytes()[: len(whole) + num_bytes])
    assert _only(tmp_path).is_torn
    assert _kinds(tmp_path) == ["Begun", "Counted"]


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\0", b"\x03\0\0\0abc", b"\xff\xff\xff\xff", b"\x04\0\0\0\x08\x07\x2a\x00", b"\x06\0\0\0\x08\x01\x2a\x02\x08\x01"]
)
def test_a_broken_record_is_refused_with_its_place(tmp_path: Path, damage: bytes) -> None:
    HistoryWriter(tmp_path, role="chief").close()
    (path,) = tmp_path.iterdir()
    place = path.stat().st_size
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(DataLoss, match=f"{path.name}: byte {place}"):
        list(read_history(tmp_path))


def test_directory_without_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="no history"):
        list(read_history(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec, match="nothing can be written"):
        HistoryWriter(tmp_path / "file", role="ps-0")


def test_the_oldest_segments_go_so_that_a_history_stays_within_its_bound(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, role="chief", max_bytes=10_000)
    sizes = []
    for step in range(3_000):
        writer.write(events.Counted(epoch=2, step=step, contributors=(_PUSH,)), [np.zeros(7, np.uint8)])
        sizes.append(_num_bytes(tmp_path))
    assert max(sizes) <= 10_000
    chronicle = _only(tmp_path)
    steps = [record.event.step for record in chronicle.records if isinstance(record.event, events.Counted)]
    assert steps == [*range(steps[0], 3_000)] and chronicle.is_cut
    assert sizes[-1] > 7_500, "an eighth at a time goes"


def test_a_segment_begins_only_with_what_can_be_understood_without_those_before_it(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, role="ps-1", max_bytes=10_000)
    state = events.StateKept(spec=_spec(), settings=ShardSettings(fence=fence(2, 4), version=1), process=7, hidden=HiddenState(step=3))
    for number in range(1_000):
        writer.write(_APPLIED if number % 20 else state)
    records = _only(tmp_path).records
    after = [type(later.event) for earlier, later in itertools.pairwise(records) if isinstance(earlier.event, events.Begun)]
    assert len(after) == 5 and {*after} == {events.StateKept}


def test_a_segment_that_is_missing_between_others_is_named(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, role="chief", max_bytes=10_000)
    for _ in range(1_000):
        writer.write(_STEP)
    paths = sorted(tmp_path.iterdir())
    content = paths[3].read_bytes()
    paths[3].unlink()
    with pytest.raises(DataLoss, match=f"missing, {re.escape(paths[3].name)}; bring it back"):
        list(read_history(tmp_path))
    paths[3].write_bytes(content[:-1])
    with pytest.raises(DataLoss, match=f"{re.escape(paths[4].name)}: .* no end .*{re.escape(paths[3].name)}"):
        list(read_history(tmp_path))


def test_a_history_is_read_while_its_cluster_goes_on_and_its_oldest_segments_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers = [HistoryWriter(tmp_path, role=role, max_bytes=10_000) for role in ("chief", "ps-0")]

    def go_on() -> None:
        for writer in writers:
            for _ in range(1_000):
                writer.write(_STEP)

    go_on()
    memmap, looks = np.memmap, []

    def mapped(path: Path, *arguments: Any, **options: Any) -> Any:
        looks.append(path)
        if len(looks) == 1:
            go_on()
        return memmap(path, *arguments, **options)

    monkeypatch.setattr(np, "memmap", mapped)
    chronicles = read_history(tmp_path)
    first = next(chronicles)
    assert looks[0] not in [*tmp_path.iterdir()], "it went before it was read"
    go_on()
    (second,) = chronicles
    for one in (first, second):
        assert one.is_cut and [record.number for record in one.records if isinstance(record.event, events.Counted)][-1] >= 2_000


def test_a_record_larger_than_the_bound_ends_the_history_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = HistoryWriter(tmp_path, role="ps-0", max_bytes=10_000)
    for _ in range(2):
        writer.write(_STEP, [np.zeros(20_000, np.uint8)])
    (record,) = caplog.records
    assert re.search(r"cause=--history-max-bytes is 10000, and one record has 200\d\d bytes", record.getMessage())
    assert _kinds(tmp_path) == ["Begun"] and _only(tmp_path).is_torn


def test_a_full_disk_ends_the_history_with_one_line_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = HistoryWriter(tmp_path, role="ps-0")
    write, room = os.writev, [5]

    def full(file: int, pieces: list[Any]) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, [pieces[0][: room.pop()]])

    monkeypatch.setattr(os, "writev", full)
    writer.write(_STEP)
    monkeypatch.undo()  # there is room again, and a record behind half of another could not be read
    writer.write(_STEP)
    (record,) = caplog.records
    assert f"in {tmp_path} ends here, and training continues without it" in record.getMessage()
    assert record.getMessage().endswith("cause=No space left on device") and not record.exc_info
    assert _kinds(tmp_path) == ["Begun"] and _only(tmp_path).is_torn


def test_a_history_that_ends_for_want_of_room_for_a_whole_record_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = HistoryWriter(tmp_path, role="ps-0")

    def full(file: int, pieces: list[Any]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    writer.write(_STEP, [np.zeros(8, np.uint8)])
    assert _kinds(tmp_path) == ["Begun"] and _only(tmp_path).is_torn


def test_a_history_whose_next_segment_cannot_be_opened_ends_in_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = HistoryWriter(tmp_path, role="ps-0", max_bytes=1_000)
    other = tmp_path / "other"

    def open_for_another_thread(*_: object) -> int:
        """As if another thread opened its file just before, and no descriptor were left."""
        with other.open("xb", buffering=0) as file:
            os.dup2(file.fileno(), others := os.dup(file.fileno()))
        open_files.append(others)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    open_files: list[int] = []
    monkeypatch.setattr(os, "open", open_for_another_thread)
    while not open_files:
        writer.write(_STEP)
    monkeypatch.undo()
    os.close(open_files[0])
    assert other.read_bytes() == b""
    assert _only(tmp_path).is_torn


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, pieces: list[Any]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(InvalidSpec, match=f"nothing can be written to '{tmp_path}': No space left on device"):
        HistoryWriter(tmp_path, role="ps-0")


def test_two_processes_of_one_role_write_separate_files(tmp_path: Path) -> None:
    for _ in range(2):
        HistoryWriter(tmp_path, role="ps-0").close()
    assert [chronicle.role for chronicle in read_history(tmp_path)] == ["ps-0", "ps-0"]
