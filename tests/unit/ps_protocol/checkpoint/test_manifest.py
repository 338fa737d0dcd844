"""Manifests survive writing and reading unchanged; other content is refused with a reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.checkpoint.manifest import ManifestEncoder, decode_manifest, manifest_end
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.roles.checkpoint import Checkpoint, epoch_of
from ps_protocol.roles.shard import CheckpointFile
from tests.support.examples import examples
from tests.support.parameter_servers.checkpoints import checkpoint_of

Fields = dict[str, Any]


def checkpoint(*, step: int = 5, num_shards: int = 2) -> Checkpoint:
    files = [CheckpointFile(name=f"ps-{n}.safetensors", shard=n, num_bytes=9, sha256=f"{n:064x}") for n in range(num_shards)]
    return checkpoint_of(files, step=step)


def sealed(fields: Fields) -> bytes:
    """Returns a manifest of just these fields whose own hash is right."""
    body = json.dumps({name: value for name, value in fields.items() if name != "sha256"}).encode().removesuffix(b"}")
    return body + manifest_end(body)


MANIFEST = ManifestEncoder().encode(checkpoint(), saved_at="now")


@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize("step", [0, 5, 1 << 62])
def test_checkpoint_comes_back_as_it_was(step: int, num_shards: int) -> None:
    written = checkpoint(step=step, num_shards=num_shards)
    assert decode_manifest(ManifestEncoder().encode(written, saved_at="now"), where="m") == (written, "now")


def test_checkpoint_without_pushes_and_training_data_comes_back() -> None:
    whole = checkpoint()
    written = replace(whole, pushes=(), record=replace(whole.record, data=None))
    assert decode_manifest(ManifestEncoder().encode(written, saved_at=""), where="m") == (written, "")


def test_manifest_can_be_read_by_any_program() -> None:
    fields = json.loads(MANIFEST)
    assert (fields["format"], fields["format_version"], fields["step"], fields["fence"]["era"]["epoch"]) == (
        "lockstep-checkpoint",
        1,
        "5",
        "1",
    )
    assert [file["name"] for file in fields["files"]] == ["ps-0.safetensors", "ps-1.safetensors"]
    assert fields["record"]["model"]["variables"][0]["name"] == "layer/w"


def test_a_reused_encoder_writes_the_same_bytes_as_a_new_one() -> None:
    encoder = ManifestEncoder()
    for step in (5, 6):
        one = checkpoint(step=step)
        assert encoder.encode(one, saved_at="now") == ManifestEncoder().encode(one, saved_at="now")
    other = checkpoint(num_shards=3)
    assert encoder.encode(other, saved_at="now") == ManifestEncoder().encode(other, saved_at="now")


def test_checkpoint_without_a_model_cannot_be_written() -> None:
    one = checkpoint()
    with pytest.raises(InvalidSpec, match="no model to save"):
        ManifestEncoder().encode(replace(one, record=replace(one.record, model=None)), saved_at="")


def change(name: str, value: Any) -> Callable[[Fields], None]:
    return lambda fields: fields.update({name: value})


def change_file(name: str, value: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["files"][1].update({name: value})


def change_variable(name: str, value: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["record"]["model"]["variables"][0].update({name: value})


FULL = {"name": "ps-00000-of-00002.safetensors", "tag": "step-000000001", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (change("format", "other"), "not of format"),
        (change("format_version", 2), "install a newer one"),
        (change("format_version", True), "install a newer one"),
        (change("format_version", "1"), "install a newer one"),
        (change("tag", "../../x"), "checkpoint tag"),
        (change("step", -1), "step -1"),
        (change("step", "9" * 30), "out of range"),
        (change("step", [5]), ""),
        (change("fence", {"era": {"life": 1, "epoch": 0}}), "epoch 0"),
        (change("num_shards", 3), "want one of each of 3"),
        (change("num_shards", 1), "want one of each of 1"),
        (change("unheard_of", 1), "unheard_of"),
        (change("files", {}), ""),
        (change("files", [None]), ""),
        (change("record", None), "record is missing"),
        (change("record", {}), "policy is missing"),
        (lambda fields: fields["record"].pop("model"), "it has no model"),
        (change("placement", []), "is not placed"),
        (lambda fields: fields["record"].update(data={"data": {"name": "", "num_samples": 1, "range_size": 1}}), "data name"),
        (lambda fields: fields.pop("record"), "record is missing"),
        (lambda fields: fields["files"].reverse(), "in order"),
        (lambda fields: fields["placement"].pop(), "not placed, or not all of it"),
        (lambda fields: fields["placement"].append(fields["placement"][0]), "occur twice"),
        (lambda fields: fields["placement"][0].update(shard=2), "lies on ps 2"),
        (change_file("name", "../x"), "checkpoint file"),
        (change_file("name", "ps-0.safetensors"), "two shards have one file"),
        (change_file("sha256", "0"), "sha256"),
        (change_file("num_bytes", "many"), ""),
        (change_file("tag", "step-000000001"), "do not end with its own"),
        (change_file("is_delta", True), "do not begin with a full one"),
        (change("bases", [FULL | {"tag": "../../x"}]), "checkpoint tag"),
        (change("bases", [FULL | {"name": "../x"}]), "checkpoint file"),
        (change("bases", [FULL | {"shard": 7}]), "rests on a file of shard 7, of 2"),
        (change("bases", [FULL]), "do not end with its own"),
        (change_variable("shape", ["3", "7"]), "another one than the model's"),
        (change_variable("shape", ["-3"]), "shape[0] = -3"),
        (change_variable("data_type", "DATA_TYPE_COMPLEX"), ""),
    ],
)
def test_manifest_that_makes_no_sense_is_refused(damage: Callable[[Fields], None], why: str) -> None:
    fields = json.loads(MANIFEST)
    damage(fields)
    with pytest.raises(DataLoss, match=r"^m: not a valid manifest: ") as refusal:
        decode_manifest(sealed(fields), where="m")
    assert why in refusal.value.message


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 300_000, b'{"a":' * 100_000, b"null", b'{"step": NaN}'])
def test_an_invalid_manifest_is_refused(content: bytes) -> None:
    for manifest in (content, content + manifest_end(content)):
        with pytest.raises(DataLoss, match=r"^m: not a valid manifest: "):
            decode_manifest(manifest, where="m")


@given(st.integers(0, len(MANIFEST) - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(position: int, bit: int) -> None:
    damaged = bytearray(MANIFEST)
    damaged[position] ^= 1 << bit
    with pytest.raises(DataLoss):
        decode_manifest(bytes(damaged), where="m")


@given(st.integers(0, len(MANIFEST) - 1))
def test_manifest_that_is_cut_off_is_found(length: int) -> None:
    with pytest.raises(DataLoss):
        decode_manifest(MANIFEST[:length], where="m")


# Each is tried in the place of every field.
@pytest.mark.slow
@settings(max_examples=examples(30))
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_json_is_read_as_a_manifest_or_refused_as_data_loss(value: Any) -> None:
    whole = json.loads(MANIFEST)
    for name in whole:
        fields = {**whole, name: value}
        try:
            decode_manifest(sealed(fields), where="m")
        except DataLoss:
            continue


@pytest.mark.parametrize(
    ("tag", "epoch"),
    [
        ("step-000000012", 1),
        ("step-000000012-epoch-7", 7),
        ("step-000000012-epoch-7-chief-3-retry-1", 7),
        ("step-000000012-chief-3", 1),
        ("mine", 0),
        ("step-12", 0),
        ("step-000000012-epoch-99999999999999999999", 1),
    ],
)
def test_the_name_of_an_unfinished_checkpoint_tells_its_epoch(tag: str, epoch: int) -> None:
    assert epoch_of(tag) == epoch
