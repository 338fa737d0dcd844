"""Checkpoints that are deltas, as people handle them: listed, verified, exported, imported, kept as long as another rests on them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.__main__ import main
from lockstep.checkpoint_changes import LAST, UNFINISHED, Changes, changes
from ps_protocol.checkpoint.catalog import find_checkpoint, list_checkpoints, prune
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.errors import CheckpointNotFound, InvalidSpec
from ps_protocol.model.keys import gathered
from ps_protocol.model.variables import Array
from ps_protocol.roles.checkpoint import Checkpoint
from ps_server.serving.local import InProcessShard
from tests.contract.shard.test_checkpoints import evicting_model, model_of
from tests.support.parameter_servers.checkpoints import Crash
from tests.support.parameter_servers.sharded_training import KEYS, ShardedTraining
from tests.unit.lockstep.cli.test_checkpoint import read_npz, read_safetensors


@pytest.fixture
def place(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


def run(*words: str, place: LocalStorage) -> int:
    return main(["checkpoint", *words, "--checkpoint-dir", place.place])


def trained(place: LocalStorage, *, num_shards: int = 2, has_keys: bool = True) -> tuple[ShardedTraining, list[Checkpoint]]:
    """A training, with a full checkpoint of step 2 and deltas of steps 3 and 5."""
    model = model_of("adagrad")
    if not has_keys:
        model = replace(model, variables=tuple(variable for variable in model.variables if variable.keys is None))
    shards = [InProcessShard(index=index, storage=place) for index in range(num_shards)]
    training, chain = ShardedTraining(shards=shards, model=model, checkpoint_dir=place.place), list[Checkpoint]()
    training.create()
    for num_steps in (2, 1, 2):
        training.train(num_steps)
        base = chain[-1] if chain else None
        chain.append(training.save(f"step-{training.step:09}", base=base, has_deltas=True))
    assert [len(one.base_tags) for one in chain] == [0, 1, 2]
    return training, chain


def damage(place: LocalStorage, checkpoint: Checkpoint) -> str:
    """Changes the last byte of the first file, and returns the file's name."""
    name = f"{checkpoint.tag}/{checkpoint.files[0].name}"
    path = Path(place.place) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return name


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_delta_is_exported_as_a_full_checkpoint_of_its_step_would_be(place: LocalStorage, tmp_path: Path, num_shards: int) -> None:
    training, chain = trained(place, num_shards=num_shards)
    full = training.save("full")
    exported = []
    for checkpoint in (chain[-1], full):
        path = tmp_path / f"{checkpoint.tag}.npz"
        assert run("export", str(path), "--slots", "--tag", checkpoint.tag, place=place) == 0
        exported.append(read_npz(path))
    assert exported[0].keys() == exported[1].keys()
    for name, values in exported[0].items():
        np.testing.assert_array_equal(values, exported[1][name])
    assert list(tmp_path.glob(".*")) == [], "nothing is left beside it"


@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_export_has_the_rows_that_are_there_by_their_age_and_with_slots_all_of_them(
    place: LocalStorage, tmp_path: Path, num_shards: int
) -> None:
    """What readers of the cluster find: a row that is gone reads as one that never was."""
    shards = [InProcessShard(index=index, storage=place) for index in range(num_shards)]
    training = ShardedTraining(shards=shards, model=evicting_model(None, max_age_steps=2), checkpoint_dir=place.place)
    training.create()
    training.train(3)
    base = training.save("full", has_deltas=True)
    training.train(1)
    delta = training.save("delta", base=base)
    exported = {}
    for words in ((), ("--slots",)):
        assert run("export", str(tmp_path / "some.npz"), "--tag", delta.tag, *words, place=place) == 0
        exported[words] = read_npz(tmp_path / "some.npz")
    known = gathered(KEYS).view(np.uint64).tolist()
    read = np.frombuffer(training.state()["recent"], np.float32).reshape(len(known), -1)
    keys, rows = exported[()]["recent@row keys"].view(np.uint64).tolist(), exported[()]["recent"]
    every = exported["--slots",]["recent@row keys"].view(np.uint64).tolist()
    assert len(rows) == len(keys) and 0 < len(keys) < len(every)
    for key, row in zip(keys, rows, strict=True):
        np.testing.assert_array_equal(row, read[known.index(key)])
    for key, row in zip(every, exported["--slots",]["recent"], strict=True):
        assert (key in keys) == np.array_equal(row, read[known.index(key)])


