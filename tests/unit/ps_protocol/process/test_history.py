"""A history: written records are read back, also when the writer was killed in the middle of a line, and damaged ones are refused."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.model.layout import Layout, Segments, VariableSlice
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.process import history as events
from ps_protocol.process.history import Chronicle, HistoryWriter, read_history
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, Metric, PushHeader, ShardSettings, ShardSpec
from tests.support.chief.eras import era, fence

_PUSH = PushId(worker=1, incarnation=3, sequence=9)


def _spec() -> ShardSpec:
    variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(4, 2))
    optimizer = OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters={"momentum": 0.3})
    return ShardSpec(epoch=2, shard=1, layout=Layout([VariableSlice(variable=variable, start=0, stop=3)]), optimizer=optimizer)


def _only(directory: Path) -> Chronicle:
    (chronicle,) = read_history(directory)
    return chronicle


def test_the_records_of_a_history_are_read_back_as_written(tmp_path: Path) -> None:
    header = PushHeader(
        era=era(2), push_id=_PUSH, step=5, layout_hash="abc", metrics={"loss": Metric(value=float("inf"))}, encoding=FloatEncoding.BFLOAT16
    )
    request = ApplyRequest(fence=fence(2, 4), step=5, contributors=(_PUSH,), weights=(0.1,), scales=(1 / 3, 1.0))
    settings = ShardSettings(fence=fence(2, 4), version=1, accepts_stale=True)
    content = np.arange(64, dtype=np.uint8)
    writer = HistoryWriter(tmp_path, role="ps-1")
    events.note_contribution(writer, header, Segments([content[:10], content[10:]]), shard=1)
    events.note_created(writer, _spec(), [content], process=77)
    events.note_applied(writer, request, shard=1, sha256=events.digest(content))
    events.note_configured(writer, settings, shard=1, step=5)
    events.note_step(writer, epoch=2, step=5, contributors=[_PUSH], chief=4)
    writer.close()
    begun, contribution, created, applied, configured, step = _only(tmp_path).records
    assert begun.words["role"] == "ps-1"
    assert events.header_of(contribution) == header
    assert contribution.content.tobytes() == created.content.tobytes() == content.tobytes()
    assert events.spec_of(created) == _spec()
    assert events.request_of(applied) == request
    assert events.settings_of(configured) == settings
    assert events.contributors_of(step) == (_PUSH,)


def test_an_unfinished_last_line_is_left_out_and_reported(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path, role="chief")
    events.note_rolled_back(writer, epoch=2, step=10, tag="step-000000010", chief=1)
    writer.close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'{"kind":"tok')
    chronicle = _only(tmp_path)
    assert chronicle.is_torn
    assert [record.kind for record in chronicle.records] == ["begun", events.ROLLED_BACK]


@pytest.mark.parametrize(
    "line",
    [
        *(b"nonsense", b"[1]", b'{"kind":"step"}', b'{"kind":"step","number":7}', b'{"kind":"step","number":1,"bytes":[0,1]}'),
        *(b'{"kind":1,"number":1}', b'{"kind":"step","number":1,"bytes":[-5,5]}', b"[" * 100_000),
    ],
)
def test_a_broken_line_is_refused(tmp_path: Path, line: bytes) -> None:
    HistoryWriter(tmp_path, role="chief").close()
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(DataLoss, match=f"{path.name}:2"):
        list(read_history(tmp_path))


@pytest.mark.parametrize("words", [{}, {"header": 1}, {"header": {"nobody": 1}}, {"header": {"epoch": "x"}}])
def test_a_record_with_broken_fields_is_refused(tmp_path: Path, words: dict[str, object]) -> None:
    writer = HistoryWriter(tmp_path, role="worker-0")
    writer.write(events.CONTRIBUTION, words)
    writer.close()
    with pytest.raises(DataLoss, match=r"record 1 \(contribution\)"):
        events.header_of(_only(tmp_path).records[1])


def test_directory_without_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="no history"):
        list(read_history(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec, match="nothing can be written"):
        HistoryWriter(tmp_path / "file", role="ps-0")


def test_a_full_disk_ends_the_history_with_one_line_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = HistoryWriter(tmp_path, role="ps-0")
    write, room = os.write, [5]

    def full(file: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    writer.write("step", {})
    monkeypatch.undo()  # there is room again, and a record behind half of another could not be read
    writer.write("step", {})
    (record,) = caplog.records
    assert f"in {tmp_path} ends here, and training continues without it" in record.getMessage()
    assert record.getMessage().endswith("cause=No space left on device") and not record.exc_info
    (chronicle,) = read_history(tmp_path)
    assert [one.kind for one in chronicle.records] == ["begun"] and chronicle.is_torn


def test_a_history_that_ends_for_want_of_room_for_bytes_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = HistoryWriter(tmp_path, role="ps-0"), os.write

    def full(file: int, data: bytes | memoryview) -> int:
        if len(data) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    writer.write("step", {}, [np.zeros(8, np.uint8)])
    (chronicle,) = read_history(tmp_path)
    assert [one.kind for one in chronicle.records] == ["begun"] and chronicle.is_torn


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InvalidSpec, match=f"nothing can be written to '{tmp_path}': No space left on device"):
        HistoryWriter(tmp_path, role="ps-0")


def test_two_processes_of_one_role_write_separate_files(tmp_path: Path) -> None:
    for _ in range(2):
        HistoryWriter(tmp_path, role="ps-0").close()
    assert len(list(read_history(tmp_path))) == 2
    assert all(json.loads(path.read_text().splitlines()[0])["role"] == "ps-0" for path in tmp_path.glob("*.jsonl"))
