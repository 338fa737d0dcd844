"""`lockstep checkpoint` without a cluster: list, verify and export."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.__main__ import main
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.checkpoint.tensor_file import decode_header, decode_length
from ps_protocol.model.variables import Array
from tests.support.parameter_servers.checkpoints import VARIABLES, save, values_of, write_files


@pytest.fixture
def place(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "ckpt")


def run(*words: str, place: LocalStorage) -> int:
    return main(["checkpoint", *words, "--checkpoint-dir", place.place])


def read_npz(path: Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy"): np.lib.format.read_array(archive.open(name), allow_pickle=False) for name in archive.namelist()}


def read_safetensors(path: Path) -> dict[str, Array]:
    file = path.read_bytes()
    header = decode_header(file[8 : 8 + decode_length(file[:8], file_bytes=len(file), where="f")], file_bytes=len(file), where="f")
    values = file[header.num_bytes :]
    return {tensor.name: np.frombuffer(values[tensor.start : tensor.stop], tensor.dtype).reshape(tensor.shape) for tensor in header.tensors}


def test_the_list_has_whole_checkpoints_and_the_faults_of_others(place: LocalStorage, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(place, step=step)
    write_files(place, step=3)
    (Path(place.place) / "step-000000002" / "MANIFEST.json").write_text("{}")
    assert run("ls", place=place) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "epoch", "ps", "size", "rests", "on", "saved", "at", "cluster"]
    assert lines[1].split()[:4] == ["step-000000001", "1", "1", "2"]
    assert any("step-000000002: step-000000002/MANIFEST.json: not a valid manifest" in line for line in lines)
    assert any("step-000000003: incomplete" in line for line in lines)


def test_list_as_json_can_be_read_by_programs(place: LocalStorage, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save(place, step=7, epoch=2)
    assert run("ls", "--json", place=place) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["whole"][0]["tag"] == checkpoint.tag
    assert (listed["whole"][0]["step"], listed["whole"][0]["num_bytes"], listed["others"]) == (7, checkpoint.num_bytes, [])


def test_verify_names_the_damaged_file(place: LocalStorage, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, step=1)
    damaged = save(place, step=2)
    assert run("verify", place=place) == 0
    path = Path(place.place) / damaged.tag / damaged.files[1].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert run("verify", place=place) == 1
    out = capsys.readouterr().out
    assert "step-000000001: whole" in out
    assert f"{damaged.tag}: DAMAGED: {damaged.tag}/{damaged.files[1].name}: sha256 mismatch" in out
    assert run("verify", "step-000000001", place=place) == 0


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_export_joins_the_slices_of_every_variable(place: LocalStorage, tmp_path: Path, num_shards: int, kind: str) -> None:
    save(place, step=3, num_shards=num_shards)
    path = tmp_path / f"model.{kind}"
    assert run("export", str(path), place=place) == 0
    arrays = read_npz(path) if kind == "npz" else read_safetensors(path)
    assert arrays.keys() == {variable.name for variable in VARIABLES}
    for variable in VARIABLES:
        np.testing.assert_array_equal(arrays[variable.name], values_of(variable, step=3))
        is_widened = kind == "npz" and variable.data_type.value == "bfloat16"
        assert arrays[variable.name].dtype == (np.float32 if is_widened else variable.data_type.dtype)
    assert list(tmp_path.glob(".*")) == [], "nothing is left beside it"


def test_export_with_slots_has_them_under_names_of_their_own(place: LocalStorage, tmp_path: Path) -> None:
    save(place, step=3)
    path = tmp_path / "model.npz"
    assert run("export", str(path), "--slots", place=place) == 0
    arrays = read_npz(path)
    np.testing.assert_array_equal(arrays["layer/w@velocity"], values_of(VARIABLES[0], step=3, part="velocity"))
    assert len(arrays) == 2 * len(VARIABLES)


def test_export_skips_a_damaged_checkpoint_and_says_so(place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, step=1)
    save(place, step=2)
    (Path(place.place) / "step-000000002" / "MANIFEST.json").write_text("{}")
    assert run("export", str(tmp_path / "model.npz"), place=place) == 0
    said = capsys.readouterr()
    assert "skipped step-000000002: " in said.err
    assert "step-000000001, step 1" in said.out


def test_an_export_of_damaged_values_leaves_the_existing_file(
    place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = save(place, step=1)
    path = Path(place.place) / checkpoint.tag / checkpoint.files[1].name
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "model.npz").write_text("the one before")
    assert run("export", str(tmp_path / "model.npz"), place=place) == 1
    assert "sha256 mismatch" in capsys.readouterr().err
    assert (tmp_path / "model.npz").read_text() == "the one before"
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["export", "model.pt"], 2, "ends in .npz, .safetensors or .parquet"),
        (["export", "model.npz", "--tag", "../x"], 2, "checkpoint tag"),
        (["export", "model.npz", "--tag", "step-9"], 1, "no complete checkpoint 'step-9'"),
        (["export", "/nonexistent/model.npz"], 2, "/nonexistent/model.npz: its directory is not there"),
        (["verify", "step-9"], 1, "no complete checkpoint 'step-9'"),
        (["ls", "--checkpoint-dir", ""], 2, "which checkpoints?"),
        (["ls", "--checkpoint-dir", "nosuch://x"], 2, "nosuch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_of_the_checkpoint_command_are_refused_with_a_reason(
    place: LocalStorage, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    save(place, step=1)
    assert main(["checkpoint", words[0], "--checkpoint-dir", place.place, *words[1:]]) == code
    error = capsys.readouterr().err
    assert error.startswith("lockstep checkpoint: ")
    assert said in error


def test_an_empty_place_has_no_checkpoints(place: LocalStorage, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", place=place) == 0
    assert run("verify", place=place) == 1
    assert capsys.readouterr().out.count(f"no complete checkpoint in {place.place}") == 2


def test_save_without_a_chief_says_what_to_give(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_CHIEF", raising=False)
    assert main(["checkpoint", "save"]) == 2
    assert "give --chief ADDRESS" in capsys.readouterr().err


def contents_of(place: LocalStorage, tag: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((Path(place.place) / tag).glob("*.safetensors"))]


def manifest_of(place: LocalStorage, tag: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((Path(place.place) / tag / "MANIFEST.json").read_text())
    return {name: value for name, value in fields.items() if name not in ("saved_at", "sha256")}


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_an_export_with_slots_is_imported_as_the_same_bytes(place: LocalStorage, tmp_path: Path, num_shards: int) -> None:
    before = save(place, step=3, num_shards=num_shards)
    path, other = tmp_path / "model.safetensors", LocalStorage(tmp_path / "other")
    assert run("export", str(path), "--slots", place=place) == 0
    assert run("import", str(path), place=other) == 0
    assert contents_of(other, before.tag) == contents_of(place, before.tag)
    assert manifest_of(other, before.tag) == manifest_of(place, before.tag)
    assert run("verify", place=other) == 0


def rewritten(path: Path, change: Callable[[dict[str, Array]], object], *, keeps_metadata: bool = True) -> Path:
    """The same file as another library writes it."""
    from safetensors.numpy import save_file

    arrays = {name: array.copy() for name, array in read_safetensors(path).items()}
    change(arrays)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    save_file(arrays, path, metadata=header["__metadata__"] if keeps_metadata else None)
    return path


def halve(arrays: dict[str, Array]) -> None:
    arrays["layer/w"] /= 2


def test_changed_values_are_imported_under_a_new_name_and_the_rest_stays(
    place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(place, step=3)
    path = tmp_path / "model.safetensors"
    assert run("export", str(path), "--slots", place=place) == 0
    rewritten(path, halve)
    capsys.readouterr()
    assert run("import", str(path), "--json", place=place) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tag"], told["newest"], told["unused"]) == ("step-000000003-imported",) * 2 + ([],)
    assert run("export", str(tmp_path / "again.safetensors"), "--slots", place=place) == 0
    found = read_safetensors(tmp_path / "again.safetensors")
    np.testing.assert_array_equal(found["layer/w"], values_of(VARIABLES[0], step=3) / 2)
    np.testing.assert_array_equal(found["layer/w@velocity"], values_of(VARIABLES[0], step=3, part="velocity"))


def test_a_file_without_slots_is_put_into_a_checkpoint(place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(place, step=3)
    save(place, step=4)
    path = tmp_path / "model.safetensors"
    assert run("export", str(path), place=place) == 0

    def only_one(arrays: dict[str, Array]) -> None:
        halve(arrays)
        for name in [name for name in arrays if name != "layer/w"]:
            del arrays[name]
        arrays["num_batches"] = np.array(3)

    rewritten(path, only_one, keeps_metadata=False)
    assert run("import", str(path), place=place) == 2
    words = capsys.readouterr().err
    assert "has values only" in words
    assert "--into TAG puts them in place of those of a checkpoint" in words
    assert run("import", str(path), "--into", "step-000000003", "--tag", "mine", place=place) == 0
    words = capsys.readouterr().err
    assert "not used, since the checkpoint has no such tensor: 'num_batches'" in words
    assert "step-000000004 is newer: start the cluster with --restore mine" in words
    assert run("export", str(tmp_path / "again.safetensors"), "--slots", "--tag", "mine", place=place) == 0
    found = read_safetensors(tmp_path / "again.safetensors")
    np.testing.assert_array_equal(found["layer/w"], values_of(VARIABLES[0], step=4) / 2)
    np.testing.assert_array_equal(found["layer/w@velocity"], values_of(VARIABLES[0], step=3, part="velocity"))
    np.testing.assert_array_equal(found[VARIABLES[1].name], values_of(VARIABLES[1], step=3))
    assert run("verify", place=place) == 0


def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(
    place: LocalStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(place, step=3)
    path = tmp_path / "model.safetensors"

    def refused(change: Callable[[dict[str, Array]], object], *words: str, options: tuple[str, ...] = (), code: int = 2) -> None:
        assert run("export", str(path), "--slots", place=place) == 0
        rewritten(path, change)
        capsys.readouterr()
        assert run("import", str(path), *options, place=place) == code
        told = capsys.readouterr().err
        assert all(word in told for word in words), told

    refused(lambda arrays: arrays.pop("layer/w@velocity"), "tensors are missing that were exported: 'layer/w", "--into TAG takes them")
    square = np.zeros((2, 2), np.float32)
    refused(lambda arrays: arrays.update({"layer/w": square}), "tensor 'layer/w' is (2, 2) float32, the checkpoint's is")
    refused(lambda arrays: arrays.update({"layer/w": arrays["layer/w"].astype(np.float16)}), "float16, the checkpoint's")

    def only_another(arrays: dict[str, Array]) -> None:
        arrays.clear()
        arrays["x"] = np.zeros(3)

    refused(only_another, "has no tensor of checkpoint step-000000003; it has 'x'", options=("--into", "latest"))
    refused(halve, "checkpoint 'step-000000003' already exists; choose another name", options=("--tag", "step-000000003"))
    refused(halve, "no complete checkpoint 'step-9'", options=("--into", "step-9"), code=1)
    path.write_bytes(b"\x08" + b"\0" * 7 + b"{}      ")
    assert run("import", str(path), place=place) == 2
    path.write_bytes(b"\xff" * 64)
    assert run("import", str(path), place=place) == 1
    assert "not a valid safetensors file" in capsys.readouterr().err
    assert run("import", str(tmp_path / "missing.safetensors"), place=place) == 1
    assert run("import", str(tmp_path / "model.pt"), place=place) == 2
    assert [path.name for path in Path(place.place).iterdir()] == ["step-000000003"]