def test_a_delta_that_was_exported_is_imported_as_a_full_checkpoint(place: LocalStorage, tmp_path: Path) -> None:
    training, chain = trained(place, has_keys=False)
    file = tmp_path / "all.safetensors"
    assert run("export", str(file), "--slots", "--tag", chain[-1].tag, place=place) == 0
    for words in ((), ("--into", chain[-1].tag)):
        elsewhere = LocalStorage(tmp_path / "elsewhere") if not words else place
        assert run("import", str(file), "--tag", "imported", *words, place=elsewhere) == 0
        imported = find_checkpoint(elsewhere, tag="imported").checkpoint
        assert not imported.bases
        assert [one.sha256 for one in imported.files] == [one.sha256 for one in training.save(f"again{len(words)}").files]


def test_first_values_are_read_from_a_delta_by_its_tag(place: LocalStorage, tmp_path: Path) -> None:
    training, _ = trained(place, num_shards=1, has_keys=False)
    file = tmp_path / "model.safetensors"
    assert run("export", str(file), place=place) == 0
    np.testing.assert_array_equal(read_safetensors(file)["words"], np.frombuffer(training.state()["words"], np.float32).reshape(40, 3))


def test_the_list_says_what_a_delta_rests_on_and_verify_which_file_is_damaged(
    place: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    _, chain = trained(place)
    assert run("ls", place=place) == 0
    assert [line.split()[6] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "-",
        chain[0].tag,
        chain[1].tag,
    ]
    assert run("verify", place=place) == 0
    assert f"{chain[2].tag}: whole" in capsys.readouterr().out
    name = damage(place, chain[1])
    assert run("verify", place=place) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{chain[0].tag}: whole")
    assert lines[1:] == [f"{one.tag}: DAMAGED: {name}: sha256 mismatch; the file is not what was written" for one in chain[1:]]


def test_a_delta_without_what_it_rests_on_is_skipped_and_that_is_named(place: LocalStorage) -> None:
    _, chain = trained(place)
    shutil.rmtree(Path(place.place) / chain[1].tag)
    found = find_checkpoint(place)
    assert (found.checkpoint, [one.tag for one in found.skipped]) == (chain[0], [chain[2].tag])
    assert found.skipped[0].reason == f"{chain[1].tag}/{chain[1].files[0].name}: is not there"
    shutil.rmtree(Path(place.place) / chain[0].tag)
    with pytest.raises(CheckpointNotFound, match="is not there"):
        find_checkpoint(place)


def test_a_full_checkpoint_is_kept_with_all_that_rests_on_it(place: LocalStorage) -> None:
    training, chain = trained(place)
    assert prune(place, cluster="lockstep", keep=1) == ()
    training.train(1)
    newer = [training.save("step-000000006", has_deltas=True)]
    assert prune(place, cluster="lockstep", keep=2) == ()
    assert prune(place, cluster="lockstep", keep=1, spare=[chain[1].tag]) == (chain[2].tag,)
    assert [one.checkpoint for one in list_checkpoints(place)[0]] == [*chain[:2], *newer]


def take(directory: Path, place: LocalStorage) -> list[tuple[str, dict[str, Array]]]:
    """Runs `checkpoint changes` and takes the files away, as who serves tables may."""
    assert run("changes", str(directory), place=place) == 0
    files = sorted(directory.glob("*.safetensors"))
    taken = [(path.stem, read_safetensors(path)) for path in files]
    for path in files:
        path.unlink()
    return taken


@pytest.mark.parametrize("num_shards", [1, 3])
def test_who_takes_the_changes_of_each_checkpoint_once_has_all_rows_of_the_last(
    place: LocalStorage, tmp_path: Path, num_shards: int
) -> None:
    training, chain = trained(place, num_shards=num_shards)
    ((tag, first),) = take(tmp_path / "out", place)
    assert tag == chain[-1].tag, "at first all rows of the newest"
    assert take(tmp_path / "out", place) == []
    numbered = {name: values.copy() for name, values in first.items() if name in ("words", "users", "w")}
    keyed = dict(zip(first["clicks@row keys"].tolist(), first["clicks"], strict=True))
    for num_steps in (1, 2):
        training.train(num_steps)
        chain.append(training.save(f"step-{training.step:09}", base=chain[-1]))
    taken = take(tmp_path / "out", place)
    assert [tag for tag, _ in taken] == [one.tag for one in chain[-2:]]
    for _, changed in taken:
        numbered["w"] = changed["w"]
        for name in ("words", "users"):
            numbered[name][changed[f"{name}@row numbers"]] = changed[name]
        keyed |= zip(changed["clicks@row keys"].tolist(), changed["clicks"], strict=True)
        assert len(changed["clicks"]) < len(keyed)
    state = training.state()
    for name, values in numbered.items():
        assert values.tobytes() == state[name]
    known, rows = gathered(KEYS).view(np.uint64).tolist(), np.frombuffer(state["clicks"], np.float32).reshape(-1, 3)
    for key, row in keyed.items():
        np.testing.assert_array_equal(row, rows[known.index(key)])


def serve(served: dict[str, Any], one: Changes) -> None:
    """Takes over what has changed, as who serves tables does."""
    if not one.since:
        served.clear()
    for name, array in one.arrays.items():
        name, _, part = name.partition("@")
        if part == "row keys":
            served.setdefault(name, {}).update(zip(array.tolist(), one.arrays[name].tolist(), strict=True))
        elif part == "gone keys":
            for key in array.tolist():
                del served[name][key]
        elif part == "row numbers":
            served[name][array] = one.arrays[name]
        elif f"{name}@row numbers" not in one.arrays and f"{name}@row keys" not in one.arrays:
            served[name] = array.copy()


@pytest.mark.parametrize("options", [{}, {"max_rows": None, "max_age_steps": 2}], ids=["bounded", "aging"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_who_begins_again_with_the_tag_of_the_last_changes_gets_each_once_and_the_keys_that_are_gone(
    place: LocalStorage, tmp_path: Path, num_shards: int, options: dict[str, Any]
) -> None:
    shards = [InProcessShard(index=index, storage=place) for index in range(num_shards)]
    training = ShardedTraining(shards=shards, model=evicting_model(**options), checkpoint_dir=place.place)
    training.create()
    training.train(2)
    base = training.save("step-000000002", has_deltas=True)
    again, lasting, num_gone = dict[str, Any](), dict[str, Any](), 0
    follower = changes(place.place, follows=True)
    (first,) = changes(place.place)
    serve(again, first)
    serve(lasting, next(follower))
    since = first.tag
    for num_steps in (1, 2, 1, 1, 3):
        training.train(num_steps)
        base = training.save(f"step-{training.step:09}", base=base)
        if num_steps == 2:
            continue  # the next call has two
        for one in changes(place.place, since=since):
            assert one.since == since, "what rests on the last has what changed alone"
            serve(again, one)
            num_gone += one.arrays["recent@gone keys"].size
            since = one.tag
            one = next(follower)
            assert one.tag == since
            serve(lasting, one)
    assert since == base.tag and num_gone
    assert [*changes(place.place, since=since)] == []
    assert run("export", str(tmp_path / "all.npz"), place=place) == 0
    exported = read_npz(tmp_path / "all.npz")
    rows = dict(zip(exported.pop("recent@row keys").tolist(), exported.pop("recent").tolist(), strict=True))
    for served in (again, lasting):
        assert served.pop("recent") == rows
        assert served.keys() == exported.keys()
        for name, values in served.items():
            np.testing.assert_array_equal(values, exported[name])


def test_changes_since_a_checkpoint_that_is_gone_are_all_of_the_newest(place: LocalStorage) -> None:
    _, chain = trained(place)
    (one,) = changes(place.place, since="step-000000001")
    assert (one.tag, one.step, one.since) == (chain[-1].tag, 5, "")
    assert [(each.tag, each.since) for each in changes(place.place, since=chain[0].tag)] == [
        (chain[1].tag, chain[0].tag),
        (chain[2].tag, chain[1].tag),
    ]


def test_changes_after_a_checkpoint_that_cannot_be_read_have_all_rows(
    place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, chain = trained(place)
    take(tmp_path / "out", place)
    training.train(1)
    lost = training.save("step-000000006", base=chain[-1])
    damage(place, lost)
    training.train(1)
    training.save("step-000000007", has_deltas=True)
    ((tag, changed),) = take(tmp_path / "out", place)
    assert tag == "step-000000007" and changed["words"].shape == (40, 3) and "words@row numbers" not in changed
    assert f"skipped {lost.tag}: {lost.tag}/{lost.files[0].name}: sha256 mismatch" in capsys.readouterr().err
    (tmp_path / "out" / "LAST").write_text("{}")
    assert run("changes", str(tmp_path / "out"), place=place) == 1
    assert "LAST: it is not what was written; remove it" in capsys.readouterr().err


@pytest.mark.parametrize("below", [(), ("out",), ("step-000000002", "out")])
def test_changes_are_not_written_where_the_chief_would_remove_them(
    place: LocalStorage, capsys: pytest.CaptureFixture[str], below: tuple[str, ...]
) -> None:
    trained(place)
    directory, before = Path(place.place).joinpath(*below), sorted(Path(place.place).rglob("*"))
    assert run("changes", str(directory), place=place) == 2
    assert "where what is no whole checkpoint is removed; choose a DIR outside" in capsys.readouterr().err
    assert sorted(Path(place.place).rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "words"), [((7,), "checkpoint directory: got '7', want a path"), (("ckpt", 7), "since: got 7, want the tag")]
)
def test_what_is_no_place_or_no_tag_is_refused_at_once(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        changes(given[0], since=given[1] if given[1:] else "")


def test_what_a_killed_writer_has_left_unfinished_is_removed_by_the_next(place: LocalStorage, tmp_path: Path) -> None:
    _, chain = trained(place)
    left = tmp_path / UNFINISHED / ".step-000000001.x"
    left.mkdir(parents=True)
    (left / "all.safetensors").write_bytes(b"half")
    assert run("changes", str(tmp_path), place=place) == 0
    assert {path.name for path in tmp_path.iterdir()} >= {LAST, f"{chain[-1].tag}.safetensors"}
    assert not (tmp_path / UNFINISHED).exists()


def test_a_crash_leaves_the_same_name_again_and_never_a_gap(place: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, chain = trained(place)
    out = tmp_path / "out"
    take(out, place)
    for _ in range(2):
        training.train(1)
        chain.append(training.save(f"step-{training.step:09}", base=chain[-1]))
    with monkeypatch.context() as crash:
        crash.setattr(LocalStorage, "put", lambda storage, name, content: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            run("changes", str(out), place=place)
    (path,) = out.glob("*.safetensors")
    before = path.read_bytes()
    assert run("changes", str(out), place=place) == 0
    assert path.read_bytes() == before
    assert sorted(one.stem for one in out.glob("*.safetensors")) == [one.tag for one in chain[-2:]]
